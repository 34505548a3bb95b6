"""What a policy sees: named numbers with fixed scales, the same code in training and in the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.belief import AcceptanceBelief
from draftdial.controller.cost_profile import OffMode
from draftdial.controller.signals import FloatArray, IntArray, RoundOutcome, RoundSignals

HALF_LIVES_SAMPLES = (8.0, 64.0, 512.0, 4096.0)
"""Memories of the belief: about one request alone, a few requests, a traffic mix."""
CLOCK_ROUNDS = 1024
TREND_DECAY = 0.97


@dataclass(frozen=True)
class Feature:
    """One number of the observation: `transform(raw) / scale`, so that policies carry no statistics."""

    name: str
    unit: str
    scale: float
    transform: str = "linear"
    """`linear`, or `log1p` applied to the raw value before `scale`."""


_LOGARITHMIC = (
    Feature("running", "requests", 6.0, "log1p"),
    Feature("context", "tokens per request", 9.0, "log1p"),
    Feature("waiting", "requests", 5.0, "log1p"),
    Feature("waiting_prompt", "tokens", 12.0, "log1p"),
    Feature("oldest_wait", "s of modelled time", 1.0, "log1p"),
    Feature("admitted_trend", "requests per round", 2.0, "log1p"),
    Feature("rounds_since_switch", "rounds", 8.0, "log1p"),
    Feature("rounds_since_informed", "rounds", 8.0, "log1p"),
)
_LINEAR = (
    Feature("graph_fill", "share of the captured batch", 1.0),
    Feature("running_share", "share of max_running", 1.0),
    Feature("kv_used", "share of the KV pool", 1.0),
    Feature("ttft_slack", "share of the TTFT limit", 1.0),
    Feature("tpot_slack", "share of the TPOT limit", 1.0),
    Feature("admitted", "share of running", 1.0),
    Feature("finished", "share of running", 1.0),
    Feature("last_k", "draft tokens", 8.0),
)


def feature_table(tiers: Sequence[int]) -> tuple[Feature, ...]:
    """Every feature a server can offer for these tiers, in the order `Features` computes them."""
    memories = range(len(HALF_LIVES_SAMPLES))
    table = list(_LOGARITHMIC)
    table += [Feature(f"evidence/{m}", "requests at depth 1", 8.0, "log1p") for m in memories]
    table += [Feature(f"evidence_deep/{m}", "requests at the last depth", 8.0, "log1p") for m in memories]
    table += _LINEAR
    for m in memories:
        table += [Feature(f"acceptance/{m}/{d}", "probability", 1.0) for d in range(1, tiers[-1] + 1)]
    for m in memories:
        table += [Feature(f"advice/{m}/k={k}", "log speed-up over k = 0", 1.0) for k in tiers[1:]]
    return tuple(table)


class Pricing(Protocol):
    """What rounds and prefills cost on each server: a `CostProfile`, or one per row."""

    @property
    def tiers(self) -> tuple[int, ...]: ...

    @property
    def captured_batches(self) -> IntArray: ...

    @property
    def bucket_of_batch(self) -> IntArray: ...

    @property
    def max_running(self) -> int: ...

    def round_s(
        self, num_running: IntArray, mean_context_tokens: IntArray, off_mode: OffMode
    ) -> FloatArray: ...

    def prefill_s(self, num_tokens: IntArray, off_mode: OffMode) -> FloatArray: ...


class Features:
    """Turns signals and outcomes into observations of shape `(num_servers, num_features)`, float32.

    Call order, once a round: `observe` any outcomes that arrived, `compute` the observation, then
    `chose` the tier. Everything is derived from those three, by arithmetic alone.
    """

    def __init__(
        self,
        profile: Pricing,
        off_mode: OffMode,
        *,
        ttft_limit_s: float = 1.0,
        tpot_limit_s: float = 0.02,
        num_servers: int = 1,
    ) -> None:
        self.profile = profile
        self.off_mode: OffMode = off_mode
        self.tiers = profile.tiers
        self.ttft_limit_s = ttft_limit_s
        self.tpot_limit_s = tpot_limit_s
        self.table = feature_table(self.tiers)
        self.belief = AcceptanceBelief(self.tiers[-1], HALF_LIVES_SAMPLES, num_servers)
        self._tiers = np.array(self.tiers, np.int64)
        self._inverse_scale = np.array([1.0 / feature.scale for feature in self.table], np.float32)
        self._captured = np.maximum(profile.captured_batches[profile.bucket_of_batch], 1)
        self.reset(num_servers)

    def reset(self, num_servers: int) -> None:
        """Forget everything; `num_servers` rows follow."""
        self.belief.reset(num_servers)
        self.round_s: FloatArray = np.zeros((num_servers, len(self.tiers)))
        """(num_servers, num_tiers): modelled seconds of the coming round, by the last `compute`."""
        self.speedup: FloatArray = np.zeros((len(HALF_LIVES_SAMPLES), num_servers, len(self.tiers)))
        """(num_memories, num_servers, num_tiers): log speed-up over k = 0, by the last `compute`."""
        self._clock_s = np.zeros(num_servers)
        self._clock_at_round = np.zeros((num_servers, CLOCK_ROUNDS))
        self._rows = np.arange(num_servers)
        self._last_tier = np.zeros(num_servers, np.int64)
        self._switched_round = np.zeros(num_servers, np.int64)
        self._trend = np.zeros(num_servers)
        self._token_s = np.zeros(num_servers)
        self._observation: NDArray[np.float32] = np.zeros((num_servers, len(self.table)), np.float32)
        self._round_id = np.full(num_servers, -1, np.int64)
        self._accept_length = np.ones(num_servers)

    def reset_servers(self, servers: IntArray) -> None:
        """Forget everything about `servers`."""
        self.belief.reset_servers(servers)
        for array in (
            self._clock_s,
            self._clock_at_round,
            self._last_tier,
            self._switched_round,
            self._trend,
            self._token_s,
        ):
            array[servers] = 0
        self._accept_length[servers] = 1.0
        self._round_id[servers] = -1

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a finished round."""
        self.belief.observe(outcome)
        num_requests = outcome.accept_counts.sum(axis=1)
        accepted = outcome.accept_counts @ np.arange(outcome.accept_counts.shape[1])
        seen = num_requests > 0
        self._accept_length[seen] = 1.0 + accepted[seen] / num_requests[seen]

    def compute(self, signals: RoundSignals) -> NDArray[np.float32]:
        """The observation before the coming round; the next call overwrites it.

        Asked again before the same round, a server gets the same answer.
        """
        running = np.maximum(signals.num_running, 1)
        is_new = signals.round_id != self._round_id
        self._round_id = signals.round_id.copy()
        self.round_s = self.profile.round_s(running, signals.mean_context_tokens, self.off_mode)
        self._clock_s += is_new * self.profile.prefill_s(signals.num_prefill_tokens, self.off_mode)
        self._clock_at_round[self._rows, signals.round_id % CLOCK_ROUNDS] = self._clock_s
        ago = np.minimum(signals.oldest_wait_rounds, CLOCK_ROUNDS - 1)
        waited_s = self._clock_s - self._clock_at_round[self._rows, (signals.round_id - ago) % CLOCK_ROUNDS]
        self._trend += is_new * (1.0 - TREND_DECAY) * (signals.num_admitted - self._trend)

        out = self._observation
        bucket = np.minimum(running, len(self._captured) - 1)
        for column, raw in enumerate(
            (
                running,
                signals.mean_context_tokens,
                signals.num_waiting,
                signals.num_waiting_prompt_tokens,
                waited_s,
                self._trend,
                signals.round_id - self._switched_round,
                signals.round_id - self.belief.last_informed_round,
            )
        ):
            out[:, column] = raw
        column = len(_LOGARITHMIC)
        reached = self.belief.reached
        num_memories, num_servers, max_k = reached.shape
        out[:, column : column + num_memories] = reached[:, :, 0].T
        column += num_memories
        out[:, column : column + num_memories] = reached[:, :, -1].T
        column += num_memories
        logarithmic = out[:, :column]
        np.log1p(logarithmic, out=logarithmic)

        out[:, column] = running / self._captured[bucket]
        out[:, column + 1] = running / signals.max_running
        out[:, column + 2] = signals.kv_used_fraction
        out[:, column + 3] = np.maximum(1.0 - waited_s / self.ttft_limit_s, -1.0)
        out[:, column + 4] = np.maximum(1.0 - self._token_s / self.tpot_limit_s, -1.0)
        out[:, column + 5] = signals.num_admitted / running
        out[:, column + 6] = signals.num_finished / running
        out[:, column + 7] = self._tiers[self._last_tier]
        column += len(_LINEAR)

        mean = self.belief.mean()
        width = num_memories * max_k
        out[:, column : column + width] = mean.swapaxes(0, 1).reshape(num_servers, width)
        column += width
        tokens = 1.0 + np.cumsum(np.cumprod(mean, axis=2), axis=2)
        slowdown = np.log(self.round_s[:, 1:] / self.round_s[:, :1])
        self.speedup[:, :, 1:] = np.log(tokens[:, :, self._tiers[1:] - 1]) - slowdown
        out[:, column:] = self.speedup[:, :, 1:].swapaxes(0, 1).reshape(num_servers, -1)
        out *= self._inverse_scale
        return out

    def chose(self, tier_index: IntArray) -> None:
        """The coming round runs at `tier_index`, shape `(num_servers,)`."""
        self._switched_round = np.where(tier_index != self._last_tier, self._round_id, self._switched_round)
        self._last_tier = tier_index.copy()
        seconds = self.round_s[self._rows, tier_index]
        self._clock_s += seconds
        self._token_s += (1.0 - TREND_DECAY) * (seconds / self._accept_length - self._token_s)
