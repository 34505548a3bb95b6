"""A made-up stretch of server history, the same on every machine, to recognise a policy by its answers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.features import Features
from draftdial.controller.policy import Policy
from draftdial.controller.signals import FloatArray, IntArray, RoundOutcome, RoundSignals

NUM_ROUNDS = 64
NUM_SERVERS = 4
_LAG = 2
_REGIME_ROUNDS = 8
_RUNNING, _JITTER, _WAITING, _WAIT, _CONTEXT, _KV, _JOINED, _ACCEPTANCE, _ROUNDING, _TIER = range(10)


class GoldenHistory:
    """What `NUM_SERVERS` servers might go through in `NUM_ROUNDS` rounds.

    Load and acceptance change every few rounds, so that answers to it differ between policies. It
    is part of the file format: all of it is integer arithmetic and single multiplications, which
    give the same bits everywhere; a change of one number is a new major version.
    """

    def __init__(self, max_running: int, max_k: int) -> None:
        shape = (NUM_ROUNDS, NUM_SERVERS)
        regime = np.arange(NUM_ROUNDS) // _REGIME_ROUNDS
        batch = 1 << (9 * _uniform(_RUNNING, shape)[regime]).astype(np.int64)
        batch += (batch * _uniform(_JITTER, shape)).astype(np.int64) >> 2
        self._running = np.minimum(batch, max_running)
        self._max_running = max_running
        self._waiting = np.maximum((60 * _uniform(_WAITING, shape)).astype(np.int64) - 30, 0)
        oldest = (40 * _uniform(_WAIT, shape)).astype(np.int64)
        oldest = np.minimum(oldest, np.arange(NUM_ROUNDS)[:, None])
        self._oldest_wait_rounds = np.where(self._waiting > 0, oldest, 0)
        self._context_tokens = 100 + (4000 * _uniform(_CONTEXT, shape)).astype(np.int64)
        self._kv_used = _uniform(_KV, shape)
        self._joined = (self._running * _uniform(_JOINED, shape)).astype(np.int64) >> 3
        acceptance = 0.25 + 0.7 * _uniform(_ACCEPTANCE, shape)[regime]
        depths = np.repeat(acceptance[..., None], max_k + 1, axis=2)
        depths[..., 0] = 1.0
        reached = self._running[..., None] * np.cumprod(depths, axis=2)
        reached[..., 1:] += _uniform(_ROUNDING, (*shape, max_k))
        # Shape (NUM_ROUNDS, NUM_SERVERS, max_k + 1): requests that would have at least d drafts accepted.
        self._at_least = np.minimum.accumulate(reached.astype(np.int64), axis=2)

    def signals(self, round_id: int) -> RoundSignals:
        """What the policy sees before round `round_id`."""
        joined = self._joined[round_id]
        return RoundSignals(
            round_id=np.full(NUM_SERVERS, round_id),
            num_running=self._running[round_id],
            num_waiting=self._waiting[round_id],
            num_waiting_prompt_tokens=500 * self._waiting[round_id],
            oldest_wait_rounds=self._oldest_wait_rounds[round_id],
            mean_context_tokens=self._context_tokens[round_id],
            kv_used_fraction=self._kv_used[round_id],
            max_running=np.full(NUM_SERVERS, self._max_running),
            num_admitted=joined,
            num_finished=joined[::-1].copy(),
            num_prefill_tokens=700 * joined,
        )

    def outcome(self, round_id: int, k: IntArray) -> RoundOutcome:
        """What round `round_id` reveals if it ran with `k`, shape `(NUM_SERVERS,)`."""
        at_least = self._at_least[round_id]
        at_least = np.where(np.arange(at_least.shape[1]) <= k[:, None], at_least, 0)
        counts = at_least.copy()
        counts[:, :-1] -= at_least[:, 1:]
        return RoundOutcome(np.full(NUM_SERVERS, round_id), k, counts)


def replay_policy(policy: Policy, max_running: int, max_k: int) -> IntArray:
    """Shape `(NUM_ROUNDS, NUM_SERVERS)`: the k that `policy` gives, round by round. Resets it."""
    history = GoldenHistory(max_running, max_k)
    answers = np.zeros((NUM_ROUNDS, NUM_SERVERS), np.int64)
    policy.reset(NUM_SERVERS)
    for round_id in range(NUM_ROUNDS):
        if round_id >= _LAG:
            policy.observe(history.outcome(round_id - _LAG, answers[round_id - _LAG]))
        answers[round_id] = policy.decide(history.signals(round_id))
    return answers


def replay_features(features: Features) -> NDArray[np.float32]:
    """Shape `(NUM_ROUNDS * NUM_SERVERS, num_features)`: what `features` makes of the history. Resets it.

    The tiers are the history's own, so that one near tie cannot change every later observation.
    """
    history = GoldenHistory(features.profile.max_running, features.tiers[-1])
    tiers = np.array(features.tiers, np.int64)
    tier = (len(tiers) * _uniform(_TIER, (NUM_ROUNDS, NUM_SERVERS))).astype(np.int64)
    observations = np.zeros((NUM_ROUNDS, NUM_SERVERS, len(features.table)), np.float32)
    features.reset(NUM_SERVERS)
    for round_id in range(NUM_ROUNDS):
        if round_id >= _LAG:
            features.observe(history.outcome(round_id - _LAG, tiers[tier[round_id - _LAG]]))
        observations[round_id] = features.compute(history.signals(round_id))
        features.chose(tier[round_id])
    return observations.reshape(NUM_ROUNDS * NUM_SERVERS, -1)


def _uniform(stream: int, shape: tuple[int, ...]) -> FloatArray:
    """Numbers in [0, 1) from a counter, by the mixer of SplitMix64 (Steele, Lea and Flood, 2014).

    NumPy promises its generators' streams only within a release; a file must outlive that.
    """
    counter = np.arange(1, np.prod(shape) + 1, dtype=np.uint64) + np.uint64(stream << 32)
    mixed = counter * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return ((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(shape)
