"""Request lists, lengths, domain schedules and closed loops."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftdial.controller.errors import UserError
from draftdial.envs.closed_loop import (
    ClosedLoop,
    LogUniformLoad,
    drift5,
    num_requests_for,
    stationary,
    swing,
    warmup_requests,
)
from draftdial.envs.domains import DomainDrift, DomainMix, DomainSwitches, as_domains
from draftdial.envs.lengths import LENGTHS, TokenLaw, as_lengths
from draftdial.envs.workload import RequestList, make_workload, workload_names

seeds = st.integers(0, 2**63 - 1)


def spans_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values of the runs of equal values, and their lengths."""
    first = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
    return values[first], np.diff(first, append=len(values))


# Request lists


def small_list(mode: str = "closed") -> RequestList:
    ones = np.ones(4, np.int32)
    closed = mode == "closed"
    return RequestList(
        mode="closed" if closed else "open",
        arrival_s=np.zeros(4) if closed else np.arange(4.0),
        concurrency=ones if closed else 0 * ones,
        prompt_tokens=ones,
        output_tokens=ones,
        domain=0 * ones,
        request_hash=np.arange(4, dtype=np.uint64),
        warmup=1,
    )


@pytest.mark.parametrize("mode", ["open", "closed"])
def test_a_sound_list_passes(mode: str) -> None:
    requests = small_list(mode)
    assert requests.check() is requests
    assert requests.num_requests == 4


@pytest.mark.parametrize(
    ("mode", "field", "value"),
    [
        ("open", "arrival_s", np.array([0.0, 2.0, 1.0, 3.0])),
        ("open", "arrival_s", np.array([-1.0, 0.0, 1.0, 3.0])),
        ("open", "arrival_s", np.array([0.0, 1.0, 2.0, np.inf])),
        ("open", "concurrency", np.ones(4, np.int32)),
        ("closed", "arrival_s", np.arange(4.0)),
        ("closed", "concurrency", np.zeros(4, np.int32)),
        ("closed", "prompt_tokens", np.zeros(4, np.int32)),
        ("closed", "output_tokens", np.zeros(4, np.int32)),
        ("closed", "output_tokens", np.ones(3, np.int32)),
        ("closed", "output_tokens", np.ones(4, np.int64)),
        ("closed", "domain", np.full(4, -1, np.int32)),
        ("closed", "warmup", 2),
        ("closed", "mode", "ajar"),
    ],
)
def test_a_broken_list_names_the_field(mode: str, field: str, value: object) -> None:
    broken = replace(small_list(mode), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"RequestList\.{field}:"):
        broken.check()


# Lengths


@pytest.mark.parametrize("name", sorted(LENGTHS))
def test_means_are_those_of_the_draws(name: str) -> None:
    lengths = LENGTHS[name]
    prompt, output = lengths.draw(np.random.default_rng(1), 400_000)
    assert prompt.mean() == pytest.approx(lengths.mean_prompt_tokens, rel=0.01)
    assert output.mean() == pytest.approx(lengths.mean_output_tokens, rel=0.01)
    assert np.median(prompt) == pytest.approx(lengths.prompt.median, rel=0.02)
    assert np.median(output) == pytest.approx(lengths.output.median, rel=0.02)
    correlation = np.corrcoef(np.log(prompt), np.log(output))[0, 1]
    assert correlation == pytest.approx(lengths.correlation, abs=0.02)


def test_short_chat_resembles_the_published_quantiles_of_azure_conversations() -> None:
    prompt, output = LENGTHS["short-chat"].draw(np.random.default_rng(2), 400_000)
    assert np.percentile(prompt, [50, 95]) == pytest.approx([1020, 4083], rel=0.02)
    assert np.percentile(output, [50, 95, 99]) == pytest.approx([129, 451, 601], rel=0.11)


@given(
    seed=seeds,
    low=st.integers(1, 50),
    above=st.integers(0, 100),
    more=st.integers(0, 100),
    sigma=st.floats(0, 3),
)
def test_lengths_stay_within_their_caps(seed: int, low: int, above: int, more: int, sigma: float) -> None:
    law = TokenLaw(low + above, sigma, low, low + above + more)
    drawn = law.of_normal(np.random.default_rng(seed).standard_normal(200))
    assert law.low <= drawn.min() and drawn.max() <= law.high
    assert law.low <= law.mean * (1 + 1e-9) and law.mean <= law.high * (1 + 1e-9)


def test_lengths_come_from_a_name_or_a_configuration() -> None:
    law = {"median": 100, "sigma": 0.5, "low": 1, "high": 500}
    assert as_lengths({"prompt": law, "output": law}).mean_output_tokens == TokenLaw(100, 0.5, 1, 500).mean
    assert as_lengths("agentic") is LENGTHS["agentic"]
    with pytest.raises(UserError, match="allowed: general, short-chat, agentic"):
        as_lengths("tiny")
    with pytest.raises(UserError, match=r"lengths\.prompt: .*'mean'.*allowed: median, sigma, low, high"):
        as_lengths({"prompt": law | {"mean": 3}, "output": law})
    with pytest.raises(UserError, match="low <= median <= high"):
        TokenLaw(100, 0.5, 1, 50)


