"""When batches were launched, and how much of the time between the host waited for the GPU."""

from __future__ import annotations

import time

from draftdial.engine_patch.counters import Counters, Steady


class LaunchClock:
    """Adds to a dial's counters: for people and benchmarks, not for decisions, as ranks' clocks differ."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.sees_waits = False
        """Whether all that the host waits for the GPU is told to `waited`."""
        self._launched_s = 0.0
        """When the newest batch was launched; 0.0 before the first, and the first after a pause."""
        self._k: int | None = None
        """Of the decided round that it was; None where it was none."""
        self._before_k: int | None = None
        """The same of the batch before it."""
        self._waited_s = 0.0
        """What the host has waited for since."""
        self._pending = 0
        """Batches whose result has not been read."""

    def launched(self, k: int | None, *, is_prefill: bool, has_waited: bool = False) -> None:
        """A batch was launched: a decided round of `k`, or none.

        `has_waited`: for a time that is not known the host waited for the GPU in that.
        """
        now = time.perf_counter()
        seconds, waited_s = now - self._launched_s, self._waited_s
        counters, sees_waits = self._counters, self.sees_waits and not has_waited
        if k is not None and self._k is not None:
            counters.seconds_at_k[self._k] += seconds
            if sees_waits and self._before_k == self._k == k:
                counters.steady_at_k.setdefault(k, Steady()).add(seconds, waited_s)
        is_busy = self._pending > 0 and self._launched_s > 0.0  # else the server was idle or paused
        if sees_waits and is_busy and (k is not None or is_prefill):  # other batches are health checks
            counters.launches.add(seconds, waited_s, is_prefill)
        self._pending += 1
        self._launched_s, self._waited_s = now, 0.0
        self._before_k, self._k = self._k, k

    def paused(self) -> None:
        """Nothing is launched until somebody lets the server go on: that time is of no batch."""
        self._launched_s, self._k = 0.0, None

    def waited(self, seconds: float) -> None:
        """The host has waited so long for a result of the GPU, with nothing else to do."""
        self._waited_s += seconds

    def processed(self) -> None:
        """A result was read."""
        self._pending = max(0, self._pending - 1)
