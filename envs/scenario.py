"""What an episode is drawn from: load, domains, server and lag, all from one seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.signals import FloatArray
from draftdial.envs.acceptance import AcceptanceBank, walk_statistics
from draftdial.envs.closed_loop import ClosedLoop, ConstantLoad
from draftdial.envs.domains import DomainSwitches
from draftdial.envs.lengths import LengthModel, as_lengths
from draftdial.envs.open_loop import MarkovModulated, OpenLoop, Poisson, Swings
from draftdial.envs.simulated_engine import ServerOptions
from draftdial.envs.workload import RequestList


@dataclass(frozen=True)
class Scenario:
    """The law of the episodes one training run sees. Episodes never repeat a load or an order of domains."""

    mode: str = "closed"
    """`closed`: a concurrency, log-uniform over episodes. `open`: arrivals that burst or swing."""
    low: int = 1
    """Least concurrency of a closed loop."""
    high: int = 400
    """Largest concurrency of a closed loop; requests beyond `max_running` wait."""
    utilisation_low: float = 0.3
    """Least share of the server's capacity that an open loop asks for."""
    utilisation_high: float = 0.95
    """Largest share."""
    lengths: str = "general"
    """Length model of the requests; see docs/workloads.md."""
    rounds: int = 512
    """Decode rounds of an episode; it is cut there, not ended."""

    @property
    def max_requests(self) -> int:
        """No episode has more requests than this."""
        if self.mode == "open":
            # A round admits a few requests at most; the list must outlast the episode.
            return 2 * self.rounds + 200
        return self.outlasting(self.high, self.rounds)

    @property
    def length_model(self) -> LengthModel:
        """Of the requests."""
        return as_lengths(self.lengths)

    def outlasting(self, concurrency: int, num_rounds: int) -> int:
        """Requests of a closed loop that last for so many rounds that commit 6 tokens per request."""
        mean = self.length_model.mean_output_tokens
        return int(1.3 * 6 * num_rounds * concurrency / mean) + 6 * concurrency + 20

    def draw(self, seed: int, num_domains: int, capacity: FloatArray) -> RequestList:
        """The requests of one episode.

        Args:
            seed: Non-negative; everything follows from it.
            num_domains: Domains the acceptance bank has.
            capacity: Shape `(num_domains,)`: requests per second the server can finish in each domain.
        """
        rng = np.random.default_rng([seed, 7201])
        chosen = rng.permutation(num_domains)[: rng.integers(2, 6)]
        lengths = self.length_model
        if self.mode == "open":
            share = rng.uniform(self.utilisation_low, self.utilisation_high)
            rate = float(share / np.mean(1.0 / capacity[chosen]))
            arrivals = (Poisson(rate), MarkovModulated(rate, 4.0, 20.0, 7.0), Swings(rate, 4.0, 10.0))
            num_requests = self.max_requests
            period = max(2, num_requests // 12)
            domains = DomainSwitches(tuple(chosen.tolist()), period, 3 * period)
            process = arrivals[rng.integers(len(arrivals))]
            return OpenLoop("training", process, num_requests, domains, lengths).requests(seed)
        concurrency = int(np.exp(rng.uniform(np.log(self.low), np.log(self.high + 1))))
        # Most episodes are shorter than the domain switches of a test; these come within an episode.
        domains = DomainSwitches(tuple(chosen.tolist()), max(2, concurrency), 6 * concurrency + 2)
        load = ConstantLoad(concurrency, self.outlasting(concurrency, self.rounds))
        return ClosedLoop("training", load, domains, lengths).requests(seed)


def capacity_per_s(
    tokens: FloatArray, profile: CostProfile, options: ServerOptions, lengths: str
) -> FloatArray:
    """(num_domains,) requests per second a full server finishes at its best fixed k, prefill included."""
    model = as_lengths(lengths)
    running = np.array([min(options.max_running or profile.max_running, profile.max_running)])
    context = np.array([model.mean_prompt_tokens + 0.5 * model.mean_output_tokens])
    running = np.minimum(running, int(profile.kv_pool_tokens / (2 * context[0])))
    round_s = profile.round_s(running, context.astype(np.int64), options.off_mode)
    decode_s = (round_s / (running * tokens)).min(axis=1) * model.mean_output_tokens
    chunk = profile.chunked_prefill_tokens
    prefill_s = float(profile.prefill_s(chunk, options.off_mode)) / chunk * model.mean_prompt_tokens
    capacity: FloatArray = 1.0 / (decode_s + prefill_s)
    return capacity


def domain_tokens(bank: AcceptanceBank, tiers: tuple[int, ...]) -> FloatArray:
    """(num_domains, num_tiers): tokens a request commits per round when every round uses that tier."""
    # By walking: rounds start right after a miss, so the mean over all positions would flatter.
    return np.array(
        [
            [walk_statistics(bank, domain, k).accept_length if k else 1.0 for k in tiers]
            for domain in range(len(bank.domain_names))
        ]
    )
