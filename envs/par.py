"""What a token is worth: the time it takes at the best fixed k."""

from __future__ import annotations

import numpy as np

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.signals import FloatArray, IntArray
from draftdial.envs.acceptance import AcceptanceBank
from draftdial.envs.closed_loop import ClosedLoop, ConstantLoad
from draftdial.envs.domains import DomainMix
from draftdial.envs.scenario import Scenario
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine
from draftdial.envs.workload import RequestList

FIRST_SEED = 1_900_000
"""The loops that are measured have the seeds from here on: not those of tuning, validation or reports."""
OPEN_LOOP_ROWS = 8
NUM_ROUNDS = 384
NUM_REQUESTS = 192
"""Of every level at once, at least: light loops are repeated, as one request says little."""
FEWEST_LOOPS = 4


class Par:
    """Seconds that one token of a request costs on a server, at the best fixed k for it and its concurrency.

    A walk over the acceptance bank gives tokens per round, the profile seconds per round. A server that
    really serves takes longer, by a share that differs between tiers: the last round of a request goes
    beyond its end, finished requests stay in the batch for a round, long requests are in it more often than
    their number says, and every prefill has a fixed cost, which long rounds share among more requests. That
    share is measured, in closed loops on the simulated server, at each tier and power of two of concurrency.
    Open loops go by the walk alone: what they are paid for is not time on par.
    """

    def __init__(
        self,
        profile: CostProfile,
        options: ServerOptions,
        bank: AcceptanceBank,
        tokens: FloatArray,
        scenario: Scenario,
    ) -> None:
        """`tokens` are `domain_tokens` of `bank` and the tiers: every server of the same bank shares them."""
        self._profile, self._options, self._tokens = profile, options, tokens
        self.prefill_token_s = _prefill_token_s(profile, options)
        powers = 2 ** np.arange(int(np.log2(scenario.high)) + 1)
        self._levels = np.unique(np.append(powers, scenario.high))
        self._share = np.ones((len(self._levels), len(profile.tiers)))
        if scenario.mode == "closed":
            self._share = self._measured(bank, scenario)

    def of(self, requests: RequestList) -> tuple[FloatArray, float]:
        """Seconds one token of each request is worth, shape `(num_requests,)`, and the longest round at par.

        A function of the work alone: no action changes what a token earns, so the sum over a fixed list of
        requests is a constant, and rewarding `worth - time` is minimising time.
        """
        is_closed = requests.mode == "closed"
        concurrency = requests.concurrency if is_closed else np.full(requests.num_requests, OPEN_LOOP_ROWS)
        levels = np.unique(concurrency.astype(np.int64))
        context = int(requests.prompt_tokens.mean() + 0.5 * requests.output_tokens.mean())
        token_s = self._walked_s(levels, context)
        if is_closed:
            token_s *= self._share_at(levels)[:, None, :]
        par: FloatArray = token_s.min(axis=2)[np.searchsorted(levels, concurrency), requests.domain]
        best_tier = token_s[-1].mean(axis=0).argmin()
        return par, float(self._round_s(levels, context)[-1, best_tier])

    def _round_s(self, concurrency: IntArray, context: int) -> FloatArray:
        """(num_levels, num_tiers)"""
        running = self._running(concurrency)
        return self._profile.round_s(running, np.full(len(running), context), self._options.off_mode)

    def _running(self, concurrency: IntArray) -> IntArray:
        """Those of so many requests that are decoded at once; the others wait."""
        most = self._options.max_running or self._profile.max_running
        return np.minimum(concurrency, min(most, self._profile.max_running))

    def _walked_s(self, concurrency: IntArray, context: int) -> FloatArray:
        """(num_levels, num_domains, num_tiers) seconds per token of a walk."""
        round_s, running = self._round_s(concurrency, context), self._running(concurrency)
        walked: FloatArray = round_s[:, None, :] / (running[:, None, None] * self._tokens[None])
        return walked

    def _share_at(self, concurrency: IntArray) -> FloatArray:
        """(len(concurrency), num_tiers), between the measured levels linear in the logarithm."""
        logs = np.log(self._levels)
        columns = [np.interp(np.log(concurrency), logs, column) for column in self._share.T]
        return np.stack(columns, axis=1)

    def _measured(self, bank: AcceptanceBank, scenario: Scenario) -> FloatArray:
        """(num_levels, num_tiers): time that served tokens take, over that of a walk, all domains alike."""
        return np.stack([self._measured_at(i, bank, scenario) for i in range(len(self._levels))])

    def _measured_at(self, i: int, bank: AcceptanceBank, scenario: Scenario) -> FloatArray:
        """(num_tiers,): the row of `_measured` at one level; 1 where no token is left to decode."""
        concurrency, num_tiers = int(self._levels[i]), len(self._profile.tiers)
        load = ConstantLoad(concurrency, scenario.outlasting(concurrency, NUM_ROUNDS))
        domains = DomainMix(tuple(range(len(self._tokens))))
        loop = ClosedLoop("par", load, domains, scenario.length_model)
        lists, worth = [], []
        for n in range(max(FEWEST_LOOPS, NUM_REQUESTS // concurrency)):
            requests = loop.requests(FIRST_SEED + NUM_REQUESTS * i + n)
            context = int(requests.prompt_tokens.mean() + 0.5 * requests.output_tokens.mean())
            walked = self._walked_s(self._levels[i : i + 1], context)[0, requests.domain]
            lists += [requests] * num_tiers
            worth += list(walked.T)
        tier = np.tile(np.arange(num_tiers), len(lists) // num_tiers)
        engine = SimulatedEngine(lists, bank, self._profile, self._options)
        engine.replace(np.arange(len(lists)), lists, worth)
        served_s, walked_s = np.zeros((2, len(lists)))
        k = np.array(engine.tiers)[tier]
        for _ in range(NUM_ROUNDS):
            walked_s += engine.expected_worth_at_s(tier)
            engine.run_round(k)
            served_s += engine.servers["step_decode_s"] + prefill_overhead_s(engine, self.prefill_token_s)
        served, walked = np.bincount(tier, served_s), np.bincount(tier, walked_s)
        return np.divide(served, walked, out=np.ones(num_tiers), where=walked > 0)


def prefill_overhead_s(engine: SimulatedEngine, token_s: FloatArray | float) -> FloatArray:
    """(num_servers,) seconds of prefill in the last step beyond `token_s` for each of its tokens.

    What a prompt token costs in a full chunk is the same for every policy; what small batches cost on top
    is not: a policy of long rounds lets more requests finish, and so start, together. Nor is what running the
    draft costs where off mode `kv-only` may leave it out: that belongs to the policies that speculate.
    """
    servers = engine.servers
    return np.asarray(servers["step_prefill_s"] - token_s * servers["num_prefill_tokens"])


def _prefill_token_s(profile: CostProfile, options: ServerOptions) -> float:
    """Seconds of one prompt token in a full chunk, without the draft where that can be."""
    chunk = profile.chunked_prefill_tokens
    return float(profile.prefill_s(chunk, options.off_mode, leaves_draft_out=True)) / chunk
