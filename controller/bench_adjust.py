"""Turns of a switchback benchmark, freed of how many prefills happened to fall into them.

All arms answer requests of the same list, so in the long run all have as many prefills per output token. A
turn of a second has more or fewer, and a prefill stops decoding. The number is a control variate: what one
prefill takes is the slope of a regression within arms (Lavenberg and Welch 1981, "A Perspective on the Use
of Control Variables to Increase the Efficiency of Monte Carlo Simulations").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftdial.controller.bench_report import ADJUSTED, Run
from draftdial.controller.signals import FloatArray

LEAST_SPREAD = 0.25
"""Of what Poisson's law gives the excesses. Where a few turns happen to have the same number of prefills, an
excess is nothing but the noise of the tokens beside it, and so a straight line through the throughput."""


def adjusted(runs: Sequence[Run]) -> list[Run]:
    """The runs, each with its throughput at the prefills per token of its load: `ADJUSTED`, tokens a second.

    That is, each turn gets the seconds back that prefills beyond its share took, or gives those of missing
    ones. Runs with failed requests are void and stay as they are.
    """
    found = [dict(run) for run in runs]
    loads: dict[tuple[str, float | None], list[Run]] = {}
    for run in found:
        if not run["failed"]:
            loads.setdefault((run["workload"], run["load"]), []).append(run)
    for of_load in loads.values():
        window_s = np.array([run["window_s"] for run in of_load])
        rate = np.array([run["output_tok_s"] for run in of_load])
        prefills = np.array([float(run["requests"]) for run in of_load])
        tokens = rate * window_s
        share = tokens * (prefills.sum() / tokens.sum())
        arms = [run["arm"] for run in of_load]
        taken_s = _prefill_s(arms, rate, window_s, prefills, share) * (prefills - share)
        for run, value in zip(of_load, (tokens / (window_s - taken_s)).tolist(), strict=True):
            run[ADJUSTED] = value
    return found


def _prefill_s(
    arms: Sequence[str], rate: FloatArray, window_s: FloatArray, prefills: FloatArray, share: FloatArray
) -> float:
    """Seconds that a prefill takes, whatever the arm; neither below 0 nor more than any turn had for each.

    Arrays are (num_turns,); `share` is of the prefills, by the tokens of the turn.
    """
    if not prefills.any():
        return 0.0
    excess, log_rate = _within((prefills - share) / window_s, arms), _within(np.log(rate), arms)
    kept = np.array([1 - 1 / arms.count(arm) for arm in arms])  # of a variance, less the mean of so many
    spread = max(float(excess @ excess), LEAST_SPREAD * float(kept @ (share / window_s**2)))
    slope = -float(excess @ log_rate) / spread if spread else 0.0
    most = np.min(window_s[prefills > 0] / prefills[prefills > 0])
    return float(np.clip(slope, 0.0, most))


def _within(values: FloatArray, arms: Sequence[str]) -> FloatArray:
    """Less the mean of each arm."""
    left = values.copy()
    for arm in set(arms):
        of_arm = np.array([other == arm for other in arms])
        left[of_arm] -= values[of_arm].mean()
    return left
