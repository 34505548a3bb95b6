"""Who decides k in a server, what is counted, and what a failure leads to."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scheduler_double import SchedulerDouble

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.policy_export import rule_file
from draftdial.controller.policy_file import PolicyFile
from draftdial.controller.rules import FixedK, Threshold
from draftdial.controller.signals import IntArray, RoundOutcome, RoundSignals
from draftdial.engine_patch.decision_log import DecisionLog
from draftdial.engine_patch.dial import Dial, Loaded
from draftdial.engine_patch.launch_checks import SKIP
from draftdial.engine_patch.log_reader import read_log
from draftdial.engine_patch.log_replay import replay
from draftdial.engine_patch.server_tiers import Refused, ServerTiers

TIERS = (0, 1, 3)


class Stock:
    """SGLang's rule, seen from outside: always k = 1, and feedback makes it ask for 3."""

    def __init__(self) -> None:
        self.candidate_steps = [0, 1, 3]
        self.feedback: list[tuple[list[int], int]] = []

    def get_steps_for_batch(self, batch_size: int) -> int:
        return 1

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        self.feedback.append((num_correct_drafts_per_req, batch_size))
        return 3

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        pass

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        return [step]


class Scripted:
    """A policy that says what it is told to, an exception included, and remembers what it saw."""

    tiers = TIERS

    def __init__(self, *script: int | Exception) -> None:
        self.script = list(script)
        self.observed: list[tuple[int, int, list[int]]] = []

    def reset(self, num_servers: int) -> None:
        pass

    def decide(self, signals: RoundSignals) -> IntArray:
        said = self.script.pop(0)
        if isinstance(said, Exception):
            raise said
        return np.array([said])

    def observe(self, outcome: RoundOutcome) -> None:
        counts = outcome.accept_counts[0].tolist()
        self.observed.append((int(outcome.round_id[0]), int(outcome.k[0]), counts))


@pytest.fixture
def start(make_profile: Callable[..., CostProfile]) -> Callable[..., tuple[Dial, SchedulerDouble]]:
    """A server with tiers 0, 1 and 3 and four requests running, its policy `Scripted` or a rule."""

    def make(*script: int | Exception, lag: int = 1, **kwargs: Any) -> tuple[Dial, SchedulerDouble]:
        profile = make_profile(TIERS)
        fallback = Threshold(TIERS, k=3, batch=2)
        file = rule_file(FixedK(TIERS, 3), profile, "warm", name="fixed", fallback=fallback)
        dial = Dial(Stock(), SimpleNamespace(speculative_num_steps=3), **kwargs)
        loaded = dial.load(file.data)
        dial.activate(Loaded(file, Scripted(*script)) if script else loaded)
        scheduler = SchedulerDouble(lag)
        scheduler.dial = dial
        dial.bind(scheduler.signals, None, None)
        scheduler.prefill(*(scheduler.queue(f"r{i}") for i in range(4)))
        return dial, scheduler

    return make


Start = Callable[..., tuple[Dial, SchedulerDouble]]


def test_the_policy_steers_and_is_counted(start: Start) -> None:
    dial, scheduler = start(3, 3, 0, 1)
    assert [scheduler.decode(accepted=2) for _ in range(4)] == [3, 3, 0, 1]
    counters = dial.counters
    assert (counters.decisions, counters.observed, counters.switches) == (4, 4, 2)
    assert counters.rounds_at_k == {0: 1, 1: 1, 3: 2}
    assert (counters.drafted, counters.wasted) == (4 * (3 + 3 + 0 + 1), 4 * (1 + 1))
    assert (dial.last_k, dial.fallback) == (1, None)


@pytest.mark.parametrize("lag", [1, 2])
def test_outcomes_carry_their_own_round_and_width(start: Start, lag: int) -> None:
    dial, scheduler = start(3, 1, 0, 3, 1, lag=lag)
    for _ in range(5):
        scheduler.decode(accepted=2)
    expected = [(0, 3, [0, 0, 4, 0]), (1, 1, [0, 4, 0, 0]), (2, 0, [4, 0, 0, 0]), (3, 3, [0, 0, 4, 0])]
    seen = dial.policy.observed  # type: ignore[attr-defined]
    assert seen[:4] == expected and len(seen) == 6 - lag


def test_requests_that_ride_along_teach_nothing(start: Start) -> None:
    dial, scheduler = start(3, 3, 3, lag=2)
    scheduler.running_batch.reqs = []
    short = scheduler._joining[0]
    short.sampling_params.max_new_tokens = 4
    scheduler.decode()
    scheduler.decode()
    scheduler.decode()
    seen = dial.policy.observed  # type: ignore[attr-defined]
    assert [counts for _, _, counts in seen] == [[0, 0, 0, 4], [0, 0, 0, 3]]


def test_nothing_switches_on_feedback_while_steering(start: Start) -> None:
    dial, _ = start()
    assert dial.on_verify_complete([3, 3], batch_size=2) is None
    assert dial.inner.feedback == []  # type: ignore[attr-defined]


