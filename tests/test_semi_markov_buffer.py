"""The rollout buffer that discounts by time, against sums worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv

from draftdial.controller.ppo import SemiMarkovRolloutBuffer

TAU_S = 2.0
# Two states that follow one another: the first lasts 1 s and pays 2, the second lasts 3 s and pays 5.
STEP_S = np.array([1.0, 3.0])
REWARD = np.array([2.0, 5.0], np.float32)
DISCOUNT = np.exp(-STEP_S / TAU_S)
# V0 = 2 + d0 V1 and V1 = 5 + d1 V0.
VALUE = np.array([2.0 + 5.0 * DISCOUNT[0], 5.0 + 2.0 * DISCOUNT[1]]) / (1.0 - DISCOUNT.prod())


def filled(
    states: list[int],
    values: list[float],
    *,
    gae_lambda: float,
    last_value: float,
    starts: tuple[int, ...] = (0,),
    cut: bool = False,
    bootstrap: dict[int, float] | None = None,
) -> SemiMarkovRolloutBuffer:
    """One environment's walk through `states`; `bootstrap` is what PPO adds to a step's reward."""
    env = SimpleNamespace(elapsed_s=np.zeros(1), raw_reward=np.zeros(1, np.float32))
    buffer = SemiMarkovRolloutBuffer(
        len(states),
        spaces.Box(0, 1, (1,)),
        spaces.Discrete(2),
        gae_lambda=gae_lambda,
        gamma=1.0,
        env=env,
        tau_s=TAU_S,
    )
    for step, (state, value) in enumerate(zip(states, values, strict=True)):
        env.elapsed_s, env.raw_reward = STEP_S[[state]], REWARD[[state]]
        buffer.add(
            np.array([[state]], np.float32),
            np.zeros((1, 1)),
            env.raw_reward + np.float32((bootstrap or {}).get(step, 0.0)),
            np.array([step in starts]),
            torch.tensor([value]),
            torch.zeros(1),
        )
    buffer.compute_returns_and_advantage(torch.tensor([last_value]), np.array([cut]))
    return buffer


def test_returns_are_sums_discounted_by_the_time_that_passed() -> None:
    buffer = filled([0, 1, 0], [0.0, 0.0, 0.0], gae_lambda=1.0, last_value=10.0)
    d0, d1 = DISCOUNT
    expected = [2 + d0 * (5 + d1 * (2 + d0 * 10)), 5 + d1 * (2 + d0 * 10), 2 + d0 * 10]
    assert buffer.returns[:, 0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
def test_true_values_leave_no_advantage(gae_lambda: float) -> None:
    states = [0, 1, 0, 1, 0]
    buffer = filled(states, list(VALUE[states]), gae_lambda=gae_lambda, last_value=float(VALUE[1]))
    assert buffer.advantages[:, 0] == pytest.approx(np.zeros(5), abs=1e-5)
    assert buffer.returns[:, 0] == pytest.approx(VALUE[states], rel=1e-6)


def test_advantages_weight_later_surprises_by_lambda_and_every_discount_between() -> None:
    values = [1.0, -2.0, 3.0]
    buffer = filled([1, 0, 1], values, gae_lambda=0.5, last_value=4.0)
    d0, d1 = DISCOUNT
    surprises = [5 + d1 * -2.0 - 1.0, 2 + d0 * 3.0 + 2.0, 5 + d1 * 4.0 - 3.0]
    expected = surprises[0] + 0.5 * d1 * surprises[1] + 0.25 * d1 * d0 * surprises[2]
    assert buffer.advantages[0, 0] == pytest.approx(expected, rel=1e-6)
    assert buffer.returns[0, 0] == pytest.approx(expected + values[0], rel=1e-6)


def test_an_episode_ends_where_the_next_one_starts() -> None:
    buffer = filled([0, 1, 0], [0.0, 7.0, 9.0], gae_lambda=1.0, last_value=100.0, starts=(0, 2), cut=True)
    d0, _ = DISCOUNT
    assert buffer.returns[:, 0] == pytest.approx([2 + d0 * 5, 5.0, 2.0], rel=1e-6)


def test_the_value_after_a_time_limit_gets_the_discount_of_its_own_step() -> None:
    # PPO(gamma=1) adds V(last observation) to the reward of the step that the limit cut.
    buffer = filled([0, 1, 0], [0.0] * 3, gae_lambda=1.0, last_value=0.0, starts=(0, 2), bootstrap={1: 20.0})
    d0, d1 = DISCOUNT
    assert buffer.rewards[:, 0] == pytest.approx([2.0, 5.0 + d1 * 20.0, 2.0], rel=1e-6)
    assert buffer.returns[:, 0] == pytest.approx([2 + d0 * (5 + d1 * 20), 5 + d1 * 20, 2], rel=1e-6)


def test_a_discount_of_one_per_step_is_required() -> None:
    env = SimpleNamespace(elapsed_s=np.zeros(1), raw_reward=np.zeros(1, np.float32))
    with pytest.raises(AssertionError, match="per time"):
        SemiMarkovRolloutBuffer(
            4, spaces.Box(0, 1, (1,)), spaces.Discrete(2), gamma=0.9, env=env, tau_s=TAU_S
        )


class ShortOrLong(VecEnv):
    """One state, two rounds: 0 takes 0.1 s at a cost of 1 per second, 1 takes 1 s at half that cost."""

    STEP_S = np.array([0.1, 1.0])
    COST = np.array([0.1, 0.5], np.float32)
    NUM_ROUNDS = 5
    render_mode: str | None = None

    def __init__(self) -> None:
        super().__init__(8, spaces.Box(0, 2, (1,)), spaces.Discrete(2))
        self.elapsed_s = np.zeros(8)
        self.raw_reward = np.zeros(8, np.float32)
        self._round = 0

    def reset(self) -> NDArray[np.float32]:
        return np.ones((8, 1), np.float32)

    def step_async(self, actions: NDArray[np.int64]) -> None:
        self.elapsed_s, self.raw_reward = self.STEP_S[actions], -self.COST[actions]

    def step_wait(self) -> Any:
        self._round += 1
        cut = np.full(8, self._round % self.NUM_ROUNDS == 0)
        info = {"terminal_observation": np.full(1, 2.0, np.float32), "TimeLimit.truncated": True}
        return self.reset(), self.raw_reward.copy(), cut, [info if cut[0] else {} for _ in range(8)]

    def close(self) -> None: ...

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name)] * 8

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return []

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * 8


def learner(buffer: type[RolloutBuffer], gamma: float, **buffer_kwargs: Any) -> PPO:
    torch.set_num_threads(1)  # more would wait for each other
    env = ShortOrLong()
    if buffer is SemiMarkovRolloutBuffer:
        buffer_kwargs["env"] = env
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=25,
        batch_size=200,
        learning_rate=0.01,
        ent_coef=0.01,
        gamma=gamma,
        rollout_buffer_class=buffer,
        rollout_buffer_kwargs=buffer_kwargs,
        policy_kwargs={"net_arch": [8]},
        seed=0,
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    return model


def test_ppo_hands_over_the_bootstrap_that_the_buffer_expects() -> None:
    model = learner(SemiMarkovRolloutBuffer, 1.0, tau_s=1.0)
    model.learn(200)
    buffer: Any = model.rollout_buffer
    actions = buffer.actions.reshape(8, 25).T.astype(int)  # the update lays them out by environment
    seconds, cost = ShortOrLong.STEP_S[actions], ShortOrLong.COST[actions]
    fresh = learner(SemiMarkovRolloutBuffer, 1.0, tau_s=1.0)  # the same weights, before the update
    with torch.no_grad():
        of_last = float(fresh.policy.predict_values(torch.full((1, 1), 2.0)))
    cut = (np.arange(1, 26) % ShortOrLong.NUM_ROUNDS == 0)[:, None]
    assert buffer.rewards == pytest.approx(-cost + cut * np.exp(-seconds) * of_last, rel=1e-5)


@pytest.mark.parametrize(
    ("buffer", "gamma", "kwargs", "chosen"),
    [(SemiMarkovRolloutBuffer, 1.0, {"tau_s": 1.0}, 1), (RolloutBuffer, 0.9, {}, 0)],
)
def test_a_discount_per_step_falls_for_many_short_rounds(
    buffer: type[RolloutBuffer], gamma: float, kwargs: dict[str, Any], chosen: int
) -> None:
    # Per step, at 0.9: -0.1 / (1 - 0.9) = -1 beats -0.5 / (1 - 0.9) = -5, twice the cost per second.
    # Per time, at 1 s: -0.1 / (1 - exp(-0.1)) = -1.05 loses to -0.5 / (1 - exp(-1)) = -0.79.
    model = learner(buffer, gamma, **kwargs)
    model.learn(12_000)
    action, _ = model.predict(np.ones(1, np.float32), deterministic=True)
    assert action == chosen
