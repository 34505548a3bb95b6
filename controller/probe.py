"""Drafting deeper once in a while: what no round has tried for long is known from old evidence, or none."""

from __future__ import annotations

import numpy as np

from draftdial.controller.rows import Numbers, OneRow, rows_of
from draftdial.controller.signals import FloatArray, IntArray

FIRST_WAIT_ROUNDS = 32
LONGEST_WAIT_ROUNDS = 256
DEAR = 0.32
"""Waits are as above where a probe takes up to this share longer than the round in its place, and longer in
proportion where it takes more: the first costs no more than a hundredth of the time before it."""


class Probe:
    """One round at the next deeper tier after a run of rounds without one so deep, for each server.

    At k = 0 nothing is observed, and at k = 3 nothing about a fourth draft. A few unlucky rounds can talk
    a policy out of a tier, and no outcome talks it back. The wait for a tier doubles with every probe of it,
    as in goodput-greedy, and starts anew when the policy goes there by itself: a server that rightly stays
    where it is pays for one round in 257 in the end.
    """

    def __init__(self, num_tiers: int) -> None:
        self._num_tiers = num_tiers
        self.reset(1)

    def reset(self, num_servers: int) -> None:
        """Forget everything; `num_servers` rows follow."""
        self._rows = rows_of(num_servers)
        # By tier: when a round as deep ran last, and for how long the next probe of it waits.
        self._ran: list[Numbers] = [self._rows.full(0) for _ in range(self._num_tiers)]
        self._wait: list[Numbers] = [self._rows.full(FIRST_WAIT_ROUNDS) for _ in range(self._num_tiers)]
        self._round = 0

    def applied(self, tier: IntArray, round_s: FloatArray) -> IntArray:
        """`tier` with probes in it.

        Args:
            tier: `(num_servers,)`, the index of each server's k.
            round_s: `(num_tiers, num_servers)`, seconds that the coming round would take.
        """
        if isinstance(self._rows, OneRow):
            return self._applied_to_one(tier, round_s)
        ran, wait = self._ran, self._wait
        self._round = now = self._round + 1
        probed = tier
        for t in range(1, self._num_tiers):
            dearness = np.maximum((round_s[t] / round_s[t - 1] - 1.0) / DEAR, 1.0)
            is_so_deep = tier >= t
            is_due = (tier == t - 1) & (now - ran[t] > wait[t] * dearness)
            ran[t] = np.where(is_so_deep | is_due, now, ran[t])
            longer = np.where(is_due, np.minimum(2 * wait[t], LONGEST_WAIT_ROUNDS), wait[t])
            wait[t] = np.where(is_so_deep, FIRST_WAIT_ROUNDS, longer)
            probed = probed + is_due
        return probed

    def _applied_to_one(self, tier: IntArray, round_s: FloatArray) -> IntArray:
        """The same on a server's critical path, where only one tier can be due."""
        ran, wait, wanted = self._ran, self._wait, tier.item()
        self._round = now = self._round + 1
        for t in range(1, wanted + 1):
            ran[t], wait[t] = now, FIRST_WAIT_ROUNDS
        t = wanted + 1
        if t == self._num_tiers:
            return tier
        dearness = max((round_s.item(t) / round_s.item(wanted) - 1.0) / DEAR, 1.0)
        if now - ran[t] <= wait[t] * dearness:
            return tier
        ran[t], wait[t] = now, min(2 * wait[t], LONGEST_WAIT_ROUNDS)
        return tier + 1
