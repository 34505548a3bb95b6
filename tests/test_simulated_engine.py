"""The simulated server, worked out by hand: clock, tokens, outcomes and when they become visible.

The profile of conftest.py bills a round `10 + 2k + b` ms at k drafts (off: `10 + b`), b the captured
batch, and a prefill `1 + 0.04 * tokens` ms, at least 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from draftdial.controller.errors import UserError
from draftdial.controller.signals import RoundOutcome
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine

Factory = Callable[..., Any]


def play(engine: SimulatedEngine, ks: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Run rounds of `ks` on one server; what each returned, as (round_id, k, counts up to 3 drafts)."""

    def row(outcome: RoundOutcome) -> tuple[int, int, list[int]]:
        return int(outcome.round_id[0]), int(outcome.k[0]), outcome.accept_counts[0, :4].tolist()

    return [row(outcome) for k in ks for outcome in engine.run_round(np.array([k]))]


def run_to_end(engine: SimulatedEngine, k: int) -> None:
    while not engine.servers["done"].all():
        engine.run_round(np.full(engine.num_servers, k))


@pytest.fixture
def make_three(make_profile: Factory, make_bank: Factory, make_requests: Factory) -> Factory:
    """Three requests: the second arrives during the first round, the third long after."""
    bank = make_bank({"first": [[2, 0, 0, 1, 0, 0]], "second": [[0, 1, 0, 0]], "third": [[3, 0]]})
    requests = make_requests(
        [6, 4, 2], prompt_tokens=[100, 200, 50], arrival_s=[0.0, 0.006, 0.2], domain=[0, 1, 2]
    )

    def make(**options: Any) -> SimulatedEngine:
        return SimulatedEngine([requests], bank, make_profile(switch_ms=1.0), ServerOptions(**options))

    return make


