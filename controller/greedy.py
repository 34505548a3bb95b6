"""Goodput-greedy: the k that is expected to commit most tokens per second, with back-off probing.

The strongest rule without training. Its parts come from shipped controllers: argmax of expected
tokens over the profiled cost of a round (TurboSpec, arXiv 2406.14066; vLLM and SGLang planners);
per-depth acceptance learned only where a depth was reached, a search that ends one tier past the
deepest depth ever reached, and probes that back off (Ollama, `x/mlxrunner/speculate_depth.go`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.controller.errors import UserError
from draftdial.controller.rules import checked_tiers, per_server, profile_columns
from draftdial.controller.signals import FloatArray, IntArray, RoundOutcome, RoundSignals

BoolArray = NDArray[np.bool_]


class GoodputGreedy:
    """argmax over the tiers of `E_k / T_k`, re-decided every round.

    `T_k` is the profile's time of the coming round. `E_k = 1 + p_1 + p_1 p_2 + ...` (k products),
    where `p_d` is the share of requests that accepted depth d among those that reached it, older
    ones counting less.

    All parameters but the first three are scalars, or arrays `(num_servers,)` when a grid is
    evaluated as one batch.

    Args:
        tiers: Values of k to choose from, all of them in the profile.
        profile: What a round costs.
        off_mode: Which off row of the profile is this server's k = 0.
        half_life_samples: A depth's evidence halves every so many requests that reach it, so a
            batch of 64 teaches 64 times as fast as a batch of 1.
        prior_samples: How many requests the prior of a depth counts as. The prior is the rate of
            the depth above it (of depth 1: every draft accepted), so that depths nobody has tried
            look worth trying.
        hysteresis: Leave the present choice only for a goodput more than this share better.
        probe_interval: While a deeper tier could be worth it, try the next one up for one round
            after this many rounds; 0 never tries.
        max_probe_interval: The interval doubles with every probe that changes nothing, up to this;
            a change of choice resets it. Equal to `probe_interval` it stays fixed.
    """

    def __init__(
        self,
        tiers: Sequence[int],
        profile: CostProfile,
        off_mode: OffMode = "warm",
        *,
        half_life_samples: ArrayLike = 150.0,
        prior_samples: ArrayLike = 20.0,
        hysteresis: ArrayLike = 0.0,
        probe_interval: ArrayLike = 32,
        max_probe_interval: ArrayLike = 128,
    ) -> None:
        self.tiers = checked_tiers(tiers)
        self._k_of_tier = np.array(self.tiers)
        self._profile, self._off_mode = profile, off_mode
        self._columns = profile_columns(profile, self.tiers)
        self._half_life = np.asarray(half_life_samples, np.float64)
        self._prior = np.asarray(prior_samples, np.float64)
        self._hysteresis = np.asarray(hysteresis, np.float64)
        self._first_interval = np.asarray(probe_interval, np.int64)
        self._max_interval = np.asarray(max_probe_interval, np.int64)
        for field, value, allowed in (
            ("half_life_samples", self._half_life > 0, "above 0"),
            ("prior_samples", self._prior > 0, "above 0"),
            ("hysteresis", self._hysteresis >= 0, "0 or more"),
            ("probe_interval", self._first_interval >= 0, "0 or more"),
            ("max_probe_interval", self._max_interval >= self._first_interval, "probe_interval or more"),
        ):
            if not value.all():
                raise UserError(f"greedy rule: {field} must be {allowed}")

    def reset(self, num_servers: int) -> None:
        for field, value in self._parameters().items():
            per_server(value, num_servers, field)
        self._rows = np.arange(num_servers)
        # Depth first, so that every step over depths works on contiguous rows.
        self._reached = np.zeros((self.tiers[-1], num_servers))
        self._accepted = np.zeros((self.tiers[-1], num_servers))
        self._choice = np.zeros(num_servers, np.int64)
        self._probing = np.zeros(num_servers, bool)
        self._interval = per_server(self._first_interval, num_servers, "probe_interval")
        self._since_probe = np.zeros(num_servers, np.int64)

    def decide(self, signals: RoundSignals) -> IntArray:
        round_s = self._profile.round_s(signals.num_running, signals.mean_context_tokens, self._off_mode)
        goodput = self._expected_tokens() / round_s[:, self._columns]
        frontier = (self._reached > 0).sum(axis=0)
        highest = np.searchsorted(self._k_of_tier, frontier, side="right")
        highest = np.minimum(highest, len(self.tiers) - 1)
        goodput[np.arange(len(self.tiers)) > highest[:, None]] = -np.inf

        best = goodput.argmax(axis=1)
        present = goodput[self._rows, self._choice]
        better = goodput[self._rows, best] > (1 + self._hysteresis) * present
        running = signals.num_running > 0
        changed = better & running
        self._choice = np.where(changed, best, self._choice)
        self._schedule_probe(changed, self._choice < highest, running)
        return self._k_of_tier[self._choice + self._probing]

    def observe(self, outcome: RoundOutcome) -> None:
        # at_least[n, s]: requests of server s that had n drafts or more accepted.
        at_least = outcome.accept_counts.T[::-1].cumsum(axis=0)[::-1]
        num_depths = min(len(at_least) - 1, self.tiers[-1])
        tried = (np.arange(1, num_depths + 1)[:, None] <= outcome.k) & (outcome.round_id >= 0)
        reached = np.where(tried, at_least[:num_depths], 0)
        kept = np.exp2(-reached / self._half_life)
        for total, new in ((self._reached, reached), (self._accepted, at_least[1 : num_depths + 1] * tried)):
            total[:num_depths] *= kept
            total[:num_depths] += new

    def card(self) -> dict[str, Any]:
        return {"kind": "greedy", **{field: value.tolist() for field, value in self._parameters().items()}}

    def _parameters(self) -> dict[str, Any]:
        return {
            "half_life_samples": self._half_life,
            "prior_samples": self._prior,
            "hysteresis": self._hysteresis,
            "probe_interval": self._first_interval,
            "max_probe_interval": self._max_interval,
        }

    def _expected_tokens(self) -> FloatArray:
        """Tokens a request commits in a round at every tier, shape `(num_servers, num_tiers)`."""
        num_depths, num_servers = self._reached.shape
        rate, survival = np.ones(num_servers), np.ones(num_servers)
        tokens = np.ones((num_depths + 1, num_servers))
        for depth in range(num_depths):
            rate = (self._accepted[depth] + self._prior * rate) / (self._reached[depth] + self._prior)
            survival = survival * rate
            np.add(tokens[depth], survival, out=tokens[depth + 1])
        tier_tokens: FloatArray = tokens[self._k_of_tier].T
        return tier_tokens

    def _schedule_probe(self, changed: BoolArray, can_probe: BoolArray, running: BoolArray) -> None:
        """Set which servers try the next tier up in this round; idle servers wait."""
        longer = np.where(self._probing, np.minimum(2 * self._interval, self._max_interval), self._interval)
        self._interval = np.where(changed, self._first_interval, longer)
        self._since_probe = np.where(changed, 0, self._since_probe) + running
        due = (self._since_probe >= self._interval) & (self._interval > 0)
        self._probing = due & can_probe
        self._since_probe[due] = 0
