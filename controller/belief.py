"""What is known about how well the draft guesses, from late and partial outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftdial.controller.signals import FloatArray, IntArray, RoundOutcome

PRIOR_ACCEPTANCE = 0.7
PRIOR_SAMPLES = 4.0
NEVER = 1 << 20


class AcceptanceBelief:
    """Acceptance at every depth, with evidence and age, over several memories at once.

    For every depth d it keeps exponentially weighted counts of requests whose d-th draft token was
    tried (*reached*) and was right (*accepted*). Counts decay per sample, so a round of 64 requests
    teaches 64 times as fast as a round of one. A round of k tokens says nothing about deeper depths:
    they lean on the pooled acceptance of all depths, the more the less they were tried.

    `half_lives_samples` ascend; each shorter memory leans on the next longer one, so that it says
    something new only once it has evidence of its own.

    Arrays have shape `(num_memories, num_servers, max_k)`; index 0 is the shortest memory.
    """

    def __init__(self, max_k: int, half_lives_samples: Sequence[float], num_servers: int = 1) -> None:
        self.max_k = max_k
        self.half_lives_samples = tuple(half_lives_samples)
        samples = np.arange(4097, dtype=np.float64)
        # A table, not a power per round: cheap, and the same bits on every rank.
        self._decay = np.stack([0.5 ** (samples / half_life) for half_life in self.half_lives_samples])
        self._depth = np.arange(1, max_k + 1)
        self._memory = np.arange(len(self.half_lives_samples))[:, None, None]
        self.reset(num_servers)

    def reset(self, num_servers: int) -> None:
        """Forget everything; `num_servers` rows follow."""
        shape = (len(self.half_lives_samples), num_servers, self.max_k)
        self.reached: FloatArray = np.zeros(shape)
        self.accepted: FloatArray = np.zeros(shape)
        self.last_informed_round: IntArray = np.full(num_servers, -NEVER, np.int64)

    def reset_servers(self, servers: IntArray) -> None:
        """Forget what was learned on `servers`."""
        self.reached[:, servers] = 0.0
        self.accepted[:, servers] = 0.0
        self.last_informed_round[servers] = -NEVER

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a finished round; rows whose `round_id` is -1 or whose k is 0 teach nothing."""
        num_at_least = outcome.accept_counts[:, ::-1].cumsum(axis=1)[:, ::-1]
        tried = (self._depth <= outcome.k[:, None]) & (outcome.round_id[:, None] >= 0)
        reached = np.where(tried, num_at_least[:, : self.max_k], 0)
        accepted = np.where(tried, num_at_least[:, 1 : self.max_k + 1], 0)
        decay = self._decay[self._memory, np.minimum(reached, 4096)]
        self.reached *= decay
        self.reached += reached
        self.accepted *= decay
        self.accepted += accepted
        informed = reached[:, 0] > 0
        self.last_informed_round[informed] = outcome.round_id[informed]

    def mean(self) -> FloatArray:
        """(num_memories, num_servers, max_k): P(draft d accepted | those before it were)."""
        mean = np.empty_like(self.reached)
        longest = len(mean) - 1
        pooled = (self.accepted[longest].sum(1) + PRIOR_SAMPLES * PRIOR_ACCEPTANCE) / (
            self.reached[longest].sum(1) + PRIOR_SAMPLES
        )
        leaning: FloatArray = pooled[:, None]
        for memory in range(longest, -1, -1):
            leaning = (self.accepted[memory] + PRIOR_SAMPLES * leaning) / (
                self.reached[memory] + PRIOR_SAMPLES
            )
            mean[memory] = leaning
        return mean
