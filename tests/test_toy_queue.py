"""The decode queue that can be solved: tables, solver, and the environment that plays it."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from draftdial.controller import toy
from draftdial.controller.errors import UserError
from draftdial.envs.toy_queue import (
    MAX_IN_SYSTEM,
    OUTPUT_TOKENS,
    TIERS,
    Arrivals,
    ToyQueue,
    ToyQueueEnv,
    departure_probability,
    expected_tokens,
    mean_in_system,
    optimum,
    restart_s,
    round_s,
)

SWITCHING = Arrivals((12.0, 60.0), dwell_s=3.0)


@pytest.fixture(scope="module")
def steady() -> ToyQueue:
    return ToyQueue(Arrivals((45.0,)), with_restart=True)


@pytest.fixture(scope="module")
def switching() -> ToyQueue:
    return ToyQueue(SWITCHING, with_restart=True)


def state_of(queue: ToyQueue, in_system: int, speculating: int, phase: int) -> int:
    matches = (queue.in_system == in_system) & (queue.speculating == speculating) & (queue.phase == phase)
    return int(np.flatnonzero(matches).item())


def test_every_row_is_a_distribution(switching: ToyQueue) -> None:
    assert switching.next_state.min() >= 0.0
    assert switching.next_state.sum(axis=2) == pytest.approx(1.0, abs=1e-9)


def test_a_round_moves_the_mean_by_what_arrives_and_what_leaves(steady: ToyQueue) -> None:
    state, tier = state_of(steady, 60, 0, 0), TIERS.index(2)
    step_s = float(round_s(np.array([60.0]), 2)[0] + restart_s(np.array([60.0]))[0])
    arrive, leave = 45.0 * step_s, 60 * departure_probability(2)
    assert steady.step_s[state, tier] == pytest.approx(step_s)
    assert steady.next_state[state, tier] @ steady.in_system == pytest.approx(60 + arrive - leave)
    assert steady.request_s[state, tier] == pytest.approx(60 * step_s + 45.0 * step_s**2 / 2)
    assert steady.next_state[state, tier] @ steady.speculating == pytest.approx(1.0)


def test_a_round_is_what_drawing_every_token_gives(switching: ToyQueue) -> None:
    """Token by token and event by event, with nothing of the tables' code."""
    rng = np.random.default_rng(1)
    k, batch, draws = 3, 30, 20_000
    state, tier = state_of(switching, batch, 0, 1), TIERS.index(k)
    accepted = np.cumprod(rng.random((draws, batch, k)) < 0.5, axis=2).sum(axis=2)
    is_last = rng.random((draws, batch, k + 1)) < 1 / OUTPUT_TOKENS
    emitted = np.arange(k + 1) <= accepted[:, :, None]
    in_system = batch - (is_last & emitted).any(axis=2).sum(axis=1)
    phase, request_s = np.ones(draws, int), np.full(draws, batch * switching.step_s[state, tier])
    left_s = np.full(draws, switching.step_s[state, tier])
    while (left_s > 0).any():
        rate = np.array(SWITCHING.rates_per_s)[phase]
        left_s -= rng.exponential(1 / (rate + 1 / SWITCHING.dwell_s))
        arrives = (left_s > 0) & (rng.random(draws) < rate / (rate + 1 / SWITCHING.dwell_s))
        phase = np.where((left_s > 0) & ~arrives, 1 - phase, phase)
        in_system = in_system + arrives
        request_s += np.where(arrives, left_s, 0.0)
    row = switching.next_state[state, tier]
    num = switching.in_system
    for drawn, expected in (
        (in_system, row @ num),
        (in_system**2, row @ num**2),
        (phase, row @ switching.phase),
    ):
        assert drawn.mean() == pytest.approx(expected, abs=4 * drawn.std() / draws**0.5)
    error = 4 * request_s.std() / draws**0.5
    assert switching.request_s[state, tier] == pytest.approx(request_s.mean(), abs=error)


def test_requests_gain_the_tokens_that_their_departures_say() -> None:
    for k in TIERS:
        # With so few tokens a round, P(the last is among them) is almost their number / 200.
        assert departure_probability(k) == pytest.approx(expected_tokens(k) / OUTPUT_TOKENS, rel=0.02)


def test_policy_iteration_agrees_with_value_iteration(steady: ToyQueue) -> None:
    """Relative value iteration brackets the optimum from both sides (Odoni 1969), by another road."""
    mean, _ = optimum(steady, toy.greedy(steady))
    slice_s = 0.9 * steady.step_s.min()
    cost = steady.request_s / steady.step_s
    share = slice_s / steady.step_s
    ahead = np.zeros(len(cost))
    for _ in range(6_000):
        backed = (cost * slice_s + share * (steady.next_state @ ahead) + (1 - share) * ahead[:, None]).min(
            axis=1
        )
        change = (backed - ahead) / slice_s
        ahead = backed - backed[0]
        if change.max() - change.min() < 1e-4 * mean:
            break
    assert change.min() <= mean + 1e-9
    assert mean - 1e-9 <= change.max()
    assert change.max() - change.min() < 1e-3 * mean


