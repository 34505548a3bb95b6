"""`draftdial train`: PPO on simulated servers, and the best policy it found as one file."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure

from draftdial.controller.errors import UserError
from draftdial.controller.features import HALF_LIVES_SAMPLES
from draftdial.controller.files import atomic_write
from draftdial.controller.interrupts import unmasked
from draftdial.controller.policy_card import Training
from draftdial.controller.policy_export import learned_file
from draftdial.controller.policy_file import write
from draftdial.controller.ppo import AdvicePolicy, SemiMarkovRolloutBuffer, network_of
from draftdial.controller.progress_lines import ProgressLines
from draftdial.controller.rules import FixedK
from draftdial.controller.run_folder import Evaluation, RunProgress, load_checkpoint, save_checkpoint
from draftdial.controller.train_command import nothing_to_keep
from draftdial.controller.train_config import TrainConfig, load_config, resumed_kind
from draftdial.controller.train_setup import Setup
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
    with ExitStack() as stack:
        with nothing_to_keep():
            config, text = load_config(overrides)
            torch.set_num_threads(1)  # the networks are small: more threads only wait for each other
            command = shlex.join(["draftdial", "train", *overrides])
            setup = stack.enter_context(closing(_setup(config)))
            training = Training(text, command, config.seed, setup.hashes, _versions())
            run = _Run(config, setup, training, folder)
        run.learn()
    if as_json:
        print(json.dumps({"run_dir": str(run.folder), "policy": str(run.folder / "policy.safetensors")}))
    return run.folder


def _made(folder: Path | None) -> Path:
    """`folder`, or one named by the time that no other run has."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    while True:
        folder = Path("runs", *datetime.now().strftime("%Y-%m-%d/%H-%M-%S").split("/"))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            time.sleep(0.1)  # runs that began together, as with several seeds at once
        else:
            return folder


class _Run:
    """One run: PPO, its evaluations, and what it leaves in its folder."""

    def __init__(self, config: TrainConfig, setup: Setup, training: Training, folder: Path | None) -> None:
        """Its folder is made once the untrained policy is evaluated: from then on there is one to keep."""
        self.config, self.setup, self.training = config, setup, training
        self.model = _model(config, setup)
        evaluations: list[Evaluation] = []
        if config.resume is not None:
            evaluations = load_checkpoint(Path(config.resume), self.model)
            if resumed_kind(config) != config.engine.kind:
                # Scores of the simulator and of a server do not compare, nor do their rounds.
                self.model.num_timesteps, evaluations = 0, []
        ProgressLines("train").say("scoring the rules that it is compared with")
        self.judge = setup.judge()
        self.reference = {
            "off": self.judge.score(FixedK(setup.profiles[0].tiers, 0)),
            "greedy": self.judge.score(setup.greedy(setup.num_judged)),
        }
        self.fallback, self.reference["threshold"] = self.judge.best_threshold()
        self.progress = RunProgress(self.reference, evaluations)
        if not evaluations:
            self._score()
        self.folder = _made(folder)

    def learn(self) -> None:
        """Train to the end, or to Ctrl-C; the best policy so far is exported either way."""
        try:
            with unmasked():
                self._begin()
                self._train()
        except KeyboardInterrupt:
            print("draftdial train: interrupted; exporting the best policy so far", file=sys.stderr)
        except UserError:  # a live server is gone: what was learned on it is kept
            self._save()
            raise
        self._save()

    def _begin(self) -> None:
        """Write what the run is made of, and where it starts."""
        atomic_write(self.folder / "config.yaml", self.training.config)
        atomic_write(self.folder / "command.txt", self.training.command + "\n")
        atomic_write(self.folder / "versions.json", json.dumps(self.training.versions, indent=1) + "\n")
        self.model.set_logger(configure(str(self.folder), ["csv", "tensorboard"]))
        self._record()

    def _train(self) -> None:
        remaining = self.config.ppo.total_rounds - self.model.num_timesteps
        with self.progress.bar(self.config.ppo.total_rounds) as bar:
            if remaining > 0:
                self.model.learn(remaining, _Evaluations(self, bar), reset_num_timesteps=False)
                self._score()
                self._record()

    def evaluate_and_save(self) -> None:
        """An evaluation on the way, and a checkpoint to go on from."""
        self._score()
        self._record()
        self._save()
        self.setup.judged(self.model)

    def _save(self) -> None:
        save_checkpoint(self.folder, self.model, self.progress)
        self._export()

    def _score(self) -> None:
        """Evaluate the policy as it is now."""
        network = network_of(self.model.policy)
        score = self.judge.score(self.setup.policy(network, self.setup.num_judged))
        self.progress.add(self.model.num_timesteps, score, network)

    def _record(self) -> None:
        """Write the newest evaluation to the logs, and all of them to `evaluations.json`."""
        newest = self.progress.evaluations[-1]
        self.model.logger.record("eval/score", newest.score)
        for rival, of_rival in self.reference.items():
            self.model.logger.record(f"eval/gain_over_{rival}", newest.score - of_rival)
        self.model.logger.dump(newest.num_rounds)
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


def _setup(config: TrainConfig) -> Setup:
    if config.engine.kind == "simulated":
        return Setup(config)
    from draftdial.controller.train_live import LiveSetup

    return LiveSetup(config)


def _model(config: TrainConfig, setup: Setup) -> PPO:
    ppo = config.ppo
    env = Sb3VectorEnv(SpeculationVectorEnv(setup.training_episodes(), for_training=True))
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
