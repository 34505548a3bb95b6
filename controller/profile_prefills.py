"""The prefill times of a cost profile, from what was measured."""

from __future__ import annotations

import numpy as np

from draftdial.controller.cell_timings import Timing
from draftdial.controller.profile_document import KV_ONLY_PREFILL
from draftdial.controller.profile_measurements import KV_ONLY_PREFILL_TASK, Measurements

_TASKS = {
    "nospec": ("prefill", "nospec"),
    "speculative": ("prefill", "speculative"),
    KV_ONLY_PREFILL: (KV_ONLY_PREFILL_TASK, "speculative"),
}
"""Kind and side of what measures each kind of prefill."""


def prefill_knots(measurements: Measurements) -> dict[str, list[list[float]]]:
    """`[tokens, ms]` by kind of prefill, ascending; only kinds that were measured at two sizes or more."""
    knots = {kind: _knots(measured_prefills(measurements, kind)) for kind in _TASKS}
    return {kind: found for kind, found in knots.items() if len(found) >= 2}


def measured_prefills(measurements: Measurements, kind: str) -> list[Timing]:
    """Of one kind of prefill, the smallest first."""
    timings = [timing for result in measurements.of(*_TASKS[kind]) for timing in result.rows.values()]
    return sorted(timings, key=lambda timing: timing["tokens"])


def _knots(timings: list[Timing]) -> list[list[float]]:
    # More tokens never take less; what is left of it is noise.
    times = np.maximum.accumulate([timing["period_ms"] for timing in timings])
    return [[timing["tokens"], round(float(ms), 3)] for timing, ms in zip(timings, times, strict=True)]
