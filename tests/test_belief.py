"""The belief about acceptance: exact on small outcomes, honest about what was not tried."""

from __future__ import annotations

import numpy as np
import pytest

from draftdial.controller.belief import PRIOR_ACCEPTANCE, PRIOR_SAMPLES, AcceptanceBelief
from draftdial.controller.signals import FloatArray, RoundOutcome


def outcome(round_id: int, k: int, counts: list[int]) -> RoundOutcome:
    return RoundOutcome(np.array([round_id]), np.array([k]), np.array([counts]))


def test_counts_by_hand() -> None:
    belief = AcceptanceBelief(3, (2.0, 8.0))
    # Of 4 requests one had no draft accepted, two had 2, one all 3.
    belief.observe(outcome(0, 3, [1, 0, 2, 1]))
    for memory in (0, 1):
        assert belief.reached[memory, 0].tolist() == [4, 3, 3]
        assert belief.accepted[memory, 0].tolist() == [3, 3, 1]
    # 4 more samples at depth 1: a half-life of 2 keeps a quarter of the old ones, one of 8 their 0.71.
    belief.observe(outcome(1, 1, [1, 3, 0, 0]))
    assert belief.reached[0, 0].tolist() == [4 / 4 + 4, 3, 3]
    assert belief.accepted[0, 0].tolist() == [3 / 4 + 3, 3, 1]
    assert belief.reached[1, 0] == pytest.approx([4 * 0.5**0.5 + 4, 3, 3])
    assert belief.accepted[1, 0] == pytest.approx([3 * 0.5**0.5 + 3, 3, 1])


def test_means_lean_on_longer_memories_and_on_all_depths() -> None:
    belief = AcceptanceBelief(2, (2.0, 8.0))
    assert belief.mean() == pytest.approx(np.full((2, 1, 2), PRIOR_ACCEPTANCE))
    belief.observe(outcome(0, 2, [0, 0, 6]))
    belief.observe(outcome(1, 1, [2, 0, 0]))
    w = PRIOR_SAMPLES
    keep = (0.5, 0.5**0.25)  # of the first round's depth 1, after 2 samples
    reached = [[6 * f + 2, 6.0] for f in keep]
    accepted = [[6 * f, 6.0] for f in keep]
    pooled = (sum(accepted[1]) + w * PRIOR_ACCEPTANCE) / (sum(reached[1]) + w)
    long = [(a + w * pooled) / (r + w) for a, r in zip(accepted[1], reached[1], strict=True)]
    short = [(a + w * m) / (r + w) for a, r, m in zip(accepted[0], reached[0], long, strict=True)]
    np.testing.assert_allclose(belief.mean()[:, 0], [short, long], rtol=1e-12)


def test_a_round_says_nothing_about_depths_it_did_not_try() -> None:
    belief = AcceptanceBelief(7, (8.0, 64.0))
    for round_id in range(200):
        belief.observe(outcome(round_id, 2, [0, 0, 16, 0, 0, 0, 0, 0]))
    assert (belief.reached[:, 0, 2:] == 0).all() and (belief.accepted[:, 0, 2:] == 0).all()
    mean = belief.mean()[:, 0]
    assert (mean[:, :2] > 0.97).all()
    assert (mean[:, 2:] == mean[-1, 2]).all()  # one guess for all of them: what the tried ones suggest
    assert 0.7 < mean[0, 2] < 1.0


@pytest.mark.parametrize(
    "nothing",
    [
        outcome(-1, 3, [5, 5, 5, 5]),  # not arrived: whatever else stands there is old
        outcome(9, 0, [20, 0, 0, 0]),  # off
        outcome(9, 3, [0, 0, 0, 0]),  # only requests that had already finished
    ],
)
def test_rounds_that_teach_nothing(nothing: RoundOutcome) -> None:
    belief = AcceptanceBelief(3, (8.0, 64.0))
    belief.observe(outcome(4, 3, [1, 0, 2, 1]))
    before = belief.mean(), belief.reached.copy(), belief.last_informed_round.copy()
    belief.observe(nothing)
    after = belief.mean(), belief.reached, belief.last_informed_round
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert belief.last_informed_round.tolist() == [4]


