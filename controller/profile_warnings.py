"""What to be told of timings that the host may have spoilt: a line for each side, which names the worst."""

from __future__ import annotations

from draftdial.controller.profile_build import SIDES
from draftdial.controller.profile_measurements import APART, Measurements, Result

Doubtful = list[tuple[float, str]]
"""How bad each timing is, and which it is."""


def warnings_of(measurements: Measurements) -> list[str]:
    """Of what repeats still disagree about, then of what the host set."""
    lines = []
    for cause, doubtful in (
        (f"the two fastest repeats are more than {APART - 1:.0%} apart in", _apart),
        ("the host set", _host_set),
    ):
        for side in SIDES:
            results = [result for result in measurements.results() if result.task.side == side]
            found = [timing for result in results for timing in doubtful(result, measurements)]
            if found:
                num_timings = sum(len(result.rows) for result in results)
                lines.append(
                    f"{side}: {cause} {len(found)} of {num_timings} timings, all in {measurements.path}; "
                    f"worst {max(found)[1]}"
                )
    return lines


def _apart(result: Result, _: Measurements) -> Doubtful:
    return [
        (second / fastest, f"{_name(result, row)}: {fastest:.2f} and {second:.2f} ms")
        for row, (fastest, second) in result.apart.items()
    ]


def _host_set(result: Result, measurements: Measurements) -> Doubtful:
    found = []
    for row in measurements.host_set(result):
        idle_ms, period_ms = (float(result.rows[row][key]) for key in ("idle_ms", "period_ms"))
        text = f"{_name(result, row)}: the GPU stood idle before it for {idle_ms:.2f} of {period_ms:.2f} ms"
        found.append((idle_ms / period_ms, text))
    return found


def _name(result: Result, row: str) -> str:
    return f"{result.task.id.removeprefix(result.task.side).strip()}, {row}"
