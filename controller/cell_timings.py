"""What the rounds of one measured cell say: their mean and spread, and how busy the host was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from draftdial.engine_patch.measurement_plan import Phase

WARM_UP_ROUNDS = 8
"""Of a phase: clocks settle, and the first two belong to the tier before under overlap."""
HICCUP = 1.5
"""Times the median of its phase: a longer round is left out, as the host held it up."""
PREFIX_HIT_TOKENS = 4
"""A random prompt may share its first tokens with a cached one, and is prefilled without them."""

Timing = dict[str, Any]
"""`period_ms`; of rounds also its quartiles `low_ms` and `high_ms`, `launch_ms`, `idle_ms`,
`context` and `rounds`."""


def row_of(phase: Phase) -> str:
    """The name that a cost profile gives to rounds of this kind."""
    if phase.k is None:
        return "nospec"
    if phase.k == 0:
        return f"off-{phase.off_mode}"
    return f"k={phase.k}"


def timings(phases: Sequence[Phase], rounds: Iterable[Sequence[float]]) -> dict[str, Timing]:
    """A timing for each row: the rounds of its phase, without their warm-up.

    Args:
        phases: Of the plan, each of another row.
        rounds: As `RoundTimer.report` gives them.
    """
    kept: dict[str, list[Sequence[float]]] = {}
    for phase, place, *times in rounds:
        if place >= WARM_UP_ROUNDS and times[0] >= 0:
            kept.setdefault(row_of(phases[int(phase)]), []).append(times)
    return {row: _timing(np.array(times)) for row, times in kept.items()}


def _timing(times: np.ndarray[Any, np.dtype[np.float64]]) -> Timing:
    period, launch, idle, context = steady_mean(times)
    low, high = np.quantile(times[:, 0], [0.25, 0.75])
    return {
        "period_ms": float(period),
        "low_ms": float(low),
        "high_ms": float(high),
        "launch_ms": float(launch),
        "idle_ms": float(idle),
        "context": float(context),
        "rounds": len(times),
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


def switch_timings(phases: Sequence[Phase], rounds: Iterable[Sequence[float]]) -> dict[str, Timing]:
    """How long a round takes whose k is the one before (`steady`), and whose k is not (`in turn`).

    `phases` are two tiers in turn for many rounds, then for one round each; both rows are means of the two.
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
    return {
        "steady": {"period_ms": float(np.mean([np.median(times) for times in steady.values()]))},
        "in turn": {"period_ms": float(np.median(_pair_means(alternating)))},
    }


def _pair_means(periods: Sequence[float]) -> list[float]:
    """Means of neighbours, so that each holds both tiers once."""
    return [(left + right) / 2 for left, right in zip(periods[::2], periods[1::2], strict=False)]


def prefill_timings(prefills: Iterable[Sequence[float]], sizes: Sequence[int]) -> dict[str, Timing]:
    """Median time of a prefill behind a decode round, by its tokens; sizes that never came are left out."""
    found: dict[int, list[Sequence[float]]] = {}
    for tokens, _, period_ms, launch_ms, _, is_after_decode in prefills:
        size = min(sizes, key=lambda size: abs(size - tokens), default=0)
        if is_after_decode and abs(size - tokens) <= PREFIX_HIT_TOKENS:
            found.setdefault(size, []).append((period_ms, launch_ms))
    return {
        f"{tokens} tokens": {
            "tokens": tokens,
            "period_ms": float(np.median([time for time, _ in found[tokens]])),
            "launch_ms": float(np.median([launch for _, launch in found[tokens]])),
            "count": len(found[tokens]),
        }
        for tokens in sorted(found)
    }
