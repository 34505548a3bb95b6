"""Paired comparison of policies: per-pair intervals, simultaneous bounds and the verdict they allow.

Everything here works on *costs*: a log ratio below 0 (a ratio below 1) means the policy is better.
Seeds are paired (common random numbers), so the unit of evidence is one difference per seed.

The interval of one pair is Student's t on the per-seed log ratios, not BCa: BCa repairs the shape of the
resampling distribution but not its narrowness at few seeds, and at 16 covers less than it says
(tests/test_statistics.py measures both).

Bounds over the whole table come from a max-t bootstrap (Westfall and Young 1993, single-step min-p):
seeds are resampled jointly within a cell, so that rivals keep their correlation, and each resample's most
extreme t statistic is turned into a tail probability by the cell's own degrees of freedom, so that a cell
with few seeds does not widen the bounds of cells with many. Upper and lower tails are calibrated
separately: skewed differences need unequal ones. Cells are taken to have independent seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from draftdial.controller.signals import FloatArray, IntArray

Verdict = Literal["better", "not-worse", "worse", "undecided"]

CONFIDENCE = 0.95
MAX_SEEDS = 1024
"""No more seeds than this are ever asked for: a pair that needs more stays undecided."""

_NUM_RESAMPLES = 4000
_FEWEST_SEEDS = 8
"""Below this a bootstrap has too few distinct resamples: Bonferroni's level caps it."""
_LEAST_ERROR = 0.25
"""A resample's standard error is at least this part of the sample's. Without it one pair that differs in
few seeds (two rules that rarely disagree) gets resamples of no spread and unbounds the whole table."""
_ROUNDING = 1e-12
"""A spread of log ratios no larger than this is floating-point noise: the pair is known exactly."""


@dataclass(frozen=True)
class Bounds:
    """Mean differences of one cell and what is known about them. Arrays are (num_pairs,)."""

    mean: FloatArray
    ci_low: FloatArray
    """Two-sided 95 % interval of each pair alone."""
    ci_high: FloatArray
    lower: FloatArray
    """One-sided: with 95 % confidence, no mean of the table lies below its lower bound."""
    upper: FloatArray
    """One-sided: with 95 % confidence, no mean of the table lies above its upper bound."""
    spread: FloatArray
    """Standard deviation over seeds; nan with a single seed."""
    num_seeds: int
    upper_tail: float
    """Tail probability, under Student's t, at which the table's upper bounds are taken."""


def log_ratio(policy: FloatArray, rival: FloatArray) -> FloatArray:
    """Per-seed log of policy ÷ rival, both (num_seeds,) costs above 0 on the same seeds."""
    return np.asarray(np.log(policy) - np.log(rival))


def combined_interval(columns: Sequence[FloatArray]) -> tuple[float, float, float]:
    """Mean over cells of the cells' mean differences, with its two-sided 95 % interval.

    `columns` holds one (num_seeds of the cell,) array per cell. The cells are fixed, not a sample: the
    interval covers the noise of the seeds. Degrees of freedom by Welch and Satterthwaite.
    """
    mean = float(np.mean([column.mean() for column in columns]))
    if min(len(column) for column in columns) < 2:
        return mean, -np.inf, np.inf
    variances = np.array([column.var(ddof=1) / len(column) for column in columns]) / len(columns) ** 2
    total = variances.sum()
    if np.sqrt(total) <= _ROUNDING:
        return mean, mean, mean
    degrees = total**2 / np.sum(variances**2 / (np.array([len(column) for column in columns]) - 1))
    reach = float(stats.t.isf((1 - CONFIDENCE) / 2, degrees) * np.sqrt(total))
    return mean, mean - reach, mean + reach


def simultaneous_bounds(cells: Sequence[FloatArray], seed: int = 0) -> list[Bounds]:
    """Intervals and simultaneous bounds of a table; the same input and seed give the same bounds.

    `cells` holds, per cell, the differences (num_seeds, num_pairs); numbers of seeds may differ. With a
    single seed nothing is bounded (infinities). A pair whose differences are all equal is known exactly;
    a pair with a nan stays nan. Neither kind affects the others.
    """
    upper_tail, lower_tail = _tail_levels(cells, seed)
    return [_bounds(differences, upper_tail, lower_tail) for differences in cells]


def verdict_of(lower: float, upper: float, margin: float) -> Verdict:
    """What simultaneous bounds of a cost ratio allow to say about "not worse by more than `margin`".

    `worse` means worse by more than the margin, so that it and `not-worse` deny each other and more seeds
    can only resolve `undecided`, never turn one into the other.
    """
    if upper < 1:
        return "better"
    if upper < 1 + margin:
        return "not-worse"
    return "worse" if lower > 1 + margin else "undecided"


