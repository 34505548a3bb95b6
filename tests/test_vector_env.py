"""The vector environment against the scalar one: restarts, seeds, the critic's columns, the bridge to SB3."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import draftdial.envs
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.signals import FloatArray
from draftdial.envs.episodes import Episodes
from draftdial.envs.fitted_acceptance import FittedAcceptance
from draftdial.envs.objectives import ObjectiveName
from draftdial.envs.par import prefill_overhead_s
from draftdial.envs.scenario import Scenario
from draftdial.envs.simulated_engine import ServerOptions
from draftdial.envs.speculation_env import SpeculationEnv
from draftdial.envs.vector_env import Sb3VectorEnv, SpeculationVectorEnv
from draftdial.envs.workload import RequestList

gym.register_envs(draftdial.envs)
PROFILE = CostProfile.load("h200-llama3-8b")
SOURCE = FittedAcceptance(num_arrays=32)


@dataclass(frozen=True)
class Ragged(Scenario):
    """Short lists of random length: rows are cut at different times."""

    def draw(self, seed: int, num_domains: int, capacity: FloatArray) -> RequestList:
        requests = super().draw(seed, num_domains, capacity)
        keep = int(np.random.default_rng(seed).integers(2, 9))
        arrays = {name: value[:keep] for name, value in vars(requests).items() if np.ndim(value)}
        arrays["output_tokens"] = np.minimum(arrays["output_tokens"], 100)
        return RequestList(mode=requests.mode, warmup=0, **arrays)


CLOSED = Ragged(high=4, rounds=150)
OPEN = Ragged(mode="open", lengths="short-chat", rounds=150)
WORLDS: dict[ObjectiveName, tuple[Scenario, ServerOptions]] = {
    "throughput": (CLOSED, ServerOptions(mid_flight=True, off_mode="skip")),
    "latency": (OPEN, ServerOptions()),
    "slo": (OPEN, ServerOptions(ttft_limit_s=0.1, lag=1)),
}


def vector(
    num_envs: int,
    scenario: Scenario,
    options: ServerOptions,
    objective: ObjectiveName = "throughput",
    **more: Any,
) -> SpeculationVectorEnv:
    return SpeculationVectorEnv(Episodes(num_envs, [PROFILE], SOURCE, scenario, objective, [options]), **more)


@pytest.mark.parametrize("objective", WORLDS)
def test_row_i_is_the_scalar_environment_of_seed_s_plus_i(objective: ObjectiveName) -> None:
    num_envs, first_seed = 5, 70
    scenario, options = WORLDS[objective]
    many = vector(num_envs, scenario, options, objective)
    ones = [
        SpeculationEnv(acceptance=SOURCE, scenario=scenario, objective=objective, options=options)
        for _ in range(num_envs)
    ]
    observations, _ = many.reset(seed=first_seed)
    for i, one in enumerate(ones):
        np.testing.assert_array_equal(one.reset(seed=first_seed + i)[0], observations[i])
    next_seed = first_seed + num_envs
    num_restarts = np.zeros(num_envs, int)
    rng = np.random.default_rng(0)
    for _ in range(450):
        actions = rng.integers(0, len(PROFILE.tiers), num_envs)
        observations, rewards, terminated, truncated, infos = many.step(actions)
        assert not terminated.any()
        for i, one in enumerate(ones):
            observation, reward, _, cut, info = one.step(actions[i])
            assert (reward, cut, info["elapsed_s"]) == (rewards[i], truncated[i], infos["elapsed_s"][i])
            if cut:
                assert infos["_final_obs"][i]
                np.testing.assert_array_equal(infos["final_obs"][i], observation)
                observation, _ = one.reset(seed=next_seed)
                next_seed += 1
                num_restarts[i] += 1
            np.testing.assert_array_equal(observation, observations[i])
    assert num_restarts.min() >= 1 and len(set(num_restarts.tolist())) > 1, "rows must restart, and apart"


def test_rows_that_go_on_are_left_alone_by_the_restart_of_another() -> None:
    env = vector(5, *WORLDS["throughput"])
    env.reset(seed=70)
    for _ in range(450):
        _, _, _, truncated, infos = env.step(np.full(5, 2))
        if truncated.any() and not truncated.all():
            break
    np.testing.assert_array_equal(infos["_final_obs"], truncated)
    episodes = env.episodes
    assert (episodes.rounds_left[truncated] == CLOSED.rounds).all()
    assert (episodes.rounds_left[~truncated] < CLOSED.rounds).all()
    assert (episodes.engine.servers["round_id"][~truncated] > 0).all()


def test_seeds_reproduce_one_by_one_in_a_list_and_in_a_row() -> None:
    env = vector(3, *WORLDS["throughput"])
    in_a_row, _ = env.reset(seed=7)
    np.testing.assert_array_equal(env.reset(seed=[7, 8, 9])[0], in_a_row)
    reversed_rows, _ = env.reset(seed=[9, 8, 7])
    np.testing.assert_array_equal(reversed_rows, in_a_row[::-1])
    assert not np.array_equal(env.reset(seed=8)[0], in_a_row)
    env.reset(seed=7)
    unseeded, _ = env.reset()
    assert not np.array_equal(unseeded, in_a_row)
    env.reset(seed=7)
    np.testing.assert_array_equal(env.reset()[0], unseeded)


def test_gymnasium_makes_it() -> None:
    env = gym.make_vec("draftdial/Speculation-v0", num_envs=3, acceptance=SOURCE, scenario=CLOSED)
    assert isinstance(env, SpeculationVectorEnv)
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    observations, _ = env.reset(seed=1)
    assert observations in env.observation_space
    assert env.action_space.sample() in env.action_space
    np.testing.assert_array_equal(
        observations[1], SpeculationEnv(acceptance=SOURCE, scenario=CLOSED).reset(seed=2)[0]
    )


def test_the_columns_for_the_critic_are_the_gains_and_nothing_else_changes() -> None:
    plain, training = (vector(4, *WORLDS["throughput"], for_training=flag) for flag in (False, True))
    assert training.single_observation_space.shape is not None and plain.single_observation_space.shape
    num_features, num_tiers = plain.single_observation_space.shape[0], len(PROFILE.tiers)
    assert training.single_observation_space.shape == (num_features + num_tiers,)
    seen, shown = plain.reset(seed=3)[0], training.reset(seed=3)[0]
    for step in range(20):
        np.testing.assert_array_equal(shown[:, :num_features], seen)
        np.testing.assert_array_equal(shown[:, num_features:], training.episodes.gains().astype(np.float32))
        actions = np.random.default_rng(step).integers(0, num_tiers, 4)
        seen, shown = plain.step(actions)[0], training.step(actions)[0]


def test_a_gain_is_the_reward_of_its_tier_but_for_switch_and_prefill() -> None:
    env = vector(6, Scenario(rounds=64), ServerOptions(mid_flight=True))
    env.reset(seed=0)
    env.step(np.zeros(6, np.int64))
    for actions in np.random.default_rng(1).integers(0, len(PROFILE.tiers), (30, 6)):
        gains = env.episodes.gains()[np.arange(6), actions]
        switches = actions != env.episodes.engine.servers["last_tier"]
        _, reward, *_ = env.step(actions)
        prefill_s = prefill_overhead_s(env.episodes.engine, env.episodes.prefill_token_s)
        unforeseen = (PROFILE.switch_s * switches + prefill_s) / env.episodes._round_s
        np.testing.assert_allclose(reward, gains - unforeseen, rtol=1e-9, atol=1e-12)


def test_first_episodes_for_training_differ_in_length() -> None:
    env = vector(16, Scenario(low=2, high=2, rounds=64), ServerOptions(mid_flight=True), for_training=True)
    env.reset(seed=0)
    assert sorted(set(env.episodes.rounds_left.tolist())) == list(range(8, 65, 8))
    _, _, _, truncated, _ = [env.step(np.zeros(16, np.int64)) for _ in range(8)][-1]
    assert truncated.sum() == 2
    assert (env.episodes.rounds_left[truncated] == 64).all(), "later episodes are whole"


def test_sb3_gets_terminal_observations_and_the_sign_of_truncation() -> None:
    env, bare = (vector(5, *WORLDS["throughput"], for_training=True) for _ in range(2))
    adapter = Sb3VectorEnv(env)
    adapter.seed(70)
    np.testing.assert_array_equal(adapter.reset(), bare.reset(seed=70)[0])
    num_cuts = 0
    for actions in np.random.default_rng(0).integers(0, len(PROFILE.tiers), (300, 5)):
        observations, rewards, dones, infos = adapter.step(actions)
        assert isinstance(observations, np.ndarray)
        expected, raw, _, cut, details = bare.step(actions)
        np.testing.assert_array_equal(observations, expected)
        np.testing.assert_array_equal(dones, cut)
        np.testing.assert_array_equal(rewards, raw.astype(np.float32))
        np.testing.assert_array_equal(adapter.raw_reward, rewards)
        np.testing.assert_array_equal(adapter.elapsed_s, details["elapsed_s"])
        rewards += 1.0  # PPO adds the value of the last observation in place
        np.testing.assert_array_equal(adapter.raw_reward, raw.astype(np.float32))
        for i, info in enumerate(infos):
            assert set(info) == ({"terminal_observation", "TimeLimit.truncated"} if cut[i] else set())
            if cut[i]:
                num_cuts += 1
                assert info["TimeLimit.truncated"] is True
                np.testing.assert_array_equal(info["terminal_observation"], details["final_obs"][i])
                assert not np.array_equal(info["terminal_observation"], observations[i])
    assert num_cuts > 5


def test_sb3_plays_a_seed_once_and_then_goes_on() -> None:
    adapter = Sb3VectorEnv(vector(3, *WORLDS["throughput"]))
    adapter.seed(7)
    first, second = adapter.reset(), adapter.reset()
    assert not np.array_equal(first, second)
    adapter.seed(7)
    np.testing.assert_array_equal(adapter.reset(), first)
    np.testing.assert_array_equal(adapter.reset(), second)


def test_the_example_in_the_manual_runs() -> None:
    manual = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", manual, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    for env in (names["env"], names["arrivals"]):
        observation, _ = env.reset(seed=0)
        assert observation in env.observation_space
        assert env.step(1)[4]["elapsed_s"] > 0
    assert Sb3VectorEnv(names["envs"].unwrapped).reset().shape[0] == 64