def test_in_shadow_the_stock_rule_acts_and_the_policy_is_recorded(start: Start) -> None:
    dial, scheduler = start()
    dial.set_mode("shadow")
    assert [scheduler.decode() for _ in range(2)] == [1, 1]
    assert (dial.last_k, dial.last_wanted_k) == (1, 3)
    assert dial.on_verify_complete([1], 1) == 3
    assert dial.shadow is not None and dial.shadow.summary()["rounds"] == 2


def test_off_and_a_forced_k(start: Start) -> None:
    dial, scheduler = start(3, 3, 3, 3)
    dial.set_mode("off")
    off = scheduler.decode()
    dial.force_k(1)
    forced = scheduler.decode()
    dial.force_k(None)
    again = scheduler.decode()
    dial.set_mode("steer")
    assert (off, forced, again, scheduler.decode()) == (0, 1, 0, 3)
    with pytest.raises(Refused, match=r"k = 2, allowed: \[0, 1, 3\]"):
        dial.force_k(2)


@pytest.mark.parametrize("said", [ArithmeticError("NaN"), 2, -1, 99])
def test_a_failing_policy_is_replaced_for_good(start: Start, said: int | Exception) -> None:
    dial, scheduler = start(3, said, 3)
    scheduler.decode()
    assert scheduler.decode() == 0, "four requests are more than the threshold rule speculates for"
    scheduler.prefill()
    scheduler.running_batch.reqs = scheduler.running_batch.reqs[:2]
    assert [scheduler.decode(), scheduler.decode()] == [3, 3]
    assert dial.fallback is not None and dial.fallback.startswith("decide: ")
    assert (dial.counters.fallbacks, dial.counters.errors) == (1, 1)
    assert len(dial.policy.observed) == 1  # type: ignore[attr-defined]


def test_a_deploy_ends_the_fallback_and_keeps_the_counts(start: Start) -> None:
    dial, scheduler = start(3, RuntimeError("broken"))
    scheduler.decode()
    scheduler.decode()
    dial.activate(dial.load(dial.file.data))
    assert scheduler.decode() == 3
    assert (dial.fallback, dial.counters.deploys, dial.counters.decisions) == (None, 1, 3)


def test_a_failure_to_read_the_scheduler_leads_to_the_fallback_too(start: Start) -> None:
    dial, scheduler = start(3)
    del scheduler.waiting_queue
    assert dial.get_steps_for_batch(2) == 3
    assert (
        dial.fallback == "decide: AttributeError: 'SchedulerDouble' object has no attribute 'waiting_queue'"
    )


def test_rounds_of_health_checks_alone_keep_k_and_count_for_nothing(start: Start) -> None:
    dial, scheduler = start(0, lag=2)  # else the check is over with its prefill
    scheduler.decode()
    scheduler.settle()
    scheduler.running_batch.reqs = []
    scheduler.prefill(scheduler.queue("HEALTH_CHECK_7", num_output=1))
    dial._worker.speculative_num_steps = 0
    assert scheduler.decode() == 0
    scheduler.settle()
    assert (dial.counters.decisions, dial.counters.observed) == (1, 1)


def test_the_warm_up_teaches_nothing_of_the_rounds_that_it_shares(start: Start) -> None:
    dial, scheduler = start(3, 3)
    scheduler.signals._warm_up_may_come = True
    scheduler.prefill(scheduler.queue("w", num_prompt=3, num_output=8))
    for num_rounds in (1, 2):
        assert scheduler.signals.has_probes
        scheduler.decode()  # a token by the prefill, four by each round
        assert dial.counters.drafted == num_rounds * 3 * 4
    assert not scheduler.signals.has_probes


def test_with_rejection_sampling_zero_never_runs(start: Start) -> None:
    dial, scheduler = start(0, 3, RuntimeError("broken"), without_zero=True)
    assert dial.tiers == (1, 3)
    assert [scheduler.decode() for _ in range(4)] == [1, 3, 1, 1]
    for change in (lambda: dial.set_mode("off"), lambda: dial.force_k(0)):
        with pytest.raises(Refused, match="rejection sampling"):
            change()
    assert (dial.mode, dial.forced_k) == ("steer", None)


