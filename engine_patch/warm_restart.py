"""The rounds between off mode `kv-only` and speculation."""

from __future__ import annotations

from draftdial.controller.cost_profile import OffMode


class WarmRestart:
    """Turns "on" into "one warm round, then on". What it says depends on the decisions before alone.

    A decision that had to wait is made good in the next round, also where that one decides 0: else one that
    probes with a single round would never learn anything.
    """

    def __init__(self) -> None:
        self.leaves_out = False
        """Does the newest round leave the draft out?"""
        self.is_cold = False
        """Did it, so that none may speculate next?"""
        self.num_restarts = 0
        """Rounds that a decision above 0 had to wait for."""
        self._owed_k = 0

    def decide(self, k: int) -> int:
        """What the coming round runs, where `k` was decided."""
        self.leaves_out = False
        if k > 0 and self.is_cold:
            self.is_cold, self._owed_k = False, k
            self.num_restarts += 1
            return 0
        k, self._owed_k = k or self._owed_k, 0
        self.leaves_out = self.is_cold = k == 0
        return k

    def measure(self, k: int, off_mode: OffMode) -> None:
        """The coming round runs `k`, in this off mode where that is 0, because a measurement says so."""
        self._owed_k = 0
        self.leaves_out = k == 0 and off_mode == "kv-only"
        self.is_cold = k == 0 and off_mode != "warm"

    def forget(self) -> None:
        """Owe nothing any more: somebody else decides from now on."""
        self._owed_k = 0
