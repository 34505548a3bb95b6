"""Does more reward mean more of what users want? Fixed policies are scored both ways on cells of training.

Rank correlation, since PPO only needs the order of policies, and a linear one would be decided by the worst
of them. Policies that happen to make the same choices in a cell count once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import spearmanr

from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.controller.greedy import GoodputGreedy
from draftdial.controller.policy import Policy
from draftdial.controller.rules import Threshold
from draftdial.controller.signals import FloatArray, IntArray, RoundOutcome, RoundSignals
from draftdial.envs.episodes import Episodes
from draftdial.envs.evaluate import run
from draftdial.envs.fitted_acceptance import FittedAcceptance
from draftdial.envs.objectives import ObjectiveName
from draftdial.envs.scenario import Scenario
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine
from draftdial.envs.workload import RequestList

PROFILE = CostProfile.load("h200-llama3-8b")
TIERS = PROFILE.tiers
TIER_OF_K = np.searchsorted(TIERS, np.arange(TIERS[-1] + 1))
SOURCE = FittedAcceptance(num_arrays=64)
ALWAYS = 10**6
RULES = [*((k, ALWAYS) for k in TIERS), (2, 4), (3, 16), (3, 32), (5, 64), (1, 128), (7, 48)]
PROBES = [(0, 0), (32, 32), (32, 128)]
"""Intervals of goodput-greedy: never, fixed, backing off."""
BURSTS = [(3, 8, 8), (3, 64, 64), (5, 24, 8), (1, 8, 24), (7, 2, 6), (2, 1, 1)]
"""k for so many rounds, then off for so many: where being off leaves a gap, they pay for it."""


class Bursts:
    """k = `k` for `on` rounds, 0 for `off` rounds, and so on; arrays `(num_servers,)`."""

    def __init__(self, k: IntArray, on: IntArray, off: IntArray) -> None:
        self.tiers = TIERS
        self._k, self._on, self._off = k, on, off

    def reset(self, num_servers: int) -> None:
        pass

    def decide(self, signals: RoundSignals) -> IntArray:
        return np.where(signals.round_id % (self._on + self._off) < self._on, self._k, 0)

    def observe(self, outcome: RoundOutcome) -> None:
        pass


@dataclass(frozen=True)
class FixedWork(Scenario):
    """Episodes that end with their list of requests, which would do for `work` rounds of the best case."""

    rounds: int = 10**9
    work: int = 64

    @property
    def max_requests(self) -> int:
        return self._cut.max_requests

    def draw(self, seed: int, num_domains: int, capacity: FloatArray) -> RequestList:
        return self._cut.draw(seed, num_domains, capacity)

    @property
    def _cut(self) -> Scenario:
        return Scenario(low=self.low, high=self.high, rounds=self.work)


def contenders(num_seeds: int, off_mode: OffMode) -> list[tuple[Policy, int]]:
    """Policies with one row for each parameter and seed, and how many parameters each has."""

    def column(values: Sequence[Sequence[int]], i: int) -> IntArray:
        return np.repeat([value[i] for value in values], num_seeds)

    return [
        (Threshold(TIERS, column(RULES, 0), column(RULES, 1)), len(RULES)),
        (
            GoodputGreedy(
                TIERS,
                PROFILE,
                off_mode,
                probe_interval=column(PROBES, 0),
                max_probe_interval=column(PROBES, 1),
            ),
            len(PROBES),
        ),
        (Bursts(column(BURSTS, 0), column(BURSTS, 1), column(BURSTS, 2)), len(BURSTS)),
    ]


def play(
    policy: Policy, scenario: Scenario, objective: ObjectiveName, options: ServerOptions, seeds: Sequence[int]
) -> tuple[FloatArray, FloatArray, Episodes]:
    """Every row's episode to its cut: reward in seconds and time taken, `(num_rows,)` each."""
    num_rows = len(seeds)
    episodes = Episodes(num_rows, [PROFILE], SOURCE, scenario, objective, [options])
    episodes.begin(np.arange(num_rows), seeds)
    policy.reset(num_rows)
    reward_s, elapsed_s = np.zeros((2, num_rows))
    going = np.ones(num_rows, np.bool_)
    while going.any():
        step = episodes.advance(TIER_OF_K[policy.decide(episodes.engine.signals())])
        for outcome in step.outcomes:
            policy.observe(outcome)
        reward_s += np.where(going, step.reward * step.round_s, 0.0)
        elapsed_s += np.where(going, step.elapsed_s, 0.0)
        going &= ~step.cut
    return reward_s, elapsed_s, episodes


