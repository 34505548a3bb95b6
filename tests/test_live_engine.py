"""Lockstep between a server and an environment: who decides, what is told when, and what time is left out."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_double import SchedulerDouble

from draftdial.controller.errors import UserError
from draftdial.controller.policy_file import PolicyFile
from draftdial.controller.signals import RoundSignals
from draftdial.engine_patch import lockstep
from draftdial.engine_patch.dial import Dial
from draftdial.engine_patch.live_channel import Channel, ChannelClosed, Listener, Message, connect
from draftdial.engine_patch.lockstep import Lockstep
from draftdial.engine_patch.round_outcomes import FinishedRound
from draftdial.engine_patch.round_timer import HostClock
from draftdial.engine_patch.settings import Settings

TIERS = (0, 1, 3)
OWN_K = 1
"""What the server's own policy says."""


class LiveScheduler(SchedulerDouble):
    """The double with a lockstep around its batches, as the hooks put it there."""

    followed: Lockstep

    def prefill(self, *requests: Any, chunk_end: int | None = None) -> None:
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: False), reqs=requests, extend_num_tokens=10
        )
        self.followed.run(lambda *_: super(LiveScheduler, self).prefill(*requests), self, batch)

    def decode(self, accepted: int | None = None) -> int:
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))
        k: int = self.followed.run(lambda *_: super(LiveScheduler, self).decode(accepted), self, batch)
        return k

    def _process(self, batch: Any, result: Any) -> None:
        if batch.forward_mode.is_decode():
            finished = FinishedRound.read(result, batch, has_probes=self.signals.has_probes)
            if finished is not None:
                self.followed.finished(finished)
        super()._process(batch, result)


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "live.sock"


@pytest.fixture
def scheduler(
    socket_path: Path,
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[int], LiveScheduler]]:
    """Schedulers with this lag that run one request and may be followed."""

    def make(lag: int) -> LiveScheduler:
        made = LiveScheduler(lag)
        made.followed = Lockstep(Listener(socket_path), TIERS, HostClock())
        made.dial = make_dial(make_policy_file(OWN_K))
        made.dial.bind(made.signals, None, None)
        monkeypatch.setattr(lockstep, "_lockstep", made.followed)
        made.queue("r-0", num_output=10_000)
        made.prefill(made.waiting_queue[0])
        return made

    yield make


class Environment:
    """Answers with the k of a list, one after the other, and keeps what it was asked."""

    def __init__(self, path: Path, answers: list[int]) -> None:
        self.channel = connect(path)
        self.questions: list[Message] = []
        self._answers = deque(answers)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> list[Message]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.questions

    def _run(self) -> None:
        while self._answers:
            question = question_of(self.channel)
            self.questions.append(question)
            self.channel.send({"round": question["round"], "k": self._answers.popleft()})


def question_of(channel: Channel) -> Message:
    question = channel.receive(30.0)
    assert question is not None
    return question


@pytest.mark.parametrize("lag", [1, 2])
def test_the_k_asked_for_runs_and_outcomes_come_with_the_servers_lag(
    scheduler: Callable[[int], LiveScheduler], socket_path: Path, lag: int
) -> None:
    """An environment that waited for the outcome of a round before its next answer would never end."""
    server = scheduler(lag)
    wanted = [3, 0, 1, 3, 3, 0]
    environment = Environment(socket_path, wanted)
    ran = [server.decode(accepted=2) for _ in wanted]
    questions = environment.join()
    assert ran == wanted and server.followed.num_timeouts == 0
    assert [question["round"] for question in questions] == list(range(6))
    for n, question in enumerate(questions):
        told = [] if n < lag else [(n - lag, wanted[n - lag])]
        assert [(outcome["round"], outcome["k"]) for outcome in question["outcomes"]] == told
        assert question["signals"]["num_running"] == 1 and question["missed"] == 0
        for outcome in question["outcomes"]:
            assert outcome["rids"] == ["r-0"] and outcome["accepted"] == [min(2, outcome["k"])]
    timed = [time_of for question in questions for time_of in question["times"]]
    assert [round_id for round_id, *_ in timed] == list(range(5))
    assert all(seconds >= 0 and waited_s > 0 for _, seconds, waited_s in timed)


def test_without_an_environment_the_server_decides(scheduler: Callable[[int], LiveScheduler]) -> None:
    server = scheduler(1)
    assert [server.decode() for _ in range(3)] == [OWN_K] * 3
    assert server.followed.status()["live_is_followed"] == 0 and server.followed.num_answers == 0


