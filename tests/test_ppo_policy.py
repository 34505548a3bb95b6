"""The actor that starts from advice, its export, the critic's private columns, and discounting by time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.features import HALF_LIVES_SAMPLES, Features
from draftdial.controller.learned import LearnedPolicy
from draftdial.controller.ppo import AdvicePolicy, SemiMarkovRolloutBuffer, network_of
from draftdial.controller.probe import FIRST_WAIT_ROUNDS
from draftdial.envs.episodes import Episodes
from draftdial.envs.fitted_acceptance import FittedAcceptance
from draftdial.envs.scenario import Scenario
from draftdial.envs.simulated_engine import ServerOptions

PROFILE = CostProfile.load("h200-llama3-8b")
NUM_TIERS = len(PROFILE.tiers)
NUM_FEATURES = len(Features(PROFILE, "warm").table)
NUM_ADVICE = len(HALF_LIVES_SAMPLES) * (NUM_TIERS - 1)
SHARES = (0.2, 0.4, 0.3, 0.1)
SHARPNESS = 200.0


def make_policy(trained: bool = False, width: int = 32) -> AdvicePolicy:
    """A fresh policy, or one whose every weight has moved."""
    torch.manual_seed(0)
    policy = AdvicePolicy(
        spaces.Box(-32, 32, (NUM_FEATURES + NUM_TIERS,), np.float32),
        spaces.Discrete(NUM_TIERS),
        lambda _: 1e-3,
        width=width,
        sharpness=SHARPNESS,
        advice_shares=SHARES,
    )
    if trained:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return policy


def logits_of(policy: AdvicePolicy, columns: NDArray[np.float32]) -> NDArray[np.float32]:
    """SB3's logits, up to the constant that its distribution subtracts."""
    with torch.no_grad():
        distribution: Any = policy.get_distribution(torch.as_tensor(columns)).distribution
    logits: NDArray[np.float32] = distribution.logits.numpy()
    return logits


def states(num: int, seed: int = 0) -> NDArray[np.float32]:
    """Made-up observations with the critic's columns behind them."""
    rng = np.random.default_rng(seed)
    return rng.normal(0.0, 1.0, (num, NUM_FEATURES + NUM_TIERS)).astype(np.float32)


def test_it_starts_as_goodput_greedy_on_the_mixed_advice() -> None:
    columns = states(2000)
    advice = columns[:, NUM_FEATURES - NUM_ADVICE : NUM_FEATURES].astype(np.float64)
    by_memory = advice.reshape(len(columns), len(SHARES), NUM_TIERS - 1)
    speed_up = np.zeros((len(columns), NUM_TIERS))
    speed_up[:, 1:] = np.tensordot(by_memory, SHARES, axes=(1, 0))
    logits = logits_of(make_policy(), columns)
    np.testing.assert_array_equal(logits.argmax(axis=1), speed_up.argmax(axis=1))
    expected = SHARPNESS * (speed_up - speed_up[:, :1])
    np.testing.assert_allclose(logits - logits[:, :1], expected, rtol=1e-4, atol=1e-2)


def test_in_a_server_it_starts_with_the_tier_of_the_highest_predicted_speed_up() -> None:
    scenario, options = Scenario(rounds=64), ServerOptions(mid_flight=True)
    episodes = Episodes(8, [PROFILE], FittedAcceptance(num_arrays=16), scenario, options=[options])
    episodes.begin(np.arange(8), range(8))
    policy = LearnedPolicy(Features(PROFILE, "warm"), network_of(make_policy()))
    policy.reset(8)
    chosen = set()
    for _ in range(FIRST_WAIT_ROUNDS):  # after that, probes come between
        k = policy.decide(episodes.engine.signals())
        predicted = np.tensordot(SHARES, policy.features.speedup, axes=(0, 0))
        tier = np.searchsorted(PROFILE.tiers, k)
        best = predicted.max(axis=1)
        np.testing.assert_allclose(predicted[np.arange(8), tier], best, atol=1e-5)
        chosen |= set(k.tolist())
        for outcome in episodes.advance(tier).outcomes:
            policy.observe(outcome)
    assert len(chosen) >= 3, "the servers must differ for this to say anything"


