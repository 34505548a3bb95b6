"""The learned policy's network, and its decisions for one server and for many."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from draftdial.controller.golden import NUM_ROUNDS, NUM_SERVERS, GoldenHistory
from draftdial.controller.learned import LearnedPolicy, Network
from draftdial.controller.policy_file import PolicyFile, load_policy
from draftdial.controller.signals import RoundOutcome, RoundSignals

FIELDS = RoundSignals.__dataclass_fields__


@pytest.fixture
def make_learned(make_policy_file: Callable[..., PolicyFile]) -> Callable[[], LearnedPolicy]:
    def make() -> LearnedPolicy:
        policy = load_policy(make_policy_file(tiers=(0, 1, 2, 3, 5, 7)))
        assert isinstance(policy, LearnedPolicy)
        return policy

    return make


def test_the_network_is_its_formula(make_learned: Callable[[], LearnedPolicy]) -> None:
    network: Network = make_learned().network
    w = {name: tensor.astype(np.float64) for name, tensor in network.tensors.items()}
    observations = np.random.default_rng(0).normal(size=(5, w["hidden.0.weight"].shape[1])).astype(np.float32)
    for x, logits in zip(observations, network.logits(observations), strict=True):
        h = np.tanh(w["hidden.0.weight"] @ x + w["hidden.0.bias"])
        h = np.tanh(w["hidden.1.weight"] @ h + w["hidden.1.bias"])
        num_advice = w["logits.weight"].shape[1] - len(h)
        expected = w["logits.weight"] @ np.concatenate([h, x[-num_advice:]]) + w["logits.bias"]
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_one_server_decides_as_it_would_among_many(make_learned: Callable[[], LearnedPolicy]) -> None:
    """Observations are the same bits; only sums inside the BLAS may differ."""
    together, alone = make_learned(), [make_learned() for _ in range(NUM_SERVERS)]
    together.reset(NUM_SERVERS)
    history = GoldenHistory(max_running=8, max_k=7)
    chosen = []
    for round_id in range(NUM_ROUNDS):
        if round_id >= 2:
            outcome = history.outcome(round_id - 2, chosen[round_id - 2])
            together.observe(outcome)
            for s, policy in enumerate(alone):
                row = slice(s, s + 1)
                policy.observe(
                    RoundOutcome(outcome.round_id[row], outcome.k[row], outcome.accept_counts[row])
                )
        signals = history.signals(round_id)
        chosen.append(together.decide(signals))
        for s, policy in enumerate(alone):
            single = RoundSignals(**{name: getattr(signals, name)[s : s + 1] for name in FIELDS})
            assert policy.decide(single) == chosen[-1][s]
            observation = together.features.compute(signals)[s]
            assert (policy.features.compute(single)[0] == observation).all()
    assert len(np.unique(chosen)) > 2


def test_nan_is_an_error_and_not_a_tier(make_learned: Callable[[], LearnedPolicy]) -> None:
    policy = make_learned()
    signals = RoundSignals.zeros(1)
    signals.max_running[:] = 8
    assert policy.decide(signals)[0] in policy.tiers
    signals.kv_used_fraction[:] = np.nan
    with pytest.raises(ArithmeticError, match="NaN"):
        policy.decide(signals)
