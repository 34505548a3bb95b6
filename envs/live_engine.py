"""A real SGLang server in lockstep with an environment: it decodes no round before it is told k."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from draftdial.controller.bench_loads import Asking
from draftdial.controller.errors import UserError
from draftdial.controller.signals import IntArray, RoundOutcome, RoundSignals
from draftdial.engine_patch.live_channel import Message
from draftdial.envs.live_load import LiveLoad
from draftdial.envs.live_server import LiveServer
from draftdial.envs.workload import RequestList

POLL_S = 0.05
STALLED_S = 60.0
"""Without a round for so long, although requests are under way, something is wrong."""
ABORT_AGAIN_S = 1.0
"""A request that was on its way when the load was called off is not known to the server at first."""


@dataclass
class LiveStep:
    """What the last round brought to light, most of it about rounds before it."""

    finished: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    """Of each round whose result was read: its id, its requests by place in the list, drafts accepted."""
    times_s: list[tuple[int, float]] = field(default_factory=list)
    """Measured rounds, without what the server waited for k."""
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    waited_s: float = 0.0
    num_missed: int = 0
    """Rounds that ran without being asked for, after an answer that came too late."""


class LiveEngine:
    """`SpeculativeEngine` over one real server, which must serve nobody else.

    It sends its own load, a new list of requests at every `reset`. No request, no round: `run_round` waits
    for the next one that is due, and `is_served` says that none will be.
    """

    num_servers = 1

    def __init__(self, server: LiveServer, draw: Callable[[int], RequestList], asking: Asking) -> None:
        """`draw(seed)` makes a list of requests, `asking` turns them into what is sent."""
        self.server = server
        self.tiers = server.tiers
        self.requests: RequestList | None = None
        self.is_served = False
        self.step = LiveStep()
        self._draw, self._asking = draw, asking
        self._signals = RoundSignals.zeros(1)
        self._load: LiveLoad | None = None
        self._run = ""
        self._first_round = 0
        self._question: Message | None = None

    def reset(self, seed: int) -> None:
        """Call off what runs and begin the list of `seed`; returns before its first round.

        Raises:
            UserError: the server is gone, or does not take the requests.
        """
        self.server.claim()
        self._drain()
        self.server.flush()
        self.requests = self._draw(seed)
        # An abort may still be on its way to requests of another list: no two may share an id.
        self._run = f"live-{uuid.uuid4().hex[:16]}"
        self._load = LiveLoad(
            self.server.url, self.requests, self._asking.bodies(self.requests, seed, self._run)
        )
        self.is_served = False
        self._next_question()
        if self._question is None:
            raise UserError(
                f"{self.server.url}: no round of {self.requests.num_requests} requests was decided here"
            )
        self._first_round = int(self._question["round"])
        self._read(self._question)
        self.step = LiveStep()

    def signals(self) -> RoundSignals:
        """Views that the next round overwrites."""
        return self._signals

    def run_round(self, k: IntArray) -> list[RoundOutcome]:
        """Run one round at `k`, shape `(1,)`, and wait until the next is due, not for its own outcome.

        Raises:
            UserError: the server is gone, silent, or used by others.
        """
        if self._question is not None:
            self.server.answer(int(self._question["round"]), int(k[0]))
        self._next_question()
        return self._read(self._question) if self._question is not None else self._nothing()

    def close(self) -> None:
        """Leave the server to its own policy, and call off the load. Harmless a second time."""
        self.server.close()
        load, self._load = self._load, None
        try:
            while load is not None and not load.is_over:
                self.server.abort(load.call_off())
                time.sleep(POLL_S)
        except UserError:
            pass  # it is gone, and the load with it

    def _next_question(self) -> None:
        """Wait for the next round, as long as one can come."""
        assert self._load is not None
        since = time.monotonic()
        while (question := self.server.question(POLL_S)) is None:
            self._load.check()
            if self._load.is_over:
                self.is_served = True
                break
            if not self._load.is_under_way:
                since = time.monotonic()
            if time.monotonic() - since > STALLED_S:
                raise UserError(f"{self.server.url}: asks for no k: {self.server.why_silent()}")
        self._question = question

    def _read(self, question: Message) -> list[RoundOutcome]:
        for column in fields(RoundSignals):
            getattr(self._signals, column.name)[0] = question["signals"][column.name]
        self.step = LiveStep(
            prefill_s=question["prefill_s"],
            prefill_tokens=question["prefill_tokens"],
            num_missed=question["missed"],
        )
        for round_id, seconds, waited_s in question["times"]:
            if round_id >= self._first_round:
                self.step.times_s.append((round_id, seconds))
                self.step.waited_s += waited_s
        outcomes = []
        for outcome in question["outcomes"]:
            if outcome["round"] >= self._first_round:
                places = [self._place(rid) for rid in outcome["rids"]]
                self.step.finished.append((outcome["round"], places, outcome["accepted"]))
                outcomes.append(
                    RoundOutcome.from_num_accepted(
                        outcome["round"], outcome["k"], outcome["accepted"], self.tiers[-1]
                    )
                )
        return outcomes

    def _nothing(self) -> list[RoundOutcome]:
        self.step = LiveStep()
        return []

    def _place(self, rid: Any) -> int:
        """Which request of the list has this id."""
        name, _, place = str(rid).partition("#")[0].rpartition("-")
        if name != self._run:
            raise UserError(
                f"{self.server.url}: somebody else's request {str(rid)[:60]} runs there, allowed: none"
            )
        return int(place)

    def _drain(self) -> None:
        """Call off the load. Rounds that are still due run at the smallest tier."""
        if self._load is None:
            return
        began = time.monotonic()
        again_s = 0.0
        is_over = False
        while not is_over:
            if self._question is not None:
                self.server.answer(int(self._question["round"]), self.tiers[0])
            now = time.monotonic()
            if now > again_s:
                self.server.abort(self._load.call_off())
                again_s = now + ABORT_AGAIN_S
            if now > began + STALLED_S:
                raise UserError(
                    f"{self.server.url}: goes on decoding without our requests: who else asks it?"
                )
            was_over = self._load.is_over
            self._question = self.server.question(POLL_S)
            is_over = was_over and self._question is None
        self._load = None
