"""Which arms of a benchmark need no more runs, since they cannot win."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftdial.controller.bench_adjust import adjusted
from draftdial.controller.bench_report import Run, paired_logs, throughput

LEAST_TURNS = 3
"""Of every arm before one may be left behind."""


def out_of_reach(runs: Sequence[Run], share: float) -> set[str]:
    """Arms whose best throughput is more than `share` below what some other arm had in its worst run.

    `runs` are of one load. Runs with failed requests are void and say nothing.
    """
    rates: dict[str, list[float]] = {}
    for run in runs:
        if not run["failed"]:
            rates.setdefault(run["arm"], []).append(run["output_tok_s"])
    surely = max(map(min, rates.values()), default=0.0)
    return {arm for arm, of_arm in rates.items() if max(of_arm) < (1 - share) * surely}


def left_behind(runs: Sequence[Run], share: float) -> set[str]:
    """Arms more than `share` slower than the fastest, by all of the 95 % interval of their ratio.

    `runs` are of one load; the fastest is that of the highest mean throughput, of `LEAST_TURNS` at least,
    among the arms of the newest cycle: one that was left out before may have met a faster host.
    """
    newest = max((run["repeat"] for run in runs), default=0)
    in_play = {run["arm"] for run in runs if run["repeat"] == newest}
    by_arm: dict[str, list[Run]] = {}
    for run in adjusted(runs):
        if not run["failed"] and run["arm"] in in_play:
            by_arm.setdefault(run["arm"], []).append(run)
    by_arm = {name: of_arm for name, of_arm in by_arm.items() if len(of_arm) >= LEAST_TURNS}
    if not by_arm:
        return set()
    from draftdial.controller.statistics import combined_interval

    best = max(by_arm, key=lambda name: float(np.mean([throughput(run) for run in by_arm[name]])))
    behind = set()
    for name in by_arm.keys() - {best}:
        logs = paired_logs(by_arm[name], by_arm[best])
        if len(logs) >= LEAST_TURNS and combined_interval([logs])[1] > -np.log1p(-share):
            behind.add(name)
    return behind
