"""What a policy settles on when nothing changes: the picture of a policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.policy import Policy
from draftdial.controller.signals import FloatArray, IntArray, RoundOutcome, RoundSignals

CONTEXT_TOKENS = 1000
PROMPT_TOKENS = 500
_LAG = 2
_TEACHING_ROUNDS = 64
_SETTLING_ROUNDS = 192
_ANSWER_ROUNDS = 64
_GOLDEN_RATIO = (5.0**0.5 - 1.0) / 2.0


def settled_k(
    policy: Policy,
    profile: CostProfile,
    num_running: Sequence[int],
    num_waiting: Sequence[int],
    acceptance: Sequence[float],
) -> IntArray:
    """The k chosen most often in constant states, one server each; resets the policy.

    First every tier is run in turn, so that the policy has seen what each one yields here; then the
    policy's own choices run until they had time to settle.

    Args:
        policy: Any policy for the profile's server.
        profile: Its costs.
        num_running: Shape `(num_servers,)`.
        num_waiting: Shape `(num_servers,)`.
        acceptance: Shape `(num_servers,)`: chance of each draft token, given those before it.
    """
    world = _SteadyServers(policy.tiers, profile, num_running, num_waiting, acceptance)
    tiers = np.array(policy.tiers, np.int64)
    votes = np.zeros((world.num_servers, len(tiers)), np.int64)
    flying: list[RoundOutcome] = []
    policy.reset(world.num_servers)
    for round_id in range(_TEACHING_ROUNDS + _SETTLING_ROUNDS + _ANSWER_ROUNDS):
        if len(flying) == _LAG:
            policy.observe(flying.pop(0))
        k = policy.decide(world.signals(round_id))
        if round_id < _TEACHING_ROUNDS:
            k = np.full(world.num_servers, tiers[round_id % len(tiers)])
        if round_id >= _TEACHING_ROUNDS + _SETTLING_ROUNDS:
            votes += k[:, None] == tiers
        flying.append(world.outcome(round_id, k))
    favourite: IntArray = tiers[votes.argmax(axis=1)]
    return favourite


class _SteadyServers:
    """Servers whose load and acceptance never change."""

    def __init__(
        self,
        tiers: tuple[int, ...],
        profile: CostProfile,
        num_running: Sequence[int],
        num_waiting: Sequence[int],
        acceptance: Sequence[float],
    ) -> None:
        self.num_servers = len(num_running)
        self._running = np.array(num_running, np.int64)
        self._waiting = np.array(num_waiting, np.int64)
        self._depth = np.arange(tiers[-1] + 1)
        # Expected requests that reach each depth, shape (num_servers, max_k + 1).
        self._reach: FloatArray = self._running[:, None] * np.array(acceptance)[:, None] ** self._depth
        self._kv_used = np.minimum(self._running * CONTEXT_TOKENS / profile.kv_pool_tokens, 1.0)
        self._max_running = np.full(self.num_servers, profile.max_running)

    def signals(self, round_id: int) -> RoundSignals:
        signals = RoundSignals.zeros(self.num_servers)
        signals.round_id[:] = round_id
        signals.num_running = self._running
        signals.num_waiting = self._waiting
        signals.num_waiting_prompt_tokens = PROMPT_TOKENS * self._waiting
        signals.oldest_wait_rounds = np.minimum(10 * self._waiting, round_id)
        signals.mean_context_tokens[:] = CONTEXT_TOKENS
        signals.kv_used_fraction = self._kv_used
        signals.max_running = self._max_running
        return signals

    def outcome(self, round_id: int, k: IntArray) -> RoundOutcome:
        """Request i of n gets the chance `(i + offset) / n`: spread evenly, and moving with the rounds."""
        offset = (round_id + 1) * _GOLDEN_RATIO % 1.0
        at_least = np.ceil(self._reach - offset).astype(np.int64)
        at_least[:, 0] = self._running
        at_least = np.where(self._depth <= k[:, None], at_least, 0)
        counts = at_least.copy()
        counts[:, :-1] -= at_least[:, 1:]
        return RoundOutcome(np.full(self.num_servers, round_id), k, counts)
