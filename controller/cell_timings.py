"""What the rounds of one measured cell say: their mean and spread, and whether the host set them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from draftdial.engine_patch.measurement_plan import Phase

WARM_UP_ROUNDS = 8
"""Of a phase: clocks settle, and the first two belong to the tier before under overlap."""
HICCUP = 1.5
"""Times the median of its phase: a longer round is left out, as the host held it up."""
HOST_BOUND_LAUNCH = 0.9
"""Launching takes this share of the period or more: the GPU waits for the host within the round."""
PREFIX_HIT_TOKENS = 4
"""A random prompt may share its first tokens with a cached one, and is prefilled without them."""
HOST_BOUND_IDLE = 0.05
"""The GPU stands idle for this share of the period or more before the round begins."""

Timing = dict[str, Any]
"""`period_ms`, quartiles `low_ms` and `high_ms`, `launch_ms`, `idle_ms`, `context`, `rounds`, `host_bound`"""


def row_of(phase: Phase) -> str:
    """The name that a cost profile gives to rounds of this kind."""
    if phase.k is None:
        return "nospec"
    if phase.k == 0:
        return f"off-{phase.off_mode}"
    return f"k={phase.k}"


def timings(phases: Sequence[Phase], rounds: Iterable[Sequence[float]], is_gpu: bool) -> dict[str, Timing]:
    """A timing for each row: rounds of all phases of its kind, without their warm-up.

    Args:
        phases: Of the plan.
        rounds: As `RoundTimer.report` gives them.
        is_gpu: Times are the GPU's; only then can the host be told from it.
    """
    kept: dict[str, dict[int, list[Sequence[float]]]] = {row_of(phase): {} for phase in phases}
    for phase, place, *times in rounds:
        if place >= WARM_UP_ROUNDS and times[0] >= 0:
            kept[row_of(phases[int(phase)])].setdefault(int(phase), []).append(times)
    return {row: _timing(list(found.values()), is_gpu) for row, found in kept.items() if found}


def _timing(of_phases: Sequence[Sequence[Sequence[float]]], is_gpu: bool) -> Timing:
    # Phases have contexts of their own, so each is averaged before they are averaged.
    period, launch, idle, context = np.mean([steady_mean(np.array(times)) for times in of_phases], axis=0)
    periods = np.array([times[0] for phase in of_phases for times in phase])
    low, high = np.quantile(periods, [0.25, 0.75])
    is_host_bound = is_gpu and (launch >= HOST_BOUND_LAUNCH * period or idle >= HOST_BOUND_IDLE * period)
    return {
        "period_ms": float(period),
        "low_ms": float(low),
        "high_ms": float(high),
        "launch_ms": float(launch),
        "idle_ms": float(idle),
        "context": float(context),
        "rounds": len(periods),
        "host_bound": bool(is_host_bound),
    }


def steady_mean(times: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Mean of each column of a phase's rounds, `(num_rounds, num_columns)`, periods first; without hiccups.

    Not the median: under off mode `kv-only` one round in several writes what the others owe.
    """
    kept = times[times[:, 0] <= HICCUP * np.median(times[:, 0])]
    means: np.ndarray[Any, np.dtype[np.float64]] = kept.mean(axis=0)
    return means


def accepted_share(phases: Sequence[Phase], rounds: Iterable[Sequence[float]]) -> float:
    """The largest share of drafts that a phase accepted, by how far the context grew; 0 without drafts."""
    contexts: dict[int, list[float]] = {}
    for phase, *_, context in rounds:
        contexts.setdefault(int(phase), []).append(context)
    shares = [0.0]
    for index, seen in contexts.items():
        k = phases[index].k
        if k and len(seen) > 1:
            shares.append(((seen[-1] - seen[0]) / (len(seen) - 1) - 1) / k)
    return min(1.0, max(shares))


def switch_ms(phases: Sequence[Phase], rounds: Iterable[Sequence[float]]) -> float:
    """How much longer a round takes whose k is not the one before, in ms.

    `phases` are two tiers in turn for many rounds, then for one round each: the mean of the latter is
    compared with the mean of the former's medians.
    """
    steady: dict[str, list[float]] = {}
    alternating: list[float] = []
    for phase, place, period_ms, *_ in rounds:
        kind = phases[int(phase)]
        if period_ms < 0:
            continue
        if kind.num_rounds == 1:
            alternating.append(period_ms)
        elif place >= WARM_UP_ROUNDS:
            steady.setdefault(row_of(kind), []).append(period_ms)
    expected = float(np.mean([np.median(times) for times in steady.values()]))
    return float(np.median(_pair_means(alternating))) - expected


def _pair_means(periods: Sequence[float]) -> list[float]:
    """Means of neighbours, so that each holds both tiers once."""
    return [(left + right) / 2 for left, right in zip(periods[::2], periods[1::2], strict=False)]


def prefill_knots(prefills: Iterable[Sequence[float]], sizes: Sequence[int]) -> list[dict[str, float]]:
    """Median time of a prefill behind a decode round, by its tokens; sizes that never came are left out."""
    found: dict[int, list[Sequence[float]]] = {}
    for tokens, _, period_ms, launch_ms, _, is_after_decode in prefills:
        size = min(sizes, key=lambda size: abs(size - tokens), default=0)
        if is_after_decode and abs(size - tokens) <= PREFIX_HIT_TOKENS:
            found.setdefault(size, []).append((period_ms, launch_ms))
    return [
        {
            "tokens": tokens,
            "ms": float(np.median([time for time, _ in found[tokens]])),
            "launch_ms": float(np.median([launch for _, launch in found[tokens]])),
            "count": len(found[tokens]),
        }
        for tokens in sorted(found)
    ]
