"""Ctrl-C where it would come at the wrong moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from draftdial.controller import measured_server
from draftdial.controller.interrupts import deferred, uninterrupted
from draftdial.controller.measured_server import MeasuredServer
from draftdial.engine_patch.measurement_plan import Phase

ANSWERED_S = 10.0


def test_ctrl_c_waits_for_the_end_of_a_deferred_block() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred():
        signal.raise_signal(signal.SIGINT)
        reached.append("the end")
    assert reached == ["the end"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_gone_after_an_uninterrupted_block() -> None:
    with uninterrupted(), deferred():
        pass
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_deferred_block_may_be_in_any_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(deferred().__enter__).result()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class SlowReader:
    """A server that knows a request `reads_after` aborts later than it was sent; it ends by an abort."""

    def __init__(self, reads_after: int, fails: bool = False) -> None:
        self.url = "http://slow"
        self.running: set[str] = set()
        self.num_ended = self.num_aborts = 0
        self._reads_after, self._fails = reads_after, fails
        self._sent: list[str] = []
        self._changed = threading.Condition()

    def post(self, path: str, body: dict[str, Any]) -> None:
        with self._changed:
            if path == "/generate":
                self._sent = body["rid"]
                self._read()
                self._changed.wait_for(self._is_answered, ANSWERED_S)
                assert self._is_answered()
                if self._fails:
                    raise ConnectionError("one request was aborted")
            else:
                assert path == "/abort_request"
                self.num_aborts += 1
                self.num_ended += body["rid"] in self.running
                self.running.discard(body["rid"])
                self._reads_after -= 1
                self._read()
                self._changed.notify_all()

    def _read(self) -> None:
        if self._sent and self._reads_after <= 0:
            self.running.update(self._sent)
            self._sent = []

    def _is_answered(self) -> bool:
        return not self._sent and len(self.running) < (2 if self._fails else 1)


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[SlowReader], MeasuredServer]:
    def make(server: SlowReader) -> MeasuredServer:
        measured = MeasuredServer.__new__(MeasuredServer)
        measured.server = measured._patient = server  # type: ignore[assignment]
        measured._number = 0
        monkeypatch.setattr(measured, "_begin", lambda plan: {})
        monkeypatch.setattr(measured, "prompt", lambda tokens: [3] * tokens)
        return measured

    return make


class Pressed(ThreadPoolExecutor):
    """Ctrl-C comes when a thread runs and `submit` has not returned yet."""

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        answer = super().submit(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return answer


@pytest.mark.parametrize(("reads_after", "fails"), [(0, False), (1, False), (5, False), (0, True)])
def test_a_batch_ends_when_ctrl_c_comes_as_it_is_sent(
    reads_after: int,
    fails: bool,
    measuring: Callable[[SlowReader], MeasuredServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured_server, "ThreadPoolExecutor", Pressed)
    monkeypatch.setattr(measured_server, "POLL_S", 0.01)
    server = SlowReader(reads_after, fails)
    with pytest.raises(KeyboardInterrupt):
        measuring(server).run([Phase(1, 4)], batch=3, context=2, new_tokens=9)
    assert not server.running and server.num_ended == 3


def test_a_server_that_ends_nothing_is_given_up(
    measuring: Callable[[SlowReader], MeasuredServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_server, "ABORT_S", 0.05)
    monkeypatch.setattr(measured_server, "POLL_S", 0.01)
    server = SlowReader(reads_after=10**6)
    answer: Future[None] = Future()
    measuring(server)._abort(["a", "b"], answer)
    assert server.num_aborts >= 2 and not answer.done()
