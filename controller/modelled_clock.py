"""Time as the cost profile has it: no clock is read, so every rank has the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftdial.controller.rows import Numbers, OneRow, rows_of
from draftdial.controller.signals import IntArray

CLOCK_ROUNDS = 1024
"""Rounds the clock remembers, a power of two; a longer wait is read as this many."""


class ModelledClock:
    """Seconds that the rounds and prefills of each server should have taken, and when each round began."""

    def __init__(self, num_servers: int) -> None:
        self._rows = rows_of(num_servers)
        self.now_s: Numbers = self._rows.full(0.0)
        self._index = 0 if isinstance(self._rows, OneRow) else np.arange(num_servers)
        self._num_servers = num_servers
        history = np.zeros(CLOCK_ROUNDS * num_servers)
        self._history: Any = history.tolist() if isinstance(self._rows, OneRow) else history

    def reset_servers(self, servers: IntArray) -> None:
        """Back to zero on `servers` (of many)."""
        self.now_s[servers] = 0.0
        self._history.reshape(CLOCK_ROUNDS, -1)[:, servers] = 0.0

    def waited_s(self, round_id: Numbers, ago_rounds: Numbers) -> Numbers:
        """Seconds since `ago_rounds` before `round_id`, which begins now."""
        self._history[self._slot(round_id)] = self.now_s
        ago_rounds = self._rows.minimum(ago_rounds, CLOCK_ROUNDS - 1)
        return self.now_s - self._history[self._slot(round_id - ago_rounds)]

    def _slot(self, round_id: Numbers) -> Numbers:
        return (round_id & (CLOCK_ROUNDS - 1)) * self._num_servers + self._index
