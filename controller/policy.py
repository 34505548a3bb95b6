"""What every policy is: it decides k before a round and learns from rounds that have finished."""

from __future__ import annotations

from typing import Protocol

from draftdial.controller.signals import IntArray, RoundOutcome, RoundSignals


class Policy(Protocol):
    """A dial for `num_servers` servers at once; a real server is the case of one row.

    A policy is a pure function of the history of signals and outcomes since `reset`: no clock, no
    measured time, no unseeded randomness, no file access. In a tensor-parallel server every rank
    runs it separately, and two ranks that disagree on k hang. Rows never influence each other.
    """

    @property
    def tiers(self) -> tuple[int, ...]:
        """The values of k it chooses from, ascending."""
        ...

    def reset(self, num_servers: int) -> None:
        """Forget everything; `num_servers` rows follow. Called before the first decision."""
        ...

    def decide(self, signals: RoundSignals) -> IntArray:
        """Shape `(num_servers,)`: k for the coming round, each value one of `tiers`."""
        ...

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from rounds that have finished; zero or more calls between two decisions.

        The outcome of round n arrives before the decision of round n + 1 or n + 2, so it must be
        read by its own `k` and `round_id`, never as the outcome of the last decision. Rows whose
        `round_id` is -1 carry nothing.
        """
        ...
