"""Lockstep with an environment: before each decode round a server asks it for k, and waits for the answer.

For training on a real server; not there unless `DRAFTDIAL_LIVE` names a socket. Whatever the environment
does, the server serves on: a round whose answer does not come in time runs as if no environment were there,
and so do all after it until the environment speaks again. One process decides, so tensor parallel is 1.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from draftdial.controller.errors import UserError
from draftdial.controller.signals import RoundSignals
from draftdial.engine_patch.live_channel import Channel, ChannelClosed, Listener
from draftdial.engine_patch.round_outcomes import FinishedRound
from draftdial.engine_patch.round_timer import CudaClock, HostClock, clock_of

logger = logging.getLogger(__name__)

WAIT_S = 5.0
"""The longest wait for an answer: `/health` says 503 after 20 s without a token."""
_SIGNALS = tuple(field.name for field in fields(RoundSignals))

_lockstep: Lockstep | None = None


def current() -> Lockstep | None:
    """The lockstep of this process; None where no environment may decide."""
    return _lockstep


def start(path: Path, scheduler: Any, tiers: tuple[int, ...]) -> None:
    """Listen at `path` for an environment that chooses among `tiers`.

    Raises:
        UserError: more than one process decides here, or `path` cannot be had.
    """
    global _lockstep
    arguments = scheduler.server_args
    for name in ("tp_size", "dp_size", "pp_size"):
        size = getattr(arguments, name, 1)
        if size > 1:
            raise UserError(f"live: --{name.replace('_', '-')}: found {size}, allowed: 1")
    _lockstep = Lockstep(Listener(path), tiers, clock_of(scheduler))
    logger.warning("draftdial: an environment may decide k, through %s", path)


class _Timed(NamedTuple):
    """A batch that was launched; marks are a clock's."""

    round_id: int | None
    """None for a prefill."""
    before: Any
    """The end of the batch before it."""
    begin: Any
    """When its k was there; of a prefill, when it was launched."""
    end: Any
    wait_s: float
    prefill_tokens: int


