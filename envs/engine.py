"""What a policy can drive: a simulated server, or a real one in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from draftdial.controller.signals import IntArray, RoundOutcome, RoundSignals


class SpeculativeEngine(Protocol):
    """An engine that asks before every decode round how many draft tokens to use.

    The main path, the same in simulation and in a server:

        k = policy.decide(engine.signals())
        for outcome in engine.run_round(k):
            policy.observe(outcome)
    """

    tiers: tuple[int, ...]
    """The values of k the engine has built, ascending, 0 first."""

    def reset(self, seed: int) -> None:
        """Start over; the same seed gives the same requests, arrivals and acceptance."""

    def signals(self) -> RoundSignals:
        """What is known before the coming round, one row per server."""

    def run_round(self, k: IntArray) -> Sequence[RoundOutcome]:
        """Launch one round with `k` draft tokens, shape `(num_servers,)`, each one of `tiers`.

        Returns the outcomes that have arrived, possibly none. An implementation must not wait for
        the outcome of this round: under overlap scheduling the next k is asked for before it exists.
        """