# Domains


@given(seed=seeds, domains=st.lists(st.integers(0, 9), min_size=2, max_size=6, unique=True))
def test_switches_keep_their_distance_and_never_repeat_a_domain(seed: int, domains: list[int]) -> None:
    drawn = DomainSwitches(tuple(domains), 20, 80).draw(np.random.default_rng(seed), 2000)
    values, lengths = spans_of(drawn)
    assert set(values) <= set(domains)
    assert len(drawn) == 2000
    # Equal neighbours would have merged into a span above the limit; the last span is cut by the end.
    assert (lengths[:-1] >= 20).all() and (lengths <= 80).all()


def test_switches_visit_all_other_domains_alike() -> None:
    values, lengths = spans_of(DomainSwitches((0, 1, 2, 3, 4)).draw(np.random.default_rng(3), 2_000_000))
    steps = np.bincount((values[1:] - values[:-1]) % 5, minlength=5)
    assert steps[0] == 0
    assert steps[1:] / steps.sum() == pytest.approx([0.25] * 4, abs=0.04)
    assert lengths[:-1].mean() == pytest.approx(500, rel=0.03)


def test_a_mix_has_its_weights() -> None:
    drawn = DomainMix((4, 2), (3.0, 1.0)).draw(np.random.default_rng(4), 100_000)
    assert np.mean(drawn == 4) == pytest.approx(0.75, abs=0.01)
    assert set(drawn) == {2, 4}


def test_a_drift_moves_from_one_mix_to_the_other() -> None:
    drift = DomainDrift((0, 1, 2), (1.0, 0.0, 1.0), (0.0, 3.0, 1.0))
    drawn = drift.draw(np.random.default_rng(5), 300_000)
    start, middle, end = (
        np.bincount(part, minlength=3) / len(part) for part in np.split(drawn, [3000, 297_000])
    )
    assert start == pytest.approx([0.5, 0.0, 0.5], abs=0.04)
    assert middle == pytest.approx([0.25, 0.375, 0.375], abs=0.01)
    assert end == pytest.approx([0.0, 0.75, 0.25], abs=0.04)


