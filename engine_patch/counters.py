"""What a dial counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Steady:
    """Rounds whose neighbours had the same k. Under overlap scheduling the time from one launch to the next
    also holds the result of the round before and the launch of the one after: only then is it all one k's.
    """

    rounds: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    """That part of it in which the host waited for the GPU."""

    def add(self, seconds: float, waited_s: float) -> None:
        self.rounds += 1
        self.seconds += seconds
        self.waited_s += waited_s


@dataclass(slots=True)
class Launches:
    """All batches launched while the result of one before was still to be read, as in a busy server."""

    seconds: float = 0.0
    """From the launch before to each of them."""
    waited_s: float = 0.0
    """That part of it in which the host waited for the GPU."""
    prefills: int = 0
    """How many of them were prefills; the others are decode rounds."""

    def add(self, seconds: float, waited_s: float, is_prefill: bool) -> None:
        self.seconds += seconds
        self.waited_s += waited_s
        self.prefills += is_prefill


@dataclass(slots=True)
class Counters:
    """Plain counts since the server started; health checks and warm-up are in none of them."""

    rounds_at_k: dict[int, int]
    """Rounds launched at each tier."""
    seconds_at_k: dict[int, float]
    """Measured from one launch to the next, where no prefill or pause came between; for people alone."""
    steady_at_k: dict[int, Steady] = field(default_factory=dict)
    """Of rounds between two of the same k; empty where it is not known what the host waits for."""
    launches: Launches = field(default_factory=Launches)
    """Nothing where that is not known."""
    decisions: int = 0
    switches: int = 0
    """Rounds whose k differed from the round before."""
    observed: int = 0
    """Rounds whose outcome has arrived."""
    drafted: int = 0
    """Draft tokens of the observed rounds."""
    wasted: int = 0
    """Those of them that were not accepted."""
    deploys: int = 0
    fallbacks: int = 0
    errors: int = 0