def test_an_answer_that_is_late_costs_one_wait_and_then_none(
    scheduler: Callable[[int], LiveScheduler], socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "WAIT_S", 0.2)
    server = scheduler(1)
    channel = connect(socket_path)
    assert [server.decode() for _ in range(50)] == [OWN_K] * 50
    assert server.followed.num_timeouts == 1 and server.followed.status()["live_is_followed"] == 0
    first = question_of(channel)
    assert first["round"] == 0 and channel.receive(0.0) is None, (
        "one question, and no more until it is answered"
    )
    channel.send({"round": 0, "k": 3})
    monkeypatch.setattr(lockstep, "WAIT_S", 30.0)
    follower = threading.Thread(target=lambda: channel.send({"round": question_of(channel)["round"], "k": 3}))
    follower.start()
    assert server.decode() == 3
    follower.join(60)
    last = threading.Thread(target=answer_and_keep, args=(channel, seen := []))
    last.start()
    assert server.decode() == 0
    last.join(60)
    assert [(question["round"], question["missed"]) for question in seen] == [(51, 0)]
    assert server.followed.num_timeouts == 1


def answer_and_keep(channel: Channel, seen: list[Message]) -> None:
    seen.append(question_of(channel))
    channel.send({"round": seen[-1]["round"], "k": 0})


def test_missed_rounds_are_counted(
    scheduler: Callable[[int], LiveScheduler], socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "WAIT_S", 0.1)
    server = scheduler(2)
    channel = connect(socket_path)
    for _ in range(7):
        server.decode()
    monkeypatch.setattr(lockstep, "WAIT_S", 30.0)
    channel.send({"round": question_of(channel)["round"], "k": 3})
    seen: list[Message] = []
    follower = threading.Thread(target=answer_and_keep, args=(channel, seen))
    follower.start()
    server.decode()
    follower.join(60)
    assert [(question["round"], question["missed"]) for question in seen] == [(7, 7)]
    assert seen[0]["outcomes"] == seen[0]["times"] == [], "of rounds that nobody asked for"


@pytest.mark.parametrize("answer", [{"round": 0, "k": 2}, {"round": 9, "k": 3}, {"k": 3}, {"round": 0}])
def test_an_answer_that_makes_no_sense_ends_the_connection(
    scheduler: Callable[[int], LiveScheduler], socket_path: Path, answer: Message
) -> None:
    server = scheduler(1)
    channel = connect(socket_path)
    channel.send(answer)
    assert [server.decode() for _ in range(3)] == [OWN_K] * 3
    question_of(channel)
    with pytest.raises(ChannelClosed):
        channel.receive(30.0)
    environment = Environment(socket_path, [3])
    assert server.decode() == 3
    environment.join()


def test_an_environment_that_dies_leaves_the_server_alone(
    scheduler: Callable[[int], LiveScheduler], socket_path: Path
) -> None:
    server = scheduler(1)
    environment = Environment(socket_path, [3, 3])
    assert [server.decode(), server.decode()] == [3, 3]
    environment.join()
    assert server.followed.status()["live_is_followed"] == 1
    environment.channel.close()
    assert server.followed.status()["live_is_followed"] == 0, "seen without a round"
    assert [server.decode() for _ in range(3)] == [OWN_K] * 3
    second = Environment(socket_path, [3])
    assert server.decode() == 3
    second.join()
    second.channel.close()
    third = Environment(socket_path, [0])
    assert server.decode() == 0, "no round in between runs without being asked for"
    third.join()
    assert server.followed.num_timeouts == 0 and server.dial is not None and server.dial.fallback is None


def test_environments_that_left_before_any_round_are_passed_over(
    scheduler: Callable[[int], LiveScheduler], socket_path: Path
) -> None:
    """More than a socket's usual backlog: nobody accepts them while the server has nothing to decode."""
    server = scheduler(1)
    for _ in range(20):
        connect(socket_path).close()
    environment = Environment(socket_path, [3, 0])
    assert [server.decode(), server.decode()] == [3, 0]
    environment.join()


class Scripted:
    """A clock whose marks are told beforehand, in milliseconds."""

    def __init__(self, *marks: float) -> None:
        self._marks = list(marks)

    def mark(self) -> float:
        return self._marks.pop(0)

    def has_passed(self, mark: float) -> bool:
        return True

    def elapsed_ms(self, begin: float, end: float) -> float:
        return end - begin


