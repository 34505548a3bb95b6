"""Servers that run one episode after another: the core under both environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.features import Features
from draftdial.controller.greedy import GoodputGreedy
from draftdial.controller.signals import FloatArray, IntArray, RoundOutcome
from draftdial.envs.acceptance import AcceptanceSource
from draftdial.envs.objectives import Latency, Objective, ObjectiveName, ServiceLevel, Throughput
from draftdial.envs.par import Par, prefill_overhead_s
from draftdial.envs.profile_rows import ProfileRows
from draftdial.envs.scenario import Scenario, capacity_per_s, domain_tokens
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine
from draftdial.envs.workload import RequestList


@dataclass(frozen=True)
class EpisodeStep:
    """What one round of every server did. Arrays have shape `(num_servers,)`."""

    reward: FloatArray
    """In units of `round_s`."""
    round_s: FloatArray
    """The longest round at par of the episode each row plays."""
    elapsed_s: FloatArray
    """From this decision to the next: round, switch, prefill and idle time."""
    cut: NDArray[np.bool_]
    """The episode is over, not by an end of its own: its value must be bootstrapped."""
    outcomes: list[RoundOutcome]


class EpisodeSource(Protocol):
    """What the environments are made of; `Episodes` says what its members mean."""

    scenario: Scenario
    features: Features
    rounds_left: IntArray

    @property
    def num_servers(self) -> int: ...

    @property
    def tiers(self) -> tuple[int, ...]: ...

    def begin(self, rows: IntArray, seeds: Sequence[int]) -> None: ...

    def observe(self) -> NDArray[np.float32]: ...

    def gains(self) -> FloatArray: ...

    def advance(self, tier_index: IntArray) -> EpisodeStep: ...


class Episodes:
    """`num_servers` simulated servers with features and rewards, each restarted on its own.

    An episode's seed decides its requests; the acceptance bank is drawn once, from `seed`.
    """

    def __init__(
        self,
        num_servers: int,
        profiles: Sequence[CostProfile],
        acceptance: AcceptanceSource,
        scenario: Scenario,
        objective: ObjectiveName = "throughput",
        options: Sequence[ServerOptions] = (ServerOptions(mid_flight=True),),
        seed: int = 0,
    ) -> None:
        self.num_servers = num_servers
        self.scenario = scenario
        self.profiles = [profiles[i % len(profiles)] for i in range(num_servers)]
        self.options = [options[i % len(options)] for i in range(num_servers)]
        self._bank = acceptance.bank(seed)
        self._tokens = domain_tokens(self._bank, self.profiles[0].tiers)
        self._par = self._pars()
        self.prefill_token_s = np.array([par.prefill_token_s for par in self._par])
        first = [self._draw(row, seed + row) for row in range(num_servers)]
        self.engine = SimulatedEngine(
            first, self._bank, self.profiles, self.options, max_requests=scenario.max_requests
        )
        self.tiers = self.engine.tiers
        self._k = np.array(self.tiers, np.int64)
        one_profile = all(profile is self.profiles[0] for profile in self.profiles)
        priced = self.profiles[0] if one_profile else ProfileRows(self.profiles)
        limits = self.options[0]
        self.features = Features(
            priced,
            limits.off_mode,
            ttft_limit_s=limits.ttft_limit_s,
            tpot_limit_s=limits.tpot_limit_s,
            num_servers=num_servers,
        )
        self._objective = self._make_objective(objective)
        self.rounds_left: IntArray = np.full(num_servers, scenario.rounds, np.int64)
        self._round_s = np.ones(num_servers)
        self._worth: FloatArray | None = None  # of the coming round at every tier, where `gains` was asked
        self._rows = np.arange(num_servers)

    def begin(self, rows: IntArray, seeds: Sequence[int]) -> None:
        """Start the episodes of `seeds` on `rows`, whose observations are then new."""
        lists = [self._draw(int(row), seed) for row, seed in zip(rows, seeds, strict=True)]
        worth = []
        for row, requests in zip(rows.tolist(), lists, strict=True):
            par, self._round_s[row] = self._par[row].of(requests)
            worth.append(par)
        self.engine.replace(rows, lists, worth)
        self._worth = None
        self.features.reset_servers(rows)
        self._objective.begin(self.engine, rows)
        self.rounds_left[rows] = self.scenario.rounds

    def observe(self) -> NDArray[np.float32]:
        """The observation before the coming round, `(num_servers, num_features)`, in a new array."""
        return self.features.compute(self.engine.signals()).copy()

    def gains(self) -> FloatArray:
        """What no policy may see: the gain of the coming round at each tier, `(num_servers, num_tiers)`.

        Worth of the expected tokens minus time, in rounds of the episode. Training shows it to the
        critic alone (asymmetric actor-critic, Pinto et al. 2018).
        """
        self._worth = self.engine.expected_worth_s()
        gain_s = self._worth - self.engine.round_s()
        return np.asarray(gain_s / self._round_s[:, None])

    def advance(self, tier_index: IntArray) -> EpisodeStep:
        """Run one round at `tier_index`, shape `(num_servers,)`.

        Rewards are in units of the episode's longest round at par, so that light and heavy load weigh
        alike. An episode is cut after `scenario.rounds` rounds, or when its list of requests is served.
        """
        if self._worth is None:
            worth_s = self.engine.expected_worth_at_s(tier_index)
        else:
            worth_s = self._worth[self._rows, tier_index]
            self._worth = None
        self.features.chose(tier_index)
        outcomes = self.engine.run_round(self._k[tier_index])
        for outcome in outcomes:
            self.features.observe(outcome)
        self.rounds_left -= 1
        servers = self.engine.servers
        cut = (self.rounds_left <= 0) | servers["done"] | self._objective.exhausted(self.engine)
        time_s = servers["step_decode_s"] + prefill_overhead_s(self.engine, self.prefill_token_s)
        reward = self._objective.reward(self.engine, worth_s - time_s)
        elapsed_s = servers["step_elapsed_s"].copy()
        return EpisodeStep(reward / self._round_s, self._round_s, elapsed_s, cut, outcomes)

    def _draw(self, row: int, seed: int) -> RequestList:
        profile, options = self.profiles[row], self.options[row]
        capacity = capacity_per_s(self._tokens, profile, options, self.scenario.lengths)
        return self.scenario.draw(seed, len(self._tokens), capacity)

    def _pars(self) -> list[Par]:
        """One for each row; rows of the same server share theirs, which takes half a second to measure."""
        servers = list(zip(self.profiles, self.options, strict=True))
        distinct = {(id(profile), options): (profile, options) for profile, options in servers}
        pars = {
            key: Par(profile, options, self._bank, self._tokens, self.scenario)
            for key, (profile, options) in distinct.items()
        }
        return [pars[id(profile), options] for profile, options in servers]

    def _make_objective(self, name: ObjectiveName) -> Objective:
        if name == "throughput":
            return Throughput()
        if name == "slo":
            return ServiceLevel()
        reference = GoodputGreedy(self.tiers, self.profiles[0], self.options[0].off_mode)
        return Latency(self._twin_of, reference, self.num_servers, 2 * self.scenario.rounds)

    def _twin_of(self, rows: IntArray) -> SimulatedEngine:
        return SimulatedEngine(
            [self.engine.request_lists[row] for row in rows],
            self._bank,
            [self.profiles[row] for row in rows],
            [self.options[row] for row in rows],
        )
