"""Scores policies on episodes that no training step and no report uses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from draftdial.controller.policy import Policy
from draftdial.controller.rules import Threshold
from draftdial.controller.signals import FloatArray
from draftdial.envs.episodes import Episodes

FIRST_SEED = 2_000_000
"""Validation episodes have the seeds from here on; training stays below, reports start at 3,000,000."""
THRESHOLD_BATCHES = (8, 16, 32, 64, 128)


class Validation:
    """The same episodes for everybody, each run to its cut by a policy's own choices.

    A score is the reward per second, averaged over the episodes: in closed loops, the seconds gained per
    second on the par of the work done (see objectives.Throughput), so that a difference of 0.01 is about
    one per cent of throughput. Per round instead, policies of many short rounds would look better.
    """

    def __init__(self, make_episodes: Callable[[], Episodes]) -> None:
        self._episodes = make_episodes()

    def score(self, policy: Policy) -> float:
        """Mean reward per second over all episodes."""
        return float(self.scores(policy).mean())

    def scores(self, policy: Policy) -> FloatArray:
        """(num_episodes,) reward per second."""
        episodes = self._episodes
        num_servers = episodes.num_servers
        episodes.begin(np.arange(num_servers), range(FIRST_SEED, FIRST_SEED + num_servers))
        policy.reset(num_servers)
        tier_of_k = np.zeros(episodes.tiers[-1] + 1, np.int64)
        tier_of_k[list(episodes.tiers)] = np.arange(len(episodes.tiers))
        total = np.zeros(num_servers)
        elapsed_s = np.zeros(num_servers)
        running = np.ones(num_servers, np.bool_)
        while running.any():
            step = episodes.advance(tier_of_k[policy.decide(episodes.engine.signals())])
            for outcome in step.outcomes:
                policy.observe(outcome)
            total += np.where(running, step.reward * step.round_s, 0.0)
            elapsed_s += np.where(running, step.elapsed_s, 0.0)
            running &= ~step.cut
        return total / elapsed_s

    def best_threshold(self) -> tuple[Threshold, float]:
        """The threshold rule of the highest score, and that score."""
        tiers = self._episodes.tiers
        rules = [Threshold(tiers, k, batch) for k in tiers[1:] for batch in self._batches()]
        scored = [(rule, self.score(rule)) for rule in rules]
        return max(scored, key=lambda pair: pair[1])

    def _batches(self) -> tuple[int, ...]:
        return (*THRESHOLD_BATCHES, self._episodes.profiles[0].max_running)
