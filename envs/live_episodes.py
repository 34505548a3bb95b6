"""Episodes on one real server: features as everywhere, rewards from measured time."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.bench_loads import Asking
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.features import Features
from draftdial.controller.signals import FloatArray, IntArray
from draftdial.envs.acceptance import AcceptanceBank, AcceptanceSource
from draftdial.envs.episodes import EpisodeStep
from draftdial.envs.live_engine import LiveEngine, LiveStep
from draftdial.envs.live_server import LiveServer
from draftdial.envs.par import Par
from draftdial.envs.scenario import Scenario, domain_tokens
from draftdial.envs.simulated_engine import ServerOptions
from draftdial.envs.workload import RequestList


class LiveEpisodes:
    """What `Episodes` is for simulated servers, for one that is real: throughput in a closed loop.

    reward = par of the tokens that requests got in a round - its measured time, without the server's wait
    for k, and less what prefills take beyond their tokens: see `Par` and `Throughput`. It is paid when both
    are known, under overlap scheduling after the next decision: `last_k` is among the features, so that a
    critic knows what is to come. Tokens are those that came, where a simulator pays those that it expected.
    Only a server that replays recorded acceptance knows the domain of a request; elsewhere all have one par.

    After an answer that came too late the server ran rounds of its own: that step earns nothing and cuts
    the episode.
    """

    num_servers = 1

    def __init__(
        self,
        server: LiveServer,
        profile: CostProfile,
        acceptance: AcceptanceSource,
        scenario: Scenario,
        options: ServerOptions,
        asking: Asking,
        seed: int = 0,
    ) -> None:
        """`profile` prices the features and the par, `acceptance` the par.

        Raises:
            UserError: the server has other tiers than the profile or another off mode, or replays acceptance
                of other domains.
        """
        if server.tiers != profile.tiers:
            found, priced = list(server.tiers), list(profile.tiers)
            raise UserError(
                f"{server.url}: tiers: found {found}, allowed: {priced}, of profile {profile.name}"
            )
        off_mode = server.status["off_mode"]
        if 0 in server.tiers and options.off_mode != off_mode:
            raise UserError(f"off_mode: found {options.off_mode}, allowed: {off_mode}, as {server.url} runs")
        self._bank = acceptance.bank(seed)
        self.scenario = scenario
        self.tiers = profile.tiers
        self._profile, self._options = profile, options
        self._has_domains = server.replays_acceptance
        if self._has_domains:
            _check_domains(self._bank, server)
            asking = Asking(asking.prompts, self._bank.domain_names)
        self._par = Par(profile, options, self._bank, domain_tokens(self._bank, profile.tiers), scenario)
        self._asking = asking
        self.engine = LiveEngine(server, self._draw, asking)
        self.features = Features(
            profile, options.off_mode, ttft_limit_s=options.ttft_limit_s, tpot_limit_s=options.tpot_limit_s
        )
        self.rounds_left: IntArray = np.full(1, scenario.rounds, np.int64)
        self._k = np.array(self.tiers, np.int64)
        self._round_s = np.ones(1)
        self._par_s: FloatArray = np.zeros(0)
        self._tokens_left: IntArray = np.zeros(0, np.int64)
        self._worth_s: dict[int, float] = {}
        self._time_s: dict[int, float] = {}

    def begin(self, rows: IntArray, seeds: Sequence[int]) -> None:
        """Start the episode of the one seed on the one server."""
        [seed] = seeds
        self.engine.reset(seed)
        requests = self.engine.requests
        assert requests is not None
        self._par_s, self._round_s[0] = self._par.of(requests)
        if not self._has_domains:
            self._par_s = np.full_like(self._par_s, self._par_s.mean())
        self._tokens_left = requests.output_tokens.astype(np.int64) - 1  # prefill makes the first
        self._worth_s, self._time_s = {}, {}
        self.features.reset_servers(rows)
        self.rounds_left[rows] = self.scenario.rounds

    def observe(self) -> NDArray[np.float32]:
        """The observation before the coming round, `(1, num_features)`, in a new array."""
        return self.features.compute(self.engine.signals()).copy()

    def gains(self) -> FloatArray:
        """What profile and belief predict for each tier, `(1, num_tiers)`: nobody knows the true gains here.

        Call after `observe`. In the units of `Episodes.gains`, which a critic was trained on.
        """
        signals = self.engine.signals()
        context = signals.mean_context_tokens
        round_s = self._profile.round_s(signals.num_running, context, self._options.off_mode)
        tokens = np.exp(self.features.speedup.mean(axis=0)) * round_s / round_s[:, :1]
        par = float(self._par_s.mean())
        return np.asarray((par * signals.num_running[:, None] * tokens - round_s) / self._round_s[:, None])

    def advance(self, tier_index: IntArray) -> EpisodeStep:
        """Run one round at `tier_index`, shape `(1,)`, and wait until the next is due."""
        self.features.chose(tier_index)
        outcomes = self.engine.run_round(self._k[tier_index])
        for outcome in outcomes:
            self.features.observe(outcome)
        self.rounds_left -= 1
        step = self.engine.step
        gain_s = self._gain_s(step) - self._prefill_overhead_s(step)
        if step.num_missed:
            gain_s = 0.0
        is_cut = self.rounds_left[0] <= 0 or self.engine.is_served or step.num_missed > 0
        elapsed_s = sum(seconds for _, seconds in step.times_s) + step.prefill_s
        reward = np.array([gain_s]) / self._round_s
        return EpisodeStep(reward, self._round_s, np.array([elapsed_s]), np.array([is_cut]), outcomes)

    def close(self) -> None:
        """Leave the server."""
        self.engine.close()

    def _gain_s(self, step: LiveStep) -> float:
        """Of the rounds whose outcome and time are both known now."""
        for round_id, places, accepted in step.finished:
            where = np.array(places, np.int64)
            # The last round of a request may commit more than the request still gets.
            got = np.minimum(np.array(accepted, np.int64) + 1, self._tokens_left[where])
            self._tokens_left[where] -= got
            self._worth_s[round_id] = float(self._par_s[where] @ got)
        self._time_s |= dict(step.times_s)
        known = self._worth_s.keys() & self._time_s.keys()
        return sum(self._worth_s.pop(i) - self._time_s.pop(i) for i in known)

    def _prefill_overhead_s(self, step: LiveStep) -> float:
        """As `par.prefill_overhead_s`."""
        if not step.prefill_s:
            return 0.0
        return step.prefill_s - self._par.prefill_token_s * step.prefill_tokens

    def _draw(self, seed: int) -> RequestList:
        num_domains = len(self._bank.domain_names)
        return self._asking.fitted(self.scenario.draw(seed, num_domains, np.ones(num_domains)), seed)


def _check_domains(bank: AcceptanceBank, server: LiveServer) -> None:
    """UserError if requests would name arrays that the server has not got."""
    replayed = re.findall(r"\d+ of ([^,]+?)(?=, | \(sha256)", server.status["acceptance_replay"])
    if not set(bank.domain_names) <= set(replayed):
        found, allowed = ", ".join(bank.domain_names), ", ".join(replayed)
        raise UserError(f"acceptance: domains: found {found}, allowed: {allowed}, which {server.url} replays")
