"""What a server says about its policy."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftdial.controller.policy_file import PolicyFile
from draftdial.controller.signals import RoundSignals
from draftdial.engine_patch import compat, steering
from draftdial.engine_patch import dial as dials
from draftdial.engine_patch.dial import Dial
from draftdial.engine_patch.status import status_of
from draftdial.engine_patch.status_command import report_lines, status_lines

FORMAT = "policy     {id} (tiny), tiers 0, 1, 3"


class OneBatch:
    """Stands in for `SchedulerSignals`: rounds of two requests, the same every time."""

    def __init__(self) -> None:
        self.values = RoundSignals.zeros(1)
        self.values.num_running[0], self.values.max_running[0] = 2, 8
        self.values.mean_context_tokens[0] = 700
        self.round_id = -1
        self.processed_s = 0.0
        self.is_prefill = self.has_grammar = False

    def output_tokens(self) -> int:
        return 12

    def processed(self, batch: object) -> list[object]:
        return []

    def is_probe_round(self, batch_size: int) -> bool:
        return False

    def row(self, batch_size: int) -> RoundSignals:
        self.round_id += 1
        self.values.round_id[0] = self.round_id
        return self.values


def run_rounds(dial: Dial, num_rounds: int, accepted: list[int]) -> None:
    """So many rounds without lag; every request has as many drafts accepted as `accepted` and k allow."""
    if dial.signals is None:
        dial.bind(OneBatch(), None, None)  # type: ignore[arg-type]
    for _ in range(num_rounds):
        k = dial.get_steps_for_batch(len(accepted))
        round_id = dial.launched()
        assert round_id is not None
        dial.observe(round_id, k, [min(n, k) for n in accepted])


@pytest.fixture(autouse=True)
def no_dial() -> Iterator[None]:
    yield
    dials.install(None)


def check_plain(status: dict[str, Any]) -> None:
    """As `/server_info` needs it: flat, finite, small."""
    assert all(type(name) is str for name in status)
    assert all(type(value) in (int, float, str) for value in status.values())
    assert all(math.isfinite(value) for value in status.values() if not isinstance(value, str))
    assert len(json.dumps(status, allow_nan=False)) < 10_000


def test_a_fresh_server(make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]) -> None:
    file = make_policy_file()
    status = status_of(make_dial(file))
    check_plain(status)
    assert status["policy_id"] == file.policy_id and status["mode"] == "steer"
    assert (status["decisions"], status["k"], status["forced_k"]) == (0, -1, -1)
    assert not [name for name in status if name.startswith("signals.")]
    assert FORMAT.format(id=file.policy_id) in list(status_lines(status))


def test_rounds_are_told(make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]) -> None:
    dial = make_dial(make_policy_file())
    dial.force_k(3)
    run_rounds(dial, 20, [1, 3])
    dial.force_k(0)
    run_rounds(dial, 10, [1, 3])
    status = status_of(dial)
    check_plain(status)
    assert (status["decisions"], status["observed"], status["switches"]) == (30, 30, 1)
    assert [status[f"rounds_at_k.{k}"] for k in (0, 1, 3)] == [10, 0, 20]
    assert (status["drafted"], status["wasted"]) == (120, 40)
    assert status["signals.num_running"] == 2 and status["signals.mean_context_tokens"] == 700
    assert 0 < float(status["acceptance"]) < 1 and status["predicted_speedup"] == 1.0
    text = "\n".join(status_lines(status))
    assert "k = 0 forced" in text and "30, 1 switches (33.3 per 1000)" in text
    assert "k=0 33.3%, k=1 0.0%, k=3 66.7%" in text and "120, 33.3% wasted" in text
    assert "2 of 8 running, none waiting, 700 tokens of context each" in text


def test_time_is_measured_between_rounds_that_follow_one_another(
    make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file(3))
    run_rounds(dial, 1, [1])
    assert dial.counters.seconds_at_k == {0: 0.0, 1: 0.0, 3: 0.0}
    run_rounds(dial, 1, [1])
    measured = dial.counters.seconds_at_k[3]
    assert measured > 0
    assert dial.launched() is None  # a prefill comes between
    run_rounds(dial, 1, [1])
    assert dial.counters.seconds_at_k == {0: 0.0, 1: 0.0, 3: measured}


class Waits:
    """A result whose copy takes the GPU a while."""

    def __init__(self, seconds: float) -> None:
        self.copy_done = SimpleNamespace(synchronize=lambda: time.sleep(seconds))


def test_how_busy_the_host_is_is_known_of_rounds_between_two_of_the_same_k(
    make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file(3))
    dials.install(dial)
    run_rounds(dial, 1, [1])

    def rounds(*ks: int) -> None:
        """The result of the round before is read behind each launch."""
        for k in ks:
            dial.force_k(k)
            run_rounds(dial, 1, [1])
            steering.around_process_batch_result(lambda *_: None, None, "batch", Waits(0.01 if k else 0.001))

    rounds(3, 3, 3)
    assert dial.counters.steady_at_k == {}, "what the host waits for elsewhere is not known"
    assert not any(line.startswith("host busy") for line in status_lines(status_of(dial)))
    dial.clock.sees_waits = True
    rounds(3, 3, 3)
    steady = dial.counters.steady_at_k[3]
    num_rounds = steady.rounds
    assert num_rounds >= 2 and 0.02 <= steady.waited_s < steady.seconds
    rounds(0, 3, 0, 3)
    assert num_rounds + 1 >= steady.rounds and 0 not in dial.counters.steady_at_k
    num_rounds = steady.rounds
    assert dial.launched() is None  # a prefill
    rounds(3, 3)
    assert steady.rounds == num_rounds
    rounds(3)
    assert steady.rounds == num_rounds + 1
    status = status_of(dial)
    assert status["steady_rounds_at_k.3"] == steady.rounds and "steady_rounds_at_k.1" not in status
    busy = f"k=3 {1 - steady.waited_s / steady.seconds:.0%} of a round"
    assert any(line.startswith("host busy") and busy in line for line in status_lines(status))


def test_launches_are_counted_while_the_server_is_busy(
    make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file(3))
    dials.install(dial)

    def launch(waits_s: float = 0.0) -> None:
        """And read the result of the batch before."""
        run_rounds(dial, 1, [1])
        steering.around_process_batch_result(lambda *_: None, None, "batch", Waits(waits_s))

    run_rounds(dial, 1, [1])
    launch()
    assert "launch_seconds" not in status_of(dial), "what the host waits for elsewhere is not known"
    dial.clock.sees_waits = True
    launch(0.01)
    launch()
    launches = dial.counters.launches
    assert 0.01 <= launches.waited_s < launches.seconds and launches.prefills == 0
    assert dial.signals is not None
    dial.signals.is_prefill = True
    assert dial.launched() is None
    assert launches.prefills == 1 and dial.counters.steady_at_k[3].seconds < launches.seconds
    for _ in range(2):
        steering.around_process_batch_result(lambda *_: None, None, "batch", Waits(0.0))
    before = status_of(dial)
    time.sleep(0.01)
    assert dial.launched() is None, "the first batch after a while without any"
    status = status_of(dial)
    for name in ("launch_seconds", "launch_waited_s", "launch_prefills"):
        assert status[name] == before[name]


def test_a_pause_is_the_time_of_no_round(
    make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file(3))
    dials.install(dial)
    dial.clock.sees_waits = True
    counters, pause_s = dial.counters, 0.3
    run_rounds(dial, 4, [1])  # none of their results is read: the newest is in flight as the server is paused
    before = (counters.seconds_at_k[3], counters.steady_at_k[3].rounds, counters.launches.seconds)
    steering.after_pause_generation(None, "scheduler", "request")
    time.sleep(pause_s)
    run_rounds(dial, 1, [1])
    assert before == (counters.seconds_at_k[3], counters.steady_at_k[3].rounds, counters.launches.seconds)
    run_rounds(dial, 3, [1])
    steady = counters.steady_at_k[3]
    assert steady.rounds == before[1] + 2, "the round after the pause is not between two others"
    assert before[0] < counters.seconds_at_k[3] < pause_s
    assert before[2] < counters.launches.seconds < pause_s and steady.seconds < pause_s
    dials.install(None)
    steering.after_pause_generation(None, "scheduler", "request")


def test_rounds_of_nothing_but_health_checks_are_no_launches(
    make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file(3))
    dial.clock.sees_waits = True
    run_rounds(dial, 2, [1])
    seconds = dial.counters.launches.seconds
    assert dial.launched() is None, "the policy was not asked"
    assert dial.counters.launches.seconds == seconds
    run_rounds(dial, 1, [1])
    assert dial.counters.launches.seconds > seconds


def test_what_a_round_waits_for_by_its_grammar_is_not_the_hosts_work(
    make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file(3))
    dial.clock.sees_waits = True
    run_rounds(dial, 4, [1])
    counters = dial.counters
    steady, launched, seconds = counters.steady_at_k[3], counters.launches, counters.seconds_at_k[3]
    assert isinstance(dial.signals, OneBatch)
    for has_grammar, counts in ((True, 0), (False, 1)):
        before = (steady.rounds, launched.seconds)
        dial.signals.has_grammar = has_grammar
        run_rounds(dial, 1, [1])
        assert steady.rounds == before[0] + counts and (launched.seconds > before[1]) == counts
    assert counters.seconds_at_k[3] > seconds, "which is the GPU's as well"


@pytest.mark.parametrize(
    ("scheduler", "known"),
    [
        ({"enable_overlap": True, "future_map": SimpleNamespace(needs_cpu_seq_lens=False)}, True),
        ({"enable_overlap": True, "future_map": SimpleNamespace(needs_cpu_seq_lens=True)}, False),
        ({"enable_overlap": False, "future_map": SimpleNamespace(needs_cpu_seq_lens=False)}, False),
        ({"enable_overlap": True, "future_map": SimpleNamespace()}, False),
        ({}, False),
    ],
)
def test_where_the_host_waits_for_results_alone(scheduler: dict[str, Any], known: bool) -> None:
    assert compat.waits_for_results_alone(SimpleNamespace(**scheduler)) == known


def test_a_rule_has_no_belief_to_show(
    make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file(1))
    run_rounds(dial, 3, [1])
    assert "acceptance" not in status_of(dial)


def test_a_fallback_shows(
    make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file())
    dial.policy.decide = lambda signals: np.array([2])  # type: ignore[method-assign]
    run_rounds(dial, 2, [1])
    status = status_of(dial)
    assert status["fallbacks"] == status["errors"] == 1
    assert "k = 2 is not one of [0, 1, 3]" in str(status["fallback"])
    text = "\n".join(status_lines(status))
    assert text.count("k = 2 is not one of") == 2


def test_long_texts_and_odd_numbers_stay_plain(
    make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file())
    run_rounds(dial, 1, [1])
    dial.last_error = dial.last_control = "x" * 100_000
    dial.signals.values.kv_used_fraction[0] = math.nan  # type: ignore[union-attr]
    status = status_of(dial)
    check_plain(status)
    assert status["signals.kv_used_fraction"] == "nan"


def test_kv_only_shows_that_it_works_or_why_not(
    make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    plain = status_of(make_dial(make_policy_file()))
    works = {"kv_only_fallback": "", "kv_only_rounds": 1234, "kv_only_prefills": 5}
    works["kv_only_restarts"] = 12

    def said(**more: int | str) -> list[str]:
        return [line for line in status_lines(plain | more) if line.startswith("off mode")]

    assert said() == []
    assert said(**works) == ["off mode   kv-only, 1,234 rounds and 5 prefills without the draft, 12 restarts"]
    assert said(kv_only_rounds=1234) == []  # of an earlier build
    fallen = works | {"kv_only_fallback": "the draft's keys differ"}
    assert said(**fallen) == ["off mode   kv-only, but k = 0 stays warm: the draft's keys differ"]


def test_a_failure_of_the_status_is_told_not_raised() -> None:
    status = status_of(SimpleNamespace())  # type: ignore[arg-type]
    check_plain(status)
    assert set(status) == {"status_error"}
    assert "AttributeError" in next(iter(status_lines(status)))


def test_an_inactive_server_says_why() -> None:
    dials.install(None, "LoRA is on")
    status = status_of(None)
    check_plain(status)
    assert status["mode"] == "inactive" and status["reason"] == "LoRA is on"
    assert list(status_lines(status)) == ["mode       inactive: LoRA is on"]


def test_the_manual_shows_the_report_as_it_is_printed() -> None:
    shares = {0: 0.021, 1: 0.402, 2: 0.0, 3: 0.577, 5: 0.0, 7: 0.0}
    status = {
        "policy_id": "6f1c2a90be11",
        "policy_name": "learned",
        "fallback": "",
        "shadow.rounds": 412_806,
        "shadow.same_k": round(0.613 * 412_806),
        "shadow.unpriced": 0,
        **{f"shadow.rounds_at_k.{k}": round(share * 412_806) for k, share in shares.items()},
        "shadow.gain": 0.091,
        "shadow.gain_low": 0.082,
        "shadow.gain_high": 0.1,
        "shadow.guessed_share": 0.044,
    }
    manual = (Path(__file__).parents[1] / "docs/operations.md").read_text()
    assert "```\n" + "\n".join(report_lines(status)) + "\n```\n" in manual


def test_the_shadow_report_in_words(
    make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file(0), stock_step=1)
    assert "no rounds yet" in next(iter(report_lines(status_of(dial))))
    dial.set_mode("shadow")
    run_rounds(dial, 100, [0, 0])
    status = status_of(dial)
    check_plain(status)
    text = "\n".join(report_lines(status))
    # Nothing is ever accepted: k = 0 takes 12 ms for what k = 1 takes 14 ms.
    assert "100; both chose the same k in 0.0%" in text and "k=0 100.0%" in text
    assert "+16.7% decode tokens per second predicted; no interval yet" in text
    assert "0.0% of the tokens are guessed" in text


def test_why_there_is_no_report(
    make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    def said() -> str:
        return "\n".join(report_lines(status_of(dial)))

    dial = make_dial(make_policy_file(0))
    dial.set_mode("shadow")
    assert "ask again" in said() and "--mode shadow" not in said()
    dial.force_k(1)
    assert "while k = 1 is forced" in said()
    dial.force_k(None)
    run_rounds(dial, 3, [0])
    dial.fail("outcome", RuntimeError("no counts"))
    assert "FALLBACK" in said() and "no counts" in said()
    dial.telemetry.shadow, dial.telemetry.error = None, "shadow: OSError: full"
    assert said() == "shadow     the report has ended: shadow: OSError: full"
    assert "ended by an error: shadow: OSError: full" in "\n".join(status_lines(status_of(dial)))


def test_a_dial_without_a_loop_says_so(
    make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file(0))
    assert "NOT BOUND" in "\n".join(status_lines(status_of(dial)))
    run_rounds(dial, 1, [0])
    assert status_of(dial)["is_bound"] == 1 and "NOT BOUND" not in "\n".join(status_lines(status_of(dial)))
