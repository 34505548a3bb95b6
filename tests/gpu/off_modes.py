"""What a round at k = 0 takes in each off mode, and what on a server without speculation.

    python3 tests/gpu/off_modes.py URL PLAIN_URL --batches 1,8,32 --context 500 --out FILE.json

The first server has off mode `kv-only`; the others are told to it round by round. Its modes take turns on the
same live requests, forth and back, so that each has the same mean context. The plain server decodes the same
batch over the same contexts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftdial.controller.cell_timings import WARM_UP_ROUNDS, steady_mean
from draftdial.controller.cost_profile import OffMode
from draftdial.controller.files import atomic_write
from draftdial.controller.measured_server import MeasuredServer
from draftdial.controller.number_arguments import counts
from draftdial.engine_patch.client import Server
from draftdial.engine_patch.measurement_plan import Phase

MODES: tuple[OffMode, ...] = ("skip", "kv-only", "warm")
ROUNDS = 20
"""Measured in a phase."""
PATIENT_S = 600.0


def measured(url: str) -> MeasuredServer:
    return MeasuredServer(Server(url), Server(url, timeout_s=PATIENT_S), seed=0)


def means(server: MeasuredServer, phases: Sequence[Phase], batch: int, context: int) -> list[float]:
    """Mean round of each phase, ms, as `draftdial profile` takes it."""
    total = sum(phase.num_rounds for phase in phases)
    report = server.run(phases, batch, context, total + 64)
    server.flush()
    kept: list[list[list[float]]] = [[] for _ in phases]
    for phase, place, period_ms, *_ in report["rounds"]:
        if place >= WARM_UP_ROUNDS and period_ms >= 0:
            kept[int(phase)].append([period_ms])
    return [float(steady_mean(np.array(times))[0]) for times in kept]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs=2)
    parser.add_argument("--batches", type=counts, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--turns", type=int, default=4, help="forth and back counts as two")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dialled, plain = (measured(url) for url in args.urls)
    order = [mode for turn in range(args.turns) for mode in (MODES if turn % 2 == 0 else reversed(MODES))]
    phases = [Phase(0, WARM_UP_ROUNDS + ROUNDS, mode) for mode in order]
    rows: list[dict[str, Any]] = []
    try:
        for batch in args.batches:
            of_phase = means(dialled, phases, batch, args.context)
            row: dict[str, Any] = {"batch": batch, "context": args.context}
            row |= {
                mode: [ms for name, ms in zip(order, of_phase, strict=True) if name == mode] for mode in MODES
            }
            row["no-spec"] = means(
                plain, [Phase(None, phase.num_rounds) for phase in phases], batch, args.context
            )
            rows.append(row)
            atomic_write(args.out, json.dumps(rows, indent=1) + "\n")
            mean = {name: float(np.mean(row[name])) for name in (*MODES, "no-spec")}
            print(
                batch,
                {name: f"{ms:.3f} ms, {ms / mean['no-spec']:.4f}" for name, ms in mean.items()},
                flush=True,
            )
    finally:
        dialled.close()
        plain.close()


if __name__ == "__main__":
    main()
