"""What `gym.make_vec("draftdial/Speculation-v0", num_envs=...)` calls."""

from __future__ import annotations

from draftdial.controller.cost_profile import CostProfile
from draftdial.envs.acceptance import AcceptanceSource
from draftdial.envs.episodes import Episodes
from draftdial.envs.fitted_acceptance import FittedAcceptance
from draftdial.envs.objectives import ObjectiveName
from draftdial.envs.scenario import Scenario
from draftdial.envs.simulated_engine import ServerOptions
from draftdial.envs.vector_env import SpeculationVectorEnv


def make_vector(
    num_envs: int,
    profile: str = "h200-llama3-8b",
    acceptance: AcceptanceSource | None = None,
    scenario: Scenario = Scenario(),  # noqa: B008
    objective: ObjectiveName = "throughput",
    options: ServerOptions = ServerOptions(mid_flight=True),  # noqa: B008
) -> SpeculationVectorEnv:
    """`num_envs` servers; the other arguments are `SpeculationEnv`'s."""
    source = acceptance or FittedAcceptance()
    return SpeculationVectorEnv(
        Episodes(num_envs, [CostProfile.load(profile)], source, scenario, objective, [options])
    )
