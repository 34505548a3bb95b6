"""The fitted source reproduces what it was fitted to, and tells the truth about its hidden state."""

from __future__ import annotations

import numpy as np
import pytest

from draftdial.controller.errors import UserError
from draftdial.envs.acceptance import MAX_K, AcceptanceBank, walk_rounds, walk_statistics
from draftdial.envs.fitted_acceptance import SHIPPED, FittedAcceptance, random_domains

SEED = 20
TOLERANCE = 0.03

RECORDED_ACCEPT_LENGTH = {
    "maths-gsm8k": {1: 1.706, 2: 2.148, 3: 2.411, 5: 2.693, 7: 2.795},
    "code-edit": {1: 1.686, 2: 2.105, 3: 2.362, 5: 2.643, 7: 2.781},
}
"""SpecDecode-Bench arrays (arXiv 2601.11580), Llama-3.1-8B-Instruct: GSM8K and InstructCoder."""

RECORDED_FIRST_DEPTH = {"maths-gsm8k": {1: 0.706, 7: 0.674}, "code-edit": {1: 0.686, 7: 0.600}}

PUBLISHED_ACCEPT_LENGTH = {
    "finance": {3: 1.91, 5: 2.04, 7: 2.10},
    "maths": {3: 2.55, 5: 2.85, 7: 2.97},
    "chat": {3: 2.90, 5: 3.52, 7: 3.86},
    "code": {3: 3.34, 5: 4.32, 7: 4.91},
    "reasoning": {3: 3.48, 5: 4.62, 7: 5.40},
}
"""SpecBundle, Llama-3.1-8B with the SpecForge head: FinanceQA, GSM8K, MT-bench, HumanEval, MATH-500."""


@pytest.fixture(scope="module")
def source() -> FittedAcceptance:
    return FittedAcceptance()


@pytest.fixture(scope="module")
def bank(source: FittedAcceptance) -> AcceptanceBank:
    return source.bank(SEED)


@pytest.mark.parametrize(
    ("domain", "k", "expected"),
    [
        (domain, k, expected)
        for table in (RECORDED_ACCEPT_LENGTH, PUBLISHED_ACCEPT_LENGTH)
        for domain, lengths in table.items()
        for k, expected in lengths.items()
    ],
)
def test_walked_accept_length(bank: AcceptanceBank, domain: str, k: int, expected: float) -> None:
    walk = walk_statistics(bank, bank.domain_names.index(domain), k)
    assert walk.accept_length == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("domain", "k", "expected"),
    [(domain, k, rate) for domain, rates in RECORDED_FIRST_DEPTH.items() for k, rate in rates.items()],
)
def test_depth_1_rate_depends_on_the_walk(bank: AcceptanceBank, domain: str, k: int, expected: float) -> None:
    walk = walk_statistics(bank, bank.domain_names.index(domain), k)
    assert walk.conditional[0] == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(("domain", "expected"), [("maths-gsm8k", 2.483), ("code-edit", 2.574)])
def test_walk_whose_k_reacts_to_its_outcomes(bank: AcceptanceBank, domain: str, expected: float) -> None:
    """k = 1 after a round without an accepted draft, else 7, on the recorded arrays: not fitted to."""
    arrays = bank.arrays_of(bank.domain_names.index(domain))
    num_tokens = num_rounds = 0
    for start, length in zip(bank.array_start[arrays], bank.array_length[arrays], strict=True):
        coming = bank.accepted[start : start + length].tolist()
        position, k = 0, 1
        while position < len(coming):
            yielded = min(coming[position], k) + 1
            position += yielded
            num_tokens += yielded
            num_rounds += 1
            k = 1 if yielded == 1 else 7
    assert num_tokens / num_rounds == pytest.approx(expected, rel=TOLERANCE)


def test_requests_differ_and_remember_as_recorded(bank: AcceptanceBank) -> None:
    maths = walk_statistics(bank, bank.domain_names.index("maths-gsm8k"), 3)
    code = walk_statistics(bank, bank.domain_names.index("code-edit"), 3)
    # Recorded at k = 3: spread of the depth-1 rate .045 and .096, autocorrelation .06 / -.01 and .22 / .14.
    assert maths.first_depth_sd == pytest.approx(0.045, abs=0.01)
    assert code.first_depth_sd == pytest.approx(0.096, abs=0.015)
    assert maths.autocorrelation[[0, 4]] == pytest.approx([0.06, -0.01], abs=0.03)
    assert code.autocorrelation[[0, 4]] == pytest.approx([0.22, 0.14], abs=0.05)
    # Recorded at k = 5: a moving average explains .010 and .275 of the next round's variance.
    assert walk_statistics(bank, 0, 5).predictability < 0.03
    assert walk_statistics(bank, 1, 5).predictability == pytest.approx(0.275, abs=0.06)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_survival_is_the_chance_at_the_starts_of_rounds(bank: AcceptanceBank, k: int) -> None:
    """A round's outcome given its latent is independent of the walk before: sums are close to normal."""
    rounds, _ = walk_rounds(bank.accepted, bank.array_start, bank.array_length, k)
    latent = bank.latent[round_starts(bank, rounds)].astype(np.int64)
    visits = np.bincount(latent, minlength=len(bank.survival))
    for depth in range(1, k + 1):
        chance = bank.survival[:, depth]
        hits = np.bincount(latent, weights=rounds >= depth, minlength=len(chance))
        deviation = np.sqrt(visits * chance * (1 - chance))
        known = deviation > 3
        assert known.sum() > 50
        assert np.abs((hits - visits * chance)[known] / deviation[known]).max() < 5
        assert hits.sum() == pytest.approx((visits * chance).sum(), rel=0.01)


