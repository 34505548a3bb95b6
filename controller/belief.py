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

    Arrays have shape `(num_memories, num_servers, max_k)`; index 0 is the shortest memory. They are
    views: servers come last in memory, where sums over depths run along whole rows.
    """

    def __init__(self, max_k: int, half_lives_samples: Sequence[float], num_servers: int = 1) -> None:
        self.max_k = max_k
        self.half_lives_samples = tuple(half_lives_samples)
        samples = np.arange(4097, dtype=np.float64)
        # A table, not a power per round: cheap, and the same bits on every rank.
        self._decay = np.stack(
            [0.5 ** (samples / half_life) for half_life in self.half_lives_samples], axis=1
        )
        self._depth = np.arange(1, max_k + 1)[:, None]
        self.reset(num_servers)

    def reset(self, num_servers: int) -> None:
        """Forget everything; `num_servers` rows follow."""
        self._counts = np.zeros((2, len(self.half_lives_samples), self.max_k, num_servers))
        self.reached: FloatArray = self._counts[0].swapaxes(1, 2)
        self.accepted: FloatArray = self._counts[1].swapaxes(1, 2)
        self.last_informed_round: IntArray = np.full(num_servers, -NEVER, np.int64)

    def reset_servers(self, servers: IntArray) -> None:
        """Forget what was learned on `servers`."""
        self._counts[..., servers] = 0.0
        self.last_informed_round[servers] = -NEVER

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a finished round; rows whose `round_id` is -1 or whose k is 0 teach nothing."""
        num_at_least = np.add.accumulate(outcome.accept_counts.T[::-1], axis=0)[::-1]
        tried = self._depth <= outcome.k * (outcome.round_id >= 0)
        reached = num_at_least[: self.max_k] * tried
        self._counts *= self._decay.take(reached, axis=0, mode="clip").transpose(2, 0, 1)
        self._counts[0] += reached
        self._counts[1] += num_at_least[1 : self.max_k + 1] * tried
        np.copyto(self.last_informed_round, outcome.round_id, where=reached[0] > 0)

    def mean(self) -> FloatArray:
        """(num_memories, num_servers, max_k): P(draft d accepted | those before it were)."""
        return self.mean_by_depth().swapaxes(1, 2)

    def mean_by_depth(self) -> FloatArray:
        """`mean` as `(num_memories, max_k, num_servers)`, contiguous."""
        reached, accepted = self._counts
        weight = reached + PRIOR_SAMPLES
        mean = np.empty_like(weight)
        tried, right = np.add.reduce(self._counts[:, -1], axis=1)
        leaning: FloatArray = (right + PRIOR_SAMPLES * PRIOR_ACCEPTANCE) / (tried + PRIOR_SAMPLES)
        for memory in range(len(mean) - 1, -1, -1):
            leaning = PRIOR_SAMPLES * leaning + accepted[memory]
            leaning = np.divide(leaning, weight[memory], out=mean[memory])
        return mean