@pytest.mark.parametrize("trained", [False, True])
def test_the_numpy_network_equals_the_actor_on_ten_thousand_states(trained: bool) -> None:
    policy = make_policy(trained)
    columns = states(10_000)
    exported = network_of(policy).logits(columns[:, :NUM_FEATURES])
    logits = logits_of(policy, columns)
    np.testing.assert_array_equal(exported.argmax(axis=1), logits.argmax(axis=1))
    with torch.no_grad():
        latent = policy.mlp_extractor.forward_actor(torch.as_tensor(columns))
        raw = policy.action_net(latent).numpy()
    np.testing.assert_allclose(exported, raw, rtol=1e-5, atol=1e-5 * np.abs(raw).max())
    assert len(np.unique(exported.argmax(axis=1))) == NUM_TIERS


def test_what_only_the_critic_sees_moves_neither_the_actor_nor_the_export() -> None:
    policy = make_policy(trained=True)
    columns = states(500)
    other = columns.copy()
    other[:, NUM_FEATURES:] = 10.0 * states(500, seed=1)[:, NUM_FEATURES:]
    np.testing.assert_array_equal(logits_of(policy, columns), logits_of(policy, other))
    np.testing.assert_array_equal(
        policy.predict(columns, deterministic=True)[0], policy.predict(other, deterministic=True)[0]
    )
    with torch.no_grad():
        values, moved = (policy.predict_values(torch.as_tensor(x)) for x in (columns, other))
    assert (values != moved).all(), "the critic must see them"

    observation = torch.as_tensor(columns).requires_grad_()
    distribution: Any = policy.get_distribution(observation).distribution
    torch.autograd.backward(distribution.logits.pow(2).sum())
    assert observation.grad is not None
    assert observation.grad[:, NUM_FEATURES:].abs().max() == 0
    assert observation.grad[:, :NUM_FEATURES].abs().max() > 0
    network = network_of(policy)
    assert network.tensors["hidden.0.weight"].shape[1] == NUM_FEATURES
    assert network.tensors["logits.weight"].shape == (NUM_TIERS, 32 + NUM_ADVICE)


def test_every_weight_of_actor_and_critic_is_trained() -> None:
    # The head is replaced after SB3 has built its optimiser.
    policy = make_policy(trained=True)
    trained = {id(p) for group in policy.optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in policy.parameters()} == trained
    before = [p.detach().clone() for p in policy.parameters()]
    _, log_prob, entropy = policy.evaluate_actions(torch.as_tensor(states(64)), torch.arange(64) % NUM_TIERS)
    assert entropy is not None
    value = policy.predict_values(torch.as_tensor(states(64)))
    torch.autograd.backward(log_prob.sum() + value.sum())
    policy.optimizer.step()
    assert all((p != b).any() for p, b in zip(policy.parameters(), before, strict=True))


class Clock:
    """Stands in for the environment that the buffer asks how long a step took."""

    def __init__(self, num_envs: int) -> None:
        self.elapsed_s = np.zeros(num_envs)
        self.raw_reward = np.zeros(num_envs, np.float32)


def fill(
    elapsed_s: NDArray[Any],
    rewards: NDArray[Any],
    values: NDArray[Any],
    *,
    starts: NDArray[Any] | None = None,
    bootstrap: NDArray[Any] | None = None,
    last_value: float = 0.0,
    gae_lambda: float = 1.0,
    tau_s: float = 2.0,
) -> SemiMarkovRolloutBuffer:
    """A buffer of one environment after these steps, as PPO fills it."""
    clock = Clock(1)
    num_steps = len(rewards)
    buffer = SemiMarkovRolloutBuffer(
        num_steps,
        spaces.Box(-1, 1, (1,), np.float32),
        spaces.Discrete(2),
        "cpu",
        gae_lambda=gae_lambda,
        gamma=1.0,
        n_envs=1,
        env=clock,
        tau_s=tau_s,
    )
    starts = np.zeros(num_steps) if starts is None else starts
    bootstrap = np.zeros(num_steps) if bootstrap is None else bootstrap
    for i in range(num_steps):
        clock.elapsed_s = np.array([elapsed_s[i]])
        clock.raw_reward = np.array([rewards[i]], np.float32)
        paid = clock.raw_reward + np.float32(bootstrap[i])  # PPO adds the value of the last observation
        start, value = np.array([starts[i]], np.float32), torch.tensor([float(values[i])])
        buffer.add(np.zeros((1, 1)), np.zeros((1, 1)), paid, start, value, torch.zeros(1))
    buffer.compute_returns_and_advantage(torch.tensor([last_value]), np.array([0.0]))
    return buffer


