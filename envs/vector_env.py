"""Many servers behind one Gymnasium vector environment, and the bridge to Stable-Baselines3."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from draftdial.envs.episodes import EpisodeSource
from draftdial.envs.speculation_env import spaces_of


class SpeculationVectorEnv(gym.vector.VectorEnv[NDArray[np.float32], NDArray[np.int64], Any]):
    """`SpeculationEnv` for `num_envs` servers at once; row i equals a scalar environment.

    Episodes restart in the step that cuts them (SAME_STEP); `infos["final_obs"]` then holds the
    last observations, `infos["_final_obs"]` which rows were cut, and `infos["elapsed_s"]` always
    the time each step took.

    With `for_training`, `num_tiers` columns more hold `Episodes.gains`, which only a critic may use, and
    the first episodes differ in length, so that rows do not all restart together.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, episodes: EpisodeSource, for_training: bool = False) -> None:
        self.num_envs = episodes.num_servers
        self.episodes = episodes
        num_hidden = len(episodes.tiers) if for_training else 0
        self.single_observation_space, self.single_action_space = spaces_of(episodes, num_hidden)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._for_training = for_training
        self._next_seed = 0

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start every row over; row i of `seed` s plays the episode of seed s + i."""
        super().reset(seed=seed if isinstance(seed, int) else None)
        if isinstance(seed, list):
            seeds = [int(self.np_random.integers(2**62)) if one is None else one for one in seed]
        else:
            first = int(self.np_random.integers(2**62)) if seed is None else seed
            seeds = list(range(first, first + self.num_envs))
        self._next_seed = seeds[-1] + 1
        self.episodes.begin(np.arange(self.num_envs), seeds)
        if self._for_training:
            groups = np.arange(self.num_envs) * 8 // self.num_envs
            self.episodes.rounds_left -= groups * self.episodes.scenario.rounds // 8
        return self._observe(), {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[
        NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]
    ]:
        step = self.episodes.advance(actions)
        cut = step.cut
        observation = self._observe()
        infos: dict[str, Any] = {"elapsed_s": step.elapsed_s}
        if cut.any():
            rows = np.flatnonzero(cut)
            infos |= {"final_obs": observation, "_final_obs": cut}
            self.episodes.begin(rows, range(self._next_seed, self._next_seed + len(rows)))
            self._next_seed += len(rows)
            observation = self._observe()
        return observation, step.reward, np.zeros(self.num_envs, np.bool_), cut, infos

    def _observe(self) -> NDArray[np.float32]:
        observation = self.episodes.observe()
        if not self._for_training:
            return observation
        return np.concatenate([observation, self.episodes.gains().astype(np.float32)], axis=1)


class Sb3VectorEnv(VecEnv):
    """A `SpeculationVectorEnv` as Stable-Baselines3 wants it: four-tuples, a list of infos.

    `elapsed_s` and `raw_reward`, each `(num_envs,)`, describe the last step; the rollout buffer reads
    them to discount by time.
    """

    def __init__(self, env: SpeculationVectorEnv) -> None:
        self.env = env
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self.elapsed_s = np.zeros(env.num_envs)
        self.raw_reward = np.zeros(env.num_envs, np.float32)
        self._actions: NDArray[np.int64] = np.zeros(env.num_envs, np.int64)
        self._no_infos: list[dict[str, Any]] = [{} for _ in range(env.num_envs)]

    def reset(self) -> NDArray[np.float32]:
        seed = self._seeds[0]
        self._reset_seeds()
        return self.env.reset(seed=seed)[0]

    def step_async(self, actions: NDArray[np.int64]) -> None:
        self._actions = actions

    def step_wait(
        self,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        observation, reward, _, cut, infos = self.env.step(self._actions)
        self.elapsed_s = infos["elapsed_s"]
        self.raw_reward = reward.astype(np.float32)
        per_env = self._no_infos
        if cut.any():
            per_env = [
                {"terminal_observation": infos["final_obs"][i], "TimeLimit.truncated": True} if cut[i] else {}
                for i in range(self.num_envs)
            ]
        return observation, self.raw_reward.copy(), cut, per_env

    def close(self) -> None:
        self.env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.env, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("the servers of a vector environment share their attributes")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError("the servers of a vector environment share their methods")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))
