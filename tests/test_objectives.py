"""Does more reward mean more of what users want? Fixed policies are scored both ways on cells of training.

Rank correlation, since PPO only needs the order of policies, and a linear one would be decided by the worst
of them. Policies that happen to make the same choices in a cell count once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import spearmanr

from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.controller.greedy import GoodputGreedy
from draftdial.controller.policy import Policy
from draftdial.controller.rules import FixedK, Threshold
from draftdial.controller.signals import FloatArray, IntArray, RoundOutcome, RoundSignals
from draftdial.controller.validation import Validation
from draftdial.envs.episodes import Episodes
from draftdial.envs.evaluate import run
from draftdial.envs.fitted_acceptance import FittedAcceptance
from draftdial.envs.objectives import VIOLATION_S, Latency, ObjectiveName, ServiceLevel
from draftdial.envs.par import Par, prefill_overhead_s
from draftdial.envs.scenario import Scenario
from draftdial.envs.simulated_engine import EngineResults, ServerOptions, SimulatedEngine
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
    work: int = 48

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


@dataclass
class Played:
    """Episodes to their cut, one per row: `(num_rows, num_steps)` and `(num_rows,)`."""

    reward_s: FloatArray
    """(num_rows, num_steps + 1) so far, in seconds."""
    elapsed_s: FloatArray
    """(num_rows, num_steps + 1) so far."""
    cost_s: FloatArray
    """(num_rows,) decode time, and what prefill cost beyond a full chunk's price of its tokens."""
    in_system_s: FloatArray
    """(num_rows,) integral of the requests in the system."""
    episodes: Episodes


def play(
    policy: Policy, scenario: Scenario, objective: ObjectiveName, options: ServerOptions, seeds: Sequence[int]
) -> Played:
    """The episodes of `seeds` under `policy`."""
    num_rows = len(seeds)
    episodes = Episodes(num_rows, [PROFILE], SOURCE, scenario, objective, [options])
    episodes.begin(np.arange(num_rows), seeds)
    policy.reset(num_rows)
    reward_s, elapsed_s = [np.zeros(num_rows)], [np.zeros(num_rows)]
    cost_s, in_system_s = np.zeros((2, num_rows))
    going = np.ones(num_rows, np.bool_)
    servers = episodes.engine.servers
    while going.any():
        step = episodes.advance(TIER_OF_K[policy.decide(episodes.engine.signals())])
        for outcome in step.outcomes:
            policy.observe(outcome)
        reward_s.append(reward_s[-1] + np.where(going, step.reward * step.round_s, 0.0))
        elapsed_s.append(elapsed_s[-1] + np.where(going, step.elapsed_s, 0.0))
        overhead_s = prefill_overhead_s(episodes.engine, episodes.prefill_token_s)
        cost_s += np.where(going, servers["step_decode_s"] + overhead_s, 0.0)
        in_system_s += np.where(going, servers["step_in_system_s"], 0.0)
        going &= ~step.cut
    return Played(np.stack(reward_s, 1), np.stack(elapsed_s, 1), cost_s, in_system_s, episodes)


def score(
    scenario: Scenario, objective: ObjectiveName, options: ServerOptions, num_seeds: int
) -> tuple[FloatArray, FloatArray]:
    """Reward per second and the objective (higher is better), means over seeds, of the contenders.

    Closed loop: over the same work. Open loop: over the same time, and the requests that arrive in it.
    """
    all_played = []
    for policy, num_parameters in contenders(num_seeds, options.off_mode):
        seeds = list(range(num_seeds)) * num_parameters
        all_played.append((policy, play(policy, scenario, objective, options, seeds)))
    ends_s = np.concatenate([played.elapsed_s[:, -1] for _, played in all_played])
    horizon_s = ends_s.reshape(-1, num_seeds).min(axis=0) if scenario.mode == "open" else np.inf
    rewarded, wanted = [], []
    for policy, played in all_played:
        until_s = np.minimum(np.resize(horizon_s, len(played.cost_s)), played.elapsed_s[:, -1])
        rows = zip(until_s, played.elapsed_s, played.reward_s, strict=True)
        reward_s = np.array([np.interp(*row) for row in rows])
        lists, bank = played.episodes.engine.request_lists, played.episodes._bank
        results = run(policy, SimulatedEngine(lists, bank, PROFILE, options))
        arrived = np.where(results.arrival_s < until_s[:, None], 1.0, np.nan)
        of_users = {
            "throughput": np.log(results.window_tokens / results.window_s),
            "latency": -np.log(np.nanmean(arrived * (results.finish_s - results.arrival_s), axis=1)),
            "slo": -np.nanmean(arrived * late(results, options), axis=1),
        }[objective]
        rewarded.append((reward_s / until_s).reshape(-1, num_seeds).mean(axis=1))
        wanted.append(of_users.reshape(-1, num_seeds).mean(axis=1))
    distinct = np.unique(np.stack([np.concatenate(rewarded), np.concatenate(wanted)]).round(9), axis=1)
    return distinct[0], distinct[1]


