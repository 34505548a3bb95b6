"""One server as a Gymnasium environment."""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from draftdial.controller.cost_profile import CostProfile
from draftdial.envs.acceptance import AcceptanceSource
from draftdial.envs.episodes import Episodes, EpisodeSource
from draftdial.envs.fitted_acceptance import FittedAcceptance
from draftdial.envs.objectives import ObjectiveName
from draftdial.envs.scenario import Scenario
from draftdial.envs.simulated_engine import ServerOptions

BOUND = 32.0
"""No scaled feature comes near it: logarithms of counts, shares and log speed-ups."""


class EpisodeEnv(gym.Env[NDArray[np.float32], np.int64]):
    """One server as an environment, simulated or real."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, episodes: EpisodeSource) -> None:
        self.tiers = episodes.tiers
        self.features = episodes.features
        observation_space, self.action_space = spaces_of(episodes)
        self.observation_space = cast("spaces.Space[NDArray[np.float32]]", observation_space)
        self._episodes = episodes

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start the episode of `seed`, or a random one."""
        super().reset(seed=seed)
        episode = seed if seed is not None else int(self.np_random.integers(2**62))
        self._episodes.begin(np.array([0]), [episode])
        return self._episodes.observe()[0], {"elapsed_s": 0.0}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        step = self._episodes.advance(np.array([action], np.int64))
        info = {"elapsed_s": float(step.elapsed_s[0])}
        return self._episodes.observe()[0], float(step.reward[0]), False, bool(step.cut[0]), info


class SpeculationEnv(EpisodeEnv):
    """
    ## Description
    A server decodes a batch of requests with a draft model that may guess ahead. Before every decode
    round the agent chooses how many draft tokens to use, 0 for none. More tokens commit more output
    when the draft guesses well and cost more time when many requests run. The server is a simulation
    of SGLang with EAGLE-3 (docs/simulator.md) priced by a measured profile (docs/profiles.md).

    ## Action Space
    `Discrete(num_tiers)`: the index of the tier; tier i uses `env.unwrapped.tiers[i]` draft tokens per
    request. Index 0 is k = 0.

    ## Observation Space
    `Box(-32, 32, (num_features,), float32)`, scaled by fixed constants:

    | Num | Observation | Unit before scaling |
    |-----|-------------|---------------------|
    | 0.. | load, context, queue, trend, ages | `env.unwrapped.features.table` names every entry, |
    | ..  | evidence and acceptance by memory and depth | its unit, its transform |
    | ..  | advice: predicted log speed-up per tier | and its scale |

    ## Rewards
    `throughput` (default): the par time of the tokens that the round is expected to commit minus the
    round's time and what prefills after it cost beyond their tokens, in units of 10 ms. `latency`: minus
    the requests in the system beyond those under goodput-greedy, integrated over the step, in units of
    10 ms. `slo`: minus the requests that finished outside their TTFT or TPOT limit. Steps last differently
    long: discount by `info["elapsed_s"]`.

    ## Starting State
    A closed loop starts mid-flight at a random concurrency, an open loop empty; both at the first
    decode round that is due.

    ## Episode End
    1. Termination: never.
    2. Truncation: after `scenario.rounds` decode rounds, or when the list of requests is served.

    ## Arguments
    | Parameter | Type | Default | Description |
    |-----------|------|---------|-------------|
    | `profile` | `str` | `"h200-llama3-8b"` | name or path of a cost profile |
    | `acceptance` | `AcceptanceSource` | the fitted model | how well the draft guesses |
    | `scenario` | `Scenario` | closed loop, 1 to 256 requests | the law of the episodes |
    | `objective` | `str` | `"throughput"` | `throughput`, `latency` or `slo` |
    | `options` | `ServerOptions` | lag 2, off warm | the server's behaviour |

    ## Vectorized environment
    `gym.make_vec("draftdial/Speculation-v0", num_envs=...)` gives `SpeculationVectorEnv`.

    ## Version History
    * v0: first version.
    """

    def __init__(
        self,
        profile: str = "h200-llama3-8b",
        acceptance: AcceptanceSource | None = None,
        scenario: Scenario = Scenario(),  # noqa: B008
        objective: ObjectiveName = "throughput",
        options: ServerOptions = ServerOptions(mid_flight=True),  # noqa: B008
    ) -> None:
        source = acceptance or FittedAcceptance()
        self.episodes = Episodes(1, [CostProfile.load(profile)], source, scenario, objective, [options])
        super().__init__(self.episodes)


def spaces_of(episodes: EpisodeSource, num_hidden: int = 0) -> tuple[spaces.Box, spaces.Discrete]:
    """Observation and action space of one server, with `num_hidden` columns more for a critic."""
    num_columns = len(episodes.features.table) + num_hidden
    return (
        spaces.Box(-BOUND, BOUND, (num_columns,), np.float32),
        spaces.Discrete(len(episodes.tiers)),
    )
