"""The scalar environment: Gymnasium's contract, seeds, and how its episodes end."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import draftdial.envs
from draftdial.controller.signals import FloatArray
from draftdial.envs.fitted_acceptance import FittedAcceptance
from draftdial.envs.objectives import ObjectiveName
from draftdial.envs.scenario import Scenario
from draftdial.envs.simulated_engine import ServerOptions
from draftdial.envs.speculation_env import BOUND, SpeculationEnv
from draftdial.envs.workload import RequestList

gym.register_envs(draftdial.envs)
ID = "draftdial/Speculation-v0"
OPEN = Scenario(mode="open", lengths="short-chat", rounds=64)
SOURCE = FittedAcceptance(num_arrays=32)
WORLDS: dict[ObjectiveName, dict[str, Any]] = {
    "throughput": {"scenario": Scenario(rounds=64)},
    "latency": {"scenario": OPEN, "options": ServerOptions()},
    "slo": {"scenario": OPEN, "options": ServerOptions(ttft_limit_s=0.1)},
}


@dataclass(frozen=True)
class ShortLists(Scenario):
    """Closed loops whose few requests are served before the rounds are over."""

    num_requests: int = 12

    def draw(self, seed: int, num_domains: int, capacity: FloatArray) -> RequestList:
        requests = super().draw(seed, num_domains, capacity)
        arrays = {
            name: value[: self.num_requests]
            for name, value in vars(requests).items()
            if isinstance(value, np.ndarray)
        }
        return RequestList(mode=requests.mode, warmup=0, **arrays)


def make(objective: ObjectiveName = "throughput", **changes: Any) -> SpeculationEnv:
    arguments: Mapping[str, Any] = {"acceptance": SOURCE, **WORLDS[objective], **changes}
    env = gym.make(ID, objective=objective, **arguments)
    return cast("SpeculationEnv", env.unwrapped)


def play(env: SpeculationEnv, seed: int | None, num_steps: int = 40) -> list[tuple[Any, ...]]:
    """What an episode of made-up actions shows, as comparable values."""
    observation, info = env.reset(seed=seed)
    shown: list[tuple[Any, ...]] = [(observation.tobytes(), info)]
    for action in np.random.default_rng(5).integers(0, len(env.tiers), num_steps):
        observation, reward, terminated, truncated, info = env.step(action)
        shown.append((observation.tobytes(), reward, terminated, truncated, info))
    return shown


@pytest.mark.parametrize("objective", WORLDS)
def test_gymnasiums_checker_has_nothing_to_say(objective: ObjectiveName) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(objective))


def test_it_is_registered_by_importing_the_package_and_by_the_module_in_the_id() -> None:
    code = f"import gymnasium; print(gymnasium.make('draftdial.envs:{ID}').unwrapped.tiers)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "(0, 1, 2, 3, 5, 7)", done.stderr


def test_the_simulator_imports_without_gymnasium() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('gymnasium', 'torch', 'stable_baselines3')))\n"
        "import draftdial.envs.simulated_engine, draftdial.envs.fitted_acceptance, draftdial.envs.evaluate"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("objective", WORLDS)
def test_a_seed_fixes_the_episode_and_another_one_changes_it(objective: ObjectiveName) -> None:
    env = make(objective)
    first = play(env, seed=3)
    assert play(env, seed=3) == first, "the same seed on the same environment"
    assert play(make(objective), seed=3) == first, "the same seed on a fresh environment"
    assert play(env, seed=4)[0] != first[0], "another seed starts elsewhere"


def test_episodes_without_a_seed_follow_from_the_last_seed() -> None:
    env = make()
    env.reset(seed=8)
    unseeded = [play(env, None), play(env, None)]
    assert unseeded[0][0] != unseeded[1][0], "every unseeded episode is another one"
    env.reset(seed=8)
    assert [play(env, None), play(env, None)] == unseeded


@pytest.mark.parametrize("objective", WORLDS)
def test_episodes_are_cut_after_their_rounds_and_never_terminate(objective: ObjectiveName) -> None:
    env = make(objective)
    env.reset(seed=0)
    steps = [env.step(np.int64(1)) for _ in range(64)]
    assert [step[3] for step in steps] == [False] * 63 + [True]
    assert not any(step[2] for step in steps)


def test_an_episode_is_cut_too_when_its_requests_are_served() -> None:
    env = make(scenario=ShortLists(low=2, high=2, rounds=100_000))
    env.reset(seed=0)
    num_steps = 0
    truncated = terminated = False
    while not truncated:
        *_, terminated, truncated, _ = env.step(np.int64(3))
        num_steps += 1
        assert num_steps < 5_000
    assert env.episodes.engine.servers["done"][0] and not terminated


def test_elapsed_time_is_what_the_server_clock_advanced() -> None:
    env = make("latency")
    env.reset(seed=2)
    for action in (0, 3, 3, 5, 0):
        before = float(env.episodes.engine.servers["clock_s"][0])
        *_, info = env.step(np.int64(action))
        after = float(env.episodes.engine.servers["clock_s"][0])
        assert info == {"elapsed_s": pytest.approx(after - before, abs=1e-12)}
        assert info["elapsed_s"] > 0


@pytest.mark.parametrize("high", [1, 256])
def test_features_stay_far_inside_the_bounds_of_the_space(high: int) -> None:
    # Bounds that bite would hide a wrong scale behind a clip or a warning of a checker.
    overload = Scenario(mode="open", utilisation_low=3.0, utilisation_high=3.0, rounds=256)
    for scenario in (Scenario(low=high, high=high, rounds=256), overload):
        env = make(scenario=scenario, options=ServerOptions(mid_flight=scenario.mode == "closed"))
        env.reset(seed=high)
        for action in np.random.default_rng(0).integers(0, len(env.tiers), 256):
            observation, *_ = env.step(action)
            assert np.abs(observation).max() < BOUND / 8
    assert env.observation_space.shape == (len(env.features.table),)


def test_the_docstring_has_gymnasiums_headings() -> None:
    headings = (
        "Description",
        "Action Space",
        "Observation Space",
        "Rewards",
        "Starting State",
        "Episode End",
        "Arguments",
        "Vectorized environment",
        "Version History",
    )
    found = [line.strip()[3:] for line in (SpeculationEnv.__doc__ or "").splitlines() if "## " in line]
    assert tuple(found) == headings
