"""What runs in the server while it is measured: the plan, and the timer around every batch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_double import Mode, SchedulerDouble
from test_control import group, install_sglang_answer  # noqa: F401

from draftdial.controller.errors import UserError
from draftdial.controller.measured_server import MeasuredServer
from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch import dial as dials
from draftdial.engine_patch import round_timer
from draftdial.engine_patch.control import around_set_internal_state
from draftdial.engine_patch.control_keys import FORCE_K_KEY, MODE_KEY
from draftdial.engine_patch.dial import Dial
from draftdial.engine_patch.launch_checks import SKIP
from draftdial.engine_patch.measurement_plan import (
    MAX_ROUNDS,
    MEASURE_KEY,
    MeasurementPlan,
    Phase,
    PlanProgress,
)
from draftdial.engine_patch.round_timer import RoundTimer
from draftdial.engine_patch.scheduler_signals import SchedulerSignals
from draftdial.engine_patch.status import status_of
from draftdial.engine_patch.status_command import status_lines

phases = st.builds(Phase, st.none() | st.integers(0, 99), st.integers(1, 500)) | st.builds(
    Phase, st.just(0), st.integers(1, 500), st.sampled_from(["warm", "skip", "kv-only"])
)


@given(st.integers(0, 10**14), st.integers(1, 512), st.lists(phases, max_size=20))
def test_a_plan_survives_its_key(number: int, batch: int, some: list[Phase]) -> None:
    plan = MeasurementPlan(number, batch, tuple(some))
    assert MeasurementPlan.from_key(plan.key()) == plan


@pytest.mark.parametrize("text", ["3", "3sx4", "x4", "3x", "3x4;", "-1x4", "3x4,x", "3x0", "3kx4"])
def test_a_wrong_phase_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="measurement"):
        MeasurementPlan.from_key(f"{MEASURE_KEY}:1:4:{text}")


def test_a_plan_too_long_to_keep_is_refused() -> None:
    with pytest.raises(UserError, match=f"allowed: up to {MAX_ROUNDS}"):
        MeasurementPlan.from_key(f"{MEASURE_KEY}:1:4:3x60000,1x60000")


def test_a_plan_moves_with_the_rounds_that_count() -> None:
    progress = PlanProgress(MeasurementPlan(1, 2, (Phase(3, 2), Phase(0, 1))))
    assert progress.advance(1, True) is None  # not all are there
    assert progress.advance(2, False) is None  # one waits
    assert [progress.advance(2, True) for _ in range(3)] == [(0, 0), (0, 1), (1, 0)]
    assert progress.is_done
    assert progress.advance(2, True) is None and progress.current is None


def test_a_phase_that_is_interrupted_starts_over_and_one_that_is_complete_does_not() -> None:
    progress = PlanProgress(MeasurementPlan(1, 2, (Phase(3, 2), Phase(1, 2))))
    progress.advance(2, True)
    progress.interrupt()
    assert [progress.advance(2, True) for _ in range(2)] == [(0, 0), (0, 1)]
    progress.interrupt()
    assert progress.advance(2, True) == (1, 0)
    assert progress.attempt == 1


class Clock:
    """Marks are what its time was; events pass only when `now` says so."""

    name = "cuda"

    def __init__(self) -> None:
        self.time_ms = 0.0
        self.passed_ms = float("inf")

    def mark(self) -> float:
        return self.time_ms

    def has_passed(self, mark: float) -> bool:
        return mark <= self.passed_ms

    def elapsed_ms(self, begin: float, end: float) -> float:
        return end - begin


class Server:
    """A scheduler whose batches take as long as they are told to."""

    def __init__(self, timer: RoundTimer, clock: Clock) -> None:
        timer._clock = clock
        timer.error = ""
        self.timer, self.clock = timer, clock
        self.scheduler = SimpleNamespace(waiting_queue=[], chunked_req=None)
        self.skips: list[str | None] = []

    def decode(self, batch: int, ms: float, context: int = 10) -> None:
        reqs = [SimpleNamespace(origin_input_ids=[0] * context, output_ids=[]) for _ in range(batch)]
        self._run(SimpleNamespace(forward_mode=Mode("decode"), reqs=reqs), ms)

    def prefill(self, tokens: int, ms: float) -> None:
        self._run(SimpleNamespace(forward_mode=Mode("extend"), reqs=[None], extend_num_tokens=tokens), ms)

    def _run(self, batch: Any, ms: float) -> None:
        def run_batch(scheduler: Any, batch: Any) -> str:
            self.skips.append(os.environ.get(SKIP))
            self.clock.time_ms += ms
            return "result"

        assert self.timer.run(run_batch, self.scheduler, batch) == "result"


def server(*phases: Phase, batch: int = 2) -> Server:
    return Server(RoundTimer(MeasurementPlan(7, batch, phases), SimpleNamespace()), Clock())


def test_a_period_reaches_from_the_end_of_the_batch_before() -> None:
    measured = server(Phase(3, 3))
    measured.prefill(20, 30.0)
    measured.decode(2, 5.0)
    measured.clock.time_ms += 1.0  # the GPU stands idle
    measured.decode(2, 6.0, context=12)
    measured.decode(2, 7.0)
    report = measured.timer.report()
    assert report["done"] == 1 and report["plan"] == 7
    columns = [[row[i] for row in report["rounds"]] for i in (0, 1, 2, 4, 5)]
    assert columns == [[0, 0, 0], [0, 1, 2], [-1.0, 7.0, 7.0], [-1.0, 1.0, 0.0], [10, 12, 10]]


def test_waiting_before_the_decision_is_not_launching() -> None:
    measured = server(Phase(3, 2))
    measured.decode(2, 5.0)
    slow = time.perf_counter()

    def run_batch(scheduler: Any, batch: Any) -> None:
        time.sleep(0.05)
        measured.clock.time_ms += 1.5  # the GPU has nothing to do meanwhile
        assert measured.timer.decide() == 3
        measured.clock.time_ms += 4.0

    reqs = [SimpleNamespace(origin_input_ids=[0], output_ids=[]) for _ in range(2)]
    measured.timer.run(run_batch, measured.scheduler, SimpleNamespace(forward_mode=Mode("decode"), reqs=reqs))
    whole_ms = 1e3 * (time.perf_counter() - slow)
    *_, (_, _, period_ms, launch_ms, idle_ms, _) = measured.timer.report()["rounds"]
    assert (period_ms, idle_ms) == (5.5, 1.5) and launch_ms < whole_ms - 49.0


def test_nothing_is_read_before_the_gpu_is_there() -> None:
    measured = server(Phase(3, 2))
    measured.clock.passed_ms = 5.0
    measured.decode(2, 5.0)
    measured.decode(2, 6.0)
    assert measured.timer.report()["rounds"] == [] and measured.timer.report()["done"] == 0
    measured.clock.passed_ms = 11.0
    assert [row[2] for row in measured.timer.report()["rounds"]] == [6.0]
    assert measured.timer.report()["done"] == 1


def test_rounds_of_a_phase_that_started_over_are_dropped() -> None:
    measured = server(Phase(3, 3))
    for batch, ms in ((2, 5.0), (2, 6.0), (1, 1.0), (2, 7.0), (2, 8.0), (2, 9.0)):
        measured.decode(batch, ms)
    assert [row[1:3] for row in measured.timer.report()["rounds"]] == [[0, -1.0], [1, 8.0], [2, 9.0]]


def test_prefills_are_timed_with_what_came_before() -> None:
    measured = server(batch=1)
    measured.decode(1, 4.0)
    measured.prefill(100, 9.0)
    measured.prefill(50, 3.0)
    rows = measured.timer.report()["prefills"]
    assert [[row[0], row[2], row[5]] for row in rows] == [[100, 9.0, 1], [50, 3.0, 0]]


def test_the_skip_variable_is_set_for_its_rounds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SKIP, "yes")
    measured = server(Phase(0, 1, "skip"), Phase(0, 1), Phase(3, 1))
    for _ in range(4):
        measured.decode(2, 1.0)
    assert measured.skips == ["1", "0", "yes", "yes"]


def test_a_timer_that_fails_leaves_the_plan_and_the_server_alone() -> None:
    measured = server(Phase(3, 2), Phase(1, 1))

    def broken() -> float:
        raise RuntimeError("no such device")

    measured.clock.mark = broken  # type: ignore[method-assign]
    measured.decode(2, 5.0)
    measured.decode(2, 5.0)
    assert measured.timer.progress.phase == 0 and measured.timer.progress.advance(2, True) == (1, 0)
    assert "no such device" in measured.timer.report()["error"]


def test_the_rounds_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_timer, "MAX_ROWS", 3)
    measured = server(Phase(3, 2), Phase(1, 4))
    for _ in range(6):
        measured.decode(2, 5.0)
    report = measured.timer.report()
    assert len(report["rounds"]) == 3 and "more than 3 rounds" in report["error"]


class BusyServer:
    """The HTTP client of a server that never gets idle."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def change(self, key: str, value: int) -> list[bool]:
        self.asked.append(key)
        return [True]

    def post(self, path: str, body: dict[str, Any]) -> None:
        self.asked.append(path)
        raise UserError("busy")