def test_a_policy_is_judged_on_the_states_that_it_reaches(steady: ToyQueue) -> None:
    never_back = np.where(steady.speculating == 1, TIERS.index(1), 0)
    assert mean_in_system(steady, never_back) == pytest.approx(
        mean_in_system(steady, toy.fixed(steady, TIERS.index(1)))
    )


@pytest.mark.parametrize("arrivals", [Arrivals((45.0,)), SWITCHING])
def test_without_restart_greedy_is_optimal(arrivals: Arrivals) -> None:
    queue = ToyQueue(arrivals, with_restart=False)
    mean, _ = optimum(queue, toy.fixed(queue, 0))
    assert mean_in_system(queue, toy.greedy(queue)) == pytest.approx(mean, rel=1e-5)
    assert (toy.greedy(queue, charge_restart=True) == toy.greedy(queue)).all()


def test_the_best_rules_lie_between_the_optimum_and_any_rule(steady: ToyQueue) -> None:
    case = toy.Case(Arrivals((45.0,)), with_restart=True)
    toy.solve(steady, case)
    assert 0.01 < case.excess["threshold"] <= case.excess["fixed"] < case.excess["greedy-charged"]
    best = toy.threshold(steady, TIERS.index(case.threshold_k), case.threshold_batch)
    assert mean_in_system(steady, best) == pytest.approx(case.optimum * (1 + case.excess["threshold"]))
    assert case.record()["dwell_s"] is None


def test_with_restart_greedy_loses_and_charging_one_round_is_a_catastrophe(switching: ToyQueue) -> None:
    mean, best = optimum(switching, toy.greedy(switching))
    assert mean_in_system(switching, best) == pytest.approx(mean)
    naive = mean_in_system(switching, toy.greedy(switching)) / mean - 1.0
    charged = mean_in_system(switching, toy.greedy(switching, charge_restart=True)) / mean - 1.0
    assert 0.02 < naive < 0.1 < charged
    # Charged with all of the restart, one round never pays for it: once off, always off.
    off = (switching.speculating == 0) & (switching.in_system > 0)
    assert (toy.greedy(switching, charge_restart=True)[off] == 0).all()
    # The optimum has hysteresis: it goes off later than it would come back.
    per_mode = [best[(switching.speculating == mode) & (switching.phase == 1)] for mode in (0, 1)]
    come_back_below, go_off_above = (int((tiers > 0).sum()) for tiers in per_mode)
    assert come_back_below < go_off_above < MAX_IN_SYSTEM


def test_the_potential_shifts_every_value_alike(switching: ToyQueue) -> None:
    """Discounted values of a policy under the shaped and the plain reward differ by the potential."""
    tau_s, reference = 2.0, 45.0
    env = ToyQueueEnv(switching, 4, reference, tau_s)
    states = np.arange(switching.in_system.size)
    choice = toy.threshold(switching, TIERS.index(2), 64)
    step_s = switching.step_s[states, choice]
    follows = np.exp(-step_s / tau_s)[:, None] * switching.next_state[states, choice]
    plain = reference * step_s - switching.request_s[states, choice]
    value = np.linalg.solve(np.eye(len(states)) - follows, np.stack([plain, env.reward[states, choice]], 1))
    assert value[:, 0] == pytest.approx(value[:, 1] + env.potential, abs=1e-6)
    assert value[:, 1].std() < 0.2 * value[:, 0].std()


def test_the_environment_plays_the_tables(switching: ToyQueue) -> None:
    env = ToyQueueEnv(switching, 4_000, 45.0, 2.0)
    env.seed(3)
    before = env.reset()
    numbers = {tuple(row): state for state, row in enumerate(env.observations)}
    states = np.array([numbers[tuple(row)] for row in before])
    actions = np.random.default_rng(0).integers(0, len(TIERS), env.num_envs)
    after, reward, cut, infos = env.step(actions)
    assert env.elapsed_s == pytest.approx(switching.step_s[states, actions])
    assert reward == pytest.approx(env.REWARD_SCALE * env.reward[states, actions], rel=1e-5)
    reached = after.copy()
    for row in np.flatnonzero(cut):
        assert infos[row]["TimeLimit.truncated"]
        reached[row] = infos[row]["terminal_observation"]
    assert 0 < cut.sum() < env.num_envs / 8  # staggered
    moved = np.array([numbers[tuple(row)] for row in reached])
    expected = switching.next_state[states, actions] @ switching.in_system
    error = switching.in_system[moved] - expected
    assert error.mean() == pytest.approx(0.0, abs=4 * error.std() / env.num_envs**0.5)
    assert (switching.next_state[states, actions, moved] > 0).all()


def test_a_short_training_is_already_better_than_off(steady: ToyQueue) -> None:
    mean, _ = optimum(steady, toy.greedy(steady))
    off = mean_in_system(steady, toy.fixed(steady, 0))
    learned = mean_in_system(steady, toy.train(steady, seed=0, total_rounds=200_000))
    assert mean <= learned < mean + 0.5 * (off - mean)


def test_the_command_needs_a_seed() -> None:
    with pytest.raises(UserError, match="--seeds: 0 is not allowed; at least 1"):
        toy.run(argparse.Namespace(seeds=0, json=True))
