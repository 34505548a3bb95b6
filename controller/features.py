"""What a policy sees: named numbers with fixed scales, the same code in training and in the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.belief import AcceptanceBelief
from draftdial.controller.cost_profile import OffMode
from draftdial.controller.modelled_clock import ModelledClock
from draftdial.controller.rows import Numbers, OneRow, rows_of
from draftdial.controller.signals import FloatArray, IntArray, RoundOutcome, RoundSignals

HALF_LIVES_SAMPLES = (8.0, 64.0, 512.0, 4096.0)
"""Memories of the belief: about one request alone, a few requests, a traffic mix."""
NUM_MEMORIES = len(HALF_LIVES_SAMPLES)
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
    memories = range(NUM_MEMORIES)
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
        self, num_running: Numbers, mean_context_tokens: Numbers, off_mode: OffMode
    ) -> FloatArray: ...

    def prefill_s(self, num_tokens: Numbers, off_mode: OffMode) -> Numbers: ...


class Features:
    """Turns signals and outcomes into observations of shape `(num_servers, num_features)`, float32.

    Call order, once a round: `observe` any outcomes that arrived, `compute` the observation, then
    `chose` the tier. Everything is derived from those three, by arithmetic alone. What depends on
    outcomes only is worked out by `observe`, which a server calls while the GPU is busy.
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
        self._inverse_scale = np.array([1.0 / feature.scale for feature in self.table], np.float32)
        self._captured = np.maximum(profile.captured_batches[profile.bucket_of_batch], 1)
        self._deepest = np.array(self.tiers[1:], np.int64) - 1
        # Of an outcome's histogram, the requests and the drafts they had accepted.
        depths = np.arange(self.tiers[-1] + 1)
        self._totals = np.stack([np.ones_like(depths), depths], axis=1)
        self.reset(num_servers)

    def reset(self, num_servers: int) -> None:
        """Forget everything; `num_servers` rows follow."""
        self._rows = rows = rows_of(num_servers)
        self._k_of_tier = rows.table(np.array(self.tiers, np.int64))
        self._captured_of_batch = rows.table(self._captured)
        self.belief.reset(num_servers)
        self._clock = ModelledClock(num_servers)
        self._round_s: FloatArray = np.zeros((len(self.tiers), num_servers))
        self._last_tier: Numbers = rows.full(0)
        self._switched_round: Numbers = rows.full(0)
        self._round_id: Numbers = rows.full(-1)
        self._trend: Numbers = rows.full(0.0)
        self._token_s: Numbers = rows.full(0.0)
        self._accept_length: Numbers = rows.full(1.0)

        # One feature a row, before scaling; the observation has one server a row.
        raw = np.zeros((len(self.table), num_servers), np.float32)
        sizes = (len(_LOGARITHMIC), 2 * NUM_MEMORIES, len(_LINEAR), NUM_MEMORIES * self.belief.max_k)
        self._logarithmic, evidence, self._linear, acceptance, advice = np.split(raw, np.cumsum(sizes))
        self._evidence = evidence.reshape(2, NUM_MEMORIES, num_servers)
        # Logarithms in double precision round to the same single ones on every processor.
        self._logs = np.zeros((len(_LOGARITHMIC), num_servers))
        self._evidence_logs = np.zeros((2, NUM_MEMORIES, num_servers))
        self._acceptance = acceptance.reshape(NUM_MEMORIES, self.belief.max_k, num_servers)
        self._advice = advice.reshape(NUM_MEMORIES, len(self.tiers) - 1, num_servers)
        self._raw_of_server = raw.T
        self._observation: NDArray[np.float32] = np.zeros((num_servers, len(self.table)), np.float32)
        self._read_belief()

    def reset_servers(self, servers: IntArray) -> None:
        """Forget everything about `servers`."""
        if isinstance(self._rows, OneRow):
            self.reset(1)
            return
        self.belief.reset_servers(servers)
        self._clock.reset_servers(servers)
        for array in (self._last_tier, self._switched_round, self._trend, self._token_s):
            array[servers] = 0
        self._accept_length[servers] = 1.0
        self._round_id[servers] = -1
        self._read_belief()

    @property
    def speedup(self) -> FloatArray:
        """(num_memories, num_servers, num_tiers): log speed-up over k = 0, by the last `compute`."""
        num_memories, _, num_servers = self._advice.shape
        speedup = np.zeros((num_memories, num_servers, len(self.tiers)))
        speedup[:, :, 1:] = self._advice.swapaxes(1, 2)
        return speedup

    @property
    def round_s(self) -> FloatArray:
        """(num_tiers, num_servers) seconds of the coming round, by the last `compute`."""
        return self._round_s

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a finished round."""
        rows = self._rows
        totals = outcome.accept_counts[:, : len(self._totals)] @ self._totals
        num_requests, accepted = rows.read(totals[:, 0]), rows.read(totals[:, 1])
        accept_length = 1.0 + accepted / rows.maximum(num_requests, 1)
        self._accept_length = rows.where(num_requests > 0, accept_length, self._accept_length)
        if np.count_nonzero(outcome.k):  # k = 0 teaches the belief nothing: bit for bit, it would stay
            self.belief.observe(outcome)
            self._read_belief()

    def _read_belief(self) -> None:
        """Bring what follows from the belief alone up to date."""
        reached = self.belief.reached
        self._evidence_logs[0] = reached[:, :, 0]
        self._evidence_logs[1] = reached[:, :, -1]
        np.log1p(self._evidence_logs, out=self._evidence_logs)
        self._evidence[:] = self._evidence_logs
        self._acceptance[:] = mean = self.belief.mean_by_depth()
        tokens = self._rows.accumulate(np.add, self._rows.accumulate(np.multiply, mean))
        tokens += 1.0
        self._log_tokens: FloatArray = np.log(tokens.take(self._deepest, axis=1))

    def compute(self, signals: RoundSignals) -> NDArray[np.float32]:
        """The observation before the coming round; the next call overwrites it.

        Asked again before the same round, a server gets the same answer.
        """
        rows, clock = self._rows, self._clock
        round_id = rows.read(signals.round_id)
        running = rows.maximum(rows.read(signals.num_running), 1)
        context = rows.read(signals.mean_context_tokens)
        admitted = rows.read(signals.num_admitted)
        is_new = round_id != self._round_id
        self._round_id = round_id + 0  # a copy, where it is a view
        self._trend = self._trend + is_new * (1.0 - TREND_DECAY) * (admitted - self._trend)
        if np.count_nonzero(signals.num_prefill_tokens):
            prefill_s = self.profile.prefill_s(signals.num_prefill_tokens, self.off_mode)
            clock.now_s = clock.now_s + is_new * rows.read(prefill_s)
        waited_s = clock.waited_s(round_id, rows.read(signals.oldest_wait_rounds))

        rows.write(
            self._logs,
            (
                running,
                context,
                rows.read(signals.num_waiting),
                rows.read(signals.num_waiting_prompt_tokens),
                waited_s,
                self._trend,
                round_id - self._switched_round,
                round_id - rows.read(self.belief.last_informed_round),
            ),
        )
        np.log1p(self._logs, out=self._logs)
        self._logarithmic[:] = self._logs
        rows.write(
            self._linear,
            (
                running / self._captured_of_batch[rows.minimum(running, len(self._captured) - 1)],
                running / rows.read(signals.max_running),
                rows.read(signals.kv_used_fraction),
                rows.maximum(1.0 - waited_s / self.ttft_limit_s, -1.0),
                rows.maximum(1.0 - self._token_s / self.tpot_limit_s, -1.0),
                admitted / running,
                rows.read(signals.num_finished) / running,
                self._k_of_tier[self._last_tier],
            ),
        )
        self._round_s = round_s = self.profile.round_s(running, context, self.off_mode).T
        slowdown = np.log(round_s[1:] / round_s[0]).reshape(self._advice.shape[1:])
        np.subtract(self._log_tokens, slowdown, out=self._advice, casting="same_kind")
        return np.multiply(self._raw_of_server, self._inverse_scale, out=self._observation)

    def chose(self, tier_index: IntArray) -> None:
        """The coming round runs at `tier_index`, shape `(num_servers,)`."""
        rows = self._rows
        tier = rows.read(tier_index) + 0  # a copy, likewise
        self._switched_round = rows.where(tier != self._last_tier, self._round_id, self._switched_round)
        self._last_tier = tier
        seconds = rows.pick(self._round_s, tier)
        self._clock.now_s = self._clock.now_s + seconds
        self._token_s = self._token_s + (1.0 - TREND_DECAY) * (seconds / self._accept_length - self._token_s)
