"""Turns of a switchback benchmark, freed of how many prefills happened to fall into them.

All arms answer the same requests, so in the long run all have the same number of prefills per output token. A
turn of a second has more or fewer, and a prefill stops decoding. The number is a control variate: its
effect is the slope of a regression within arms (Lavenberg and Welch 1981, "A Perspective on the Use of
Control Variables to Increase the Efficiency of Monte Carlo Simulations").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftdial.controller.bench_report import ADJUSTED, Run

ROUNDING = 1e-12
"""Of squared excesses: a spread no larger than this is floating-point noise."""


def adjusted(runs: Sequence[Run]) -> list[Run]:
    """The runs, each with its throughput at the prefills per token of its load: `ADJUSTED`, tokens a second.

    Runs with failed requests are void and stay as they are.
    """
    found = [dict(run) for run in runs]
    loads: dict[tuple[str, float | None], list[Run]] = {}
    for run in found:
        if not run["failed"]:
            loads.setdefault((run["workload"], run["load"]), []).append(run)
    for of_load in loads.values():
        rate = np.array([run["output_tok_s"] for run in of_load])
        tokens = rate * [run["window_s"] for run in of_load]
        prefills = np.array([run["requests"] for run in of_load])
        per_token = prefills / tokens
        excess = per_token * (tokens.sum() / max(1, prefills.sum())) - 1.0
        arms = [run["arm"] for run in of_load]
        log_rate, within = np.log(rate), _within(excess, arms)
        spread = within @ within
        slope = within @ _within(log_rate, arms) / spread if spread > ROUNDING else 0.0
        for run, value in zip(of_load, np.exp(log_rate - slope * excess).tolist(), strict=True):
            run[ADJUSTED] = value
    return found


def _within(values: np.ndarray, arms: Sequence[str]) -> np.ndarray:
    """Less the mean of each arm."""
    left = values.astype(float)
    for arm in set(arms):
        of_arm = np.array([other == arm for other in arms])
        left[of_arm] -= values[of_arm].mean()
    return left
