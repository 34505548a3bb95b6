"""Tokens of a round: what is expected, what is coming, what comes; and what a gap in the draft's KV does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from draftdial.controller.signals import IntArray
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine

Factory = Callable[..., Any]
TIERS = (0, 1, 2, 3, 5, 7)


def at(engine: SimulatedEngine, history: Sequence[IntArray]) -> SimulatedEngine:
    """The engine, started over and brought through `history`."""
    engine.reset()
    for k in history:
        engine.run_round(k)
    return engine


@pytest.mark.parametrize("off_mode", ["warm", "skip"])
def test_a_round_yields_and_costs_what_was_said_before_it(
    off_mode: str, make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    rng = np.random.default_rng(3)
    bank = make_bank({"a": [rng.integers(0, 9, 50) for _ in range(9)]})
    lists = [make_requests(rng.integers(2, 60, 40), concurrency=c, seed=c) for c in (1, 4, 9)]
    engine = SimulatedEngine(lists, bank, make_profile(TIERS), ServerOptions(off_mode))
    history = [rng.choice(TIERS, len(lists)) for _ in range(40)]
    seen = set()
    for rounds in range(0, 40, 3):
        at(engine, history[:rounds])
        promised, seconds = engine.realised_tokens(), engine.round_s()
        for tier, k in enumerate(TIERS):
            at(engine, history[:rounds]).run_round(np.full(len(lists), k))
            assert not engine.servers["done"].any()
            # One token of every admitted request comes from its prefill, not from the round.
            yielded = engine.servers["step_tokens"] - engine.servers["num_admitted"]
            assert (yielded == promised[:, tier]).all()
            assert (engine.servers["step_decode_s"] == seconds[:, tier]).all()
        seen |= set(promised.ravel().tolist())
    assert len(seen) > 15


def test_expected_tokens_are_the_mean_of_what_comes(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    """8,000 servers whose first position hides one of three states, with flips drawn from its survival."""
    rng = np.random.default_rng(7)
    n = 8000
    depths = np.arange(8)
    survival = np.stack([0.5**depths, 0.9**depths, 0.8 * 0.3**depths])
    survival[2, 0] = 1.0
    latent = rng.integers(0, 3, n)
    accepted = (rng.random(n)[:, None] < survival[latent][:, 1:]).sum(axis=1)
    accepted[accepted == 7] = 200  # uncapped: more than any tier asks for
    # One domain and one array of one position per server, so that every server has its own flip.
    bank = make_bank({f"d{i}": [[a]] for i, a in enumerate(accepted)}, latent, survival)
    for output in (9, 4):
        lists = [make_requests([output], domain=i, seed=i) for i in range(n)]
        engine = SimulatedEngine(lists, bank, make_profile(TIERS))
        # By hand: 1 + the survivals up to k, and no more tokens than are left after the prefill's one.
        cap = np.minimum(np.array(TIERS), output - 2)
        expected = np.cumsum(survival, axis=1)[latent][:, cap]
        np.testing.assert_allclose(engine.expected_tokens(), expected, rtol=1e-12)
        error = engine.realised_tokens().mean(axis=0) - expected.mean(axis=0)
        spread = engine.realised_tokens().std(axis=0) / np.sqrt(n)
        assert (np.abs(error) <= 4 * spread).all() and (spread[1:] < 0.03).all()


@pytest.mark.parametrize("off_mode", ["warm", "skip"])
def test_worth_weighs_the_expected_tokens_of_each_request(
    off_mode: str, make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    rng = np.random.default_rng(9)
    bank = make_bank({"a": [rng.integers(0, 9, 50) for _ in range(9)]})
    requests = make_requests(rng.integers(20, 60, 4), concurrency=4)
    engine = SimulatedEngine([requests] * 3, bank, make_profile(TIERS), ServerOptions(off_mode))
    par_s = rng.uniform(1e-3, 9e-3, 4)
    engine.replace(np.arange(3), [requests] * 3, [np.ones(4), par_s, par_s * [1, 1, 0, 0]])
    for _ in range(10):
        worth, tokens = engine.expected_worth_s(), engine.expected_tokens()
        np.testing.assert_allclose(worth[0], tokens[0], rtol=1e-12)
        for tier in np.indices((len(TIERS),) * 3).reshape(3, -1).T[::7]:
            assert (engine.expected_worth_at_s(tier) == worth[np.arange(3), tier]).all()
        assert len(set(engine._sim.slots["request"][0, :4].tolist())) == 4
        alone = []
        for request in range(
            4
        ):  # the same rounds with one request worth a second a token, the others nothing
            twin = SimulatedEngine([requests] * 3, bank, make_profile(TIERS), ServerOptions(off_mode))
            twin.replace(np.arange(3), [requests] * 3, [np.eye(4)[request]] * 3)
            for _ in range(int(engine.signals().round_id[0])):
                twin.run_round(np.array([0, 0, 0]))
            alone.append(twin.expected_worth_s()[0])
        np.testing.assert_allclose(worth[1], par_s @ np.array(alone), rtol=1e-12)
        np.testing.assert_allclose(worth[2], par_s[:2] @ np.array(alone)[:2], rtol=1e-12)
        engine.run_round(np.array([0, 0, 0]))
    engine.replace(np.arange(3), [requests] * 3)
    assert (engine.expected_worth_s() == 0).all()  # the old list's par is gone


def servers_with_gaps(
    gaps: IntArray, seeds: IntArray, make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> SimulatedEngine:
    """Server s has been off in `gaps[s]` of its first rounds; all stand at the same output position.

    Drafts before that position are wrong, so that k = 0 and k = 1 advance alike; from there on all are right.
    """
    rounds = int(gaps.max())
    bank = make_bank({"a": [[0] * rounds + [7] * 20]})
    lists = [make_requests([rounds + 20], seed=int(seed)) for seed in seeds]
    engine = SimulatedEngine(lists, bank, make_profile(TIERS), ServerOptions("skip"))
    for i in range(rounds):
        engine.run_round(np.where(i < gaps, 0, 1))
    assert (engine._sim.slots["gap"][:, 0] == gaps).all()
    assert (engine._sim.slots["remaining"][:, 0] == 19).all()
    return engine


def test_the_gap_grows_in_off_rounds_alone_and_ends_with_the_request(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    requests = make_requests([12, 12], concurrency=1)
    bank = make_bank({"a": [[1, 0, 2, 0, 0]]})
    for off_mode in ("skip", "warm"):
        engine = SimulatedEngine([requests], bank, make_profile(), ServerOptions(off_mode, lag=1))
        slot = engine._sim.slots[0, 0]
        gaps = []
        for k in (0, 0, 1, 3, 0, 1, 1):
            engine.run_round(np.array([k]))
            gaps.append(int(slot["gap"]))
        assert gaps == ([1, 2, 2, 2, 3, 3, 3] if off_mode == "skip" else [0] * 7)
        while slot["request"] == 0:
            engine.run_round(np.array([1]))
        assert slot["gap"] == 0
        engine.run_round(np.array([0]))
        assert slot["gap"] == (off_mode == "skip")


def test_longer_gaps_never_accept_more(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    gaps, seeds = np.meshgrid(np.arange(91), np.arange(30), indexing="ij")
    engine = servers_with_gaps(gaps.ravel(), seeds.ravel(), make_profile, make_bank, make_requests)
    tokens = engine.realised_tokens().reshape(91, 30, len(TIERS))
    expected = engine.expected_tokens().reshape(91, 30, len(TIERS))
    assert (tokens[0] == [1, 2, 3, 4, 6, 8]).all() and (expected[0] == tokens[0]).all()
    assert (np.diff(tokens, axis=0) <= 0).all()
    assert (tokens[1:] < tokens[:-1]).any(axis=(0, 2)).all()  # each request suffers somewhere
    assert (tokens[64:] == tokens[64]).all()  # 64 missing tokens are as bad as any number
    assert (np.diff(expected, axis=0)[:64, :, 1:] < 0).all()
    # By hand: the factor on every depth falls evenly to 0.3.
    factor = np.maximum(1 - 0.7 * np.arange(91) / 64, 0.3)
    by_hand = np.cumsum(factor[:, None] ** np.arange(8), axis=1)[:, None, list(TIERS)]
    np.testing.assert_allclose(expected, np.broadcast_to(by_hand, expected.shape), rtol=1e-12)


@pytest.mark.parametrize("gap", [8, 40, 64])
def test_flips_under_a_gap_are_as_frequent_as_expected(
    gap: int, make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    n = 4000
    engine = servers_with_gaps(np.full(n, gap), np.arange(n), make_profile, make_bank, make_requests)
    tokens, expected = engine.realised_tokens(), engine.expected_tokens()
    error = tokens.mean(axis=0) - expected.mean(axis=0)
    assert (np.abs(error) <= 4 * tokens.std(axis=0) / np.sqrt(n)).all()
    # Depth by depth, given the one before: the flips of a position are independent of each other.
    accepted = tokens[:, -1] - 1
    factor = 1 - 0.7 * gap / 64
    for depth in range(1, 5):
        reached = int((accepted >= depth - 1).sum())
        rate = (accepted >= depth).sum() / reached
        assert abs(rate - factor) <= 4 * np.sqrt(factor * (1 - factor) / reached)


def test_a_gap_does_nothing_where_the_draft_is_kept_warm(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    bank = make_bank({"a": [[0] * 70 + [7] * 20]})
    lists = [make_requests([90], seed=seed) for seed in range(50)]
    engine = SimulatedEngine(lists, bank, make_profile(TIERS), ServerOptions("warm"))
    for _ in range(70):
        engine.run_round(np.zeros(50, np.int64))
    assert (engine.realised_tokens() == [1, 2, 3, 4, 6, 8]).all()
    assert (engine.expected_tokens() == [1, 2, 3, 4, 6, 8]).all()


def test_a_shallower_gap_floor_accepts_more(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    bank = make_bank({"a": [[0] * 10 + [7] * 9]})
    lists = [make_requests([19], seed=seed) for seed in range(400)]
    means = []
    for floor in (0.1, 0.5, 1.0):
        options = ServerOptions("skip", gap_floor=floor, gap_tokens=10)
        engine = SimulatedEngine(lists, bank, make_profile(TIERS), options)
        for _ in range(10):
            engine.run_round(np.zeros(400, np.int64))
        assert engine.expected_tokens()[:, 1] == pytest.approx(np.full(400, 1 + floor))
        means.append(engine.realised_tokens()[:, -1].mean())
    assert means[0] < means[1] < means[2] == 8
