"""`draftdial train`: PPO on simulated servers, and the best policy it found as one file."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.features import HALF_LIVES_SAMPLES, Features
from draftdial.controller.files import atomic_write, sha256_of
from draftdial.controller.greedy import GoodputGreedy
from draftdial.controller.learned import LearnedPolicy, Network
from draftdial.controller.policy_card import Training, canonical
from draftdial.controller.policy_export import learned_file
from draftdial.controller.policy_file import write
from draftdial.controller.ppo import AdvicePolicy, SemiMarkovRolloutBuffer, network_of
from draftdial.controller.rules import FixedK
from draftdial.controller.run_folder import RunProgress, load_checkpoint, save_checkpoint
from draftdial.controller.train_config import TrainConfig, load_config
from draftdial.controller.validation import FIRST_SEED, Validation
from draftdial.envs.acceptance import AcceptanceSource
from draftdial.envs.episodes import Episodes
from draftdial.envs.fitted_acceptance import FittedAcceptance, random_domains
from draftdial.envs.profile_rows import ProfileRows
from draftdial.envs.random_profiles import random_profile
from draftdial.envs.replayed_acceptance import ReplayedAcceptance
from draftdial.envs.shipped_acceptance import SHIPPED_RECORDINGS, ShippedAcceptance
from draftdial.envs.simulated_engine import ServerOptions
from draftdial.envs.suite import workload_sha256
from draftdial.envs.vector_env import Sb3VectorEnv, SpeculationVectorEnv

PACKAGES = ("draftdial", "torch", "stable-baselines3", "gymnasium", "numpy", "numba", "hydra-core")
TRAINING_FIRST_SEED = 10_000_000
"""Training episodes have the seeds from here on: above those of tuning, validation and reports."""
LEAST_RATE_SHARE = 0.05
"""The learning rate falls linearly to this share: PPO's last update comes when nothing remains."""
TRAINING_SEED_STRIDE = 1_000_000


def main(overrides: Sequence[str], as_json: bool = False, folder: Path | None = None) -> Path:
    """Train as conf/train.yaml with `overrides` says; returns the run's folder.

    Raises:
        UserError: before anything is written, if the configuration is wrong.
    """
    config, text = load_config(overrides)
    torch.set_num_threads(1)  # the networks are small: more threads only wait for each other
    setup = _Setup(config)
    command = shlex.join(["draftdial", "train", *overrides])
    training = Training(text, command, config.seed, setup.hashes, _versions())
    folder = folder or Path("runs", *datetime.now().strftime("%Y-%m-%d/%H-%M-%S").split("/"))
    run = _Run(config, setup, folder, training)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "config.yaml", text)
    atomic_write(folder / "command.txt", command + "\n")
    atomic_write(folder / "versions.json", json.dumps(_versions(), indent=1) + "\n")
    run.learn()
    if as_json:
        print(json.dumps({"run_dir": str(folder), "policy": str(folder / "policy.safetensors")}))
    return folder


class _Setup:
    """Servers, acceptance and episodes of a configuration."""

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
            off_mode="skip" if engine.off_mode == "skip" else "warm",
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

    def policy(self, network: Network, num_servers: int | None = None) -> LearnedPolicy:
        """`network` on the first profile, or on `num_servers` servers that take turns over all."""
        profiles = self.profiles
        priced = (
            profiles[0]
            if num_servers is None
            else ProfileRows([profiles[i % len(profiles)] for i in range(num_servers)])
        )
        options = self.options
        return LearnedPolicy(
            Features(
                priced,
                options.off_mode,
                ttft_limit_s=options.ttft_limit_s,
                tpot_limit_s=options.tpot_limit_s,
            ),
            network,
        )

    def greedy(self, num_servers: int) -> GoodputGreedy:
        """Goodput-greedy on the same servers, each priced by its own profile."""
        profiles: Any = ProfileRows([self.profiles[i % len(self.profiles)] for i in range(num_servers)])
        return GoodputGreedy(profiles.tiers, profiles, self.options.off_mode)

    def _source(self, rng: np.random.Generator) -> AcceptanceSource:
        acceptance = self.config.acceptance
        if acceptance.kind == "replayed":
            return ReplayedAcceptance(acceptance.domains)
        if acceptance.kind == "fitted":
            return FittedAcceptance(acceptance.domains, acceptance.num_arrays)
        if acceptance.kind in SHIPPED_RECORDINGS:
            return ShippedAcceptance(acceptance.kind)
        return random_domains(rng, acceptance.num_domains, acceptance.num_arrays)


