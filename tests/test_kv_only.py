"""Off mode `kv-only`: when the draft may be left out, by which drafts, and what the simulator makes of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from assumed_kv_only import assumed_kv_only, with_kv_only_prefill
from hypothesis import given
from hypothesis import strategies as st
from scheduler_double import SchedulerDouble
from test_dial import TIERS, Scripted, Stock

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.features import Features
from draftdial.controller.policy_export import rule_file
from draftdial.controller.rules import FixedK, Threshold
from draftdial.controller.signals import RoundSignals
from draftdial.engine_patch.dial import Dial, Loaded
from draftdial.engine_patch.kv_only import KvOnly, around_draft_extend_for_prefill
from draftdial.engine_patch.kv_only_backlog import Backlog
from draftdial.engine_patch.kv_only_projection import obstacle
from draftdial.engine_patch.launch_checks import SKIP
from draftdial.engine_patch.server_tiers import off_mode_of
from draftdial.engine_patch.settings import OFF_MODE, Settings
from draftdial.engine_patch.status import status_of
from draftdial.engine_patch.status_command import status_lines
from draftdial.engine_patch.warm_restart import WarmRestart
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine

Factory = Callable[..., Any]
EXTRA_MS, EXTRA_SHARE = 0.2, 0.01


@pytest.fixture
def profile(make_profile: Callable[..., CostProfile]) -> CostProfile:
    return assumed_kv_only(make_profile(TIERS), "assumed", EXTRA_MS, EXTRA_SHARE)


# The way back.


def test_on_becomes_one_warm_round_and_then_on() -> None:
    restart, ran = WarmRestart(), []
    for k in (3, 0, 0, 3, 3, 1, 0, 1):
        ran.append((restart.decide(k), restart.leaves_out))
    assert ran == [
        (3, False), (0, True), (0, True), (0, False), (3, False), (1, False), (0, True), (0, False)
    ]  # fmt: skip
    assert restart.num_restarts == 2


def test_a_probe_of_one_round_is_made_good_unless_somebody_else_decides() -> None:
    restart = WarmRestart()
    assert [restart.decide(k) for k in (0, 1, 0, 0)] == [0, 0, 1, 0]
    assert [restart.decide(k) for k in (0, 3)] == [0, 0]
    restart.forget()
    assert restart.decide(0) == 0 and restart.leaves_out


@given(st.lists(st.sampled_from(TIERS), max_size=60))
def test_no_round_speculates_on_what_was_left_out(decided: list[int]) -> None:
    restart, was_left_out, waits = WarmRestart(), False, 0
    for k in decided:
        ran = restart.decide(k)
        assert not (ran > 0 and was_left_out)
        assert not (restart.leaves_out and ran > 0)
        waits = waits + 1 if k > 0 and ran == 0 else 0
        assert waits <= 1
        was_left_out = restart.leaves_out


def test_measured_rounds_are_what_the_plan_says() -> None:
    restart = WarmRestart()
    seen = []
    for k, off_mode in ((0, "kv-only"), (3, "warm"), (0, "warm"), (0, "skip")):
        restart.measure(k, off_mode)  # type: ignore[arg-type]
        seen.append(restart.leaves_out)
    assert seen == [True, False, False, False]
    assert [restart.decide(k) for k in (3, 3)] == [0, 3]  # after skipped rounds, too


# In the simulator.


@pytest.mark.parametrize("lag", [1, 2])
def test_the_simulator_runs_and_bills_what_the_server_would(
    lag: int, profile: CostProfile, make_bank: Factory, make_requests: Factory
) -> None:
    num_servers, rng = 7, np.random.default_rng(3)
    requests = [make_requests(np.full(3, 400), prompt_tokens=np.full(3, 20), concurrency=3)] * num_servers
    options = ServerOptions("kv-only", lag=lag)
    engine = SimulatedEngine(requests, make_bank({"a": [[1, 0, 2, 3, 0]]}), profile, options)
    restarts = [WarmRestart() for _ in range(num_servers)]
    ran: list[list[int]] = []
    for _ in range(60):
        decided = rng.choice(TIERS, num_servers, p=(0.6, 0.2, 0.2))
        signals = engine.signals()
        running, context = signals.num_running.copy(), signals.mean_context_tokens.copy()
        tier = np.searchsorted(TIERS, decided)
        promised_s, rows = engine.round_s(), np.arange(num_servers)
        promised = engine.expected_tokens()[rows, tier]
        realised = engine.realised_tokens()[rows, tier]
        engine._sim.requests["par_s"] = 1.0
        [outcome] = engine.run_round(decided)
        ran.append([restart.decide(int(k)) for restart, k in zip(restarts, decided, strict=True)])
        for s, restart in enumerate(restarts):
            mode = "kv-only" if restart.leaves_out else "warm"
            now = list(TIERS).index(ran[-1][s])
            seconds = profile.round_s(int(running[s]), int(context[s]), mode)[now]  # type: ignore[arg-type]
            assert engine.servers["step_decode_s"][s] == pytest.approx(seconds)
            assert promised_s[s, tier[s]] == pytest.approx(seconds)
            if ran[-1][s] == 0:
                assert promised[s] == realised[s] == engine.servers["step_tokens"][s] == 3
        if lag == 1 or len(ran) > 1:
            assert outcome.k.tolist() == ran[-lag]
    assert sum(restart.num_restarts for restart in restarts) > 20


def test_gains_are_told_for_what_would_run(
    profile: CostProfile, make_bank: Factory, make_requests: Factory
) -> None:
    requests = make_requests(np.full(2, 100), prompt_tokens=np.full(2, 20), concurrency=2)
    engine = SimulatedEngine(
        [requests], make_bank({"a": [[3, 3, 3]]}), profile, ServerOptions("kv-only", lag=1)
    )
    assert engine.realised_tokens().tolist() == [[2, 4, 8]]
    engine.run_round(np.array([0]))
    assert engine.realised_tokens().tolist() == [[2, 2, 2]]  # above 0 only a warm round can come now
    assert engine.round_s()[0].argmin() == 0 and engine.round_s()[0, 1] == engine.round_s()[0, 2]
    engine.run_round(np.array([3]))
    assert engine.realised_tokens().tolist() == [[8, 4, 8]]  # and after it 3, unless 1 is decided
    engine.run_round(np.array([0]))
    assert engine.servers["step_tokens"].tolist() == [8]


WITHOUT_DRAFT_MS = ((100, 3.0), (300, 7.0))
"""A prompt of 200 tokens: 5 ms, and 9 with the draft."""


@pytest.mark.parametrize(
    ("is_known", "expected_ms"),
    [(True, [9, 5, 5, 9, 9, 5, 9, 9]), (False, [9] * 8)],
    ids=["measured", "not measured"],
)
def test_a_prefill_behind_a_round_that_left_the_draft_out_is_billed_without_it(
    is_known: bool,
    expected_ms: list[float],
    profile: CostProfile,
    make_bank: Factory,
    make_requests: Factory,
) -> None:
    if is_known:
        profile = with_kv_only_prefill(profile, WITHOUT_DRAFT_MS)
    # One request goes on; the others end in the round after their prefill, and the next one comes.
    requests = make_requests([400, *[2] * 20], prompt_tokens=[100, *[200] * 20], concurrency=2)
    engine = SimulatedEngine([requests], make_bank({"a": [[0]]}), profile, ServerOptions("kv-only", lag=1))
    assert 1e3 * engine.servers["step_prefill_s"][0] == pytest.approx(13.0)  # nothing has been left out yet
    billed_ms = []
    # The second 3 becomes a warm round; so does the 1, which the round of the last 0 makes good.
    for k in (3, 0, 0, 3, 3, 0, 1, 0):
        engine.run_round(np.array([k]))
        billed_ms.append(1e3 * engine.servers["step_prefill_s"][0])
    assert billed_ms == pytest.approx(expected_ms)


@pytest.mark.parametrize(("decided", "expected_ms"), [((0,), 5.0), ((3,), 9.0), ((0, 3), 9.0), ((3, 0), 5.0)])
def test_a_prefill_on_an_idle_server_goes_by_the_last_round_before(
    decided: tuple[int, ...],
    expected_ms: float,
    profile: CostProfile,
    make_bank: Factory,
    make_requests: Factory,
) -> None:
    profile = with_kv_only_prefill(profile, WITHOUT_DRAFT_MS)
    # As many rounds as decisions, then nothing for the rest of the first second.
    requests = make_requests([1 + len(decided), 2], prompt_tokens=200, arrival_s=[0.0, 1.0])
    engine = SimulatedEngine([requests], make_bank({"a": [[0]]}), profile, ServerOptions("kv-only", lag=1))
    for k in decided:
        engine.run_round(np.array([k]))
    assert engine.results().arrival_s[0, 1] == 1.0
    assert 1e3 * engine.servers["step_prefill_s"][0] == pytest.approx(expected_ms)


@pytest.mark.parametrize("off_mode", ["warm", "skip", "nospec"])
def test_other_off_modes_know_no_such_prefill(
    off_mode: Any, profile: CostProfile, make_bank: Factory, make_requests: Factory
) -> None:
    profile = with_kv_only_prefill(profile, WITHOUT_DRAFT_MS)
    requests = make_requests([400, *[2] * 4], prompt_tokens=[100, *[200] * 4], concurrency=2)
    engine = SimulatedEngine([requests], make_bank({"a": [[0]]}), profile, ServerOptions(off_mode, lag=1))
    engine.run_round(np.array([0]))
    assert 1e3 * engine.servers["step_prefill_s"][0] == pytest.approx(9.0)


def test_what_a_policy_sees_does_not_depend_on_it(profile: CostProfile) -> None:
    known, signals = with_kv_only_prefill(profile, WITHOUT_DRAFT_MS), RoundSignals.zeros(1)
    plain, priced = (Features(each, "kv-only") for each in (profile, known))
    signals.num_running[0], signals.max_running[0], signals.num_prefill_tokens[0] = 1, 8, 200
    for round_id in range(4):  # behind rounds at k = 0, with a request that waits all the time
        signals.round_id[0] = signals.oldest_wait_rounds[0] = round_id
        observations = [features.compute(signals) for features in (plain, priced)]
        np.testing.assert_array_equal(*observations)
        for features in (plain, priced):
            features.chose(np.array([0]))
    waited = [feature.name for feature in plain.table].index("oldest_wait")
    assert observations[0][0, waited] > 0


def test_a_profile_without_times_of_it_says_so(
    make_profile: Callable[..., CostProfile], make_bank: Factory, make_requests: Factory
) -> None:
    plain = make_profile(TIERS)
    with pytest.raises(
        UserError, match="profile tiny: found no row for off mode kv-only, needed: off-kv-only"
    ):
        SimulatedEngine(
            [make_requests(np.full(2, 9))], make_bank({"a": [[1]]}), plain, ServerOptions("kv-only")
        )
    with pytest.raises(UserError, match='off_mode: found "kv-only", allowed: warm, skip, those of its cost'):
        rule_file(FixedK(TIERS, 3), plain, "kv-only", name="k3", fallback=Threshold(TIERS, k=3, batch=2))


def test_an_assumed_row_is_labelled(profile: CostProfile) -> None:
    [row] = [row for row in profile.document["rows"] if row["row"] == "off-kv-only"]
    assert all(cell["inferred"] and cell["note"].startswith("assumed: ") for cell in row["cells"])
    skip = profile.round_s(2, 50, "skip")
    kv_only = profile.round_s(2, 50, "kv-only")
    assert 1e3 * (kv_only[0] - skip[0]) == pytest.approx(EXTRA_MS) and (kv_only[1:] == skip[1:]).all()
    assert (
        CostProfile.from_document(profile.to_document(), "again").round_s(2, 50, "kv-only")[0] == kv_only[0]
    )


# In the dial.


def test_the_dial_waits_for_the_draft(profile: CostProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFF_MODE, "kv-only")
    dial = Dial(Stock(), SimpleNamespace(speculative_num_steps=3))
    fallback = Threshold(TIERS, k=3, batch=2)
    for off_mode in ("warm", "kv-only"):
        file = rule_file(FixedK(TIERS, 3), profile, off_mode, name="fixed", fallback=fallback)  # type: ignore[arg-type]
        dial.activate(dial.load(file.data))
    with pytest.raises(UserError, match=f"found skip, allowed: kv-only: .* with {OFF_MODE}=kv-only$"):
        dial.load(rule_file(FixedK(TIERS, 3), profile, "skip", name="fixed", fallback=fallback).data)
    dial.activate(Loaded(file, Scripted(3, 0, 1, 0, 3, 3, 3)))
    scheduler = SchedulerDouble(1)
    scheduler.dial = dial
    dial.bind(scheduler.signals, None, None)
    dial.kv_only = SimpleNamespace(restart=(restart := WarmRestart()), decide=restart.decide)  # type: ignore[assignment]
    scheduler.prefill(*(scheduler.queue(f"r{i}") for i in range(4)))
    assert [scheduler.decode() for _ in range(4)] == [3, 0, 0, 1]
    dial.set_mode("off")
    assert scheduler.decode() == 0
    dial.set_mode("steer")
    assert [scheduler.decode() for _ in range(2)] == [0, 3]
    assert dial.counters.rounds_at_k == {0: 4, 1: 1, 3: 2}


def test_a_server_that_fell_back_says_so(profile: CostProfile) -> None:
    dial = Dial(Stock(), SimpleNamespace(speculative_num_steps=3))
    rule = FixedK(TIERS, 3)
    dial.activate(
        dial.load(
            rule_file(rule, profile, "warm", name="fixed", fallback=Threshold(TIERS, k=3, batch=2)).data
        )
    )
    restart = WarmRestart()
    dial.kv_only = SimpleNamespace(  # type: ignore[assignment]
        restart=restart, fallback="two layers", num_rounds=0, num_prefills=0
    )
    status = status_of(dial)
    assert (status["off_mode"], status["kv_only_fallback"], status["kv_only_rounds"]) == (
        "warm",
        "two layers",
        0,
    )
    assert any("kv-only, but k = 0 stays warm: two layers" in line for line in status_lines(status))


def test_the_variable_says_kv_only_or_nothing() -> None:
    assert off_mode_of({OFF_MODE: "kv-only"}) == "kv-only"
    assert [off_mode_of({OFF_MODE: "", SKIP: value}) for value in ("", "true")] == ["warm", "skip"]
    with pytest.raises(UserError, match=f"{OFF_MODE}: found 'skip', allowed: kv-only, or unset"):
        Settings.from_environment({"DRAFTDIAL_POLICY": "/p", OFF_MODE: "skip"})
    with pytest.raises(UserError, match=f"{SKIP}: found 1, allowed with {OFF_MODE}=kv-only: unset"):
        off_mode_of({OFF_MODE: "kv-only", SKIP: "1"})


# The first round, and rounds that fail.


class Draft:
    """The draft's projections and pool in one: `write` keeps what `project` gives, the draft writes ones."""

    width = 2

    def __init__(self, projected: float, fails: bool) -> None:
        self.projected, self.fails = projected, fails
        self.pool = torch.zeros(20, 1, 2)
        self.writes: list[list[int]] = []
        """The slots of each."""
        self.seen: list[tuple[list[int], list[int]]] = []
        """Tokens and positions of each projection."""

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def project(
        self, token_ids: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fails:
            raise RuntimeError("no such kernel")
        self.seen.append((token_ids.tolist(), positions.tolist()))
        entry = torch.full((len(token_ids), 1, 2), self.projected)
        return entry, entry.clone()

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.writes.append(slots.tolist())
        self.pool[slots] = key

    def written(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pool[slots], self.pool[slots]


@pytest.fixture
def round_at_zero(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[KvOnly, Draft, Callable[..., int]]]:
    """A process with a `Draft`, and a function that runs a round at k = 0: how often did the draft run?"""

    def make(projected: float = 1.0, fails: bool = False) -> tuple[KvOnly, Draft, Callable[..., int]]:
        monkeypatch.setattr(KvOnly, "_prepared", lambda self: "")
        monkeypatch.setattr("draftdial.engine_patch.rank_agreement.gather", lambda _, vote: [vote])
        kv_only, draft, runs = KvOnly(None), Draft(projected, fails), []
        monkeypatch.setattr("draftdial.engine_patch.kv_only._current", kv_only)
        kv_only._draft_kv = draft  # type: ignore[assignment]

        def original(*_: Any) -> None:
            runs.append(1)
            draft.pool[:] = 1.0

        def run(slots: tuple[int, int] = (0, 2), requests: str = "ab") -> int:
            assert kv_only.decide(0) == 0
            batch = SimpleNamespace(
                out_cache_loc=torch.tensor(slots),
                seq_lens=torch.tensor([5, 9]),
                reqs=[SimpleNamespace(rid=rid) for rid in requests],
            )
            result = SimpleNamespace(
                next_token_ids=torch.tensor([7, 8], dtype=torch.int32),
                logits_output=SimpleNamespace(hidden_states=torch.ones(2, 4)),
                next_draft_input=SimpleNamespace(),
            )
            runs.clear()
            kv_only.extend(original, None, batch, result)
            if not runs:  # token ids of the target, and its vocabulary may be larger than the draft's
                assert result.next_draft_input.topk_index.tolist() == [[0], [0]]
            return len(runs)

        return kv_only, draft, run

    return make


EagleDraftInput = SimpleNamespace
"""What `Prefill` looks for in the module of SGLang's worker, which is this one for `Worker`."""


def _eagle_prefill_tail_tokens(batch: Any, next_token_ids: torch.Tensor) -> torch.Tensor:
    return next_token_ids.long()


class Worker:
    pass


LONG = list(range(1, 12))
"""Slots of a prefill that is long enough to prove the projection."""


def prefill(draft: Draft, slots: list[int], mode: str = "EXTEND", **others: Any) -> Any:
    """Two tokens behind a prefix of three, and a prompt of the others; None if the draft read them."""
    batch = SimpleNamespace(
        extend_lens=[2, len(slots) - 2],
        prefix_lens=[3, 0],
        input_ids=torch.arange(10, 10 + len(slots)),
        out_cache_loc=torch.tensor(slots),
        forward_mode=SimpleNamespace(name=mode),
        **others,
    )

    def original(*_: Any) -> None:
        draft.pool[torch.tensor(slots)] = 1.0

    hidden = torch.arange(4.0 * len(slots)).view(-1, 4)
    return around_draft_extend_for_prefill(original, Worker(), batch, hidden, torch.tensor([7, 8]))


def test_the_first_round_runs_the_draft_and_the_next_ones_do_not(round_at_zero: Factory) -> None:
    kv_only, draft, run = round_at_zero()
    assert [run() for _ in range(3)] == [1, 0, 0]
    assert (kv_only.fallback, kv_only.num_rounds, draft.writes) == ("", 2, [])
    assert (kv_only.decide(3), kv_only.decide(3)) == (0, 3)


def test_what_is_owed_is_written_at_once_before_the_draft_runs(round_at_zero: Factory) -> None:
    kv_only, draft, run = round_at_zero()
    run()
    draft.pool[:] = 0.0
    assert [run(slots=slots) for slots in ((1, 2), (3, 4), (5, 6))] == [0, 0, 0]
    assert draft.writes == []
    assert kv_only.decide(3) == 0  # the round that warms up
    kv_only.settle()
    assert draft.writes == [[1, 2, 3, 4, 5, 6]]
    assert draft.pool.sum(dim=(1, 2))[:9].tolist() == [0, 2, 2, 2, 2, 2, 2, 0, 0]
    kv_only.settle()
    assert len(draft.writes) == 1


def test_a_slot_that_changes_hands_keeps_what_its_last_owner_wrote(round_at_zero: Factory) -> None:
    kv_only, draft, run = round_at_zero()
    run()
    for _ in range(2):  # what a prefill needs to be trusted, and a round to leave the draft out again
        prefill(draft, LONG)
        run()
    draft.writes.clear(), draft.seen.clear()
    run(slots=(1, 2), requests="ab")
    run(slots=(3, 4), requests="ab")
    run(slots=(5, 1), requests="bc")  # a has ended
    prefill(draft, [3, 6, 7])
    prefill(draft, [7, 8, 9])
    run(slots=(6, 9), requests="bc")
    assert draft.writes == []
    kv_only.settle()
    assert draft.writes == [[0, 2, 1, 2, 3, 4], [5, 1], [3, 6, 7], [7, 8, 9], [6, 9]]
    assert len(draft.seen) == 1


def test_a_write_that_fails_at_a_prefill_still_costs_a_warm_round(round_at_zero: Factory) -> None:
    kv_only, draft, run = round_at_zero()
    run()
    run()
    draft.fails = True
    assert prefill(draft, [5, 6, 7]) is None
    assert kv_only.fallback == "RuntimeError: no such kernel"
    assert [kv_only.decide(3), kv_only.decide(3)] == [0, 3]


def test_prefills_between_rounds_that_left_the_draft_out_leave_it_out_too(round_at_zero: Factory) -> None:
    kv_only, draft, run = round_at_zero()
    assert prefill(draft, LONG) is None  # nothing was left out yet
    run()
    assert prefill(draft, LONG) is None  # nor by the round that proved the projection
    run()
    assert prefill(draft, [1, 2, 3]) is None  # too short to prove anything
    assert prefill(draft, LONG) is None  # and this one proves it for prefills
    assert (kv_only.num_prefills, draft.writes) == (0, [[0, 2]])
    after = prefill(draft, [4, 5, 6, 7])
    assert (kv_only.num_prefills, draft.writes[1:]) == (1, [])
    kv_only.settle()
    assert draft.writes[1:] == [[4, 5, 6, 7]]
    assert draft.seen[-1] == ([11, 7, 13, 8], [3, 4, 0, 1])
    assert after.topk_index.tolist() == [[0], [0]] and after.topk_p.tolist() == [[1.0], [1.0]]
    assert after.hidden_states.tolist() == [[4.0, 5.0], [12.0, 13.0]]
    assert after.bonus_tokens.tolist() == [7, 8]
    assert kv_only.decide(3) == 0  # the round that warms up
    kv_only.extend(lambda *_: None, None, None, None)
    assert prefill(draft, [1, 2, 3]) is None
    assert kv_only.fallback == ""


@pytest.mark.parametrize("given", [{"mode": "MIXED"}, {"input_embeds": 1}, {"replace_embeds": 1}])
def test_prompts_that_are_more_than_tokens_run_the_draft(
    round_at_zero: Factory, given: dict[str, Any]
) -> None:
    kv_only, draft, run = round_at_zero()
    for _ in range(3):
        run()
        assert prefill(draft, LONG, **given) is None
    assert kv_only.num_prefills == 0


def test_a_prefill_that_differs_from_its_projection_ends_it(round_at_zero: Factory) -> None:
    kv_only, draft, run = round_at_zero()
    run()
    run()
    draft.projected = 2.0
    assert prefill(draft, LONG) is None
    assert "the draft's keys differ from their projection" in kv_only.fallback


def test_a_projection_that_fails_at_a_prefill_runs_the_draft(round_at_zero: Factory) -> None:
    kv_only, draft, run = round_at_zero()
    for _ in range(2):
        run()
        prefill(draft, LONG)
    draft.fails = True
    kv_only._backlog = Backlog(capacity=3)  # too small for it
    assert prefill(draft, [4, 5, 6, 7]) is None
    assert kv_only.fallback == "RuntimeError: no such kernel" and draft.pool[4:8].eq(1.0).all()


def test_rounds_leave_half_of_the_room_to_a_prefill(round_at_zero: Factory) -> None:
    kv_only, draft, run = round_at_zero()
    run()
    run()
    prefill(draft, LONG)  # which proves the projection
    run(slots=(0, 1))
    kv_only.settle()
    kv_only._backlog = Backlog(capacity=8)
    draft.writes.clear()
    for slots in ((1, 2), (3, 4), (5, 6)):
        run(slots=slots)
    assert draft.writes == [[1, 2, 3, 4]]
    prefill(draft, list(range(10, 16)))
    assert len(draft.writes) == 1
    prefill(draft, [16, 17, 18])
    assert draft.writes[1:] == [[5, 6], list(range(10, 16))]
    kv_only._backlog = Backlog(capacity=1)
    run(slots=(7, 8))
    assert draft.writes[3:] == [[7, 8]]


def test_what_is_owed_is_written_before_the_draft_runs_for_a_round_that_cannot_be_kept(
    round_at_zero: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv_only, draft, run = round_at_zero()
    run()
    run(slots=(1, 2))

    def full(*_: Any) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(kv_only._backlog, "add", full)
    assert run(slots=(3, 4), requests="bc") == 1
    assert draft.writes == [[1, 2]] and kv_only.fallback == "MemoryError: out of memory"


def test_what_is_owed_is_written_before_the_round_that_proves(round_at_zero: Factory) -> None:
    kv_only, draft, run = round_at_zero()
    run()
    run(slots=(1, 2))
    kv_only._proven.clear()  # as where a measurement left the draft out first
    assert run(slots=(3, 4)) == 1 and draft.writes == [[1, 2]]


def test_the_first_round_leaves_the_draft_warm(round_at_zero: Factory) -> None:
    kv_only, _, run = round_at_zero()
    run()
    assert kv_only.decide(3) == 3


@pytest.mark.parametrize("projected", [0.9, 2.0, float("nan")])
def test_a_projection_that_differs_is_never_used(round_at_zero: Factory, projected: float) -> None:
    kv_only, draft, run = round_at_zero(projected)
    assert [run() for _ in range(3)] == [1, 1, 1]
    assert "the draft's keys differ from their projection" in kv_only.fallback
    assert (kv_only.num_rounds, draft.writes, kv_only.decide(3)) == (0, [], 3)


@pytest.mark.parametrize("fails_first", [True, False])
def test_a_projection_that_raises_is_never_used_again(round_at_zero: Factory, fails_first: bool) -> None:
    kv_only, draft, run = round_at_zero(fails=fails_first)
    assert run() == 1
    if not fails_first:
        assert run() == 0
        draft.fails = True
        kv_only._backlog.capacity = 2
        assert run() == 1
        kv_only.settle()
        assert draft.writes == []
    assert kv_only.fallback == "RuntimeError: no such kernel"
    draft.fails = False
    assert run() == 1 and kv_only.decide(3) == 3


# Drafts that must be run.


def runner(**changes: Any) -> Any:
    """An SGLang draft in all that is looked at; `changes` by the name of the thing."""
    given = {
        "model_class": "LlamaForCausalLMEagle3",
        "num_layers": 1,
        "method": "UnquantizedLinearMethod",
        "bias": None,
        "rows": 8 + 2 * 4,
        "pool_class": "MHATokenToKVPool",
        "pool_dtype": "bfloat16",
        "window": None,
        "mrope": False,
        "translates": False,
    } | changes
    weight = SimpleNamespace(dim=lambda: 2, shape=(given["rows"], 16), dtype="bfloat16")
    linear = SimpleNamespace(quant_method=instance(given["method"]), bias=given["bias"], weight=weight)
    layer = SimpleNamespace(self_attn=SimpleNamespace(qkv_proj=linear, q_size=8, kv_size=4))
    model = SimpleNamespace(layers=[layer] * given["num_layers"], is_mrope_enabled=given["mrope"])
    return SimpleNamespace(
        model=instance(given["model_class"], model=model, _draft_window_size=given["window"]),
        token_to_kv_pool=instance(given["pool_class"], dtype=given["pool_dtype"]),
        kv_index_translator=SimpleNamespace(is_translating=given["translates"]),
    )


def instance(name: str, **attributes: Any) -> Any:
    made = type(name, (), {})()
    vars(made).update(attributes)
    return made


def test_a_plain_draft_need_not_be_run() -> None:
    assert [obstacle(runner(), release) for release in ("0.5.14", "0.5.17", "0.5.23")] == [""] * 3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_class": "Qwen3ForCausalLMMTP"}, "the draft is a Qwen3ForCausalLMMTP"),
        ({"num_layers": 2}, "the draft has 2 layers"),
        ({"method": "Fp8LinearMethod"}, "qkv projection is not plain"),
        ({"bias": object()}, "qkv projection is not plain"),
        ({"rows": 15}, "laid out in an unknown way"),
        ({"pool_class": "SWAKVPool"}, "KV is in a SWAKVPool"),
        ({"pool_dtype": "float8_e4m3fn"}, "KV is kept as float8_e4m3fn, its weights as bfloat16"),
        ({"window": 512}, "--speculative-draft-window-size"),
        ({"mrope": True}, "more than text"),
        ({"translates": True}, "translates KV slots"),
    ],
)
def test_other_drafts_are_run_and_the_reason_is_told(changes: dict[str, Any], told: str) -> None:
    assert told in obstacle(runner(**changes), "0.5.17")


def test_other_servers_run_their_draft() -> None:
    assert "more than text" in obstacle(runner(), "0.5.17", is_multimodal=True)
    for release in ("0.5.13", "0.5.24", "0.6.0"):
        assert f"SGLang {release} is none of the releases" in obstacle(runner(), release)
