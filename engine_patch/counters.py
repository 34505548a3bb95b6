"""What a dial counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Plain counts since the server started; health checks and warm-up are in none of them."""

    rounds_at_k: dict[int, int]
    """Rounds launched at each tier."""
    seconds_at_k: dict[int, float]
    """Measured from one launch to the next, where no prefill came between; for people, not for decisions."""
    timed_at_k: dict[int, int]
    """Rounds that this was measured of."""
    waited_at_k: dict[int, float] = field(default_factory=dict)
    """Seconds of it in which the host waited for the GPU; empty where nothing overlaps."""
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

    def timed(self, k: int, seconds: float, waited_s: float) -> None:
        """From the launch of a round to the next, with no prefill between."""
        self.seconds_at_k[k] += seconds
        self.timed_at_k[k] += 1
        if waited_s:
            self.waited_at_k[k] = self.waited_at_k.get(k, 0.0) + waited_s
