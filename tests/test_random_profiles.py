"""Servers drawn around a measured one: plausible, reproducible, and different enough to learn from."""

from __future__ import annotations

import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.signals import FloatArray
from draftdial.envs.profile_rows import ProfileRows
from draftdial.envs.random_profiles import random_profile

BASE = CostProfile.load("h200-llama3-8b")
BATCHES = np.array([1, 2, 5, 8, 17, 32, 64, 100, 200, BASE.captured_batches[-1]])
CONTEXT = np.full(len(BATCHES), 700)


def draws(num: int, seed: int = 0, base: CostProfile = BASE) -> list[CostProfile]:
    rng = np.random.default_rng(seed)
    return [random_profile(base, rng) for _ in range(num)]


def round_s(profile: CostProfile) -> FloatArray:
    return profile.round_s(BATCHES, CONTEXT, "warm")


def test_the_same_generator_draws_the_same_servers() -> None:
    for one, other in zip(draws(3), draws(3), strict=True):
        np.testing.assert_array_equal(round_s(one), round_s(other))
    first, second = draws(2)
    assert not np.allclose(round_s(first), round_s(second), rtol=0.01)
    assert not np.allclose(round_s(first), round_s(BASE), rtol=0.01)


@pytest.mark.parametrize("name", ["h200-llama3-8b", "h100-llama3-8b"])
def test_a_draw_has_the_tiers_batches_and_limits_of_its_base(name: str) -> None:
    base = CostProfile.load(name)
    drawn = draws(1, base=base)[0]
    assert (drawn.tiers, drawn.rows, drawn.max_running) == (base.tiers, base.rows, base.max_running)
    np.testing.assert_array_equal(drawn.captured_batches, base.captured_batches)
    assert drawn.name != base.name


def test_times_are_positive_and_drafting_is_never_free() -> None:
    for drawn in draws(60):
        for seconds in (drawn.round_s(BATCHES, CONTEXT, "warm"), drawn.round_s(BATCHES, CONTEXT, "skip")):
            assert (seconds > 0).all() and np.isfinite(seconds).all()
            assert (seconds[:, 1:] >= 0.95 * seconds[:, :1]).all(), "a draft round under the off round"
        assert drawn.prefill_s(1000, "warm") > 0


def test_draws_lie_around_the_base_within_a_factor() -> None:
    ratio = np.stack([round_s(drawn) / round_s(BASE) for drawn in draws(1000)])
    # A little above it, since drafting is never drawn cheaper than off.
    assert np.abs(np.median(np.log(ratio), axis=0)).max() < 0.2, "the base is in the middle"
    assert 0.2 < np.log(ratio).std(axis=0).min() and np.log(ratio).std(axis=0).max() < 0.7


def test_the_best_k_differs_from_server_to_server() -> None:
    # With drafts right at 0.75 each: tokens per round at each tier.
    tokens = np.array([(1 - 0.75 ** (k + 1)) / 0.25 for k in BASE.tiers])
    best = np.stack([(tokens / round_s(drawn)).argmax(axis=1) for drawn in draws(300)])
    assert all(len(set(column.tolist())) >= 2 for column in best.T), "at every batch"
    assert len(set(best.ravel().tolist())) >= 5, "nearly every tier somewhere"
    assert (best[:, 0] > 0).mean() > 0.8, "speculation still pays at batch 1, mostly"


def test_rows_of_several_profiles_are_priced_each_by_its_own() -> None:
    profiles = draws(3)
    rows = ProfileRows([profiles[i % 3] for i in range(len(BATCHES))])
    seconds = rows.round_s(BATCHES, CONTEXT, "skip")
    prefill = rows.prefill_s(100 * BATCHES, "skip")
    for i in range(len(BATCHES)):
        own = profiles[i % 3]
        np.testing.assert_array_equal(
            seconds[i], own.round_s(BATCHES[i : i + 1], CONTEXT[i : i + 1], "skip")[0]
        )
        assert prefill[i] == own.prefill_s(100 * BATCHES[i], "skip")
