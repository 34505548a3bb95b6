"""The arithmetic behind a cost profile: measured cells become one table that is cheap to look up."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from draftdial.controller.signals import FloatArray, IntArray

_LEAST_SHARE = 0.2  # extrapolating a steep cell to a short context must not reach zero
_LONGEST_TOKENS = 1e7  # no request is so long
_FAR_TOKENS = 2.0**31  # a knot no prefill reaches: carries the last slope past the measured range


def cell_knots(rows: list[dict[str, Any]]) -> tuple[FloatArray, FloatArray]:
    """Contexts in tokens and times in seconds of every cell, each `(num_rows, num_batches, num_knots)`."""
    num_knots = max(len(cell["round_ms"]) for row in rows for cell in row["cells"])
    contexts = [[_continued(cell["context_tokens"], num_knots) for cell in row["cells"]] for row in rows]
    times = [[_continued(cell["round_ms"], num_knots) for cell in row["cells"]] for row in rows]
    return np.array(contexts, np.float64), np.array(times, np.float64) / 1e3


def no_less(contexts: list[float], times: list[float], least: float) -> tuple[list[float], list[float]]:
    """Knots of a cell that costs `least` wherever the line through these knots, carried on, is below it.

    Where it is below nowhere, these very knots.
    """
    line = list(zip(contexts, times, strict=True))
    (first, time), (second, later) = line[:2]
    if first > 0 and least > _LEAST_SHARE * time:
        line.insert(0, (0.0, time - first * (later - time) / (second - first)))
    (before, earlier), (last, time) = line[-2:]
    slope = (time - earlier) / (last - before)
    if time < least < time + slope * _LONGEST_TOKENS:  # as far again behind the crossing
        line.append((last + 2 * (least - time) / slope, 2 * least - time))
    if all(time >= least for _, time in line):
        return contexts, times
    knots: list[tuple[float, float]] = []
    for (here, time), (there, later) in itertools.pairwise(line):
        knots.append((here, max(time, least)))
        if (time < least) != (later < least):
            crossing = here + (least - time) / (later - time) * (there - here)
            if here < crossing < there:
                knots.append((crossing, least))
    knots.append((line[-1][0], max(line[-1][1], least)))
    needed = [knots[0], knots[-1]]
    needed[1:1] = [
        knot
        for (_, left), knot, (_, right) in zip(knots, knots[1:], knots[2:], strict=False)
        if not left == knot[1] == right == least
    ]
    return [context for context, _ in needed], [time for _, time in needed]


def _continued(values: list[float], length: int) -> list[float]:
    """`values` made `length` long by repeating the last step."""
    step = values[-1] - values[-2]
    return values + [values[-1] + step * i for i in range(1, length - len(values) + 1)]


def prefill_knots(pairs: list[list[float]]) -> tuple[FloatArray, FloatArray]:
    """Tokens and seconds of the knots, with one far out that carries on the last slope."""
    tokens, milliseconds = np.array(pairs, np.float64).T
    slope = (milliseconds[-1] - milliseconds[-2]) / (tokens[-1] - tokens[-2])
    far_ms = milliseconds[-1] + slope * (_FAR_TOKENS - tokens[-1])
    return np.append(tokens, _FAR_TOKENS), np.append(milliseconds, far_ms) / 1e3


def fold(
    knot_context: FloatArray,
    knot_round_s: FloatArray,
    captured_batches: IntArray,
    bucket_of_batch: IntArray,
    eager_factor: float,
    eager_extra_s: float,
) -> FloatArray:
    """Round times by number of running requests, with padding and the eager cliff folded in.

    Args:
        knot_context: Shape `(num_rows, num_batches, num_knots)`, in tokens.
        knot_round_s: The same shape, in seconds.
        captured_batches: Shape `(num_batches,)`.
        bucket_of_batch: Shape `(max_running + 1,)`.
        eager_factor: See `CostProfile`.
        eager_extra_s: See `CostProfile`.

    Returns:
        Shape `(max_running + 1, num_pieces, num_rows)`, read as `CostProfile.round_table` says.
    """
    num_rows, _, num_knots = knot_context.shape
    slopes = np.diff(knot_round_s, axis=2) / np.diff(knot_context, axis=2)
    running = np.maximum(np.arange(len(bucket_of_batch)), 1)
    fill = running / captured_batches[bucket_of_batch]
    kv_share = np.minimum(fill, 1.0)[:, None]
    growth = np.where(fill > 1.0, 1.0 + eager_factor * (fill - 1.0), 1.0)[:, None]
    extra_s = np.where(fill > 1.0, eager_extra_s, 0.0)[:, None]

    def by_running(values: FloatArray) -> FloatArray:
        """From `(num_rows, num_batches)` to `(max_running + 1, num_rows)`."""
        return values.T[bucket_of_batch]

    table = np.empty((len(bucket_of_batch), 2 * num_knots - 1, num_rows))
    intercept = knot_round_s[..., 0] - slopes[..., 0] * knot_context[..., 0]
    table[:, 0] = growth * by_running(intercept) + extra_s
    table[:, 1] = growth * by_running(slopes[..., 0]) * kv_share
    for knot in range(1, num_knots - 1):
        table[:, 2 * knot] = by_running(knot_context[..., knot]) / kv_share
        table[:, 2 * knot + 1] = growth * by_running(slopes[..., knot] - slopes[..., knot - 1]) * kv_share
    table[:, -1] = growth * by_running(_LEAST_SHARE * knot_round_s[..., 0]) + extra_s
    return table
