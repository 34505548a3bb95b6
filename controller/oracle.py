"""References that see what no server can see. Simulator only."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from draftdial.controller.signals import FloatArray, IntArray, RoundOutcome, RoundSignals


class TransparentEngine(Protocol):
    """An engine that shows its hidden state."""

    tiers: tuple[int, ...]

    def round_s(self) -> FloatArray: ...

    def expected_tokens(self) -> FloatArray: ...

    def realised_tokens(self) -> FloatArray: ...


class Informed:
    """Goodput-greedy with exact costs and, per running request, the acceptance its hidden state implies.

    Myopic, so not a bound: a policy that plans ahead can beat it.
    """

    def __init__(self, engine: TransparentEngine) -> None:
        self._engine = engine
        self.tiers = engine.tiers
        self._k = np.array(engine.tiers, np.int64)

    def reset(self, num_servers: int) -> None:
        """Nothing to forget."""

    def tokens(self) -> FloatArray:
        """(num_servers, num_tiers) tokens of the coming round."""
        return self._engine.expected_tokens()

    def decide(self, signals: RoundSignals) -> IntArray:
        k: IntArray = self._k[np.argmax(self.tokens() / self._engine.round_s(), axis=1)]
        return k

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""


class Clairvoyant(Informed):
    """The same rule, given how many drafts each request is about to accept at every tier."""

    def tokens(self) -> FloatArray:
        return self._engine.realised_tokens()
