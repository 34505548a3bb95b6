"""A batch-size bandit over the tiers: discounted UCB with a switch lock.

In the style of two published rivals. From Nightjar (arXiv 2512.22420): the context is the batch
size and nothing else, the reward is goodput, and a chosen arm is locked for a few rounds. From
BanditSpec (ICML 2025, arXiv 2505.15141): an upper confidence bound picks the arm. Discounting the
past (Garivier and Moulines 2011, arXiv 0805.3415) is what lets a stationary bandit follow drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.controller.errors import UserError
from draftdial.controller.rules import checked_tiers, profile_columns
from draftdial.controller.signals import IntArray, RoundOutcome, RoundSignals

REMEMBERED_ROUNDS = 4
"""Rounds whose context is kept until their outcome arrives, at most two rounds later."""


class Bandit:
    """One bandit per captured batch size; arms are tiers, reward is goodput over that of no drafts.

    The reward of a round with k is `mean tokens per request * T_0 / T_k`, both times the profile's
    for that round's batch and context (measured time may not reach a decision). Dividing by the
    goodput of k = 0 only makes rewards of different contexts comparable. Unlike the greedy rule it
    does not use that a round with k shows what every smaller k would have done: bandits ignore
    that, and so do the rivals it stands for.

    Args:
        tiers: Values of k to choose from, all of them in the profile.
        profile: What a round costs, and which batches are captured.
        off_mode: Which off row of the profile is this server's k = 0.
        discount: What a reward still counts after one more round in its context.
        exploration: Width of the confidence bound. It shrinks with the square root of the batch,
            because a reward is the mean over that many requests.
        lock_rounds: Rounds an arm is kept once chosen, unless the batch moves to another captured
            size.
    """

    def __init__(
        self,
        tiers: Sequence[int],
        profile: CostProfile,
        off_mode: OffMode = "warm",
        *,
        discount: float = 0.995,
        exploration: float = 0.3,
        lock_rounds: int = 4,
    ) -> None:
        self.tiers = checked_tiers(tiers)
        self._k_of_tier = np.array(self.tiers)
        self._profile, self._off_mode = profile, off_mode
        self._columns = profile_columns(profile, self.tiers)
        if not 0 < discount < 1 or exploration < 0 or lock_rounds < 1:
            raise UserError(
                "bandit rule: discount must lie between 0 and 1, exploration be 0 or more and lock_rounds "
                f"1 or more, got {discount}, {exploration}, {lock_rounds}"
            )
        self._discount, self._exploration, self._lock_rounds = discount, exploration, lock_rounds

    def reset(self, num_servers: int) -> None:
        num_batches, num_tiers = len(self._profile.captured_batches), len(self.tiers)
        self._rows = np.arange(num_servers)
        self._pulls = np.zeros((num_servers, num_batches, num_tiers))
        self._rewards = np.zeros((num_servers, num_batches, num_tiers))
        self._arm = np.zeros(num_servers, np.int64)
        self._bucket = np.full(num_servers, -1)
        self._locked_for = np.zeros(num_servers, np.int64)
        self._past_round = np.full((REMEMBERED_ROUNDS, num_servers), -1)
        self._past_bucket = np.zeros((REMEMBERED_ROUNDS, num_servers), np.int64)
        self._past_speed = np.zeros((REMEMBERED_ROUNDS, num_servers, num_tiers))

    def decide(self, signals: RoundSignals) -> IntArray:
        buckets = self._profile.bucket_of_batch.take(signals.num_running, mode="clip")
        free = (self._locked_for == 0) | (buckets != self._bucket)
        self._arm = np.where(free, self._best_arm(buckets, signals.num_running), self._arm)
        self._locked_for = np.where(free, self._lock_rounds, self._locked_for) - 1
        self._bucket = buckets
        self._remember(signals, buckets)
        return self._k_of_tier[self._arm]

    def observe(self, outcome: RoundOutcome) -> None:
        counts = outcome.accept_counts
        num_requests = counts.sum(axis=1)
        slot = outcome.round_id % REMEMBERED_ROUNDS
        arm = np.minimum(np.searchsorted(self._k_of_tier, outcome.k), len(self.tiers) - 1)
        known = (outcome.round_id >= 0) & (self._past_round[slot, self._rows] == outcome.round_id)
        usable = known & (self._k_of_tier[arm] == outcome.k) & (num_requests > 0)
        row = np.flatnonzero(usable)
        slot, arm = slot[row], arm[row]
        tokens = 1 + counts[row] @ np.arange(counts.shape[1]) / num_requests[row]
        bucket = self._past_bucket[slot, row]
        self._pulls[row, bucket] *= self._discount
        self._rewards[row, bucket] *= self._discount
        self._pulls[row, bucket, arm] += 1
        self._rewards[row, bucket, arm] += tokens * self._past_speed[slot, row, arm]

    def card(self) -> dict[str, Any]:
        return {
            "kind": "bandit",
            "discount": self._discount,
            "exploration": self._exploration,
            "lock_rounds": self._lock_rounds,
        }

    def _best_arm(self, buckets: IntArray, num_running: IntArray) -> IntArray:
        """The arm with the highest upper bound; arms that were never tried come first, in order."""
        pulls = self._pulls[self._rows, buckets]
        seen = np.maximum(pulls, 1e-9)
        log_total = np.log(np.maximum(pulls.sum(axis=1), 1.0))
        width = self._exploration * np.sqrt(log_total / np.maximum(num_running, 1))
        bound = self._rewards[self._rows, buckets] / seen + width[:, None] / np.sqrt(seen)
        bound[pulls == 0] = np.inf
        best: IntArray = bound.argmax(axis=1)
        return best

    def _remember(self, signals: RoundSignals, buckets: IntArray) -> None:
        """Keep what the reward of this round will be computed from."""
        round_s = self._profile.round_s(signals.num_running, signals.mean_context_tokens, self._off_mode)
        slot = signals.round_id % REMEMBERED_ROUNDS
        self._past_round[slot, self._rows] = signals.round_id
        self._past_bucket[slot, self._rows] = buckets
        self._past_speed[slot, self._rows] = round_s[:, :1] / round_s[:, self._columns]