def score(
    scenario: Scenario, objective: ObjectiveName, options: ServerOptions, num_seeds: int
) -> tuple[FloatArray, FloatArray]:
    """Reward per second and the objective (higher is better), means over episodes, of the contenders.

    In open loop the objective is that of the requests which arrive in everybody's episode.
    """
    played = []
    for policy, num_parameters in contenders(num_seeds, options.off_mode):
        seeds = list(range(num_seeds)) * num_parameters
        played.append((policy, *play(policy, scenario, objective, options, seeds)))
    horizon_s = min(elapsed_s.min() for _, _, elapsed_s, _ in played)
    rewarded, wanted = [], []
    for policy, reward_s, elapsed_s, episodes in played:
        engine = SimulatedEngine(episodes.engine.request_lists, episodes._bank, PROFILE, options)
        results = run(policy, engine)
        arrived = np.where(results.arrival_s < horizon_s, 1.0, np.nan)
        e2e_s = arrived * (results.finish_s - results.arrival_s)
        decoding_s = results.finish_s - results.first_token_s
        late = (results.first_token_s - results.arrival_s > options.ttft_limit_s) | (
            decoding_s > options.tpot_limit_s * (results.output_tokens - 1)
        )
        of_users = {
            "throughput": np.log(results.window_tokens / results.window_s),
            "latency": -np.log(np.nanmean(e2e_s, axis=1)),
            "slo": -np.nanmean(arrived * late, axis=1),
        }[objective]
        rewarded.append((reward_s / elapsed_s).reshape(-1, num_seeds).mean(axis=1))
        wanted.append(of_users.reshape(-1, num_seeds).mean(axis=1))
    distinct = np.unique(np.stack([np.concatenate(rewarded), np.concatenate(wanted)]).round(9), axis=1)
    return distinct[0], distinct[1]


def check_agreement(rewarded: FloatArray, wanted: FloatArray, tolerance: float) -> None:
    """The same best policy (or one as good, within `tolerance` of the spread) and the same order."""
    assert len(rewarded) >= 12, "too few policies differ in this cell"
    assert wanted.max() - wanted.min() > 0.1, "the cell tells no policies apart"
    regret = (wanted.max() - wanted[rewarded.argmax()]) / (wanted.max() - wanted.min())
    assert regret <= tolerance, f"the best by reward loses {regret:.1%} of the spread"
    correlation = spearmanr(rewarded, wanted).statistic
    assert correlation >= 0.95, f"rank correlation {correlation:.3f}"


@pytest.mark.parametrize("off_mode", ["warm", "skip"])
@pytest.mark.parametrize(("concurrency", "num_seeds"), [(1, 8), (8, 4), (64, 4), (256, 4)])
def test_throughput_reward_per_second_ranks_like_output_tokens_per_second(
    concurrency: int, num_seeds: int, off_mode: OffMode
) -> None:
    scenario = FixedWork(low=concurrency, high=concurrency)
    options = ServerOptions(mid_flight=True, off_mode=off_mode)
    check_agreement(*score(scenario, "throughput", options, num_seeds), tolerance=0.01)


@pytest.mark.parametrize("utilisation", [0.5, 0.8])
def test_latency_reward_per_second_ranks_like_mean_end_to_end_latency(utilisation: float) -> None:
    scenario = open_loop(utilisation)
    check_agreement(*score(scenario, "latency", ServerOptions(), num_seeds=8), tolerance=0.02)


@pytest.mark.parametrize("utilisation", [0.5, 0.8])
def test_slo_reward_per_second_ranks_like_attainment(utilisation: float) -> None:
    scenario = open_loop(utilisation)
    options = ServerOptions(ttft_limit_s=0.5, tpot_limit_s=0.01)
    check_agreement(*score(scenario, "slo", options, num_seeds=8), tolerance=0.05)


def open_loop(utilisation: float) -> Scenario:
    return Scenario(
        mode="open",
        lengths="short-chat",
        utilisation_low=utilisation,
        utilisation_high=utilisation,
        rounds=384,
    )
