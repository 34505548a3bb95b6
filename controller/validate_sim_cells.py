"""Cells of benches that were served: what several of them say about one arm under one load is one cell."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np

from draftdial.controller.bench_arms import Arm
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.files import sha256_of
from draftdial.controller.policy_file import PolicyFile
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
    files = {sha256_of(arm.policy.data): arm.policy for arm in policies if arm.policy is not None}
    _check_policies(benches, files)
    for bench in benches:
        bench.check(profile, acceptance)
    pairs: dict[Place, list[tuple[Run, Figures]]] = {}
    hosted: dict[Place, list[Figures]] = {}
    rates: dict[Place, dict[str, float]] = {}
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
                repeat = f"{bench.source} {run['repeat']}"
                rates.setdefault(place, {})[repeat] = run["output_tok_s"]
            for run, figures in bench.simulated(arm, profile, acceptance, files, "own") or []:
                hosted.setdefault((bench.kind, run["workload"], run["load"], arm), []).append(figures)
    if left_out:
        print(f"draftdial: cannot be simulated, left out: {', '.join(left_out)}", file=sys.stderr)
    if not pairs:
        raise UserError(f"{benches[0].source}: no run of an arm that can be simulated")
    _tell_of_assumed_rounds({load for _, _, load, _ in pairs if load is not None}, profile)
    return [_cell(place, found, rates[place], hosted.get(place, [])) for place, found in pairs.items()]


def _tell_of_assumed_rounds(loads: set[float], profile: CostProfile) -> None:
    most = int(profile.captured_batches.max())
    if beyond := sorted(load for load in loads if load > most):
        print(
            f"draftdial: warning: C = {', '.join(f'{load:g}' for load in beyond)}: profile {profile.name} "
            f"has batches up to {most}; beyond, what its rounds take is assumed (`eager`)",
            file=sys.stderr,
        )


def _check_policies(benches: Sequence[ServedBench], files: Mapping[str, PolicyFile]) -> None:
    """UserError unless each file ran in some arm."""
    ran = {bench.policy_sha256(arm) for bench in benches for arm in bench.document["arms"]}
    for sha256, file in files.items():
        if sha256 not in ran:
            arms = [(arm, benches[0].policy_sha256(arm)) for arm in benches[0].document["arms"]]
            known = [f"{arm} of sha256 {found[:12]}" for arm, found in arms if found]
            raise UserError(
                f"--policy: found {file.source} of sha256 {sha256[:12]}, allowed: what is an arm of "
                f"{benches[0].source}: {', '.join(known) or 'none'}"
            )


def _cell(
    place: Place,
    found: Sequence[tuple[Run, Figures]],
    rates: Mapping[str, float],
    on_its_host: Sequence[Figures],
) -> Cell:
    acceptance, workload, load, arm = place
    runs, simulated = zip(*found, strict=True)
    return cell_of(
        arm,
        workload,
        load,
        _means(runs),
        _means(simulated),
        acceptance=acceptance,
        rates=rates,
        repeats=len(found),
        on_its_host=_means(on_its_host) if len(on_its_host) == len(found) else None,
    )


def _means(rows: Sequence[Run]) -> Figures:
    known = [name for name in (*FIGURES, WASTED) if all(row.get(name) is not None for row in rows)]
    return {name: float(np.mean([row[name] for row in rows])) for name in known}
