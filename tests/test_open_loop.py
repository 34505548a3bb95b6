"""Arrival processes: exact in rate and burstiness, ascending, and apart from everything else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftdial.controller.errors import UserError
from draftdial.envs.domains import DomainMix
from draftdial.envs.lengths import LENGTHS
from draftdial.envs.open_loop import (
    ARRIVALS,
    ArrivalProcess,
    DayNight,
    GammaBursts,
    MarkovModulated,
    OpenLoop,
    Poisson,
    ProfileArrivals,
    Ramp,
    RateProfile,
    Swings,
    open_loop,
    unit_renewals,
)
from draftdial.envs.workload import make_workload

PARAMETERS: dict[str, dict[str, object]] = {
    "poisson": {},
    "markov": {"burst_ratio": 6.0, "quiet_s": 20.0, "burst_s": 5.0},
    "gamma": {"cv": 3.0},
    "ramp": {"start_share": 0.5},
    "day-night": {"period_s": 300.0, "depth": 0.9},
    "swings": {"ratio": 5.0, "dwell_s": 10.0},
}
STEPS = RateProfile(60.0, np.array([3.0, 0.0, 1.0, 4.0, 0.0]))


def mean_rate(process: ArrivalProcess, num_requests: int, num_seeds: int) -> float:
    """Requests over time, over seeds together."""
    ends = [process.draw(np.random.default_rng(seed), num_requests)[-1] for seed in range(num_seeds)]
    return num_requests * num_seeds / float(np.sum(ends))


def counts(process: ArrivalProcess, num_requests: int, num_seeds: int, edges_s: np.ndarray) -> np.ndarray:
    """Arrivals between the edges, shape `(num_seeds, len(edges_s) - 1)`."""
    draws = (process.draw(np.random.default_rng(seed), num_requests) for seed in range(num_seeds))
    return np.stack([np.histogram(arrival_s, edges_s)[0] for arrival_s in draws])


@given(seed=st.integers(0, 2**63 - 1), rate_per_s=st.floats(0.01, 1000))
@pytest.mark.parametrize("name", sorted(ARRIVALS))
def test_a_list_is_a_pure_function_of_its_seed(name: str, seed: int, rate_per_s: float) -> None:
    workload = make_workload(name, rate_per_s=rate_per_s, num_requests=50, **PARAMETERS[name])
    requests, again = workload.requests(seed), workload.requests(seed)
    assert workload.name == name
    assert requests.mode == "open" and requests.num_requests == 50 and requests.warmup == 2
    assert (np.diff(requests.arrival_s) >= 0).all() and requests.arrival_s[0] >= 0
    for field, value in vars(requests).items():
        assert np.array_equal(value, getattr(again, field)), field


@given(seed=st.integers(0, 2**63 - 1))
@pytest.mark.parametrize("name", sorted(set(ARRIVALS) - {"poisson"}))
def test_arrivals_do_not_disturb_lengths_domains_or_hashes(name: str, seed: int) -> None:
    domains = {"schedule": "switches", "domains": [0, 1, 2], "min_requests": 5, "max_requests": 9}
    lists = [
        make_workload(
            process, rate_per_s=rate, num_requests=60, domains=domains, **PARAMETERS[process]
        ).requests(seed)
        for process, rate in (("poisson", 2.0), (name, 9.0))
    ]
    for field in ("prompt_tokens", "output_tokens", "domain", "request_hash"):
        assert np.array_equal(*(getattr(requests, field) for requests in lists)), field
    assert not np.array_equal(lists[0].arrival_s, lists[1].arrival_s)


@pytest.mark.parametrize(
    ("process", "num_requests"),
    [
        (Poisson(5.0), 40_000),
        (GammaBursts(5.0, cv=3.0), 40_000),
        (MarkovModulated(5.0, burst_ratio=6.0, quiet_s=20.0, burst_s=5.0), 40_000),
        (Ramp(5.0, start_share=0.2), 2000),
        (DayNight(5.0, period_s=100.0, depth=1.0), 40_000),
        (Swings(5.0, ratio=8.0, dwell_s=7.0), 40_000),
        (ProfileArrivals(5.0, STEPS, time_compression=10.0), 40_000),
        (ProfileArrivals(5.0, STEPS, time_compression=10.0, cv=2.0), 40_000),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ArrivalProcess) else str(value),
)
def test_the_mean_rate_is_the_one_asked_for(process: ArrivalProcess, num_requests: int) -> None:
    assert mean_rate(process, num_requests, 20) == pytest.approx(5.0, rel=0.02)
    assert mean_rate(process.at_rate(0.5), num_requests, 20) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_gaps_have_the_coefficient_of_variation_asked_for(cv: float) -> None:
    gaps = np.diff(GammaBursts(3.0, cv).draw(np.random.default_rng(1), 400_000))
    assert gaps.mean() == pytest.approx(1 / 3, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.04)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_a_renewal_process_starts_in_equilibrium(cv: float) -> None:
    times = np.stack([unit_renewals(np.random.default_rng(seed), 60, cv) for seed in range(20_000)])
    # Only a stationary process expects `t` events in every span of length t, from time 0 on.
    early = (times < 0.5).sum(axis=1).mean()
    assert early == pytest.approx(0.5, rel=0.06)
    # The mean rest of a gap is (1 + cv**2) / 2 (Cox, Renewal Theory, 1962).
    assert times[:, 0].mean() == pytest.approx((1 + cv**2) / 2, rel=0.06)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(Poisson(2.0).draw(np.random.default_rng(2), 200_000))
    assert np.mean(gaps > 0.5) == pytest.approx(np.exp(-1), abs=0.005)
    assert np.corrcoef(gaps[1:], gaps[:-1])[0, 1] == pytest.approx(0, abs=0.01)


def test_a_markov_modulated_process_has_the_variance_of_its_theory() -> None:
    process = MarkovModulated(4.0, burst_ratio=5.0, quiet_s=12.0, burst_s=4.0)
    window_s = 10.0
    drawn = counts(process, 4000, 400, np.arange(0.0, 600.0, window_s))
    quiet = 4.0 * 16 / (12 + 5 * 4)
    # Fischer and Meier-Hellstern 1993: Var N(t) from the covariance of the rate, v * exp(-c t).
    v, c = (4 * quiet) ** 2 * (12 * 4) / 16**2, 1 / 12 + 1 / 4
    variance = 4.0 * window_s + 2 * v / c * (window_s - (1 - np.exp(-c * window_s)) / c)
    assert drawn.mean() == pytest.approx(4.0 * window_s, rel=0.02)
    assert drawn.var() == pytest.approx(variance, rel=0.05)


def test_a_ramp_climbs_evenly_and_stays_up() -> None:
    start, end = 0.4, 1.6
    edges_s = np.linspace(0, 50, 6)
    drawn = counts(Ramp(20.0, start), 1000, 400, edges_s).mean(axis=0)
    middle = start + (end - start) * (edges_s[:-1] + edges_s[1:]) / 2 / 50
    # The last bin misses what a list of exactly 1000 requests did not reach.
    assert drawn[:-1] == pytest.approx((20 * 10 * middle)[:-1], rel=0.02)
    late = Ramp(20.0, 0.0).draw(np.random.default_rng(3), 1000)
    assert np.isfinite(late).all()


def test_a_falling_ramp_falls() -> None:
    drawn = counts(Ramp(20.0, 1.5), 1000, 400, np.array([0.0, 10.0, 40.0])).mean(axis=0)
    assert drawn == pytest.approx([20 * 10 * 1.4, 20 * 30 * 1.0], rel=0.02)


def test_day_and_night_follow_the_sinusoid() -> None:
    quarters = counts(DayNight(40.0, period_s=40.0, depth=0.8), 3000, 300, np.array([0.0, 20.0, 40.0]))
    # Half a cycle that begins at phase p holds 800 + 1280 / pi * cos(p) requests.
    assert quarters.sum(axis=1).mean() == pytest.approx(1600, rel=0.01)
    excess = (quarters[:, 0] - quarters[:, 1]) / 2
    assert excess.std() == pytest.approx(np.sqrt((1280 / np.pi) ** 2 / 2 + 400), rel=0.06)


def test_swings_have_two_rates() -> None:
    arrival_s = Swings(20.0, ratio=4.0, dwell_s=50.0).draw(np.random.default_rng(4), 100_000)
    per_second = np.histogram(arrival_s, np.arange(0.0, 4000.0, 5.0))[0] / 5
    low, high = np.percentile(per_second, [25, 75])
    assert (low, high) == (pytest.approx(8, rel=0.1), pytest.approx(32, rel=0.1))


def test_a_profile_keeps_its_empty_windows_empty() -> None:
    process = ProfileArrivals(5.0, STEPS, time_compression=10.0, cv=2.0)
    rng = np.random.default_rng(5)
    place = rng.random() * 5
    arrival_s = process.draw(np.random.default_rng(5), 50_000)
    window = np.floor((arrival_s / 6.0 + place) % 5).astype(int)
    share = np.bincount(window, minlength=5) / len(window)
    assert share == pytest.approx([3 / 8, 0, 1 / 8, 4 / 8, 0], abs=0.02)
    assert share[1] == share[4] == 0


def test_a_flat_profile_is_a_renewal_process() -> None:
    flat = ProfileArrivals(2.0, RateProfile(60.0, np.ones(7)), cv=3.0)
    gaps = np.diff(flat.draw(np.random.default_rng(6), 200_000))
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.04)


def test_a_workload_at_another_rate_keeps_its_requests() -> None:
    workload = open_loop("poisson", 500, rate_per_s=1.0)
    slow, fast = workload.requests(8), workload.at_rate(4.0).requests(8)
    assert slow.arrival_s == pytest.approx(4 * fast.arrival_s)
    assert np.array_equal(slow.output_tokens, fast.output_tokens)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("poisson", {"rate_per_s": 0.0}, "rate_per_s is 0.0; allowed: finite numbers above 0"),
        ("poisson", {"rate_per_s": float("nan")}, "rate_per_s is nan"),
        ("poisson", {}, "missing.*'rate_per_s'; allowed: rate_per_s"),
        ("poisson", {"rate_per_s": 1.0, "cv": 2.0}, "'cv'; allowed: rate_per_s"),
        ("gamma", {"rate_per_s": 1.0, "cv": -1.0}, "cv is -1.0"),
        ("markov", {"rate_per_s": 1.0, "burst_s": 0.0}, "burst_s is 0.0"),
        ("ramp", {"rate_per_s": 1.0, "start_share": 2.0}, "start_share is 2.0; allowed: 0 up to but not 2"),
        ("day-night", {"rate_per_s": 1.0, "depth": 1.5}, "depth is 1.5; allowed: 0 to 1"),
        ("swings", {"rate_per_s": 1.0, "dwell_s": 0.0}, "dwell_s is 0.0"),
    ],
)
def test_bad_parameters_say_what_is_allowed(name: str, parameters: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_workload(name, num_requests=10, **parameters)


def test_a_profile_or_a_list_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="not all 0"):
        RateProfile(60.0, np.zeros(3))
    with pytest.raises(UserError, match="num_requests is 0"):
        OpenLoop("empty", Poisson(1.0), 0, DomainMix((0,)), LENGTHS["general"])
