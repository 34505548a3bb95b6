"""What a training run is made of: servers, acceptance, episodes and what policies are judged by."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from stable_baselines3 import PPO

from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.controller.errors import UserError
from draftdial.controller.features import Features
from draftdial.controller.files import sha256_of
from draftdial.controller.greedy import GoodputGreedy
from draftdial.controller.learned import LearnedPolicy, Network
from draftdial.controller.policy import Policy
from draftdial.controller.policy_card import canonical
from draftdial.controller.rules import Threshold
from draftdial.controller.train_config import TrainConfig
from draftdial.controller.validation import FIRST_SEED, Validation
from draftdial.envs.acceptance import AcceptanceSource
from draftdial.envs.episodes import Episodes, EpisodeSource
from draftdial.envs.fitted_acceptance import FittedAcceptance, random_domains
from draftdial.envs.profile_rows import ProfileRows
from draftdial.envs.random_profiles import random_profile
from draftdial.envs.replayed_acceptance import ReplayedAcceptance
from draftdial.envs.shipped_acceptance import SHIPPED_RECORDINGS, ShippedAcceptance
from draftdial.envs.simulated_engine import ServerOptions
from draftdial.envs.suite import workload_sha256


class Judge(Protocol):
    """Scores policies, see `Validation`."""

    def score(self, policy: Policy) -> float: ...

    def best_threshold(self) -> tuple[Threshold, float]: ...


class Setup:
    """Simulated servers of a configuration."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        named = [CostProfile.load(name) for name in config.profile.names]
        rng = np.random.default_rng([config.seed, 7301])
        drawn = [random_profile(named[i % len(named)], rng) for i in range(config.profile.num_random)]
        self.profiles = [*named, *drawn]
        if len({profile.tiers for profile in named}) > 1:
            found = "; ".join(f"{profile.name} has {profile.tiers}" for profile in named)
            raise UserError(f"train: profile.names: {found}; allowed: profiles with the same tiers")
        self.acceptance = self._source(np.random.default_rng([config.seed, 7302]))
        engine = config.engine
        self.options = ServerOptions(
            off_mode=cast(OffMode, engine.off_mode),
            lag=engine.lag,
            gap_floor=engine.gap_floor,
            mid_flight=config.scenario.mode == "closed",
            ttft_limit_s=engine.ttft_limit_s,
            tpot_limit_s=engine.tpot_limit_s,
        )
        self.hashes = {
            f"profile/{profile.name}": sha256_of(canonical(profile.document).encode()) for profile in named
        } | {"workload/drift5": workload_sha256("drift5")}
        if config.acceptance.kind == "replayed":
            for path in config.acceptance.domains:
                self.hashes[f"acceptance/{Path(path).name}"] = sha256_of(Path(path).read_bytes())
        if isinstance(self.acceptance, ShippedAcceptance):
            self.hashes[f"acceptance/{self.acceptance.name}"] = self.acceptance.sha256

    def episodes(self, num_servers: int, seed: int) -> Episodes:
        """Servers that take turns over the profiles."""
        objective: Any = self.config.objective.name
        return Episodes(
            num_servers, self.profiles, self.acceptance, self.config.scenario, objective, [self.options], seed
        )

    def policy(self, network: Network, num_servers: int = 1) -> LearnedPolicy:
        """`network` on the first profile, or on `num_servers` servers that take turns over all."""
        options = self.options
        return LearnedPolicy(
            Features(
                self._priced(num_servers),
                options.off_mode,
                ttft_limit_s=options.ttft_limit_s,
                tpot_limit_s=options.tpot_limit_s,
            ),
            network,
        )

    def greedy(self, num_servers: int) -> GoodputGreedy:
        """Goodput-greedy on the same servers, each priced by its own profile."""
        return GoodputGreedy(self.profiles[0].tiers, self._priced(num_servers), self.options.off_mode)

    @property
    def num_judged(self) -> int:
        """Servers on which a policy is judged at once."""
        return self.config.ppo.num_validation_episodes

    def judge(self) -> Judge:
        """What scores the policies of the run."""
        episodes = self.episodes(self.num_judged, FIRST_SEED + self.config.seed)
        return Validation(episodes, self.greedy(self.num_judged))

    def training_episodes(self) -> EpisodeSource:
        """What PPO plays."""
        return self.episodes(self.config.ppo.num_servers, self.config.seed)

    def judged(self, model: PPO) -> None:
        """Policies have been scored while `model` was in the midst of its episodes, which were left alone."""

    def close(self) -> None:
        """Nothing is held."""

    def _priced(self, num_servers: int) -> Any:
        profiles = self.profiles
        if num_servers == 1:
            return profiles[0]
        return ProfileRows([profiles[i % len(profiles)] for i in range(num_servers)])

    def _source(self, rng: np.random.Generator) -> AcceptanceSource:
        acceptance = self.config.acceptance
        if acceptance.kind == "replayed":
            return ReplayedAcceptance(acceptance.domains)
        if acceptance.kind == "fitted":
            return FittedAcceptance(acceptance.domains, acceptance.num_arrays)
        if acceptance.kind in SHIPPED_RECORDINGS:
            return ShippedAcceptance(acceptance.kind)
        return random_domains(rng, acceptance.num_domains, acceptance.num_arrays)
