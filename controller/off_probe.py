"""Drafting once in a while where a policy has stopped: at k = 0 nothing is observed."""

from __future__ import annotations

import numpy as np

from draftdial.controller.signals import IntArray

FIRST_WAIT_ROUNDS = 32
LONGEST_WAIT_ROUNDS = 512


class OffProbe:
    """One round at the smallest k above 0 after a run of rounds at k = 0, for each server.

    A few unlucky rounds at batch 1 can talk a policy into k = 0, where no outcome talks it out again. The
    wait doubles with every probe that changes nothing, as in goodput-greedy, and starts anew when the policy
    drafts by itself: a server that is rightly off pays for one round in 513 in the end.
    """

    def __init__(self) -> None:
        self.reset(1)

    def reset(self, num_servers: int) -> None:
        """Forget everything; `num_servers` rows follow."""
        self._quiet = np.zeros(num_servers, np.int64)
        self._wait = np.full(num_servers, FIRST_WAIT_ROUNDS)
        self._is_idle = True

    def applied(self, tier: IntArray) -> IntArray:
        """`tier`, shape `(num_servers,)`, the index of each server's k (0 is k = 0), with probes in it."""
        num_off = len(tier) - np.count_nonzero(tier)
        if not num_off and self._is_idle:
            return tier
        self._is_idle = not num_off
        is_off = tier == 0
        self._quiet = np.where(is_off, self._quiet + 1, 0)
        self._wait = np.where(is_off, self._wait, FIRST_WAIT_ROUNDS)
        is_due = self._quiet > self._wait
        self._wait = np.where(is_due, np.minimum(2 * self._wait, LONGEST_WAIT_ROUNDS), self._wait)
        self._quiet[is_due] = 0
        return np.where(is_due, 1, tier)