def test_ranks_that_see_the_same_have_the_same_hash(start: Start) -> None:
    hashes = []
    for script in ((3, 1, 0), (3, 1, 0), (3, 0, 1)):
        dial, scheduler = start(*script)
        for _ in script:
            scheduler.decode()
        hashes.append(dial.decision_hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_policy_for_other_tiers_is_refused(start: Start, make_profile: Callable[..., CostProfile]) -> None:
    dial, _ = start()
    other = rule_file(
        FixedK((0, 2), 2), make_profile((0, 2)), "warm", name="two", fallback=Threshold((0, 2), k=2, batch=1)
    )
    with pytest.raises(UserError, match=r"tiers: found \[0, 2\], allowed: some of \[0, 1, 3\]"):
        dial.load(other.data)
    with pytest.raises(UserError, match="cut short"):
        dial.load(other.data[:1000])


def test_a_policy_for_the_other_off_mode_is_refused(
    start: Start, make_profile: Callable[..., CostProfile], monkeypatch: pytest.MonkeyPatch
) -> None:
    fallback = Threshold(TIERS, k=3, batch=2)
    skip = rule_file(FixedK(TIERS, 3), make_profile(TIERS), "skip", name="s", fallback=fallback)
    warm, _ = start()
    with pytest.raises(UserError, match=f"found skip, allowed: warm: this server .* without {SKIP}$"):
        warm.load(skip.data)
    monkeypatch.setenv(SKIP, "1")
    skipping = Dial(Stock(), SimpleNamespace(speculative_num_steps=3))
    assert skipping.load(skip.data).file.policy_id == skip.policy_id
    with pytest.raises(UserError, match="off_mode: found warm, allowed: skip"):
        skipping.load(warm.file.data)
    # Where 0 never runs its cost does not matter.
    without_zero = Dial(Stock(), SimpleNamespace(speculative_num_steps=3), without_zero=True)
    without_zero.load(warm.file.data)
    monkeypatch.delenv(SKIP)  # as a measurement does in the rounds it counts
    skipping.load(skip.data)


def test_the_threshold_rule_never_drafts_more_than_it_asked_for() -> None:
    tiers = ServerTiers((0, 1, 3), without_zero=False)
    assert [tiers.at_most(k) for k in (0, 1, 2, 3, 9)] == [0, 1, 1, 3, 3]
    assert [ServerTiers((0, 1, 3), without_zero=True).at_most(k) for k in (0, 2)] == [1, 1]


def test_the_report_leaves_out_what_the_threshold_rule_wanted(start: Start) -> None:
    dial, scheduler = start(3, 3, RuntimeError("broken"), lag=1)
    dial.set_mode("shadow")
    for _ in range(6):
        scheduler.decode(accepted=1)
    assert dial.fallback is not None and dial.shadow is not None
    assert dial.shadow.summary()["rounds"] == 2


def test_before_the_loop_begins_nothing_is_steered() -> None:
    dial = Dial(Stock(), SimpleNamespace(speculative_num_steps=3))
    assert dial.get_steps_for_batch(4) == 1, "SGLang's rule, not the tier that the server started with"
    assert dial.on_verify_complete([2], 1) == 3, "which goes on learning"
    assert dial.cuda_graph_bs_for_step(3) is None, "every tier may run at every batch"


def test_a_server_decides_as_the_same_policy_does_offline(
    make_policy_file: Callable[..., PolicyFile], tmp_path: Path
) -> None:
    dial = Dial(Stock(), SimpleNamespace(speculative_num_steps=3))
    dial.activate(dial.load(make_policy_file(seed=5).data))
    scheduler = SchedulerDouble(lag=2)
    scheduler.dial = dial
    log = DecisionLog.open(tmp_path / "log", 8 << 20, {"tiers": list(TIERS)})
    dial.bind(scheduler.signals, log, None)
    rng = random.Random(3)
    for number in range(400):
        if number == 200:
            dial.activate(dial.load(make_policy_file(seed=15).data))
        if number % 7 == 0:
            scheduler.queue(f"r{number}", 10 + number % 90, 40 + number % 50)
            scheduler.prefill(*scheduler.waiting_queue)
        scheduler.decode(accepted=rng.randrange(4))
    log.close()
    replayed = replay(read_log(tmp_path / "log"))
    assert dial.fallback is None and dial.counters.switches > 10
    assert len(replayed.round_id) == 400
    assert replayed.logged_k.tolist() == replayed.offline_k.tolist()


class Counting:
    """A part of the telemetry to which much is told."""

    error = ""

    def __init__(self) -> None:
        self.num_calls = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        def count(*args: Any) -> None:
            self.num_calls += 1

        return count


class Broken:
    """Whatever is asked of it fails."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def fail(*args: Any) -> None:
            raise RuntimeError(f"no {name}")

        return fail


@pytest.mark.parametrize(
    ("part", "said"), [("log", "no round"), ("shadow", "no decided"), ("metrics", "no flush")]
)
def test_a_failing_part_of_the_telemetry_changes_nothing_else(start: Start, part: str, said: str) -> None:
    dial, scheduler = start(3, 1, 3)
    parts = {name: Counting() for name in ("log", "shadow", "metrics")}
    for name, counting in parts.items():
        setattr(dial.telemetry, name, Broken() if name == part else counting)
    assert [scheduler.decode() for _ in range(3)] == [3, 1, 3]
    dial.telemetry.flush(dial)
    assert dial.telemetry.error == f"{part}: RuntimeError: {said}" and dial.telemetry.has_failed
    assert getattr(dial.telemetry, part) is None
    assert all(counting.num_calls > 0 for name, counting in parts.items() if name != part)
    assert (dial.fallback, dial.counters.observed) == (None, 3)
    assert len(dial.policy.observed) == 3  # type: ignore[attr-defined]