def needed_seeds(bounds: Bounds, margin: FloatArray) -> IntArray:
    """Seeds (num_pairs,) after which each log ratio should be known well enough for its margin.

    Well enough: the upper bound reaches at most margin / 2 beyond the mean or, where the mean lies further
    than the margin from the boundary 1 + margin, half of the way to it. Between `num_seeds` and `MAX_SEEDS`.
    """
    if bounds.num_seeds < 2:
        return np.full(bounds.mean.shape, _FEWEST_SEEDS)
    target = np.maximum(margin / 2, np.abs(bounds.mean - np.log1p(margin)) / 2)
    candidates = np.arange(bounds.num_seeds, max(MAX_SEEDS, bounds.num_seeds) + 1)
    reach = stats.t.isf(bounds.upper_tail, candidates - 1) / np.sqrt(candidates)
    enough = reach[:, None] * bounds.spread <= target
    enough[-1] = True
    return np.asarray(candidates[np.argmax(enough, axis=0)])


def _bounds(differences: FloatArray, upper_tail: float, lower_tail: float) -> Bounds:
    num_seeds = len(differences)
    mean = differences.mean(axis=0)
    if num_seeds < 2:
        unknown = np.full(mean.shape, np.inf)
        return Bounds(mean, -unknown, unknown, -unknown, unknown, unknown * np.nan, num_seeds, upper_tail)
    spread = differences.std(axis=0, ddof=1)
    spread = np.where(spread <= _ROUNDING, 0.0, spread)
    error = spread / np.sqrt(num_seeds)
    alone, above, below = stats.t.isf([(1 - CONFIDENCE) / 2, upper_tail, lower_tail], num_seeds - 1)
    return Bounds(
        mean=mean,
        ci_low=mean - alone * error,
        ci_high=mean + alone * error,
        lower=mean - below * error,
        upper=mean + above * error,
        spread=spread,
        num_seeds=num_seeds,
        upper_tail=upper_tail,
    )


def _tail_levels(cells: Sequence[FloatArray], seed: int) -> tuple[float, float]:
    """Tail probabilities at which upper and lower bounds hold for the whole table at once."""
    alpha = 1 - CONFIDENCE
    smallest_upper = np.ones(_NUM_RESAMPLES)
    smallest_lower = np.ones(_NUM_RESAMPLES)
    num_pairs, fewest_seeds = 0, _FEWEST_SEEDS
    for i, differences in enumerate(cells):
        num_seeds = len(differences)
        if num_seeds < 2:
            continue
        residuals = differences - differences.mean(axis=0)
        residuals = residuals[:, differences.std(axis=0, ddof=1) > _ROUNDING]
        if residuals.shape[1] == 0:
            continue
        num_pairs += residuals.shape[1]
        fewest_seeds = min(fewest_seeds, num_seeds)
        weights = _resample_weights(np.random.default_rng([seed, i]), num_seeds)
        mean = weights @ residuals
        variance = np.maximum(
            weights @ residuals**2 - mean**2, _LEAST_ERROR**2 * np.mean(residuals**2, axis=0)
        )
        t = mean / np.sqrt(variance / (num_seeds - 1))
        # An upper bound fails when the sample's mean falls short of the truth, hence the sign.
        smallest_upper = np.minimum(smallest_upper, stats.t.sf((-t).max(axis=1), num_seeds - 1))
        smallest_lower = np.minimum(smallest_lower, stats.t.sf(t.max(axis=1), num_seeds - 1))
    if num_pairs == 0:
        return alpha, alpha
    levels = [float(np.quantile(s, alpha, method="lower")) for s in (smallest_upper, smallest_lower)]
    if fewest_seeds < _FEWEST_SEEDS:
        levels = [min(level, alpha / num_pairs) for level in levels]
    return levels[0], levels[1]


def _resample_weights(rng: np.random.Generator, num_seeds: int) -> FloatArray:
    """(num_resamples, num_seeds) shares with which each resample drew each seed."""
    drawn = rng.integers(0, num_seeds, (_NUM_RESAMPLES, num_seeds))
    drawn += num_seeds * np.arange(_NUM_RESAMPLES)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=_NUM_RESAMPLES * num_seeds)
    return counts.reshape(_NUM_RESAMPLES, num_seeds) / num_seeds