class Lockstep:
    """The server's end. Every method leaves the server running, whatever the other end does."""

    def __init__(self, listener: Listener, tiers: tuple[int, ...], clock: HostClock | CudaClock) -> None:
        self.path = listener.path
        self.num_answers = 0
        self.num_timeouts = 0
        self.waited_s = 0.0
        self._listener = listener
        self._tiers = tiers
        self._clock = clock
        self._channel: Channel | None = None
        self._is_late = False
        """The newest question has no answer yet, and nobody waits for it any more."""
        self._missed = 0
        self._answered: set[int] = set()
        """Rounds at the environment's k whose results have not been read."""
        self._is_deciding = False
        """Was the newest decode round at the environment's k? Not where k is forced, say."""
        self._outcomes: list[dict[str, Any]] = []
        self._in_flight: deque[_Timed] = deque()
        self._previous_end: Any = None
        self._asked: tuple[int, Any, float] | None = None
        """Of the batch being launched: its round, the mark after the answer and the time waited."""

    @property
    def is_followed(self) -> bool:
        """Does an environment answer?"""
        return self._channel is not None and not self._is_late

    def k_of(self, signals: RoundSignals, own_k: int) -> int:
        """The environment's k for the round being launched; `own_k` where it does not say one."""
        began = time.perf_counter()
        try:
            k = self._ask(signals)
        except Exception as error:
            self._part(str(error) if isinstance(error, ChannelClosed) else repr(error))
            k = None
        if k is None:
            return own_k
        wait_s = time.perf_counter() - began
        self.num_answers += 1
        self.waited_s += wait_s
        self._answered.add(int(signals.round_id[0]))
        self._asked = (int(signals.round_id[0]), self._clock.mark(), wait_s)
        return k

    def run(
        self, run_batch: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `batch`, and time it while an environment answers."""
        is_decode = batch.forward_mode.is_decode()
        self._asked = None
        before, began = self._previous_end, self._clock.mark()
        result = run_batch(scheduler, batch, *args, **kwargs)
        self._previous_end = end = self._clock.mark()
        if self._asked is not None:
            round_id, begin, wait_s = self._asked
            self._in_flight.append(_Timed(round_id, before or began, begin, end, wait_s, 0))
            self._is_deciding = True
        elif is_decode:
            self._is_deciding = False
        elif self._is_deciding and self.is_followed:
            num_tokens = batch.extend_num_tokens or 0
            self._in_flight.append(_Timed(None, began, began, end, 0.0, num_tokens))
        return result

    def finished(self, finished: FinishedRound) -> None:
        """The result of a round has been read; only those at the environment's k are kept for it."""
        is_answered = finished.round_id in self._answered
        self._answered.discard(finished.round_id)
        if is_answered and self.is_followed:
            rids = [req.rid for req in finished.requests]
            outcome = {"round": finished.round_id, "k": finished.k, "accepted": finished.accepted}
            self._outcomes.append(outcome | {"rids": rids})

    def status(self) -> dict[str, Any]:
        """What `/server_info` says of it."""
        self._look()
        return {
            "live": str(self.path),
            "live_is_followed": int(self.is_followed),
            "live_answers": self.num_answers,
            "live_timeouts": self.num_timeouts,
            "live_waited_s": self.waited_s,
        }

    def _ask(self, signals: RoundSignals) -> int | None:
        self._look()
        if self._channel is None:
            self._channel = self._listener.accept()
            if self._channel is None:
                return None
            self._is_late, self._missed = False, 0
        if self._is_late:
            if self._channel.receive(0.0) is None:
                self._missed += 1
                return None
            self._is_late = False
        round_id = int(signals.round_id[0])
        times, prefill_s, prefill_tokens = self._harvest()
        self._channel.send(
            {
                "round": round_id,
                "signals": {name: getattr(signals, name)[0].item() for name in _SIGNALS},
                "missed": self._missed,
                "outcomes": self._outcomes,
                "times": times,
                "prefill_s": prefill_s,
                "prefill_tokens": prefill_tokens,
            }
        )
        self._missed, self._outcomes = 0, []
        answer = self._channel.receive(WAIT_S)
        if answer is None:
            self._is_late, self._missed = True, 1
            self.num_timeouts += 1
            self._in_flight.clear()
            logger.warning("draftdial: no answer in %g s: going on without the environment", WAIT_S)
            return None
        if answer.get("round") != round_id or answer.get("k") not in self._tiers:
            raise ChannelClosed(f"it answered {str(answer)[:80]} to round {round_id}")
        return int(answer["k"])

    def _harvest(self) -> tuple[list[list[float]], float, int]:
        """Rounds that are over, and the seconds and tokens of prefills that are.

        A round lasts from the end of the batch before to its own, less the wait as far as the device stood
        still for it: a wait behind the round before delays nothing.
        """
        times: list[list[float]] = []
        prefill_s, prefill_tokens = 0.0, 0
        clock = self._clock
        while self._in_flight and clock.has_passed(self._in_flight[0].end):
            timed = self._in_flight.popleft()
            if timed.round_id is None:
                prefill_s += 1e-3 * clock.elapsed_ms(timed.begin, timed.end)
                prefill_tokens += timed.prefill_tokens
                continue
            idle_s = max(0.0, 1e-3 * clock.elapsed_ms(timed.before, timed.begin))
            period_s = 1e-3 * clock.elapsed_ms(timed.before, timed.end)
            times.append([timed.round_id, period_s - min(timed.wait_s, idle_s), timed.wait_s])
        return times, prefill_s, prefill_tokens

    def _look(self) -> None:
        """An environment that has left makes room for the next one, which decides from this round on."""
        if self._channel is not None and not self._channel.is_open():
            self._part("it has left")

    def _part(self, reason: str) -> None:
        """The environment has gone, or is to go: another one may come."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self._answered.clear()
        self._outcomes = []
        self._in_flight.clear()
        logger.warning("draftdial: the environment is gone (%s): going on without it", reason)