def test_a_two_state_process_solved_by_hand_is_a_fixed_point_at_any_lambda() -> None:
    # A (1 s, pays 3) and B (0.25 s, pays 1) take turns; tau = 2 s. With a = exp(-1/2) and b = exp(-1/8):
    # V_A = 3 + a V_B and V_B = 1 + b V_A, so V_A = (3 + a) / (1 - a b).
    a, b = np.exp(-0.5), np.exp(-0.125)
    value_a = (3 + a) / (1 - a * b)
    value_b = 1 + b * value_a
    turns = np.arange(40) % 2
    elapsed_s, rewards = np.where(turns == 0, 1.0, 0.25), np.where(turns == 0, 3.0, 1.0)
    values = np.where(turns == 0, value_a, value_b)
    for gae_lambda in (0.0, 0.7, 1.0):
        buffer = fill(elapsed_s, rewards, values, last_value=value_a, gae_lambda=gae_lambda)
        np.testing.assert_allclose(buffer.advantages, 0.0, atol=1e-5)
        np.testing.assert_allclose(buffer.returns[:, 0], values, rtol=1e-6)


def test_equal_pay_in_less_time_is_better_and_splitting_a_round_gains_nothing() -> None:
    # At a value of 5: one step of 1 s that pays 2, or the same pay in 0.5 s.
    slow = fill(np.array([1.0]), np.array([2.0]), np.zeros(1), last_value=5.0)
    fast = fill(np.array([0.5]), np.array([2.0]), np.zeros(1), last_value=5.0)
    np.testing.assert_allclose(slow.returns[0, 0], 2 + 5 * np.exp(-1 / 2.0), rtol=1e-6)
    assert fast.returns[0, 0] > slow.returns[0, 0]
    # Two half rounds without pay of their own discount like one: a discount per step would not.
    halves = fill(np.array([0.5, 0.5]), np.array([0.0, 0.0]), np.zeros(2), last_value=5.0)
    whole = fill(np.array([1.0]), np.array([0.0]), np.zeros(1), last_value=5.0)
    np.testing.assert_allclose(halves.returns[0, 0], whole.returns[0, 0], rtol=1e-6)


@pytest.mark.parametrize("gae_lambda", [0.5, 1.0])
def test_a_cut_episode_is_bootstrapped_and_the_next_one_does_not_leak_into_it(gae_lambda: float) -> None:
    # Step 1 cuts the episode at an observation worth 4; step 2 starts another one.
    elapsed_s, rewards = np.array([0.5, 0.25, 1.0]), np.array([1.0, 2.0, 30.0])
    values, starts = np.array([0.5, 1.5, 2.5]), np.array([1.0, 0.0, 1.0])
    buffer = fill(
        elapsed_s, rewards, values, starts=starts, bootstrap=np.array([0.0, 4.0, 0.0]), last_value=7.0,
        gae_lambda=gae_lambda,
    )  # fmt: skip
    discount = np.exp(-elapsed_s / 2.0)
    last = rewards[2] + discount[2] * 7.0 - values[2]
    cut = rewards[1] + discount[1] * 4.0 - values[1]
    first = rewards[0] + discount[0] * values[1] - values[0] + discount[0] * gae_lambda * cut
    np.testing.assert_allclose(buffer.advantages[:, 0], [first, cut, last], rtol=1e-6)


def test_the_buffer_wants_ppo_not_to_discount() -> None:
    box = spaces.Box(-1, 1, (1,), np.float32)
    with pytest.raises(AssertionError, match="per time"):
        SemiMarkovRolloutBuffer(4, box, spaces.Discrete(2), "cpu", gamma=0.99, env=Clock(1), tau_s=1.0)