def late(results: EngineResults, options: ServerOptions) -> NDArray[np.bool_]:
    """(num_servers, num_requests): outside the TTFT or the TPOT limit."""
    decode_limit_s = options.tpot_limit_s * (results.output_tokens - 1)
    slow_start = results.first_token_s - results.arrival_s > options.ttft_limit_s
    slow: NDArray[np.bool_] = slow_start | (results.finish_s - results.first_token_s > decode_limit_s)
    return slow


def check_agreement(rewarded: FloatArray, wanted: FloatArray) -> None:
    """The same best policy, or one that loses 1 % of the spread at most, and the same order."""
    assert len(rewarded) >= 12, "too few policies differ in this cell"
    spread = wanted.max() - wanted.min()
    assert spread > 0.2, "the cell tells no policies apart"
    regret = (wanted.max() - wanted[rewarded.argmax()]) / spread
    assert regret <= 0.01, f"the best by reward loses {regret:.1%} of the spread"
    correlation = spearmanr(rewarded, wanted).statistic
    assert correlation >= 0.95, f"rank correlation {correlation:.3f}"


@pytest.mark.parametrize("off_mode", ["warm", "skip"])
@pytest.mark.parametrize(("concurrency", "num_seeds"), [(1, 8), (8, 4), (64, 4), (256, 4)])
def test_throughput_reward_ranks_policies_like_output_tokens_per_second(
    concurrency: int, num_seeds: int, off_mode: OffMode
) -> None:
    scenario = FixedWork(low=concurrency, high=concurrency)
    options = ServerOptions(mid_flight=True, off_mode=off_mode)
    check_agreement(*score(scenario, "throughput", options, num_seeds))


@pytest.mark.parametrize(("utilisation", "off_mode"), [(0.5, "warm"), (0.8, "skip")])
def test_latency_reward_ranks_policies_like_mean_end_to_end_latency(
    utilisation: float, off_mode: OffMode
) -> None:
    check_agreement(*score(open_loop(utilisation), "latency", ServerOptions(off_mode=off_mode), num_seeds=12))


@pytest.mark.parametrize(("utilisation", "off_mode"), [(0.5, "warm"), (0.8, "skip")])
def test_slo_reward_ranks_policies_like_attainment(utilisation: float, off_mode: OffMode) -> None:
    options = ServerOptions(off_mode=off_mode, ttft_limit_s=0.5, tpot_limit_s=0.01)
    check_agreement(*score(open_loop(utilisation), "slo", options, num_seeds=12))


def open_loop(utilisation: float) -> Scenario:
    return Scenario(
        mode="open",
        lengths="short-chat",
        utilisation_low=utilisation,
        utilisation_high=utilisation,
        rounds=320,
    )


class ToTheLast(FixedWork):
    """Every request counts and is served to its end."""

    def draw(self, seed: int, num_domains: int, capacity: FloatArray) -> RequestList:
        return replace(super().draw(seed, num_domains, capacity), warmup=0)


