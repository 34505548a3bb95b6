"""Probes while off: when they come, and that a policy cannot be stuck at k = 0."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from draftdial.controller.learned import LearnedPolicy
from draftdial.controller.off_probe import FIRST_WAIT_ROUNDS, LONGEST_WAIT_ROUNDS, OffProbe
from draftdial.controller.policy_file import PolicyFile, load_policy
from draftdial.controller.signals import RoundOutcome, RoundSignals


def probes(wanted: list[list[int]]) -> list[list[int]]:
    """Rounds in which each server ran something else than it wanted."""
    probe = OffProbe()
    probe.reset(len(wanted[0]))
    run = [probe.applied(np.array(tiers)).tolist() for tiers in wanted]
    return [
        [r for r, (got, asked) in enumerate(zip(run, wanted, strict=True)) if got[s] != asked[s]]
        for s in range(len(wanted[0]))
    ]


def test_the_wait_doubles_up_to_its_limit() -> None:
    (rounds,) = probes([[0]] * 4000)
    gaps = np.diff([-1, *rounds])
    waits = [FIRST_WAIT_ROUNDS * 2**i for i in range(5)]
    assert waits[-1] == LONGEST_WAIT_ROUNDS
    assert gaps[:5].tolist() == [wait + 1 for wait in waits]
    assert set(gaps[5:].tolist()) == {LONGEST_WAIT_ROUNDS + 1}


def test_drafting_by_itself_starts_the_wait_anew() -> None:
    (rounds,) = probes([*[[0]] * 100, [2], *[[0]] * 40])
    assert rounds == [FIRST_WAIT_ROUNDS, FIRST_WAIT_ROUNDS + 65, 101 + FIRST_WAIT_ROUNDS]


def test_servers_do_not_share_their_waits() -> None:
    alone = probes([[0]] * 200)[0]
    together = probes([[0, 3, 0 if r > 50 else 1] for r in range(200)])
    assert together == [alone, [], [51 + r for r in alone if 51 + r < 200]]


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
    assert set(chosen[FIRST_WAIT_ROUNDS:]) == {1}
