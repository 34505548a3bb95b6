"""Scores policies on episodes that no training step and no report uses."""

from __future__ import annotations

import numpy as np

from draftdial.controller.policy import Policy
from draftdial.controller.rules import Threshold
from draftdial.controller.signals import FloatArray
from draftdial.envs.episodes import Episodes, EpisodeStep

FIRST_SEED = 2_000_000
"""Validation episodes have the seeds from here on; training stays below, reports start at 3,000,000."""
THRESHOLD_BATCHES = (8, 16, 32, 64, 128)


class Validation:
    """The same episodes for everybody, each played by a policy's own choices for the same time.

    A score is the reward per second, averaged over the episodes: in closed loops, the seconds gained per
    second on the par of the work done (see objectives.Throughput), so that a difference of 0.01 is about
    one per cent of throughput. Per round instead, policies of many short rounds would look better.
    """

    def __init__(self, episodes: Episodes, reference: Policy) -> None:
        """`reference` plays every episode once; the time it takes is the time that all are judged on.

        A number of rounds instead would stop a policy of short rounds before a queue has built up.
        """
        self._episodes = episodes
        self._tier_of_k = np.zeros(episodes.tiers[-1] + 1, np.int64)
        self._tier_of_k[list(episodes.tiers)] = np.arange(len(episodes.tiers))
        self._horizon_s: FloatArray = np.full(episodes.num_servers, np.inf)
        self._begin(reference)
        for _ in range(episodes.scenario.rounds):
            self._step(reference)
        self._horizon_s = episodes.engine.servers["clock_s"].copy()

    def score(self, policy: Policy) -> float:
        """Mean reward per second over all episodes."""
        return float(self.scores(policy).mean())

    def scores(self, policy: Policy) -> FloatArray:
        """(num_episodes,) reward per second, from the start of each episode to its horizon."""
        self._begin(policy)
        servers = self._episodes.engine.servers
        total = np.zeros(len(servers))
        elapsed_s = np.zeros(len(servers))
        running = np.ones(len(servers), np.bool_)
        while running.any():
            step = self._step(policy)
            total += np.where(running, step.reward * step.round_s, 0.0)
            elapsed_s += np.where(running, step.elapsed_s, 0.0)
            running = (servers["clock_s"] < self._horizon_s) & ~servers["done"]
        return total / elapsed_s

    def _begin(self, policy: Policy) -> None:
        num_servers = self._episodes.num_servers
        self._episodes.begin(np.arange(num_servers), range(FIRST_SEED, FIRST_SEED + num_servers))
        policy.reset(num_servers)

    def _step(self, policy: Policy) -> EpisodeStep:
        step = self._episodes.advance(self._tier_of_k[policy.decide(self._episodes.engine.signals())])
        for outcome in step.outcomes:
            policy.observe(outcome)
        return step

    def best_threshold(self) -> tuple[Threshold, float]:
        """The threshold rule of the highest score, and that score."""
        tiers = self._episodes.tiers
        rules = [Threshold(tiers, k, batch) for k in tiers[1:] for batch in self._batches()]
        scored = [(rule, self.score(rule)) for rule in rules]
        return max(scored, key=lambda pair: pair[1])

    def _batches(self) -> tuple[int, ...]:
        return (*THRESHOLD_BATCHES, self._episodes.profiles[0].max_running)
