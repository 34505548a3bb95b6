"""The scheduler around the rounds: prefill first and in chunks, the KV pool, retraction, nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftdial.controller.errors import UserError
from draftdial.controller.rules import FixedK
from draftdial.envs.acceptance import AcceptanceBank
from draftdial.envs.evaluate import run
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine
from draftdial.envs.workload import RequestList

Factory = Callable[..., Any]
RESERVE = 2 * (3 + 1)  # per running request with tiers up to 3: two rounds of the widest tier


def test_a_long_prompt_is_prefilled_in_chunks_before_anything_decodes(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    requests = make_requests(
        [50, 50, 50, 50], prompt_tokens=[100, 20_000, 60, 5000], arrival_s=[0.0, 0.006, 0.007, 0.008]
    )
    engine = SimulatedEngine([requests], make_bank({"a": [[0]]}), make_profile(), ServerOptions(lag=1))
    server = engine.servers[0]
    engine.run_round(np.array([0]))  # 5 to 16 ms
    # 8192, 8192 and 3616 tokens of the long prompt; the last batch has room for 60 and for 4516 of 5000.
    seconds = [1e-3 * (1 + 0.04 * 8192)] * 3 + [1e-3 * (1 + 0.04 * 484)]
    assert server["step_prefill_s"] == pytest.approx(sum(seconds))
    assert engine.signals().num_prefill_tokens[0] == 20_000 + 60 + 5000
    assert engine.signals().num_admitted[0] == 3
    assert engine.signals().num_running[0] == 4
    first = engine.results().first_token_s[0]
    assert first == pytest.approx(
        [0.005, 0.016 + sum(seconds[:3]), 0.016 + sum(seconds[:3]), 0.016 + sum(seconds)]
    )


def test_prefill_waits_for_a_free_row_in_order_of_arrival(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    outputs = [9, 3, 5, 4, 4, 4, 4, 4]
    engine = SimulatedEngine(
        [make_requests(outputs, prompt_tokens=20, concurrency=8)],
        make_bank({"a": [[0]]}),
        make_profile(max_running=3),
        ServerOptions(lag=1, max_running=5),  # more than the profile has prices for
    )
    signals, running, waiting = engine.signals(), [], []
    while not engine.servers["done"][0]:
        running.append(int(signals.num_running[0]))
        waiting.append(int(signals.num_waiting[0]))
        engine.run_round(np.array([0]))
    # Rounds left after prefill: 8, 2, 4 first; three join in turn as rows free up, by index.
    assert running == [3] * 8 + [2, 2, 1]
    assert waiting == [5, 5, 4, 4, 3, 2, 2, 1, 0, 0, 0]
    assert (np.diff(engine.results().first_token_s[0]) >= 0).all()


def test_a_full_pool_sends_the_request_with_least_output_back(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    # Each round commits 4 tokens a request until position 181 of the second request's array.
    second = [3] * 181 + [2, 0, 0, 0] + [3] * 20
    bank = make_bank({"first": [[3] * 200], "second": [second]})
    requests = make_requests([200, 200], arrival_s=[0.0, 0.006], domain=[0, 1])
    engine = SimulatedEngine([requests], bank, make_profile(), ServerOptions(lag=1, kv_pool_tokens=580))
    server, signals, k = engine.servers[0], engine.signals(), np.array([3])
    engine.run_round(k)
    assert signals.num_running[0] == 2
    for together in range(1, 45):
        engine.run_round(k)
        assert server["context_tokens"] == 105 + 101 + 8 * together
    assert server["kv_used_fraction"] == pytest.approx((105 + 101 + 8 * 44 + 2 * RESERVE) / 580)

    # The 46th round would leave 8 tokens more than the pool holds: the second request has 181, the first 185.
    engine.run_round(k)
    assert server["retracted"] == 1
    assert (signals.num_running[0], signals.num_waiting[0]) == (1, 1)
    assert signals.num_waiting_prompt_tokens[0] == 100 + 181
    assert server["context_tokens"] == 100 + 185
    assert 1e3 * server["clock_s"] == pytest.approx(5 + 17 + 5 + 45 * 18)

    # It does not fit beside the first, which needs 15 tokens more: 4 rounds. Then all its 281 tokens are
    # prefilled again and yield the 182nd; where the walk left off, 2 drafts are right.
    for _ in range(4):
        assert signals.num_waiting[0] == 1
        engine.run_round(k)
    assert signals.num_prefill_tokens[0] == 281
    assert 1e3 * server["clock_s"] == pytest.approx(837 + 4 * 17 + 1 + 0.04 * 281)
    assert server["context_tokens"] == 100 + 182
    assert engine.realised_tokens().tolist() == [[1, 2, 3]]
    # 3 tokens, then 1 for position 184, then 4 a round: 14 are left for 4 rounds.
    for _ in range(6):
        assert not server["done"]
        engine.run_round(k)
    assert server["done"] and not server["failed"]
    results = engine.results()
    assert results.window_tokens[0] == 400
    assert 1e3 * results.first_token_s[0] == pytest.approx([5, 27])
    assert 1e3 * results.finish_s[0] == pytest.approx([905, 905 + 12.24 + 6 * 17])


def test_requests_that_join_together_leave_room_for_each_others_output(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    # Two need 2 * (100 + 100) tokens in the end and 2 reserves; a third would need 624 of 532.
    engine = SimulatedEngine(
        [make_requests([100] * 4, concurrency=4)],
        make_bank({"a": [[3]]}),
        make_profile(),
        ServerOptions(kv_pool_tokens=532),
    )
    signals = engine.signals()
    assert (signals.num_running[0], signals.num_waiting[0]) == (2, 2)
    while not engine.servers["done"][0]:
        engine.run_round(np.array([3]))
    assert engine.servers["retracted"][0] == 0 and not engine.servers["failed"][0]


def test_of_equal_output_the_longest_prompt_is_sent_back(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    # Three join together, so they have equal output when the pool is made too small by hand.
    requests = make_requests(
        [700, 70, 70, 70], prompt_tokens=[10, 60, 80, 70], arrival_s=[0.0, 7.0, 7.0, 7.0]
    )
    engine = SimulatedEngine(
        [requests], make_bank({"a": [[0]]}), make_profile(max_running=4), ServerOptions(lag=1)
    )
    while engine.signals().num_running[0] < 4:
        engine.run_round(np.array([0]))
    server = engine.servers[0]
    server["kv_pool_tokens"] = server["context_tokens"] + 4 * RESERVE
    engine.run_round(np.array([0]))
    assert server["retracted"] == 1
    assert sorted(engine._sim.slots["request"][0, :3].tolist()) == [0, 1, 3]


def test_what_finished_requests_still_hold_voids_no_cell(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    # Both advance 4 tokens a round. The second joins when the first has 5 of 61, and has 57 when it ends:
    # 161 + 157 tokens and two reserves are more than 328, but half of that is free after the next round.
    requests = make_requests([61, 60], arrival_s=[0.0, 0.001])
    engine = SimulatedEngine(
        [requests], make_bank({"a": [[3]]}), make_profile(), ServerOptions(kv_pool_tokens=328)
    )
    server = engine.servers[0]
    for _ in range(15):
        engine.run_round(np.array([3]))
    assert (server["num_active"], server["num_ghosts"]) == (1, 1)
    assert (server["context_tokens"], server["ghost_tokens"]) == (157, 161)
    assert not server["done"]
    engine.run_round(np.array([3]))
    assert server["done"] and not server["failed"] and server["retracted"] == 0


def test_a_prefill_between_two_rounds_leaves_no_ghosts(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    requests = make_requests([3, 5], arrival_s=[0.0, 0.006])
    engine = SimulatedEngine([requests], make_bank({"a": [[0]]}), make_profile(), ServerOptions(lag=2))
    signals = engine.signals()
    engine.run_round(np.array([0]))  # 5 to 16 ms
    assert (signals.num_running[0], signals.num_waiting[0]) == (1, 1)
    engine.run_round(np.array([0]))  # 16 to 27 ms, the first request's last
    # While the second one's prefill runs, the server reads that the first has ended.
    assert 1e3 * engine.servers["clock_s"][0] == pytest.approx(32)
    assert (signals.num_running[0], signals.mean_context_tokens[0]) == (1, 101)
    assert (signals.num_admitted[0], signals.num_finished[0]) == (1, 1)


@pytest.mark.parametrize("lag", [1, 2])
def test_the_pool_is_held_for_the_largest_tier_whatever_k_is(
    lag: int, make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    """Where every draft is wrong, contexts grow alike: then k must not matter to who runs and who waits."""
    rng = np.random.default_rng(5)
    requests = make_requests(
        rng.integers(100, 200, 80), prompt_tokens=rng.integers(10, 60, 80), concurrency=12
    )
    profile = make_profile((0, 1, 3, 7), max_running=12)
    traces = []
    for k in (0, 7):
        engine = SimulatedEngine(
            [requests], make_bank({"a": [[0]]}), profile, ServerOptions(lag=lag, kv_pool_tokens=1000)
        )
        trace = []
        while not engine.servers["done"][0]:
            server = engine.servers[0]
            running = int(server["num_running"])
            held = int(server["context_tokens"] + server["ghost_tokens"])
            assert server["kv_used_fraction"] == pytest.approx((held + 16 * running) / 1000)
            trace.append((running, int(server["num_waiting"]), held, int(server["retracted"])))
            engine.run_round(np.array([k]))
        assert engine.servers["retracted"][0] > 3 and not engine.servers["failed"][0]
        traces.append(trace)
    assert traces[0] == traces[1]


@pytest.mark.parametrize(
    ("prompt", "output", "pool", "served"),
    [
        (500, 20, 500 + RESERVE - 1, False),
        (500, 20, 500 + 19 + RESERVE, True),
        (500, 20, 500 + 10 + RESERVE, False),
    ],
)
def test_a_request_the_pool_cannot_hold_voids_the_cell(
    prompt: int,
    output: int,
    pool: int,
    served: bool,
    make_profile: Factory,
    make_bank: Factory,
    make_requests: Factory,
) -> None:
    requests = make_requests([5, output, 5], prompt_tokens=[50, prompt, 50], concurrency=1)
    engine = SimulatedEngine(
        [requests], make_bank({"a": [[0]]}), make_profile(), ServerOptions(kv_pool_tokens=pool)
    )
    policy = Always(engine.tiers, 1)
    if served:
        assert not run(policy, engine).failed.any()
    else:
        with pytest.raises(UserError, match="not served"):
            run(policy, engine)
        assert engine.servers["failed"][0]


class Always:
    """A policy with one k."""

    def __init__(self, tiers: tuple[int, ...], k: int) -> None:
        self.tiers = tiers
        self._k = k
        self._num_servers = 1

    def reset(self, num_servers: int) -> None:
        self._num_servers = num_servers

    def decide(self, signals: Any) -> np.ndarray:
        return np.full(self._num_servers, self._k)

    def observe(self, outcome: Any) -> None:
        pass


def mixed_cells(
    make_requests: Factory, make_bank: Factory
) -> tuple[list[RequestList], AcceptanceBank, list[ServerOptions]]:
    """Closed and open loops under both lags and off modes, with room, with little and with very little KV."""
    rng = np.random.default_rng(11)
    bank = make_bank({d: [rng.integers(0, 9, rng.integers(3, 60)) for _ in range(7)] for d in "abc"})
    lists, options = [], []
    for lag in (1, 2):
        for off_mode in ("warm", "skip"):
            for pool in (1 << 20, 4000, 1200):
                for closed in (True, False):
                    n = 120
                    load = {"concurrency": np.repeat(rng.integers(1, 24, 4), 30)}
                    lists.append(
                        make_requests(
                            rng.integers(1, 120, n),
                            prompt_tokens=rng.integers(1, 300, n),
                            domain=rng.integers(0, 3, n),
                            seed=len(lists),
                            **(load if closed else {"arrival_s": np.cumsum(rng.exponential(0.08, n))}),
                        )
                    )
                    options.append(ServerOptions(off_mode, lag=lag, kv_pool_tokens=pool, max_running=16))
    return lists, bank, options


def test_nothing_is_lost_and_time_adds_up(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    lists, bank, options = mixed_cells(make_requests, make_bank)
    profile = make_profile((0, 1, 2, 5, 7), switch_ms=0.3, max_running=16, chunked_prefill_tokens=256)
    engine = SimulatedEngine(lists, bank, profile, options)
    servers, sim = engine.servers, engine._sim
    produced = servers["step_tokens"].copy()
    in_system_s = servers["step_in_system_s"].copy()
    clock = servers["clock_s"].copy()
    num_running, retracted = servers["num_running"].copy(), servers["retracted"].copy()
    drafted = np.zeros(engine.num_servers, np.int64)
    committed = np.zeros(engine.num_servers, np.int64)
    rng = np.random.default_rng(1)
    while not servers["done"].all():
        active = np.arange(sim.slots.shape[1]) < servers["num_active"][:, None]
        for counter, field in (("context_tokens", "context"), ("remaining_tokens", "remaining")):
            assert (servers[counter] == (sim.slots[field] * active).sum(axis=1)).all()
        output = np.take_along_axis(sim.requests["output_tokens"], sim.slots["request"], axis=1)
        prompt = np.take_along_axis(sim.requests["prompt_tokens"], sim.slots["request"], axis=1)
        assert (sim.slots["context"] == prompt + output - sim.slots["remaining"])[active].all()
        assert (sim.slots["remaining"] > 0)[active].all()
        assert (servers["num_running"] <= servers["max_running"]).all()
        # Only what requests that have just ended still hold may exceed the pool, for a round.
        assert ((servers["kv_used_fraction"] <= 1.0) | (servers["num_ghosts"] > 0)).all()

        running = servers["num_active"].copy()
        k = rng.choice(engine.tiers, engine.num_servers)
        going = ~servers["done"]
        engine.run_round(k)
        produced += servers["step_tokens"]
        in_system_s += servers["step_in_system_s"]
        # Who is in the batch follows from who came and who went, as a server counts them.
        went = servers["num_finished"] + servers["retracted"] - retracted
        num_running += np.where(going, servers["num_admitted"] - went, 0)
        retracted = servers["retracted"].copy()
        assert (num_running == servers["num_running"])[~servers["done"]].all()
        elapsed = servers["clock_s"] - clock
        clock = servers["clock_s"].copy()
        assert (elapsed[going] > 0).all() and (elapsed[~going] == 0).all()
        np.testing.assert_allclose(servers["step_elapsed_s"], elapsed, rtol=1e-9, atol=1e-12)
        assert (
            servers["step_decode_s"] + servers["step_prefill_s"] <= servers["step_elapsed_s"] + 1e-12
        ).all()
        drafted += np.where(going, k * running, 0)
        committed += np.where(going, running, 0)

    assert not servers["failed"].any()
    results = engine.results()
    outputs = results.output_tokens.sum(axis=1)
    assert (produced == outputs).all() and (results.window_tokens == outputs).all()
    for field in (
        "context_tokens",
        "remaining_tokens",
        "num_waiting",
        "num_waiting_prompt_tokens",
        "num_active",
    ):
        assert (servers[field] == 0).all(), field
    assert (results.arrival_s < results.first_token_s).all()
    assert (results.first_token_s <= results.finish_s).all()
    one_token = results.output_tokens == 1
    assert (results.first_token_s == results.finish_s)[one_token].all()
    assert (results.finish_s.max(axis=1) == clock).all()
    np.testing.assert_allclose(in_system_s, (results.finish_s - results.arrival_s).sum(axis=1), rtol=1e-9)
    # Every token comes from a prefill (one a request, and one a retraction) or from a round: one a row and
    # the right drafts.
    num_prefills = results.output_tokens.shape[1] + results.retracted
    assert (results.drafted == drafted).all()
    assert (results.accepted == outputs - num_prefills - committed).all()
    assert (results.accepted <= results.drafted).all()
    tight = np.array([o.kv_pool_tokens == 1200 for o in options])
    assert (results.retracted[tight] > 0).any() and (results.retracted[~tight] == 0).any()


@pytest.mark.parametrize("lag", [1, 2])
def test_one_client_turns_round_after_every_answer(
    lag: int, make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    requests = make_requests([5] * 6, prompt_tokens=20, concurrency=1)
    options = ServerOptions(lag=lag, turnaround_s=0.5)  # longer than an ended request stays in the batch
    engine = SimulatedEngine([requests], make_bank({"a": [[0]]}), make_profile(), options)
    results = run(FixedK(engine.tiers, 0), engine)
    arrived, ended = results.arrival_s[0], results.finish_s[0]
    np.testing.assert_allclose(arrived[1:], ended[:-1] + 0.5)
    np.testing.assert_allclose(ended - arrived, ended[0])  # each finds the server idle, as the first one did


def test_others_decode_while_a_client_turns_round(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    """Eight clients keep fewer than eight requests in the server; all are served, in their order."""
    requests = make_requests(np.arange(40) % 7 + 3, prompt_tokens=20, concurrency=8)
    engine = SimulatedEngine(
        [requests], make_bank({"a": [[0]]}), make_profile(), ServerOptions(lag=1, turnaround_s=0.05)
    )
    results = run(FixedK(engine.tiers, 0), engine)
    arrived = results.arrival_s[0]
    assert (np.diff(arrived) >= 0).all() and (arrived[:8] == 0).all()
    ended = np.sort(results.finish_s[0])
    np.testing.assert_allclose(arrived[8:], ended[: len(arrived) - 8] + 0.05)


def test_load_that_rises_while_clients_turn_round_arrives_in_order(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    concurrency = np.array([2] * 6 + [5] * 6 + [1] * 4)
    requests = make_requests([6] * 16, prompt_tokens=20, concurrency=concurrency)
    engine = SimulatedEngine(
        [requests], make_bank({"a": [[0]]}), make_profile(), ServerOptions(lag=1, turnaround_s=0.02)
    )
    results = run(FixedK(engine.tiers, 0), engine)
    arrived, ended = results.arrival_s[0], results.finish_s[0]
    assert (np.diff(arrived) >= 0).all() and np.isfinite(ended).all()
    in_system = [(arrived[: r + 1] <= arrived[r]).sum() - (ended < arrived[r]).sum() for r in range(16)]
    assert (np.array(in_system) <= concurrency).all()