@pytest.mark.parametrize("off_mode", ["warm", "skip"])
def test_over_fixed_work_throughput_rewards_add_up_to_a_constant_minus_time(off_mode: OffMode) -> None:
    # The constant is the par of all tokens decoded. Rewards pay for expected tokens, so it holds on average.
    options = ServerOptions(mid_flight=True, off_mode=off_mode)
    for policy, num_parameters in contenders(4, off_mode):
        seeds = list(range(4)) * num_parameters
        played = play(policy, ToTheLast(low=16, high=16), "throughput", options, seeds)
        requests = played.episodes.engine._sim.requests
        num_decoded = np.maximum(requests["output_tokens"] - requests["head_start"] - 1, 0)
        par_s = (requests["par_s"] * num_decoded).reshape(-1, 4, requests.shape[1]).sum(axis=(1, 2))
        paid_s = (played.reward_s[:, -1] + played.cost_s).reshape(-1, 4).sum(axis=1)
        np.testing.assert_allclose(paid_s, par_s, rtol=0.01)
        np.testing.assert_allclose(par_s, par_s[0], rtol=1e-12)


def test_no_action_changes_what_a_token_or_the_reference_is_worth() -> None:
    by_action = []
    for tier in range(len(TIERS)):
        episodes = Episodes(4, [PROFILE], SOURCE, Scenario(low=4, high=16, rounds=64), "throughput")
        episodes.begin(np.arange(4), range(4))
        for _ in range(64):
            episodes.advance(np.full(4, tier))
        lists = episodes.engine.request_lists
        options = ServerOptions(mid_flight=True)
        par = Par(PROFILE, options, episodes._bank, episodes._tokens, episodes.scenario)
        for row, requests in enumerate(lists):
            worth, round_s = par.of(requests)
            stored = episodes.engine._sim.requests["par_s"][row]
            np.testing.assert_array_equal(stored[: len(worth)], worth)
            assert episodes._round_s[row] == round_s
        by_action.append(episodes.engine._sim.requests["par_s"].tobytes())
    assert len(set(by_action)) == 1


def test_the_latency_reference_is_greedy_alone_whatever_the_policy_does() -> None:
    scenario, num_rows = replace(open_loop(0.8), rounds=48), 3
    references = []
    for tier in (0, 1, 5):
        episodes = Episodes(num_rows, [PROFILE], SOURCE, scenario, "latency", [ServerOptions()])
        episodes.begin(np.arange(num_rows), range(num_rows))
        for _ in range(48):
            episodes.advance(np.full(num_rows, tier))
        objective = episodes._objective
        assert isinstance(objective, Latency)
        references.append((objective._clock_s.tobytes(), objective._in_system_s.tobytes()))
    assert len(set(references)) == 1

    greedy = GoodputGreedy(TIERS, PROFILE)
    rewards_s = play(greedy, scenario, "latency", ServerOptions(), range(num_rows)).reward_s
    np.testing.assert_allclose(rewards_s, 0.0, atol=1e-9)


def test_latency_rewards_add_up_to_the_requests_in_the_system_beyond_the_reference() -> None:
    scenario = replace(open_loop(0.8), rounds=192)
    played = play(FixedK(TIERS, 0), scenario, "latency", ServerOptions(), range(3))
    episodes, objective = played.episodes, played.episodes._objective
    assert isinstance(objective, Latency)
    twin = SimulatedEngine(episodes.engine.request_lists, episodes._bank, PROFILE, ServerOptions())
    greedy = GoodputGreedy(TIERS, PROFILE)
    greedy.reset(3)
    clock_s, in_system_s = [twin.servers["clock_s"].copy()], [np.zeros(3)]
    for _ in range(2 * scenario.rounds):
        for outcome in twin.run_round(greedy.decide(twin.signals())):
            greedy.observe(outcome)
        clock_s.append(twin.servers["clock_s"].copy())
        in_system_s.append(in_system_s[-1] + twin.servers["step_in_system_s"])
    for row in range(3):
        times, totals = np.array(clock_s)[:, row], np.array(in_system_s)[:, row]
        mean = totals[-1] / (times[-1] - times[0])
        end_s = episodes.engine.servers["clock_s"][row]
        excess = (played.in_system_s[row] - np.interp(end_s, times, totals)) / mean
        assert played.reward_s[row, -1] == pytest.approx(-excess, rel=1e-9)
        assert excess > 0, "never speculating is slower than greedy here"


