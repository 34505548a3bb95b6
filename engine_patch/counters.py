"""What a dial counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Plain counts since the server started; health checks and warm-up are in none of them."""

    rounds_at_k: dict[int, int]
    """Rounds launched at each tier."""
    seconds_at_k: dict[int, float]
    """Measured from one launch to the next, where no prefill came between; for people, not for decisions."""
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