def test_domains_come_from_a_list_or_a_configuration() -> None:
    assert as_domains([1, 3]) == DomainMix((1, 3))
    configured = {"schedule": "switches", "domains": [0, 1], "max_requests": 300}
    assert as_domains(configured) == DomainSwitches((0, 1), 200, 300)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "one or more different indices"),
        ([0, 0], "one or more different indices"),
        ([-1], "one or more different indices"),
        ({"domains": [0, 1], "weights": [1.0]}, "must be 2 numbers"),
        ({"domains": [0, 1], "weights": [0.0, 0.0]}, "do not sum to 0"),
        ({"schedule": "switches", "domains": [0]}, "at least two"),
        ({"schedule": "switches", "domains": [0, 1], "min_requests": 900}, "min_requests <= max_requests"),
        ({"schedule": "jumps", "domains": [0, 1]}, "allowed: mix, switches, drift"),
        ({"domains": [0], "period": 3}, "allowed: domains, weights"),
    ],
)
def test_bad_domains_say_what_is_allowed(spec: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_domains(spec)  # type: ignore[arg-type]


# Closed loops


CLOSED = {
    "stationary": {"concurrency": 16, "num_requests": 900, "domains": (0, 1)},
    "switches": {"concurrency": 16, "num_requests": 900},
    "drift5": {"high": 16},
    "swing": {"low": 2, "high": 20, "num_segments": 4},
}


@given(seed=seeds)
@pytest.mark.parametrize("name", sorted(CLOSED))
def test_a_closed_loop_is_a_pure_function_of_its_seed(name: str, seed: int) -> None:
    workload = make_workload(name, **CLOSED[name])
    requests, again = workload.requests(seed), workload.requests(seed)
    assert workload.name == name
    assert requests.mode == "closed"
    for field, value in vars(requests).items():
        assert np.array_equal(value, getattr(again, field)), field
    assert not np.array_equal(requests.request_hash, workload.requests(seed + 1).request_hash)


@given(seed=seeds)
def test_load_does_not_disturb_lengths_domains_or_hashes(seed: int) -> None:
    light, heavy = drift5(high=8).requests(seed), drift5(low=8, high=30).requests(seed)
    shared = min(light.num_requests, heavy.num_requests)
    for field in ("prompt_tokens", "output_tokens", "domain", "request_hash"):
        assert np.array_equal(getattr(light, field)[:shared], getattr(heavy, field)[:shared]), field


@given(seed=seeds)
def test_domains_do_not_disturb_load_lengths_or_hashes(seed: int) -> None:
    one, five = stationary(4, 500).requests(seed), stationary(4, 500, domains=(0, 1, 2, 3, 4)).requests(seed)
    for field in ("concurrency", "prompt_tokens", "output_tokens", "request_hash"):
        assert np.array_equal(getattr(one, field), getattr(five, field)), field
    assert not one.domain.any() and five.domain.any()


@given(seed=seeds)
def test_every_load_segment_has_work_in_proportion(seed: int) -> None:
    concurrency = LogUniformLoad(1, 256, 12, 3.0).draw(np.random.default_rng(seed))
    values, lengths = spans_of(concurrency)
    assert values.min() >= 1 and values.max() <= 256
    alone = np.maximum(np.rint(3 * values ** (2 / 3)), 1).astype(np.int64)
    # Neighbouring segments at the same level read as one span.
    assert (lengths % alone == 0).all()
    assert (lengths // alone).sum() == 12


def test_segments_are_log_uniform() -> None:
    load = LogUniformLoad(1, 256, 20, 20.0)
    levels = np.concatenate(
        [spans_of(load.draw(np.random.default_rng(seed)))[0] for seed in range(300)]
    ).astype(float)
    # P(C <= c) = log(c + 1) / log(257)
    for level in (1, 2, 4, 16, 64, 128):
        assert np.mean(levels <= level) == pytest.approx(np.log(level + 1) / np.log(257), abs=0.02), level


def test_drift5_has_twenty_segments_and_five_domains() -> None:
    requests = drift5().requests(0)
    assert len(spans_of(requests.concurrency)[0]) <= 20
    assert requests.num_requests > 20 * 40
    assert set(requests.domain) == {0, 1, 2, 3, 4}
    lengths = spans_of(requests.domain)[1]
    assert (lengths[:-1] >= 200).all() and (lengths <= 800).all()


def test_a_swing_alternates() -> None:
    levels, lengths = spans_of(swing(2, 40, num_segments=6).requests(7).concurrency)
    assert set(pairwise(levels.tolist())) == {(2, 40), (40, 2)}
    assert (lengths == np.rint(40 * levels ** (2 / 3))).all()
    assert {swing(2, 40).requests(seed).concurrency[0] for seed in range(20)} == {2, 40}


@given(
    num_rounds=st.integers(1, 50_000),
    concurrency=st.integers(1, 256),
    mean_output_tokens=st.floats(16, 1024),
    max_tokens_per_round=st.floats(1, 8),
)
def test_the_counted_window_holds_the_rounds_asked_for(
    num_rounds: int, concurrency: int, mean_output_tokens: float, max_tokens_per_round: float
) -> None:
    num_requests = num_requests_for(num_rounds, concurrency, mean_output_tokens, max_tokens_per_round)
    counted = num_requests - 2 * warmup_requests(num_requests, concurrency)
    rounds = counted * mean_output_tokens / (concurrency * max_tokens_per_round)
    assert rounds >= num_rounds * (1 - 1e-9)


def test_the_warm_up_is_two_batches_of_the_busier_end_but_a_tenth_at_most() -> None:
    assert stationary(8, 1000).requests(0).warmup == 16
    assert stationary(256, 1000).requests(0).warmup == 100
    assert swing(2, 40, num_segments=2).requests(0).warmup == 53  # a tenth of 40 * (2 ** (2/3) + 40 ** (2/3))


# Names


def test_every_workload_has_a_name() -> None:
    closed = {"stationary", "switches", "drift5", "swing"}
    opened = {"poisson", "markov", "gamma", "ramp", "day-night", "swings", "rate-profile", "trace"}
    assert set(workload_names()) == closed | opened


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("burst", {}, "workload 'burst' is unknown; allowed: .*drift5"),
        ("stationary", {"concurrency": 3}, "missing.*'num_requests'; allowed: concurrency, num_requests"),
        (
            "stationary",
            {"concurrency": 0, "num_requests": 9},
            "concurrency is 0; allowed: whole numbers >= 1",
        ),
        ("swing", {"low": 9, "high": 3}, "high is 3; allowed: at least low"),
        ("drift5", {"requests_at_one": 0.0}, "requests_at_one is 0.0"),
        ("drift5", {"segments": 3}, "'segments'; allowed: .*num_segments"),
    ],
)
def test_bad_parameters_say_what_is_allowed(name: str, parameters: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_workload(name, **parameters)


def test_a_workload_can_be_composed_from_parts() -> None:
    workload = ClosedLoop("mine", LogUniformLoad(2, 4, 3), DomainMix((0,)), LENGTHS["agentic"])
    requests = workload.requests(0)
    assert set(requests.concurrency) <= {2, 3, 4}