class _Run:
    """One run: PPO, its evaluations, and what it leaves in its folder."""

    def __init__(self, config: TrainConfig, setup: _Setup, folder: Path, training: Training) -> None:
        self.config, self.setup, self.folder, self.training = config, setup, folder, training
        ppo = config.ppo
        self.model = _model(config, setup)
        greedy = setup.greedy(ppo.num_validation_episodes)
        self.validation = Validation(
            setup.episodes(ppo.num_validation_episodes, FIRST_SEED + config.seed), greedy
        )
        self.reference = {
            "off": self.validation.score(FixedK(setup.profiles[0].tiers, 0)),
            "greedy": self.validation.score(greedy),
        }
        self.fallback, self.reference["threshold"] = self.validation.best_threshold()
        self.progress = RunProgress(self.reference)
        if config.resume is not None:
            self.progress = load_checkpoint(Path(config.resume), self.model, self.reference)

    def learn(self) -> None:
        """Train to the end, or to Ctrl-C; the best policy so far is exported either way."""
        self.model.set_logger(configure(str(self.folder), ["csv", "tensorboard"]))
        if not self.progress.evaluations:
            self._evaluate()
        remaining = self.config.ppo.total_rounds - self.model.num_timesteps
        with self.progress.bar(self.config.ppo.total_rounds) as bar:
            try:
                if remaining > 0:
                    callback = _Evaluations(self, bar)
                    self.model.learn(remaining, callback, reset_num_timesteps=False)
                    self._evaluate()
            except KeyboardInterrupt:
                print("draftdial train: interrupted; exporting the best policy so far", file=sys.stderr)
        self._save()

    def evaluate_and_save(self) -> None:
        """An evaluation on the way, and a checkpoint to go on from."""
        self._evaluate()
        self._save()

    def _save(self) -> None:
        save_checkpoint(self.folder, self.model, self.progress)
        self._export()

    def _evaluate(self) -> None:
        network = network_of(self.model.policy)
        score = self.validation.score(self.setup.policy(network, self.config.ppo.num_validation_episodes))
        self.progress.add(self.model.num_timesteps, score, network)
        self.model.logger.record("eval/score", score)
        for rival, of_rival in self.reference.items():
            self.model.logger.record(f"eval/gain_over_{rival}", score - of_rival)
        self.model.logger.dump(self.model.num_timesteps)
        atomic_write(self.folder / "evaluations.json", json.dumps(self.progress.record(), indent=1) + "\n")

    def _export(self) -> None:
        best = self.progress.best
        file = learned_file(
            self.setup.policy(best.network),
            name=self.config.name,
            fallback=self.fallback,
            training=self.training,
            evaluation=self.progress.record(),
        )
        write(self.folder / "policy.safetensors", file)


class _Evaluations(BaseCallback):
    """Evaluates a few times over a run and keeps the progress bar moving."""

    def __init__(self, run: _Run, bar: Any) -> None:
        super().__init__()
        self._run = run
        self._bar = bar
        ppo = run.config.ppo
        self._interval = ppo.total_rounds / ppo.num_evaluations
        self._next = (int(run.model.num_timesteps / self._interval) + 1) * self._interval

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self._bar(self.num_timesteps)
        if self._next <= self.num_timesteps < self._run.config.ppo.total_rounds:
            self._next += self._interval
            self._run.evaluate_and_save()


def _model(config: TrainConfig, setup: _Setup) -> PPO:
    ppo = config.ppo
    env = Sb3VectorEnv(SpeculationVectorEnv(setup.episodes(ppo.num_servers, config.seed), for_training=True))
    env.seed(TRAINING_FIRST_SEED + config.seed * TRAINING_SEED_STRIDE)
    shares = (0.2, 0.4, 0.3, 0.1)
    assert len(shares) == len(HALF_LIVES_SAMPLES)
    return PPO(
        AdvicePolicy,
        env,
        n_steps=ppo.rounds_per_update,
        batch_size=min(ppo.batch_size, ppo.num_servers * ppo.rounds_per_update),
        n_epochs=ppo.num_epochs,
        learning_rate=lambda remaining: ppo.learning_rate * max(remaining, LEAST_RATE_SHARE),
        gamma=1.0,  # the buffer discounts by time
        gae_lambda=ppo.gae_lambda,
        clip_range=ppo.clip_range,
        ent_coef=0.0,
        rollout_buffer_class=SemiMarkovRolloutBuffer,
        rollout_buffer_kwargs={"env": env, "tau_s": ppo.tau_s},
        policy_kwargs={"width": ppo.width, "sharpness": ppo.sharpness, "advice_shares": shares},
        seed=config.seed,
        device="cpu",
    )


def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


def add_parser(subparsers: Any) -> None:
    """`draftdial train [--json] [OVERRIDE ...]`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train", help="train a policy; overrides use Hydra's syntax (docs/training.md)"
    )
    parser.add_argument("overrides", nargs="*", metavar="group.key=value", help="see conf/train.yaml")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=_train_command)


def _train_command(args: argparse.Namespace) -> int:
    folder = main(args.overrides, args.json)
    if not args.json:
        print(f"policy: {folder / 'policy.safetensors'}")
    return 0
