"""One real server as a Gymnasium environment."""

from __future__ import annotations

from draftdial.controller.bench_loads import Asking
from draftdial.controller.cost_profile import CostProfile
from draftdial.envs.acceptance import AcceptanceSource
from draftdial.envs.fitted_acceptance import FittedAcceptance
from draftdial.envs.live_episodes import LiveEpisodes
from draftdial.envs.live_server import LiveServer
from draftdial.envs.scenario import Scenario
from draftdial.envs.simulated_engine import ServerOptions
from draftdial.envs.speculation_env import EpisodeEnv


class LiveSpeculationEnv(EpisodeEnv):
    """
    ## Description
    `SpeculationEnv` on a real SGLang server, which asks for k before each decode round and waits up to 5 s
    for it (docs/training.md). The server must be on this host and serve nobody else.

    ## Action Space, Observation Space
    Those of `SpeculationEnv`.

    ## Rewards
    The par time of the tokens that a round brought minus its measured time, without what the server waited
    for k, in units of 10 ms or so: paid as soon as both are known, which may be a step later.

    ## Starting State
    A closed loop of a random concurrency, with all its first requests just prefilled.

    ## Episode End
    1. Termination: never.
    2. Truncation: after `scenario.rounds` decode rounds, when the list of requests is served, or after an
       answer that came too late.

    ## Arguments
    | Parameter | Type | Default | Description |
    |-----------|------|---------|-------------|
    | `url` | `str` | | a server that `DRAFTDIAL_LIVE=SOCKET draftdial serve` started |
    | `profile` | `str` | `"h200-llama3-8b"` | its cost profile: for features and par |
    | `acceptance` | `AcceptanceSource` | the fitted model | for the par; what the server replays, if any |
    | `scenario` | `Scenario` | closed loop, 1 to 256 requests | the law of the episodes |
    | `options` | `ServerOptions` | off warm | what k = 0 does there, limits |
    | `asking` | `Asking` | random token ids | what is asked |

    ## Version History
    * v0: first version.
    """

    def __init__(
        self,
        url: str,
        profile: str = "h200-llama3-8b",
        acceptance: AcceptanceSource | None = None,
        scenario: Scenario = Scenario(),  # noqa: B008
        options: ServerOptions = ServerOptions(),  # noqa: B008
        asking: Asking = Asking(),  # noqa: B008
    ) -> None:
        source = acceptance or FittedAcceptance()
        self.episodes = LiveEpisodes(
            LiveServer(url), CostProfile.load(profile), source, scenario, options, asking
        )
        super().__init__(self.episodes)

    def close(self) -> None:
        """Leave the server to its own policy."""
        self.episodes.close()
