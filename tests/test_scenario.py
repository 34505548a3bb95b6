"""What episodes are drawn from, how long they last, and what a token is worth in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.rules import FixedK
from draftdial.envs.acceptance import AcceptanceBank
from draftdial.envs.domains import as_domains
from draftdial.envs.evaluate import run
from draftdial.envs.fitted_acceptance import FittedAcceptance
from draftdial.envs.lengths import LENGTHS
from draftdial.envs.open_loop import OpenLoop, Poisson
from draftdial.envs.scenario import Scenario, capacity_per_s, domain_tokens
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine
from draftdial.envs.workload import RequestList

CAPACITY = np.array([5.0, 10.0, 20.0, 20.0, 20.0, 20.0, 20.0])
CLOSED = Scenario(high=256, rounds=8)
OPEN = Scenario(mode="open", lengths="short-chat", rounds=8)


def draw(scenario: Scenario, seed: int) -> RequestList:
    return scenario.draw(seed, len(CAPACITY), CAPACITY)


def same(one: RequestList, other: RequestList) -> bool:
    return all(np.array_equal(value, getattr(other, name)) for name, value in vars(one).items())


@pytest.mark.parametrize("scenario", [CLOSED, OPEN])
def test_an_episode_is_a_function_of_its_seed(scenario: Scenario) -> None:
    assert same(draw(scenario, 5), draw(scenario, 5))
    assert not same(draw(scenario, 5), draw(scenario, 6))


def test_concurrency_is_log_uniform_and_constant_within_an_episode() -> None:
    lists = [draw(CLOSED, seed) for seed in range(600)]
    assert all(len(np.unique(requests.concurrency)) == 1 for requests in lists)
    levels = np.array([requests.concurrency[0] for requests in lists])
    assert levels.min() == 1 and levels.max() > 200 and levels.max() <= 256
    for level in (1, 4, 16, 64):
        expected = np.log(level + 1) / np.log(257)
        assert (levels <= level).mean() == pytest.approx(expected, abs=0.08)
    fixed = replace(CLOSED, low=7, high=7)
    assert {int(draw(fixed, seed).concurrency[0]) for seed in range(20)} == {7}


@pytest.mark.parametrize("scenario", [CLOSED, OPEN])
def test_episodes_mix_two_to_five_domains_out_of_all(scenario: Scenario) -> None:
    lists = [draw(replace(scenario, high=4), seed) for seed in range(200)]
    used = [set(requests.domain.tolist()) for requests in lists]
    assert {len(domains) for domains in used} == {2, 3, 4, 5}
    assert set.union(*used) == set(range(len(CAPACITY)))


def test_arrivals_ask_for_the_stated_share_of_capacity() -> None:
    # 0.5 of a server that finishes 20 requests per second. Rates swing, so only a long list shows the mean.
    long = replace(OPEN, rounds=20_000, utilisation_low=0.5, utilisation_high=0.5)
    for seed in range(8):
        arrival_s = long.draw(seed, 7, np.full(7, 20.0)).arrival_s
        assert len(arrival_s) / arrival_s[-1] == pytest.approx(10.0, rel=0.1)
    wide = replace(OPEN, rounds=2000, utilisation_low=0.2, utilisation_high=0.9)
    shares = [(4200 / requests.arrival_s[-1]) / 20.0 for requests in
              (wide.draw(seed, 7, np.full(7, 20.0)) for seed in range(40))]  # fmt: skip
    assert min(shares) < 0.35 and max(shares) > 0.75


@pytest.mark.parametrize("name", ["h200-llama3-8b", "qwen3-235b-a22b"])
@pytest.mark.parametrize("lengths", ["short-chat", "general"])
def test_capacity_is_what_an_overloaded_server_finishes_prefill_included(name: str, lengths: str) -> None:
    profile, options = CostProfile.load(name), ServerOptions()
    bank = FittedAcceptance(["chat"], num_arrays=64).bank(0)
    tokens = domain_tokens(bank, profile.tiers)
    stated = float(capacity_per_s(tokens, profile, options, lengths)[0])
    workload = OpenLoop("overload", Poisson(4 * stated), 2000, as_domains([0]), LENGTHS[lengths])
    finished_per_s = []
    for k in profile.tiers:
        engine = SimulatedEngine([workload.requests(1)], bank, profile, options)
        finish_s = np.sort(run(FixedK(profile.tiers, k), engine).finish_s[0])
        finished_per_s.append(1000 / (finish_s[1500] - finish_s[500]))
    assert stated == pytest.approx(max(finished_per_s), rel=0.2)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(low=1, high=1, rounds=256),
        Scenario(low=256, high=256, rounds=64),
        Scenario(mode="open", lengths="short-chat", rounds=64),
    ],
)
def test_requests_outlast_the_rounds_however_good_the_drafts_are(
    scenario: Scenario, make_bank: Callable[..., AcceptanceBank]
) -> None:
    profile = CostProfile.load("h200-llama3-8b")
    perfect = make_bank({str(domain): [[255] * 512] for domain in range(5)})
    options = ServerOptions(mid_flight=scenario.mode == "closed")
    tokens = domain_tokens(perfect, profile.tiers)
    capacity = capacity_per_s(tokens, profile, options, scenario.lengths)
    lists = [scenario.draw(seed, 5, capacity) for seed in range(8)]
    assert max(requests.num_requests for requests in lists) <= scenario.max_requests
    engine = SimulatedEngine(lists, perfect, profile, options)
    for _ in range(scenario.rounds):
        assert not engine.servers["done"].any()
        engine.run_round(np.full(8, profile.tiers[-1]))


@pytest.fixture
def two_domains(make_bank: Callable[..., AcceptanceBank]) -> AcceptanceBank:
    """Drafts are always right, or never."""
    return make_bank({"right": [[3] * 8], "wrong": [[0] * 8]})


def test_tokens_per_round_are_those_of_a_walk(two_domains: AcceptanceBank) -> None:
    np.testing.assert_array_equal(domain_tokens(two_domains, (0, 1, 3)), [[1, 2, 4], [1, 1, 1]])
