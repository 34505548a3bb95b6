"""The observation: what every column means, the same for one server as for many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.features import (
    HALF_LIVES_SAMPLES,
    TREND_DECAY,
    Features,
    feature_table,
)
from draftdial.controller.signals import RoundOutcome, RoundSignals
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine

Factory = Callable[..., Any]
FIELDS = RoundSignals.__dataclass_fields__


def values(features: Features, observation: np.ndarray, server: int = 0) -> dict[str, float]:
    """The observation by name, in the units the table states."""
    raw = observation[server] * [feature.scale for feature in features.table]
    return {
        feature.name: float(np.expm1(x) if feature.transform == "log1p" else x)
        for feature, x in zip(features.table, raw, strict=True)
    }


def signals_of(**given: float) -> RoundSignals:
    signals = RoundSignals.zeros(1)
    for name, value in given.items():
        getattr(signals, name)[0] = value
    return signals


@pytest.mark.parametrize("tiers", [(0, 1, 3), (0, 5), (0, 1, 2, 3, 5, 7)])
def test_names_are_unique_and_the_table_is_the_observation(
    tiers: tuple[int, ...], make_profile: Factory
) -> None:
    features = Features(make_profile(tiers), "warm", num_servers=4)
    names = [feature.name for feature in features.table]
    assert len(set(names)) == len(names)
    assert features.table == feature_table(tiers)
    signals = RoundSignals.zeros(4)
    signals.max_running[:] = 8
    observation = features.compute(signals)
    assert observation.shape == (4, len(names)) and observation.dtype == np.float32
    assert all(feature.scale > 0 and feature.transform in ("linear", "log1p") for feature in features.table)
    # What LearnedPolicy relies on: the advice columns come last.
    num_advice = len(HALF_LIVES_SAMPLES) * (len(tiers) - 1)
    assert [name.startswith("advice/") for name in names] == [False] * (len(names) - num_advice) + [
        True
    ] * num_advice


def test_a_case_by_hand(make_profile: Factory) -> None:
    profile = make_profile((0, 1, 3), ms_per_token=0.01)
    features = Features(profile, "skip", ttft_limit_s=0.1, tpot_limit_s=0.02)
    common = {"max_running": 8, "mean_context_tokens": 200}
    # Decision 0: two requests have just been prefilled (300 tokens, 13 ms); k = 3 is chosen.
    features.compute(signals_of(num_running=2, num_admitted=2, num_prefill_tokens=300, **common))
    features.chose(np.array([2]))
    # Decision 1: a third has waited since before round 0, for its 16 + 2 + 2 = 20 ms. k = 1 now.
    features.compute(
        signals_of(
            round_id=1,
            num_running=2,
            num_waiting=1,
            num_waiting_prompt_tokens=40,
            oldest_wait_rounds=1,
            **common,
        )
    )
    features.chose(np.array([1]))
    # Round 0 arrives: 1 and 3 drafts right. Decision 2: round 1 took 12 + 2 + 2 = 16 ms, one request left.
    features.observe(RoundOutcome(np.array([0]), np.array([3]), np.array([[0, 1, 0, 1, 0, 0, 0, 0]])))
    observation = features.compute(
        signals_of(
            round_id=2,
            num_running=3,
            num_waiting=1,
            num_waiting_prompt_tokens=40,
            oldest_wait_rounds=2,
            kv_used_fraction=0.25,
            num_finished=1,
            num_admitted=1,
            num_prefill_tokens=100,
            **common,
        )
    )
    seen = values(features, observation)
    waited_s = 0.020 + 0.016 + 0.005
    trend = (1 - TREND_DECAY) * (2 * TREND_DECAY**2 + 1)
    # The first rounds' outcomes were not known when their tokens were priced: one token each.
    token_s = (1 - TREND_DECAY) * (0.020 * TREND_DECAY + 0.016)
    expected = {
        "running": 3,
        "context": 200,
        "waiting": 1,
        "waiting_prompt": 40,
        "oldest_wait": waited_s,
        "admitted_trend": trend,
        "rounds_since_switch": 1,
        "rounds_since_informed": 2,
        "evidence/0": 2,
        "evidence_deep/0": 1,  # of the two, one had the second draft accepted and so tried the third
        "graph_fill": 3 / 4,
        "running_share": 3 / 8,
        "kv_used": 0.25,
        "ttft_slack": 1 - waited_s / 0.1,
        "tpot_slack": 1 - token_s / 0.02,
        "admitted": 1 / 3,
        "finished": 1 / 3,
        "last_k": 1,
    }
    for name, value in expected.items():
        assert seen[name] == pytest.approx(value, rel=1e-5), name
    # Belief and advice: 3 running pay for 4 and read the context of 3: 2 ms at 200 tokens, 3 / 4 of it 1.5.
    acceptance = features.belief.mean()[:, 0]
    for memory in range(4):
        for depth in (1, 2, 3):
            assert seen[f"acceptance/{memory}/{depth}"] == pytest.approx(
                acceptance[memory, depth - 1], rel=1e-5
            )
        p1, p2, p3 = acceptance[memory]
        off = 9 + 4 + 1.5
        for k, tokens in ((1, 1 + p1), (3, 1 + p1 + p1 * p2 + p1 * p2 * p3)):
            speedup = tokens / ((10 + 2 * k + 4 + 1.5) / off)
            assert seen[f"advice/{memory}/k={k}"] == pytest.approx(np.log(speedup), rel=1e-4, abs=1e-6)


def test_a_row_of_a_batch_is_the_server_alone(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    engine, profile = mixed_engine(make_profile, make_bank, make_requests)
    n = engine.num_servers
    together = Features(profile, "warm", num_servers=n)
    alone = [Features(profile, "warm") for _ in range(n)]
    rng = np.random.default_rng(2)
    largest = 0.0
    for _ in range(250):
        signals = engine.signals()
        observation = together.compute(signals)
        largest = max(largest, float(np.abs(observation).max()))
        tier = rng.integers(0, engine.num_tiers, n)
        for s, features in enumerate(alone):
            row = slice(s, s + 1)
            single = RoundSignals(**{name: getattr(signals, name)[row] for name in FIELDS})
            assert (features.compute(single)[0] == observation[s]).all()
            features.chose(tier[row])
        together.chose(tier)
        for outcome in engine.run_round(np.array(engine.tiers)[tier]):
            together.observe(outcome)
            for s, features in enumerate(alone):
                row = slice(s, s + 1)
                features.observe(
                    RoundOutcome(outcome.round_id[row], outcome.k[row], outcome.accept_counts[row])
                )
    assert largest < 4.0  # the fixed scales keep a network's inputs small, whatever comes


def test_a_server_that_starts_over_is_like_new(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    engine, profile = mixed_engine(make_profile, make_bank, make_requests)
    n = engine.num_servers
    again, others = np.array([0, 3]), np.array([1, 2, 4, 5])
    used, undisturbed = Features(profile, "warm", num_servers=n), Features(profile, "warm", num_servers=4)
    rng = np.random.default_rng(4)

    def step(watchers: list[tuple[Features, np.ndarray]]) -> list[np.ndarray]:
        signals = engine.signals()
        tier = rng.integers(0, engine.num_tiers, n)
        observations = []
        for features, rows in watchers:
            seen = RoundSignals(**{name: getattr(signals, name)[rows] for name in FIELDS})
            observations.append(features.compute(seen).copy())
            features.chose(tier[rows])
        for outcome in engine.run_round(np.array(engine.tiers)[tier]):
            for features, rows in watchers:
                features.observe(
                    RoundOutcome(outcome.round_id[rows], outcome.k[rows], outcome.accept_counts[rows])
                )
        return observations

    everyone = np.arange(n)
    for _ in range(60):
        step([(used, everyone), (undisturbed, others)])
    engine.replace(again, [make_requests([30] * 40, concurrency=5)] * 2)
    used.reset_servers(again)
    new = Features(profile, "warm", num_servers=2)
    for _ in range(40):
        after, before, fresh = step([(used, everyone), (undisturbed, others), (new, again)])
        assert (after[again] == fresh).all()
        assert (after[others] == before).all()


def test_a_choice_is_kept_when_the_caller_reuses_its_array(make_profile: Factory) -> None:
    features = Features(make_profile(), "warm")
    signals = signals_of(num_running=1, max_running=8)
    features.compute(signals)
    choice = np.array([2])
    features.chose(choice)
    choice[:] = 0
    assert values(features, features.compute(signals))["last_k"] == 3


@pytest.mark.parametrize("lag", [1, 2])
def test_the_modelled_clock_is_the_engines_when_it_never_idles(
    lag: int, make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    """In a closed loop nothing but rounds and prefills takes time, where switching is free.

    Two prefill batches between decisions look like one to the features, so their cost must add up here.
    """
    rng = np.random.default_rng(lag)
    bank = make_bank({"a": [rng.integers(0, 8, 40) for _ in range(5)]})
    knots = [[1, 0.04], [1001, 40.04]]
    profile = make_profile((0, 1, 2, 5), ms_per_token=0.003, max_running=16, prefill_ms=knots)
    lists = [
        make_requests(
            rng.integers(2, 60, 100 * c), prompt_tokens=rng.integers(1, 400, 100 * c), concurrency=c, seed=c
        )
        for c in (1, 3, 8, 16)
    ]
    engine = SimulatedEngine(lists, bank, profile, ServerOptions(lag=lag))
    features = Features(profile, "warm", num_servers=4)
    while not engine.servers["done"].any():
        features.compute(engine.signals())
        np.testing.assert_allclose(features._clock.now_s, engine.servers["clock_s"], rtol=1e-9)
        tier = rng.integers(0, 4, 4)
        features.chose(tier)
        for outcome in engine.run_round(np.array(engine.tiers)[tier]):
            features.observe(outcome)
    assert engine.signals().round_id.min() > 1000


def test_the_oldest_wait_is_read_off_the_modelled_clock(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    """With one row and a queue, the head of the queue has waited since it came, to within a round."""
    profile = make_profile((0, 1, 3))
    requests = make_requests([400] * 5, arrival_s=[0.0, 0.5, 1.1, 1.2, 30.0])
    engine = SimulatedEngine([requests], make_bank({"a": [[0, 1]]}), profile, ServerOptions(max_running=1))
    features = Features(profile, "warm")
    k = np.array([1])
    waits = 0
    while not engine.servers["done"][0]:
        observation = features.compute(engine.signals())
        server = engine.servers[0]
        if 0.5 < server["clock_s"] < 10.0:
            head = engine._sim.queue[0, server["queue_head"]] if server["num_waiting"] else None
            seen = values(features, observation)["oldest_wait"]
            truth = 0.0 if head is None else server["clock_s"] - requests.arrival_s[head]
            assert truth - 0.013 - 1e-6 <= seen <= truth + 1e-6
            waits += head is not None
        features.chose(np.array([1]))
        for outcome in engine.run_round(k):
            features.observe(outcome)
    assert waits > 300


def mixed_engine(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> tuple[SimulatedEngine, CostProfile]:
    """Closed and open loops, one of them overloaded, two with little KV."""
    rng = np.random.default_rng(8)
    bank = make_bank({d: [rng.integers(0, 9, 40) for _ in range(4)] for d in "ab"})
    profile = make_profile((0, 1, 2, 3, 5, 7), ms_per_token=0.01, max_running=12, switch_ms=0.1)
    lists = []
    for s in range(6):
        n = 400
        load: dict[str, Any] = {"concurrency": np.repeat(rng.integers(1, 16, 8), 50)}
        if s % 2:
            load = {"arrival_s": np.cumsum(rng.exponential((0.02, 0.1, 0.5)[s // 2], n))}
        lists.append(
            make_requests(
                rng.integers(1, 100, n),
                prompt_tokens=rng.integers(1, 3000, n),
                domain=rng.integers(0, 2, n),
                seed=s,
                **load,
            )
        )
    options = [ServerOptions(kv_pool_tokens=8000 if s >= 4 else 100_000) for s in range(6)]
    return SimulatedEngine(lists, bank, profile, options), profile