def test_the_end_of_a_measurement_reaches_a_busy_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftdial.controller.measured_server.FLUSH_S", -1.0)
    measured = MeasuredServer.__new__(MeasuredServer)
    measured.server = busy = BusyServer()  # type: ignore[assignment]
    with pytest.raises(UserError, match="busy"):
        measured.close()
    assert busy.asked == [MEASURE_KEY, "/flush_cache"]


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    round_timer.stop()
    dials.install(None)


def test_a_measurement_goes_before_policy_and_forced_k(
    clean: None, make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file(1))
    double = SchedulerDouble()
    dial.signals = SchedulerSignals(double)
    dial.set_mode("shadow")
    assert dial.on_verify_complete([1], 1) is not None  # SGLang's rule acts
    dial.force_k(0)
    round_timer.start(MeasurementPlan(1, 2, (Phase(3, 1),)), double)
    timer = round_timer.current()
    assert timer is not None
    asked: list[tuple[int, int | None]] = []

    def run_batch(scheduler: Any, batch: Any) -> None:
        dial.force_k(0)
        k = dial.get_steps_for_batch(len(batch.reqs))
        dial.force_k(None)
        asked.append((k, dial.on_verify_complete([1], 1)))

    for batch_size in (1, 2, 2):  # not all are there, all are, the plan is through
        reqs = [SimpleNamespace(origin_input_ids=[0], output_ids=[]) for _ in range(batch_size)]
        timer.run(run_batch, double, SimpleNamespace(forward_mode=Mode("decode"), reqs=reqs))
    assert asked == [(0, 1), (3, None), (0, 1)]


