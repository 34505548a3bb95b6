"""Common random numbers: what is compared differs by the policy alone, never by its luck.

Arrivals, lengths, domains and the acceptance at every output position belong to the request. Any two
sequences of k must meet the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draftdial.controller.signals import IntArray
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine

Factory = Callable[..., Any]
TIERS = (0, 1, 2, 3, 5, 7)
NUM_SERVERS = 6
GIVEN = ("arrival_s", "concurrency", "prompt_tokens", "output_tokens", "domain", "request_hash")

sequences = st.lists(st.lists(st.sampled_from(TIERS), min_size=NUM_SERVERS, max_size=NUM_SERVERS), min_size=1)
off_modes = st.sampled_from(["warm", "skip"])
lags = st.sampled_from([1, 2])
worlds = st.integers(0, 5)
run_many = settings(max_examples=25, deadline=None)


def make_engine(
    world: int,
    options: ServerOptions,
    make_profile: Factory,
    make_bank: Factory,
    make_requests: Factory,
    servers: Sequence[int] = range(NUM_SERVERS),
) -> SimulatedEngine:
    """Closed and open loops in turn; the odd worlds have so little KV that requests are retracted."""
    rng = np.random.default_rng(world)
    bank = make_bank({d: [rng.integers(0, 10, rng.integers(2, 40)) for _ in range(5)] for d in "abcd"})
    lists = []
    for s in range(NUM_SERVERS):
        n = 25
        load: dict[str, Any] = {"concurrency": rng.integers(1, 9, n)}
        if s % 2:
            load = {"arrival_s": np.cumsum(rng.exponential(0.1, n))}
        lists.append(
            make_requests(
                rng.integers(1, 80, n),
                prompt_tokens=rng.integers(1, 200, n),
                domain=rng.integers(0, 4, n),
                seed=100 * world + s,
                **load,
            )
        )
    profile = make_profile(TIERS, switch_ms=0.2, kv_pool_tokens=900 if world % 2 else 100_000)
    return SimulatedEngine([lists[s] for s in servers], bank, profile, options)


def rounds(engine: SimulatedEngine, sequence: Sequence[Sequence[int]]) -> Iterator[IntArray]:
    """The k of every coming round, until every server is done."""
    for k in cycle(sequence):
        if engine.servers["done"].all():
            return
        yield np.array(k)[: engine.num_servers]


def walk(engine: SimulatedEngine, sequence: Sequence[Sequence[int]]) -> dict[tuple[int, int, int], Any]:
    """Run to the end; for every (server, request, output tokens so far) a decision was taken at: the place
    in the bank where its next round started."""
    places = {}
    for k in rounds(engine, sequence):
        for s in range(engine.num_servers):
            if not engine.servers["done"][s]:
                for slot in engine._sim.slots[s, : engine.servers["num_active"][s]]:
                    request = int(slot["request"])
                    emitted = int(engine._sim.requests["output_tokens"][s, request]) - int(slot["remaining"])
                    places[s, request, emitted] = int(slot["position"])
        engine.run_round(k)
    return places


@run_many
@given(world=worlds, off_mode=off_modes, lag=lags, one=sequences, other=sequences)
def test_no_sequence_of_k_moves_another_policys_world(
    make_profile: Factory,
    make_bank: Factory,
    make_requests: Factory,
    world: int,
    off_mode: Any,
    lag: int,
    one: list[list[int]],
    other: list[list[int]],
) -> None:
    options = ServerOptions(off_mode, lag=lag)
    results, constants, places = [], [], []
    for sequence in (one, other):
        engine = make_engine(world, options, make_profile, make_bank, make_requests)
        places.append(walk(engine, sequence))
        results.append(engine.results())
        requests = engine._sim.requests
        constants.append({name: requests[name].tobytes() for name in GIVEN})
    assert constants[0] == constants[1]
    common = places[0].keys() & places[1].keys()
    assert len(common) >= NUM_SERVERS * 20  # at least the positions after the prefills
    assert all(places[0][key] == places[1][key] for key in common)
    left, right = results
    assert (left.arrival_s[1::2] == right.arrival_s[1::2]).all()
    for result in results:
        assert (np.diff(result.arrival_s, axis=1) >= 0).all() and not result.failed.any()
        assert np.isfinite(result.finish_s).all()
        assert (result.window_tokens == result.output_tokens.sum(axis=1)).all()
    assert (left.output_tokens == right.output_tokens).all()


@run_many
@given(world=worlds, off_mode=off_modes, lag=lags, sequence=sequences)
def test_the_same_choices_see_the_same_bits(
    make_profile: Factory,
    make_bank: Factory,
    make_requests: Factory,
    state_of: Factory,
    world: int,
    off_mode: Any,
    lag: int,
    sequence: list[list[int]],
) -> None:
    options = ServerOptions(off_mode, lag=lag)
    one, other = (make_engine(world, options, make_profile, make_bank, make_requests) for _ in range(2))
    for step, k in enumerate(rounds(one, sequence)):
        one.run_round(k)
        other.run_round(k)
        assert step % 16 or state_of(one) == state_of(other)
    assert state_of(one) == state_of(other)


@run_many
@given(world=worlds, off_mode=off_modes, lag=lags, sequence=sequences, server=st.integers(0, NUM_SERVERS - 1))
def test_a_server_in_a_batch_is_the_server_alone(
    make_profile: Factory,
    make_bank: Factory,
    make_requests: Factory,
    state_of: Factory,
    world: int,
    off_mode: Any,
    lag: int,
    sequence: list[list[int]],
    server: int,
) -> None:
    options = ServerOptions(off_mode, lag=lag)
    batch = make_engine(world, options, make_profile, make_bank, make_requests)
    alone = make_engine(world, options, make_profile, make_bank, make_requests, [server])
    for step, k in enumerate(rounds(batch, sequence)):
        batch.run_round(k)
        alone.run_round(k[server : server + 1])
        for call in ("round_s", "expected_tokens", "realised_tokens"):
            assert (getattr(batch, call)()[server] == getattr(alone, call)()[0]).all()
        assert step % 16 or state_of(batch, [server]) == state_of(alone)
    assert state_of(batch, [server]) == state_of(alone)


@run_many
@given(seed=st.integers(0, 99), one=st.lists(st.sampled_from(TIERS)), other=st.lists(st.sampled_from(TIERS)))
def test_flips_under_a_gap_belong_to_request_position_and_depth(
    make_profile: Factory,
    make_bank: Factory,
    make_requests: Factory,
    seed: int,
    one: list[int],
    other: list[int],
) -> None:
    """With a gap of one token as bad as any, a request that has a gap must flip alike in any history."""
    rng = np.random.default_rng(seed)
    bank = make_bank({"a": [rng.integers(1, 9, 60) for _ in range(4)]})
    requests = make_requests(rng.integers(4, 60, 12), concurrency=1, seed=seed)
    options = ServerOptions("skip", gap_floor=0.5, gap_tokens=1)
    flips: list[dict[tuple[int, int], list[float]]] = []
    for sequence in (one, other):
        engine = SimulatedEngine([requests], bank, make_profile(TIERS), options)
        seen = {}
        for k in cycle([*sequence, 7]):
            server, slot = engine.servers[0], engine._sim.slots[0, 0]
            if server["done"]:
                break
            has_gap = server["num_active"] == 1 and slot["gap"] > 0
            if has_gap:
                seen[int(slot["request"]), int(slot["remaining"])] = engine.realised_tokens()[0].tolist()
            engine.run_round(np.array([k if has_gap else 0]))
        flips.append(seen)
    common = flips[0].keys() & flips[1].keys()
    assert len(common) >= 12
    assert all(flips[0][key] == flips[1][key] for key in common)


def test_gap_flips_do_not_repeat_over_requests_and_positions(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    """Flips must differ from request to request and along a request, or a whole batch would fall at once."""
    lists = [make_requests([60], seed=seed) for seed in range(200)]
    engine = SimulatedEngine(
        lists, make_bank({"a": [[7] * 60]}), make_profile(TIERS), ServerOptions("skip", gap_tokens=1)
    )
    first_depth = []
    for _ in range(50):
        engine.run_round(np.zeros(200, np.int64))
        first_depth.append(engine.realised_tokens()[:, 1] == 2)
    flips = np.array(first_depth, np.float64)  # (position, request)
    assert abs(flips.mean() - 0.3) < 0.02
    along = np.corrcoef(flips[1:].ravel(), flips[:-1].ravel())[0, 1]
    across = np.corrcoef(flips[:, 1:].ravel(), flips[:, :-1].ravel())[0, 1]
    assert abs(along) < 0.04 and abs(across) < 0.04  # 4 standard errors
