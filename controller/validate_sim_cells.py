"""Cells of benches that were served: what several of them say about one arm under one load is one cell."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from draftdial.controller.bench_arms import Arm
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.validate_sim_acceptance import GivenAcceptance
from draftdial.controller.validate_sim_bench import Figures, Run, ServedBench
from draftdial.controller.validate_sim_report import FIGURES, WASTED, Cell, cell_of

Place = tuple[str, str, float | None, str]
"""Acceptance, workload, load and arm."""


def bench_cells(
    benches: Sequence[ServedBench], profile: CostProfile, acceptance: GivenAcceptance, policies: Sequence[Arm]
) -> list[Cell]:
    """A cell for each arm under each load with each kind of acceptance: means over all their runs.

    Raises:
        UserError: a bench cannot be compared with this profile and these files, or none of its arms can.
    """
    files = {arm.name: arm.policy for arm in policies if arm.policy is not None}
    unknown = set(files) - {arm for bench in benches for arm in bench.document["arms"]}
    if unknown:
        raise UserError(f"--policy: found {min(unknown)}, allowed: what is an arm of {benches[0].source}")
    for bench in benches:
        bench.check(profile, acceptance)
    pairs: dict[Place, list[tuple[Run, Figures]]] = {}
    left_out: dict[str, None] = {}
    for bench in benches:
        if bench.num_void:
            print(f"draftdial: {bench.source}: {bench.num_void} runs are void and left out", file=sys.stderr)
        for arm in bench.document["arms"]:
            simulated = bench.simulated(arm, profile, acceptance, files)
            if simulated is None:
                left_out[arm] = None
            for run, figures in simulated or []:
                place = (bench.kind, run["workload"], run["load"], arm)
                pairs.setdefault(place, []).append((run, figures))
    if left_out:
        print(f"draftdial: cannot be simulated, left out: {', '.join(left_out)}", file=sys.stderr)
    if not pairs:
        raise UserError(f"{benches[0].source}: no run of an arm that can be simulated")
    return [_cell(place, found) for place, found in pairs.items()]


def _cell(place: Place, found: Sequence[tuple[Run, Figures]]) -> Cell:
    acceptance, workload, load, arm = place
    runs, simulated = zip(*found, strict=True)
    return cell_of(
        arm,
        workload,
        load,
        _means(runs),
        _means(simulated),
        acceptance=acceptance,
        repeats=len(found),
    )


def _means(rows: Sequence[Run]) -> Figures:
    known = [name for name in (*FIGURES, WASTED) if all(row.get(name) is not None for row in rows)]
    return {name: float(np.mean([row[name] for row in rows])) for name in known}
