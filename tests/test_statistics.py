"""Intervals cover what they promise, bounds hold for the whole table, verdicts follow from bounds."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from draftdial.controller.statistics import (
    MAX_SEEDS,
    Bounds,
    combined_interval,
    log_ratio,
    needed_seeds,
    simultaneous_bounds,
    verdict_of,
)

FloatArray = NDArray[np.float64]


def noise(rng: np.random.Generator, shape: tuple[int, int], skewed: bool) -> FloatArray:
    """Draws of mean 0 and variance 1; `skewed` ones are lognormal with a long right tail."""
    normal = rng.standard_normal(shape)
    if not skewed:
        return normal
    variance = np.exp(0.09) * (np.exp(0.09) - 1)
    return np.asarray((np.exp(0.3 * normal) - np.exp(0.045)) / np.sqrt(variance))


def table(
    rng: np.random.Generator, seeds: tuple[int, ...], num_pairs: int, skewed: bool = False
) -> list[FloatArray]:
    """Differences of mean 0; the pairs of a cell share half of their noise and differ in scale."""
    return [
        (noise(rng, (n, 1), skewed) + noise(rng, (n, num_pairs), skewed))
        * np.geomspace(0.001, 0.03, num_pairs)
        for n in seeds
    ]


@pytest.mark.parametrize(
    ("seeds", "skewed"),
    [((16,) * 5, False), ((16, 16, 48), False), ((16,) * 5, True)],
    ids=["16 seeds", "16 and 48 seeds", "skewed"],
)
def test_bounds_cover_the_whole_table(seeds: tuple[int, ...], skewed: bool) -> None:
    rng = np.random.default_rng(11)
    num_tables = 250
    covered_above = covered_below = 0
    for i in range(num_tables):
        bounds = simultaneous_bounds(table(rng, seeds, 6, skewed), seed=i)
        covered_above += all((b.upper >= 0).all() for b in bounds)
        covered_below += all((b.lower <= 0).all() for b in bounds)
    assert covered_above / num_tables >= 0.93
    assert covered_below / num_tables >= 0.93


def test_bounds_taken_pair_by_pair_would_not_cover_the_table() -> None:
    """The power of the coverage test above: it fails for bounds that ignore the number of pairs."""
    rng = np.random.default_rng(12)
    covered = 0
    for _ in range(200):
        cells = table(rng, (16,) * 5, 6)
        covered += all((d.mean(0) + stats.t.isf(0.05, 15) * d.std(0, ddof=1) / 4 >= 0).all() for d in cells)
    assert covered / 200 < 0.5


def test_few_seeds_still_cover() -> None:
    rng = np.random.default_rng(13)
    covered = sum(
        all((b.upper >= 0).all() for b in simultaneous_bounds(table(rng, (4,) * 2, 6), seed=i))
        for i in range(500)
    )
    assert covered / 500 >= 0.93


def test_student_interval_covers_where_bca_falls_short() -> None:
    rng = np.random.default_rng(14)
    num_samples, student, bca = 600, 0, 0
    for _ in range(num_samples):
        sample = rng.standard_normal(16)
        _, low, high = combined_interval([sample])
        student += low <= 0 <= high
        interval = stats.bootstrap((sample,), np.mean, method="BCa", n_resamples=500, rng=rng)
        bca += interval.confidence_interval.low <= 0 <= interval.confidence_interval.high
    assert 0.93 <= student / num_samples <= 0.97
    assert bca < student


def test_same_input_and_seed_give_the_same_bounds() -> None:
    cells = table(np.random.default_rng(1), (16, 20), 4)
    first, again, other = (simultaneous_bounds(cells, seed) for seed in (3, 3, 4))
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a.upper, b.upper)
        np.testing.assert_array_equal(a.lower, b.lower)
        assert (a.upper != c.upper).all()
        np.testing.assert_allclose(a.upper, c.upper, rtol=0.15)


def test_bounds_lie_outside_the_interval_of_a_pair_alone() -> None:
    (bounds,) = simultaneous_bounds(table(np.random.default_rng(2), (16,), 10))
    assert (bounds.lower < bounds.ci_low).all()
    assert (bounds.ci_low < bounds.mean).all()
    assert (bounds.mean < bounds.ci_high).all()
    assert (bounds.ci_high < bounds.upper).all()


def test_equal_policies_are_known_exactly_and_leave_other_pairs_alone() -> None:
    (noisy,) = table(np.random.default_rng(3), (16,), 3)
    costs = np.random.default_rng(4).uniform(1, 2, 16)
    equal = log_ratio(costs, costs)[:, None]
    (alone,) = simultaneous_bounds([noisy])
    (beside,) = simultaneous_bounds([np.hstack([noisy, equal])])
    assert np.exp(beside.upper[3]) == np.exp(beside.lower[3]) == np.exp(beside.ci_high[3]) == 1.0
    np.testing.assert_array_equal(beside.upper[:3], alone.upper)
    (only,) = simultaneous_bounds([equal])
    assert only.upper[0] == only.lower[0] == 0.0


def test_undefined_pair_stays_undefined_and_leaves_other_pairs_alone() -> None:
    (noisy,) = table(np.random.default_rng(9), (16,), 3)
    (alone,) = simultaneous_bounds([noisy])
    (beside,) = simultaneous_bounds([np.hstack([noisy, np.full((16, 1), np.nan)])])
    assert np.isnan([beside.mean[3], beside.upper[3], beside.ci_low[3]]).all()
    np.testing.assert_array_equal(beside.upper[:3], alone.upper)


def test_constant_difference_is_known_exactly() -> None:
    (bounds,) = simultaneous_bounds([np.full((16, 1), np.log(0.9))])
    assert np.exp(bounds.upper[0]) == pytest.approx(0.9, rel=1e-12)


def test_pair_that_differs_in_one_seed_does_not_unbound_the_table() -> None:
    (noisy,) = table(np.random.default_rng(5), (16,), 3)
    sparse = np.zeros((16, 1))
    sparse[7] = 0.02
    (alone,) = simultaneous_bounds([noisy])
    (beside,) = simultaneous_bounds([np.hstack([noisy, sparse])])
    assert 0 < beside.upper[3] < 0.02
    assert ((beside.upper - beside.mean)[:3] < 2 * (alone.upper - alone.mean)).all()


def test_single_seed_bounds_nothing() -> None:
    (bounds,) = simultaneous_bounds([np.array([[0.01, 0.0]])])
    assert np.isposinf(bounds.upper).all()
    assert np.isneginf(bounds.ci_low).all()
    assert (needed_seeds(bounds, np.array([0.01, 0.01])) > 1).all()


def test_combined_interval_of_equal_cells_has_the_pooled_width() -> None:
    rng = np.random.default_rng(6)
    column = rng.standard_normal(16)
    mean, low, high = combined_interval([column, column, column, column])
    error = column.std(ddof=1) / 4 / 2
    assert mean == pytest.approx(column.mean())
    assert high - low == pytest.approx(2 * stats.t.isf(0.025, 60) * error)
    assert combined_interval([np.zeros(16), np.zeros(16)]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        (0.90, 0.99, "better"),
        (0.99, 1.005, "not-worse"),
        (1.0, 1.0, "not-worse"),
        (1.002, 1.008, "not-worse"),
        (1.005, 1.015, "undecided"),
        (0.98, 1.02, "undecided"),
        (1.011, 1.02, "worse"),
        (-np.inf, np.inf, "undecided"),
        (0.0, 1.01, "undecided"),
    ],
)
def test_verdict(lower: float, upper: float, expected: str) -> None:
    assert verdict_of(lower, upper, 0.01) == expected


def test_needed_seeds_reach_the_wanted_width() -> None:
    """With as many seeds as asked for, the bounds reach no further than half the margin."""
    rng = np.random.default_rng(7)

    def standard(num_seeds: int) -> FloatArray:
        draws = rng.standard_normal((num_seeds, 20))
        return np.asarray((draws - draws.mean(axis=0)) / draws.std(axis=0, ddof=1))

    margin = np.full(20, 0.01)
    (pilot,) = simultaneous_bounds([0.006 * standard(16) + 0.004])
    wanted = int(needed_seeds(pilot, margin).max())
    assert 16 < wanted < 100
    (grown,) = simultaneous_bounds([0.006 * standard(wanted) + 0.004])
    assert (grown.upper - grown.mean <= 0.005).all()


def test_needed_seeds_asks_for_no_more_where_the_answer_is_clear() -> None:
    rng = np.random.default_rng(8)
    pilot = rng.standard_normal((16, 3)) * 0.02 + np.log([0.7, 1.0, 1.5])
    (bounds,) = simultaneous_bounds([pilot])
    clear_better, close, clear_worse = needed_seeds(bounds, np.full(3, 0.01))
    assert clear_better == clear_worse == 16
    assert 16 < close <= MAX_SEEDS


def test_needed_seeds_is_capped() -> None:
    wide = Bounds(
        mean=np.zeros(1),
        ci_low=-np.ones(1),
        ci_high=np.ones(1),
        lower=-np.ones(1),
        upper=np.ones(1),
        spread=np.ones(1),
        num_seeds=16,
        upper_tail=1e-4,
    )
    assert needed_seeds(wide, np.array([0.01]))[0] == MAX_SEEDS


def test_asking_for_more_seeds_does_not_favour_a_verdict() -> None:
    """Policies that are worse by exactly the margin rarely pass, however often the table is extended."""
    rng = np.random.default_rng(15)
    num_tables, passed = 100, 0

    def draw(num_seeds: int) -> FloatArray:
        common = rng.standard_normal((num_seeds, 1))
        return np.asarray((common + rng.standard_normal((num_seeds, 5))) * 0.004 + np.log1p(0.01))

    for i in range(num_tables):
        cells = [draw(16) for _ in range(3)]
        for _ in range(3):
            wanted = [
                int(needed_seeds(b, np.full(5, 0.01)).max()) for b in simultaneous_bounds(cells, seed=i)
            ]
            cells = [np.vstack([c, draw(n - len(c))]) for c, n in zip(cells, wanted, strict=True)]
        passed += any((b.upper < np.log1p(0.01)).any() for b in simultaneous_bounds(cells, seed=i))
    assert passed / num_tables <= 0.08
