"""The batch-size bandit: contexts, arms, locks and what an outcome is credited to.

The tiny profile takes `10 + batch + 2 k` ms a round at captured batches 1, 2 and 4, so at a batch of
4: 14 ms off, 16 at k = 1, 20 at k = 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftdial.controller.bandit import Bandit
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.signals import RoundOutcome, RoundSignals

MakeProfile = Callable[..., CostProfile]


class Server:
    """One server under a bandit; its rounds are numbered as they are decided."""

    def __init__(self, profile: CostProfile, **parameters: Any) -> None:
        self.rule = Bandit(profile.tiers, profile, **parameters)
        self.rule.reset(1)
        self.round_id = -1

    def decide(self, num_running: int = 4) -> int:
        self.round_id += 1
        signals = RoundSignals.zeros(1)
        signals.round_id[:], signals.num_running[:] = self.round_id, num_running
        signals.mean_context_tokens[:] = 100
        return int(self.rule.decide(signals)[0])

    def observe(self, round_id: int, k: int, accepted: list[int]) -> None:
        self.rule.observe(RoundOutcome.from_num_accepted(round_id, k, accepted, self.rule.tiers[-1]))

    def play(self, accepted_of_k: dict[int, int], num_running: int = 4) -> int:
        """One round whose outcome arrives at once; what each k would have accepted is given."""
        k = self.decide(num_running)
        self.observe(self.round_id, k, [accepted_of_k[k]] * num_running)
        return k


def test_every_arm_is_tried_and_then_the_best_is_kept(make_profile: MakeProfile) -> None:
    server = Server(make_profile(), exploration=0.0, lock_rounds=2)
    # Rewards: 1 without drafts, 2 * 14 / 16 at k = 1, 2 * 14 / 20 at k = 3.
    ks = [server.play({0: 0, 1: 1, 3: 1}) for _ in range(12)]
    assert ks == [0, 0, 1, 1, 3, 3, *[1] * 6]


def test_a_wide_bound_returns_to_the_arm_it_knows_least(make_profile: MakeProfile) -> None:
    # Rewards 1, 14 / 16 and 2 * 14 / 20; discounted pulls 0.25, 0.5 and 1.
    for exploration, choice in ((0.0, 3), (10.0, 0)):
        server = Server(make_profile(), exploration=exploration, discount=0.5, lock_rounds=1)
        assert [server.play({0: 0, 1: 0, 3: 1}) for _ in range(4)] == [0, 1, 3, choice]


def test_each_captured_batch_learns_for_itself(make_profile: MakeProfile) -> None:
    server = Server(make_profile(), exploration=0.0, lock_rounds=1)
    accepted = {0: 0, 1: 1, 3: 0}
    assert [server.play(accepted, 4) for _ in range(4)] == [0, 1, 3, 1]
    assert [server.play(accepted, 1) for _ in range(4)] == [0, 1, 3, 1]
    assert server.play(accepted, 3) == 1  # three requests are padded to four


def test_a_late_outcome_is_booked_in_the_context_of_its_round(make_profile: MakeProfile) -> None:
    server = Server(make_profile(), lock_rounds=1)
    assert server.decide(num_running=4) == 0
    assert server.decide(num_running=1) == 0
    server.observe(0, 0, [0] * 4)
    assert server.decide(num_running=1) == 0  # still untried here
    assert server.decide(num_running=4) == 1


def test_a_forced_k_is_credited_to_its_own_arm(make_profile: MakeProfile) -> None:
    server = Server(make_profile(), lock_rounds=1)
    assert server.decide() == 0
    server.observe(0, 1, [1] * 4)
    assert server.decide() == 0  # 1 was tried, 0 was not
    server.observe(1, 0, [0] * 4)
    assert server.decide() == 3


@pytest.mark.parametrize(("round_id", "k"), [(-1, 0), (4, 2), (0, 0)])
def test_outcomes_without_a_round_or_an_arm_are_left_out(
    make_profile: MakeProfile, round_id: int, k: int
) -> None:
    server = Server(make_profile(), lock_rounds=1)
    for _ in range(5):
        assert server.decide() == 0
    # Nothing arrived; a k that is no tier; a round so long ago that its context is forgotten.
    server.observe(round_id, k, [0] * 4)
    assert server.decide() == 0
    server.observe(5, 0, [0] * 4)
    assert server.decide() == 1


def test_an_arm_is_locked_until_the_batch_moves_to_another_captured_size(make_profile: MakeProfile) -> None:
    server = Server(make_profile(), lock_rounds=5)
    accepted = {0: 0, 1: 1, 3: 1}
    assert [server.play(accepted, 4) for _ in range(7)] == [0] * 5 + [1] * 2
    assert server.play(accepted, 2) == 0
    assert server.play(accepted, 4) == 3


def test_it_follows_acceptance_that_changes() -> None:
    profile = CostProfile.load("h200-llama3-8b")
    generator = np.random.default_rng(8)
    server = Server(profile)
    times = profile.round_s(np.array([64]), np.array([100]), "warm")[0]
    for rate in (0.9, 0.1, 0.9):
        goodput = np.array([sum(rate**d for d in range(k + 1)) for k in profile.tiers]) / times
        time_share = np.zeros(len(profile.tiers))
        for step in range(2000):
            k = server.decide(num_running=64)
            server.observe(server.round_id, k, np.minimum(generator.geometric(1 - rate, 64) - 1, k).tolist())
            if step >= 1000:
                time_share[profile.tiers.index(k)] += times[profile.tiers.index(k)]
        # No single k reaches this at both rates.
        assert goodput @ time_share / time_share.sum() >= 0.93 * goodput.max()