def test_evidence_fades_by_the_sample_not_by_the_round() -> None:
    one_round, many_rounds = AcceptanceBelief(1, (8.0, 100.0)), AcceptanceBelief(1, (8.0, 100.0))
    for belief in (one_round, many_rounds):
        belief.observe(outcome(0, 1, [0, 10]))
    one_round.observe(outcome(1, 1, [64, 0]))
    for round_id in range(64):
        many_rounds.observe(outcome(1 + round_id, 1, [1, 0]))
    faded = 10 * 0.5 ** (64 / np.array([8.0, 100.0]))
    assert one_round.accepted[:, 0, 0] == pytest.approx(faded)
    assert many_rounds.accepted[:, 0, 0] == pytest.approx(faded)
    # A batch beyond the table of decays fades what was known as much as the table allows, not less.
    one_round.observe(outcome(2, 1, [6000, 0]))
    assert (one_round.accepted[:, 0, 0] <= faded * 0.5 ** (4096 / 100)).all()


def drafts(rng: np.random.Generator, truth: FloatArray, num_servers: int, batch: int, k: int) -> RoundOutcome:
    """A round of independent requests; `truth` (max_k,) is each depth's acceptance given the one before."""
    accepted = np.cumprod(rng.random((num_servers, batch, k)) < truth[:k], axis=2).sum(axis=2)
    counts = np.stack([(accepted == n).sum(axis=1) for n in range(8)], axis=1)
    return RoundOutcome(np.zeros(num_servers, np.int64), np.full(num_servers, k), counts)


def test_it_finds_the_truth_and_the_short_memory_first() -> None:
    rng = np.random.default_rng(0)
    early, late = np.linspace(0.9, 0.6, 7), np.linspace(0.5, 0.8, 7)
    belief = AcceptanceBelief(7, (64.0, 4096.0), num_servers=50)
    for _ in range(400):
        belief.observe(drafts(rng, early, 50, 16, int(rng.choice([1, 2, 3, 5, 7, 7, 7]))))
    mean = belief.mean()
    assert np.abs(mean.mean(axis=1)[1] - early).max() < 0.02  # no bias from shallow rounds or the prior
    assert np.abs(mean.mean(axis=1)[0] - early).max() < 0.06
    assert (mean.std(axis=1)[0] > 1.5 * mean.std(axis=1)[1]).all()
    for _ in range(12):
        belief.observe(drafts(rng, late, 50, 16, 7))
    moved = (belief.mean() - mean).mean(axis=1)[:, :2] / (late - early)[:2]
    assert (moved[0] > 0.6).all() and (moved[1] < 0.2).all()


def test_servers_learn_and_forget_separately() -> None:
    rng = np.random.default_rng(1)
    together = AcceptanceBelief(7, (8.0, 64.0), num_servers=3)
    alone = [AcceptanceBelief(7, (8.0, 64.0)) for _ in range(3)]
    for round_id in range(30):
        batch = drafts(rng, np.full(7, 0.7), 3, 5, 7)
        batch.k[:] = rng.choice([0, 1, 3, 7], 3)
        batch.round_id[:] = np.where(rng.random(3) < 0.2, -1, round_id)
        together.observe(batch)
        for s, belief in enumerate(alone):
            row = slice(s, s + 1)
            belief.observe(RoundOutcome(batch.round_id[row], batch.k[row], batch.accept_counts[row]))
    for s, belief in enumerate(alone):
        assert (together.mean()[:, s] == belief.mean()[:, 0]).all()
        assert together.last_informed_round[s] == belief.last_informed_round[0]
    kept = together.mean()[:, [0, 2]]
    together.reset_servers(np.array([1]))
    assert (together.mean()[:, 1] == AcceptanceBelief(7, (8.0, 64.0)).mean()[:, 0]).all()
    assert (together.mean()[:, [0, 2]] == kept).all()
    assert (together.last_informed_round < 0).tolist() == [False, True, False]