def test_the_control_channel_starts_checks_and_ends_measurements(
    clean: None,
    group: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
) -> None:
    install_sglang_answer(monkeypatch)
    scheduler = SimpleNamespace(tp_cpu_group=group)

    def ask(key: str, value: int) -> bool:
        request = SimpleNamespace(server_args={key: value})
        updated: bool = around_set_internal_state(lambda *_: None, scheduler, request).updated
        return updated

    steered, plain = MeasurementPlan(1, 2, (Phase(3, 1),)), MeasurementPlan(2, 2, (Phase(None, 1),))
    assert ask(plain.key(), 1) and not ask(steered.key(), 1)  # nothing is steered yet
    dial = make_dial(make_policy_file(1))
    dials.install(dial)
    assert not ask(plain.key(), 1) and "one that" not in dial.last_control
    assert not ask(MeasurementPlan(3, 2, (Phase(2, 1),)).key(), 1)  # no such tier
    assert "k = 2" in dial.last_control
    assert ask(steered.key(), 1) and status_of(dial)["measuring"] == "plan 1 at batch 2, phase 1 of 1"
    assert any(line.startswith("MEASURING") for line in status_lines(status_of(dial)))
    assert ask(MEASURE_KEY, 0) and round_timer.current() is None
    assert status_of(dial)["measuring"] == ""
    for key, value in ((FORCE_K_KEY, 1), (MODE_KEY, 1)):
        assert ask(steered.key(), 1) and round_timer.current() is not None
        assert ask(key, value) and round_timer.current() is None