@pytest.mark.parametrize(
    ("answered_ms", "ended_ms", "expected_ms"),
    [
        (10.0, 30.0, 20.0),  # the answer was there before the round before had ended: nothing to leave out
        (110.0, 125.0, 15.0),  # the device stood still for a part of the wait
        (10_010.0, 10_022.0, None),  # it stood still for longer than the wait: the rest is the host's doing
    ],
)
def test_the_wait_is_left_out_as_far_as_the_device_stood_still(
    scheduler: Callable[[int], LiveScheduler],
    socket_path: Path,
    answered_ms: float,
    ended_ms: float,
    expected_ms: float | None,
) -> None:
    """Marks: begin, (answer) and end of each batch; the round before ends at 10 ms."""
    server = scheduler(1)
    clock: Any = Scripted(0.0, 1.0, 10.0, 10.0, answered_ms, ended_ms, 20_000.0, 20_000.0, 20_000.0)
    server.followed._clock = clock
    channel = connect(socket_path)
    times: list[Any] = []

    def answer() -> None:
        for delay_s in (0.0, 0.2, 0.0):
            question = question_of(channel)
            times.extend(question["times"])
            time.sleep(delay_s)
            channel.send({"round": question["round"], "k": 1})

    follower = threading.Thread(target=answer)
    follower.start()
    for _ in range(3):
        server.decode()
    follower.join(60)
    (_, seconds, waited_s) = times[1]
    assert waited_s >= 0.2
    if expected_ms is None:
        expected_ms = ended_ms - 10.0 - 1e3 * waited_s
    assert 1e3 * seconds == pytest.approx(expected_ms)


def test_a_socket_belongs_to_one_server_and_is_taken_from_a_dead_one(socket_path: Path) -> None:
    first = Listener(socket_path)
    with pytest.raises(UserError, match="another server listens there"):
        Listener(socket_path)
    first._socket.close()
    second = Listener(socket_path)
    assert socket_path.stat().st_mode & 0o077 == 0, "for this user alone"
    assert second.accept() is None
    channel = connect(socket_path)
    accepted = second.accept()
    assert accepted is not None
    accepted.send({"round": 1})
    assert channel.receive(30.0) == {"round": 1}


def test_what_is_no_message_closes_the_channel(socket_path: Path) -> None:
    listener = Listener(socket_path)
    channel = connect(socket_path)
    accepted = listener.accept()
    assert accepted is not None
    channel._socket.send(b"[1, 2")
    with pytest.raises(ChannelClosed, match="not a message"):
        accepted.receive(30.0)


@pytest.mark.parametrize("path", ["live.sock", "/nowhere/live.sock", f"/tmp/{'x' * 120}"])
def test_a_socket_that_cannot_be_is_refused_before_the_start(path: str) -> None:
    with pytest.raises(
        UserError, match=r"DRAFTDIAL_LIVE: found '.*', allowed: an absolute path of up to 107"
    ):
        Settings.from_environment({"DRAFTDIAL_POLICY": "/p", "DRAFTDIAL_LIVE": path})


def test_more_than_one_process_is_refused(socket_path: Path) -> None:
    arguments = SimpleNamespace(tp_size=2, dp_size=1, pp_size=1)
    with pytest.raises(UserError, match="live: --tp-size: found 2, allowed: 1"):
        lockstep.start(socket_path, SimpleNamespace(server_args=arguments), TIERS)
    assert lockstep.current() is None and not socket_path.exists()


def test_rounds_that_the_environment_did_not_decide_are_not_kept_for_it(socket_path: Path) -> None:
    """While k is forced, say, it is not asked: nothing may grow, as its next question might never come."""
    followed = Lockstep(Listener(socket_path), TIERS, HostClock())
    environment = connect(socket_path)
    signals = RoundSignals.zeros(1)
    environment.send({"round": 0, "k": 3})  # ahead of the question

    def run(is_decode: bool, ask: bool) -> None:
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: is_decode), extend_num_tokens=10
        )
        followed.run(lambda *_: followed.k_of(signals, 0) if ask else None, None, batch)

    run(is_decode=True, ask=True)
    assert followed.num_answers == 1
    for round_id in range(1, 50):
        run(is_decode=True, ask=False)
        run(is_decode=False, ask=False)
        followed.finished(FinishedRound(round_id, 3, [SimpleNamespace(rid="live")], [1]))
    followed.finished(FinishedRound(0, 3, [SimpleNamespace(rid="live")], [1]))
    environment.send({"round": 0, "k": 1})
    run(is_decode=True, ask=True)
    environment.receive(1.0)
    question = environment.receive(1.0)
    assert question is not None
    assert [outcome["round"] for outcome in question["outcomes"]] == [0]
    assert question["prefill_tokens"] == 0 and len(question["times"]) <= 1


def test_a_server_too_busy_to_answer_keeps_its_socket(socket_path: Path) -> None:
    listener = Listener(socket_path)
    waiting = []
    with pytest.raises(UserError):
        while True:
            waiting.append(connect(socket_path))
    with pytest.raises(UserError, match="another server listens there"):
        Listener(socket_path)
    assert listener.accept() is not None
