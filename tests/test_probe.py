"""Probes of deeper tiers: when they come, and that a policy cannot be stuck at a k that bad luck chose."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from draftdial.controller.learned import LearnedPolicy
from draftdial.controller.policy_file import PolicyFile, load_policy
from draftdial.controller.probe import DEAR, FIRST_WAIT_ROUNDS, LONGEST_WAIT_ROUNDS, Probe
from draftdial.controller.signals import RoundOutcome, RoundSignals

NUM_TIERS = 4


def probes(wanted: list[list[int]], growth: float = 1.1) -> list[list[int]]:
    """Rounds in which each server ran deeper than wanted; a tier takes `growth` times as long as the last."""
    num_servers = len(wanted[0])
    probe = Probe(NUM_TIERS)
    probe.reset(num_servers)
    round_s = np.repeat(growth ** np.arange(NUM_TIERS)[:, None], num_servers, axis=1)
    run = np.array([probe.applied(np.array(tiers), round_s) for tiers in wanted])
    assert set(np.unique(run - wanted)) <= {0, 1}
    return [np.flatnonzero(column).tolist() for column in (run - wanted).T]


@pytest.mark.parametrize("tier", range(NUM_TIERS - 1))
def test_the_wait_doubles_up_to_its_limit(tier: int) -> None:
    (rounds,) = probes([[tier]] * 3000)
    gaps = np.diff([-1, *rounds])
    waits = [FIRST_WAIT_ROUNDS * 2**i for i in range(4)]
    assert waits[-1] == LONGEST_WAIT_ROUNDS
    assert gaps[:4].tolist() == [wait + 1 for wait in waits]
    assert set(gaps[4:].tolist()) == {LONGEST_WAIT_ROUNDS + 1}


def test_the_deepest_tier_has_nothing_to_probe() -> None:
    assert probes([[NUM_TIERS - 1]] * 1000) == [[]]


def test_going_deeper_by_itself_starts_the_wait_anew() -> None:
    (rounds,) = probes([*[[0]] * 100, [NUM_TIERS - 1], *[[0]] * 40])
    assert rounds == [FIRST_WAIT_ROUNDS, FIRST_WAIT_ROUNDS + 65, 101 + FIRST_WAIT_ROUNDS]


def test_wavering_between_two_tiers_does_not_put_off_the_third() -> None:
    (rounds,) = probes([[0], [1]] * 100)
    assert rounds[0] in (FIRST_WAIT_ROUNDS, FIRST_WAIT_ROUNDS + 1)


def test_a_dear_probe_waits_in_proportion() -> None:
    for times in (4, 16):
        (rounds,) = probes([[0]] * 2000, growth=1 + times * DEAR)
        assert rounds[:2] == [times * FIRST_WAIT_ROUNDS, 3 * times * FIRST_WAIT_ROUNDS + 1]


def test_servers_do_not_share_their_waits() -> None:
    alone = probes([[0]] * 200)[0]
    together = probes([[0, 3, 0 if r > 50 else 1] for r in range(200)])
    assert together[:2] == [alone, []]
    assert together[2] == [FIRST_WAIT_ROUNDS, *(51 + r for r in alone if 51 + r < 200)]


def test_one_server_and_many_are_probed_alike() -> None:
    wanted = np.random.default_rng(0).choice(NUM_TIERS, 2000, p=[0.5, 0.4, 0.09, 0.01]).tolist()
    alone = probes([[tier] for tier in wanted])[0]
    assert alone
    assert probes([[tier] * 3 for tier in wanted]) == [alone] * 3


def test_a_policy_that_was_unlucky_at_first_drafts_again(
    make_policy_file: Callable[..., PolicyFile],
) -> None:
    """Ten rounds accept nothing, then all is accepted: without probes it would never know."""
    policy = load_policy(make_policy_file(tiers=(0, 1, 2, 3, 5, 7)))
    assert isinstance(policy, LearnedPolicy)
    # Off until something has been accepted, on ever after: the trap in its purest form.
    policy.network.logits = lambda observation: np.array(  # type: ignore[method-assign]
        [[0.0, float(policy.features.belief.accepted.sum() > 0) - 0.5, -1, -1, -1, -1]], np.float32
    )
    policy.reset(1)
    signals = RoundSignals.zeros(1)
    signals.num_running[0], signals.max_running[0] = 1, 8
    chosen = []
    for round_id in range(400):
        signals.round_id[0] = round_id
        k = int(policy.decide(signals)[0])
        chosen.append(k)
        if k:
            policy.observe(RoundOutcome.from_num_accepted(round_id, k, [k if round_id >= 10 else 0], 7))
    assert chosen[:FIRST_WAIT_ROUNDS] == [0] * FIRST_WAIT_ROUNDS
    assert min(chosen[FIRST_WAIT_ROUNDS:]) == 1