def test_an_episode_is_cut_where_the_latency_reference_ends() -> None:
    # Rounds of k = 7 last so much longer under load that the policy outlives twice the reference's rounds.
    scenario = replace(open_loop(0.95), rounds=192)
    episodes = Episodes(8, [PROFILE], SOURCE, scenario, "latency", [ServerOptions()])
    episodes.begin(np.arange(8), range(8))
    objective = episodes._objective
    assert isinstance(objective, Latency)
    cut = np.zeros(8, np.bool_)
    num_early = 0
    for num_rounds in range(1, 193):
        step = episodes.advance(np.full(8, len(TIERS) - 1))
        new = step.cut & ~cut
        if num_rounds < 192:
            num_early += new.sum()
            past = episodes.engine.servers["clock_s"] >= objective._clock_s[:, -1]
            np.testing.assert_array_equal(step.cut, past)
        cut |= step.cut
    assert num_early > 0 and cut.all()


def test_a_violation_is_charged_once_and_when_its_limit_passes() -> None:
    options = ServerOptions(ttft_limit_s=0.3, tpot_limit_s=0.01)
    lists = [
        Scenario(mode="open", lengths="short-chat", rounds=64).draw(s, 5, np.full(5, 25.0)) for s in (1, 2)
    ]
    engine = SimulatedEngine(lists, SOURCE.bank(0), PROFILE, options)
    engine.replace(np.arange(2), [replace(requests, warmup=0) for requests in lists])
    charged = np.zeros(2, np.int64)
    objective = ServiceLevel()
    while not engine.servers["done"].all():
        engine.run_round(np.full(2, 3))
        charged -= np.rint(objective.reward(engine, np.zeros(2)) / VIOLATION_S).astype(np.int64)
        results = engine.results()
        now_s = engine.servers["clock_s"][:, None]
        first = np.where(np.isnan(results.first_token_s), now_s, results.first_token_s)
        last = np.where(np.isnan(results.finish_s), now_s, results.finish_s)
        late = first - results.arrival_s > options.ttft_limit_s
        late |= last - first > options.tpot_limit_s * (results.output_tokens - 1)
        np.testing.assert_array_equal(charged, late.sum(axis=1))
    assert (0 < charged).all() and (charged < [r.num_requests for r in lists]).all()


class OneDomain(Scenario):
    """Episodes that do not drift, so that a part of one says what the whole would."""

    def draw(self, seed: int, num_domains: int, capacity: FloatArray) -> RequestList:
        requests = super().draw(seed, num_domains, capacity)
        return replace(requests, domain=np.full_like(requests.domain, requests.domain[0]))


@pytest.mark.parametrize("objective", ["throughput", "slo"])
def test_validation_ranks_policies_like_the_objective(objective: ObjectiveName) -> None:
    # Checkpoints are chosen by it. Per round, policies of many short rounds would look better; and had all
    # the same number of rounds, these would be judged before a queue has built up.
    closed = objective == "throughput"
    scenario = OneDomain(low=8, rounds=192) if closed else replace(open_loop(0.6), rounds=192)
    options = ServerOptions(mid_flight=closed, ttft_limit_s=0.5, tpot_limit_s=0.01)
    episodes = Episodes(16, [PROFILE], SOURCE, scenario, objective, [options])
    validation = Validation(episodes, GoodputGreedy(TIERS, PROFILE))
    scored, wanted = [], []
    for policy in alone():
        scored.append(validation.score(policy))
        results = run(
            policy, SimulatedEngine(episodes.engine.request_lists, episodes._bank, PROFILE, options)
        )
        if closed:
            wanted.append(np.log(results.window_tokens / results.window_s).mean())
        else:
            arrived = results.arrival_s < validation._horizon_s[:, None]
            wanted.append(-np.nanmean(np.where(arrived, late(results, options), np.nan), axis=1).mean())
    check_agreement(np.array(scored), np.array(wanted))


def alone() -> list[Policy]:
    """The contenders one by one."""
    return [
        *(Threshold(TIERS, k, batch) for k, batch in RULES),
        *(GoodputGreedy(TIERS, PROFILE, probe_interval=a, max_probe_interval=b) for a, b in PROBES),
        *(Bursts(np.array(k), np.array(on), np.array(off)) for k, on, off in BURSTS),
    ]