def test_three_requests_under_overlap(make_three: Factory) -> None:
    engine = make_three(lag=2)
    clock, running, waiting, context, admitted, prefilled = ([] for _ in range(6))
    outcomes = []
    for k in (3, 0, 1, 1, 3, 3):
        signals = engine.signals()
        clock.append(1e3 * float(engine.servers["clock_s"][0]))
        running.append(int(signals.num_running[0]))
        waiting.append((int(signals.num_waiting[0]), int(signals.num_waiting_prompt_tokens[0])))
        context.append(int(signals.mean_context_tokens[0]))
        admitted.append(int(signals.num_admitted[0]))
        prefilled.append(int(signals.num_prefill_tokens[0]))
        outcomes += play(engine, [k])

    # Round 0 starts after the first prefill (5 ms) and takes 17. The second request came at 6 ms, while
    # the batch of round 1 was being formed: it waits until 34 (round 1: 11 + 1 for the switch), then prefills
    # for 9. Round 2, 14 + 1: the first request ends at 58, but round 3 (14) was launched with it still
    # in. The second request ends in round 3, so round 4 (17 + 1) has only its ghost.
    # Then nothing happens until 200; 5 ms of prefill; round 5 takes 17 and is the last.
    assert clock == pytest.approx([5, 22, 43, 58, 72, 205])
    assert 1e3 * engine.servers["clock_s"][0] == pytest.approx(222)
    assert running == [1, 1, 2, 2, 1, 1]
    assert waiting == [(0, 0), (1, 200), (0, 0), (0, 0), (0, 0), (0, 0)]
    assert context == [101, 104, (105 + 201) // 2, (106 + 202) // 2, 204, 51]
    assert admitted == [1, 0, 1, 0, 0, 1]
    assert prefilled == [100, 0, 200, 0, 0, 50]
    # The first round's 2 right drafts become visible after round 1, and so on. The ghost is no outcome, and
    # the third request's last token cuts off nothing of what its round 5 would show.
    none = [0, 0, 0, 0]
    assert outcomes == [
        (-1, 0, none),
        (0, 3, [0, 0, 1, 0]),
        (1, 0, [1, 0, 0, 0]),
        (2, 1, [2, 0, 0, 0]),
        (3, 1, [0, 1, 0, 0]),
        (4, 3, none),
    ]

    results = engine.results()
    assert 1e3 * results.arrival_s[0] == pytest.approx([0, 6, 200])
    assert 1e3 * results.first_token_s[0] == pytest.approx([5, 43, 205])
    assert 1e3 * results.finish_s[0] == pytest.approx([58, 72, 222])
    assert results.window_s[0] == pytest.approx(0.222)
    assert results.window_tokens.tolist() == [6 + 4 + 2]
    assert (results.rounds.tolist(), results.switches.tolist()) == ([6], [3])
    # Drafts: 3, 0, 1 for each of two, 1, none for a ghost, 3. Right and committed: 2, 0, 0, 1, none, 0.
    assert (results.drafted.tolist(), results.accepted.tolist()) == ([3 + 2 + 1 + 3], [3])
    assert 1e3 * results.tier_time_s[0] == pytest.approx([12, 15 + 14, 17 + 18 + 17])


def test_three_requests_without_overlap(make_three: Factory) -> None:
    engine = make_three(lag=1)
    clock, running, waiting, context = ([] for _ in range(4))
    outcomes = []
    for k in (3, 0, 1, 1):
        signals = engine.signals()
        clock.append(1e3 * float(engine.servers["clock_s"][0]))
        running.append(int(signals.num_running[0]))
        waiting.append(int(signals.num_waiting[0]))
        context.append(int(signals.mean_context_tokens[0]))
        outcomes += play(engine, [k])

    # 5 + 17 = 22; the second request is there and prefills (9); off at batch 2 with a switch 13; k = 1 with
    # a switch 15: both end at 59. Idle until 200, prefill 5, one round of 13.
    assert clock == pytest.approx([5, 31, 44, 205])
    assert 1e3 * engine.servers["clock_s"][0] == pytest.approx(218)
    assert (running, waiting, context) == ([1, 2, 2, 1], [0, 0, 0, 0], [101, 152, 153, 51])
    assert outcomes == [
        (0, 3, [0, 0, 1, 0]),
        (1, 0, [2, 0, 0, 0]),
        (2, 1, [1, 1, 0, 0]),
        (3, 1, [0, 1, 0, 0]),
    ]
    results = engine.results()
    assert 1e3 * results.first_token_s[0] == pytest.approx([5, 31, 205])
    assert 1e3 * results.finish_s[0] == pytest.approx([59, 59, 218])


def test_service_level_violations_are_counted_when_a_request_finishes(make_three: Factory) -> None:
    # By hand, lag 1: TTFT 5, 25, 5 ms; time per token after the first (59-5)/5, (59-31)/3, 13/1 ms.
    ttft_ms, tpot_ms = [5, 25, 5], [10.8, 9.333, 13.0]
    for ttft_limit, tpot_limit in ((26, 14), (24, 14), (26, 12), (26, 10), (4, 9)):
        engine = make_three(lag=1, ttft_limit_s=1e-3 * ttft_limit, tpot_limit_s=1e-3 * tpot_limit)
        late = [ttft > ttft_limit or tpot > tpot_limit for ttft, tpot in zip(ttft_ms, tpot_ms, strict=True)]
        seen = []
        for k in (3, 0, 1, 1):
            play(engine, [k])
            seen.append(int(engine.servers["step_violations"][0]))
        assert seen == [0, 0, late[0] + late[1], late[2]]


def test_the_oldest_wait_is_counted_in_rounds(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    requests = make_requests([10, 10, 10], arrival_s=[0.0, 0.012, 0.03])
    engine = SimulatedEngine([requests], make_bank({"a": [[0]]}), make_profile(max_running=1))
    waits = []
    for _ in range(4):
        play(engine, [0])  # 11 ms each, from 5 ms on: the second request arrives in the first of them
        signals = engine.signals()
        waits.append((int(signals.num_waiting[0]), int(signals.oldest_wait_rounds[0])))
    assert waits == [(1, 0), (1, 1), (2, 2), (2, 3)]


def test_a_request_walks_on_through_arrays_of_its_domain(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    # One domain holds arrays of ones, the other of zeros; lengths are odd against the steps of 2.
    bank = make_bank({"zeros": [[0] * 5, [0] * 3], "ones": [[1] * 3, [1] * 5, [1] * 1]})
    lists = [make_requests([40], domain=domain, seed=seed) for domain in (0, 1) for seed in range(20)]
    engine = SimulatedEngine(lists, bank, make_profile())
    for _ in range(19):
        yields = engine.realised_tokens()
        assert (yields == np.repeat([[1, 1, 1], [1, 2, 2]], 20, axis=0)).all()
        engine.run_round(np.ones(40, np.int64))
    visited = {int(start) for start in engine._sim.slots["array_end"][20:, 0]}
    assert len(visited) > 1  # not everybody stays in one array


def test_off_without_speculation_built_in(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    engine = SimulatedEngine(
        [make_requests([3], concurrency=1)], make_bank({"a": [[7]]}), make_profile(), ServerOptions("nospec")
    )
    assert engine.tiers == (0,)
    assert engine.servers["kv_used_fraction"][0] == pytest.approx((101 + 1) / 1_000_000)
    run_to_end(engine, 0)
    # 5 ms of prefill, two rounds of 8 + 1 ms, one token each.
    assert 1e3 * engine.results().finish_s[0, 0] == pytest.approx(5 + 9 + 9)


@pytest.mark.parametrize("lag", [1, 2])
def test_a_closed_loop_keeps_its_concurrency(
    lag: int, make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    rng = np.random.default_rng(lag)
    levels = np.repeat([3, 7, 2, 1, 5], 30)
    requests = make_requests(rng.integers(1, 30, 150), concurrency=levels)
    engine = SimulatedEngine(
        [requests], make_bank({"a": [[0, 3, 1, 2]]}), make_profile(), ServerOptions(lag=lag)
    )
    server = engine.servers[0]
    started, in_system = 0, 0
    while True:
        in_system -= int(server["requests_finished"]) - (started - in_system)
        while started < 150 and in_system < levels[started]:
            started += 1
            in_system += 1
        assert server["next_request"] == started
        if server["done"]:
            break
        engine.run_round(np.array([rng.choice(engine.tiers)]))
    arrivals = engine.results().arrival_s[0]
    assert (np.diff(arrivals) >= 0).all() and in_system == 0


def test_open_loop_arrivals_are_kept_to_the_bit(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    times = np.cumsum(np.random.default_rng(0).exponential(0.02, 80))
    requests = make_requests([5] * 80, arrival_s=times)
    engine = SimulatedEngine([requests] * 3, make_bank({"a": [[1]]}), make_profile())
    while not engine.servers["done"].all():
        engine.run_round(np.array([0, 1, 3]))
    assert (engine.results().arrival_s == times).all()
    assert (engine.results().first_token_s > times).all()


def test_a_server_starts_mid_flight(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    outputs = np.array([40] * 8 + [1] * 2 + [25] * 10)
    requests = make_requests(outputs, concurrency=10, prompt_tokens=np.arange(20) + 1)
    engine = SimulatedEngine(
        [requests], make_bank({"a": [[0]]}), make_profile(max_running=16), ServerOptions(mid_flight=True)
    )
    head_start = engine._sim.requests["head_start"][0]
    assert (head_start[10:] == 0).all() and ((head_start >= 0) & (head_start < outputs)).all()
    assert len(set(head_start[:8].tolist())) > 4
    # All that a request already has is prefilled with its prompt, and one token comes out of the prefill.
    assert engine.servers["num_prefill_tokens"][0] == (np.arange(20) + 1 + head_start)[:10].sum()
    produced = int(engine.servers["step_tokens"][0])
    while not engine.servers["done"][0]:
        engine.run_round(np.array([0]))
        produced += int(engine.servers["step_tokens"][0])
    assert produced == (outputs - head_start).sum()


def test_a_reset_brings_the_same_world_again(make_three: Factory, state_of: Factory) -> None:
    engine = make_three(off_mode="skip")
    start = state_of(engine)
    first = play(engine, [3, 0, 1, 1, 3, 3])
    end = state_of(engine)
    assert end != start
    engine.reset()
    assert state_of(engine) == start
    assert play(engine, [3, 0, 1, 1, 3, 3]) == first
    assert state_of(engine) == end


def test_replaced_servers_start_over_and_others_go_on(
    make_profile: Factory, make_bank: Factory, make_requests: Factory, state_of: Factory
) -> None:
    bank, profile = make_bank({"a": [[1, 0, 3, 2]]}), make_profile()
    options = ServerOptions(mid_flight=True)
    long = make_requests([30] * 6, concurrency=3)
    short = make_requests([7, 9], concurrency=1)
    engine = SimulatedEngine([long, long], bank, profile, options)
    undisturbed = SimulatedEngine([long, long], bank, profile, options)
    for _ in range(5):
        engine.run_round(np.array([3, 1]))
        undisturbed.run_round(np.array([3, 1]))
    engine.replace(np.array([0]), [short])
    assert np.isnan(engine.results().finish_s[0, 2:]).all()
    alone = SimulatedEngine([short], bank, profile, options)
    for _ in range(4):
        for field in engine.servers.dtype.names:
            if field not in ("profile", "queue_head"):  # the queue is a ring, as long as the longest list
                assert engine.servers[field][0] == alone.servers[field][0], field
        assert state_of(engine, [1]) == state_of(undisturbed, [1])
        engine.run_round(np.array([3, 1]))
        undisturbed.run_round(np.array([3, 1]))
        alone.run_round(np.array([3]))


def test_head_starts_do_not_outlive_their_list(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    options = ServerOptions(mid_flight=True)
    engine = SimulatedEngine(
        [make_requests([90] * 6, concurrency=4)], make_bank({"a": [[0]]}), make_profile(), options
    )
    assert (engine._sim.requests["head_start"][0] > 0).sum() > 1
    engine.replace(np.array([0]), [make_requests([90] * 5, concurrency=1)])
    assert (engine._sim.requests["head_start"][0, 1:] == 0).all()


def test_requests_of_a_domain_without_acceptance_are_refused(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    bank = make_bank({"a": [[0]], "b": [[1]]})
    engine = SimulatedEngine([make_requests([5, 5], domain=[0, 1])], bank, make_profile())
    with pytest.raises(UserError, match="domain 2; the acceptance source has domains 0 to 1"):
        engine.replace(np.array([0]), [make_requests([5, 5], domain=[0, 2])])


def test_tiers_that_no_bank_describes_are_refused(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    with pytest.raises(UserError, match="profile tiny: tiers: 8; allowed: up to 7"):
        SimulatedEngine([make_requests([5])], make_bank({"a": [[0]]}), make_profile((0, 1, 8)))


def test_only_tiers_can_be_chosen(make_profile: Factory, make_bank: Factory, make_requests: Factory) -> None:
    engine = SimulatedEngine([make_requests([5])] * 2, make_bank({"a": [[0]]}), make_profile((0, 1, 3)))
    with pytest.raises(AssertionError, match=r"k must be one of \(0, 1, 3\)"):
        engine.run_round(np.array([1, 2]))
    assert (engine.signals().round_id == 0).all()
