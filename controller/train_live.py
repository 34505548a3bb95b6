"""Training on a real server in lockstep: `draftdial train engine=live`."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3 import PPO

from draftdial.controller.bench_loads import Asking
from draftdial.controller.errors import UserError
from draftdial.controller.launched_server import LaunchedServer
from draftdial.controller.policy import Policy
from draftdial.controller.policy_export import rule_file
from draftdial.controller.policy_file import write
from draftdial.controller.rules import FixedK, Threshold
from draftdial.controller.train_config import TrainConfig
from draftdial.controller.train_setup import Judge, Setup
from draftdial.controller.validation import FIRST_SEED, Validation
from draftdial.engine_patch.settings import LIVE
from draftdial.envs.episodes import EpisodeSource
from draftdial.envs.live_episodes import LiveEpisodes
from draftdial.envs.live_server import LiveServer

SIMULATED_EPISODES = 64
"""On which the fallback is chosen among all thresholds; it is scored on the server as the others are."""


class LiveSetup(Setup):
    """One real server, on which PPO learns and policies are judged in turn; simulation chooses the fallback.

    Raises:
        UserError: from every method: the server is gone.
    """

    def __init__(self, config: TrainConfig) -> None:
        """Claim the server of the configuration, or start it.

        Raises:
            UserError: it is not live, has other tiers than the profile, or does not start.
        """
        super().__init__(config)
        self._stack = ExitStack()
        try:
            server = LiveServer(config.engine.url or self._launched())
            self._stack.callback(server.close)
            server.claim()
            tokenizer = config.engine.tokenizer
            asking = Asking.read(
                Path(config.engine.prompts) if config.engine.prompts else None,
                Path(tokenizer) if tokenizer else None,
            )
            self._live = LiveEpisodes(
                server,
                self.profiles[0],
                self.acceptance,
                config.scenario,
                self.options,
                asking,
                config.seed,
            )
            self._stack.callback(self._live.close)
        except BaseException:
            self._stack.close()
            raise

    @property
    def num_judged(self) -> int:
        return 1

    def judge(self) -> Judge:
        simulated = self.episodes(SIMULATED_EPISODES, FIRST_SEED + self.config.seed)
        thresholds = Validation(simulated, self.greedy(SIMULATED_EPISODES))
        return LiveValidation(self._live, self.config.ppo.num_validation_episodes, thresholds)

    def training_episodes(self) -> EpisodeSource:
        return self._live

    def judged(self, model: PPO) -> None:
        """Judging took the server: PPO goes on with a new episode."""
        vector: Any = model.env
        model._last_obs = vector.reset()
        model._last_episode_starts = np.ones(1, np.bool_)

    def close(self) -> None:
        """Leave the server, and end it if it was started here."""
        self._stack.close()

    def _launched(self) -> str:
        """URL of a server started with `engine.command`."""
        profile, off_mode = self.profiles[0], self.options.off_mode
        try:
            arguments = shlex.split(self.config.engine.command or "")
        except ValueError as error:
            found = self.config.engine.command
            raise UserError(f"engine.command: found {found}, allowed: SGLang's arguments ({error})") from None
        folder = Path(tempfile.mkdtemp(prefix="draftdial-live-"))
        fallback = Threshold(profile.tiers, k=0, batch=0)
        rule = rule_file(FixedK(profile.tiers, 0), profile, off_mode, name="live", fallback=fallback)
        write(folder / "start.safetensors", rule)
        launched = LaunchedServer(
            folder / "start.safetensors",
            arguments,
            folder / "server.log",
            {LIVE: str(folder / "live.sock")},
        )
        try:
            url = self._stack.enter_context(launched).url
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)  # kept where it did not start
        return url


class LiveValidation:
    """The same episodes for everybody, one after the other on the server.

    A score is as in `Validation`: reward per second of measured time. The episodes are few, and so is the
    time of each: scores of the same policy differ by some per cent.
    """

    def __init__(self, episodes: LiveEpisodes, num_episodes: int, thresholds: Validation) -> None:
        self._episodes = episodes
        self._seeds = range(FIRST_SEED, FIRST_SEED + num_episodes)
        self._thresholds = thresholds

    def score(self, policy: Policy) -> float:
        """Mean reward per second over all episodes."""
        return float(np.mean([self._play(policy, seed) for seed in self._seeds]))

    def best_threshold(self) -> tuple[Threshold, float]:
        """The threshold rule that simulation finds best, and its score on the server."""
        rule, _ = self._thresholds.best_threshold()
        return rule, self.score(rule)

    def _play(self, policy: Policy, seed: int) -> float:
        episodes = self._episodes
        tiers = np.array(episodes.tiers, np.int64)
        policy.reset(1)
        episodes.begin(np.array([0]), [seed])
        total_s = elapsed_s = 0.0
        is_cut = False
        while not is_cut:
            k = policy.decide(episodes.engine.signals())
            step = episodes.advance(np.searchsorted(tiers, k))
            for outcome in step.outcomes:
                policy.observe(outcome)
            total_s += float(step.reward[0] * step.round_s[0])
            elapsed_s += float(step.elapsed_s[0])
            is_cut = bool(step.cut[0])
        if not elapsed_s:
            raise UserError(f"{episodes.engine.server.url}: no round of episode {seed} could be timed")
        return total_s / elapsed_s