def round_starts(bank: AcceptanceBank, rounds: np.ndarray) -> np.ndarray:
    """Positions at which the rounds of a walk over all arrays started, from the bank's layout alone."""
    starts = []
    index = 0
    for first, length in zip(bank.array_start, bank.array_length, strict=True):
        position = 0
        while position < length:
            starts.append(first + position)
            position += int(rounds[index]) + 1
            index += 1
    return np.array(starts)


def test_survival_starts_at_1_and_falls(bank: AcceptanceBank) -> None:
    assert bank.survival.shape[1] == MAX_K + 1
    assert (bank.survival[:, 0] == 1).all()
    assert (np.diff(bank.survival) <= 0).all()
    assert (bank.survival >= 0).all()


def test_layout_of_the_bank(bank: AcceptanceBank) -> None:
    assert bank.domain_names == tuple(SHIPPED)
    assert bank.array_start[0] == 0
    assert np.array_equal(np.diff(bank.array_start), bank.array_length[:-1])
    assert bank.array_start[-1] + bank.array_length[-1] == len(bank.accepted) == len(bank.latent)
    owner = np.repeat(np.repeat(np.arange(len(SHIPPED)), bank.domain_count), bank.array_length)
    rows = [np.unique(bank.latent[owner == domain]) for domain in range(len(SHIPPED))]
    assert sum(len(row) for row in rows) == len(bank.survival)  # no row is shared, none is idle


def test_spans_are_stationary_along_an_array() -> None:
    domain = SHIPPED["chat"]
    bank = FittedAcceptance([domain], num_arrays=5000, num_positions=12).bank(SEED)
    easy_share = (bank.latent.reshape(5000, 12) % 2).mean(axis=0)
    expected = (1 - domain.stay_hard) / (2 - domain.stay_hard - domain.stay_easy)
    assert easy_share == pytest.approx(np.full(12, expected), abs=0.03)


def test_same_seed_same_bank_other_seed_other_bank(source: FittedAcceptance, bank: AcceptanceBank) -> None:
    again, other = source.bank(SEED), source.bank(SEED + 1)
    assert np.array_equal(again.accepted, bank.accepted)
    assert np.array_equal(again.latent, bank.latent)
    assert not np.array_equal(other.accepted, bank.accepted)


def test_a_domain_does_not_depend_on_its_neighbours(bank: AcceptanceBank) -> None:
    alone = FittedAcceptance(["chat"]).bank(SEED)
    arrays = bank.arrays_of(bank.domain_names.index("chat"))
    first = bank.array_start[arrays][0]
    assert np.array_equal(alone.accepted, bank.accepted[first : first + len(alone.accepted)])


def test_longer_arrays_and_fewer_of_them() -> None:
    bank = FittedAcceptance(["finance", "code"], num_arrays=20, num_positions=1000).bank(SEED)
    assert bank.domain_count.tolist() == [20, 20]
    assert (bank.array_length == 1000).all()


def test_unknown_domain_is_refused_with_the_choice() -> None:
    with pytest.raises(UserError, match="'poetry' is not shipped: choose from maths-gsm8k, code-edit"):
        FittedAcceptance(["poetry"])


def test_random_domains_cover_the_shipped_ones(bank: AcceptanceBank) -> None:
    drawn = random_domains(np.random.default_rng(SEED), 100, num_arrays=32, num_positions=256).bank(SEED)
    for k in (1, 7):
        seen = [walk_statistics(drawn, domain, k).accept_length for domain in range(100)]
        shipped = [walk_statistics(bank, domain, k).accept_length for domain in range(len(SHIPPED))]
        assert min(seen) < min(shipped)
        assert max(seen) > max(shipped)


def test_random_domains_follow_their_generator() -> None:
    first, again, other = (
        random_domains(np.random.default_rng(seed), 3, num_arrays=8, num_positions=64).bank(0)
        for seed in (1, 1, 2)
    )
    assert np.array_equal(first.survival, again.survival)
    assert np.array_equal(first.accepted, again.accepted)
    assert not np.array_equal(first.survival, other.survival)
