"""How long a host was busy in the rounds and prefills of a benchmark, as its server counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftdial.controller.bench_report import Run

MOST_MS = 1e6
"""Of any round or prefill: what a server counts is far below."""


@dataclass(frozen=True)
class HostTime:
    """Milliseconds for which the host did something else than wait for the GPU."""

    off_ms: float | None
    """In a round at k = 0; None: not known, as in all of these."""
    drafts_ms: float | None
    """In a round of any k > 0: their drafts are one launch, so they count as one."""
    prefill_ms: float | None

    @classmethod
    def of(cls, runs: Sequence[Run]) -> HostTime:
        """Means over the rounds and the requests of `runs`.

        Raises:
            LookupError, TypeError, ValueError, AttributeError, ArithmeticError: they are not as `draftdial
                bench` writes them.
        """
        off, drafts, prefills = _Mean(), _Mean(), _Mean()
        for run in runs:
            for k, ms in run.get("host_ms_at_k", {}).items():
                (drafts if int(k) else off).add(ms, run["rounds_at_k"][k])
            if "host_ms_in_prefill" in run:
                prefills.add(run["host_ms_in_prefill"], run["requests"])
        return cls(off.value, drafts.value, prefills.value)

    def or_else(self, other: HostTime) -> HostTime:
        """This, and where it knows nothing what `other` knows."""
        pairs = (
            (self.off_ms, other.off_ms),
            (self.drafts_ms, other.drafts_ms),
            (self.prefill_ms, other.prefill_ms),
        )
        return HostTime(*(theirs if mine is None else mine for mine, theirs in pairs))

    def round_ms(self, k: int) -> float:
        """0.0 where it is not known."""
        return (self.drafts_ms if k else self.off_ms) or 0.0


class _Mean:
    """Weighted; None of nothing."""

    def __init__(self) -> None:
        self._total, self._weight = 0.0, 0.0

    def add(self, value: float, weight: float) -> None:
        if not (0.0 <= value <= MOST_MS and weight >= 0.0):  # NaN is neither
            raise ValueError(f"found {value} ms in {weight} of a run, allowed: 0 to {MOST_MS:g} ms")
        self._total += value * weight
        self._weight += weight

    @property
    def value(self) -> float | None:
        return self._total / self._weight if self._weight else None
