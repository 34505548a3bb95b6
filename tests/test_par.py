"""What a token is worth: what it costs a server that serves at the best fixed k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from assumed_kv_only import assumed_kv_only, with_kv_only_prefill

from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.envs import scenario as scenarios
from draftdial.envs.acceptance import AcceptanceBank, WalkStatistics, walk_statistics
from draftdial.envs.episodes import Episodes
from draftdial.envs.fitted_acceptance import SHIPPED, FittedAcceptance
from draftdial.envs.par import Par
from draftdial.envs.scenario import Scenario, domain_tokens
from draftdial.envs.simulated_engine import ServerOptions
from draftdial.envs.workload import RequestList

LINEAR_PREFILL = ((1, 0.04), (300, 12.0))


def par_of(profile: CostProfile, options: ServerOptions, bank: AcceptanceBank, scenario: Scenario) -> Par:
    return Par(profile, options, bank, domain_tokens(bank, profile.tiers), scenario)


@pytest.fixture
def two_domains(make_bank: Callable[..., AcceptanceBank]) -> AcceptanceBank:
    """Drafts are always right, or never."""
    return make_bank({"right": [[3] * 8], "wrong": [[0] * 8]})


@pytest.mark.parametrize(
    ("off_mode", "expected_ms"), [("warm", [2.25, 6.0, 1.25, 3.5]), ("skip", [2.25, 5.5, 1.25, 3.25])]
)
def test_par_is_the_time_of_a_token_at_the_best_fixed_k(
    off_mode: OffMode,
    expected_ms: list[float],
    two_domains: AcceptanceBank,
    make_profile: Callable[..., CostProfile],
    make_requests: Callable[..., RequestList],
) -> None:
    # At 2 rows rounds take 12 (off; skip 11), 14 and 18 ms, at 4 rows 14 (13), 16 and 20.
    requests = make_requests([50] * 4, concurrency=[2, 2, 4, 4], domain=[0, 1, 0, 1])
    options = ServerOptions(off_mode=off_mode, lag=1)
    profile = make_profile(prefill_ms=LINEAR_PREFILL)
    par, round_s = par_of(profile, options, two_domains, Scenario(high=4)).of(requests)
    # A request's last round goes beyond its end by 1.5 tokens of some 280 on average, at k = 3.
    assert (1e3 * par >= expected_ms).all()
    np.testing.assert_allclose(1e3 * par, expected_ms, rtol=0.015)
    # At 4 rows k = 1 has the best mean over both domains: (16/8 + 16/4) / 2 = 3 ms a token.
    assert 1e3 * round_s == pytest.approx(16.0)


def test_par_of_an_open_loop_is_that_of_eight_rows(
    two_domains: AcceptanceBank,
    make_profile: Callable[..., CostProfile],
    make_requests: Callable[..., RequestList],
) -> None:
    requests = make_requests([50] * 2, arrival_s=[0.0, 9.0], domain=[0, 1])
    profile = make_profile()
    par, _ = par_of(profile, ServerOptions(), two_domains, Scenario(mode="open")).of(requests)
    off_s, one_s, three_s = profile.round_s(np.array([8]), np.array([125]), "warm")[0]
    np.testing.assert_allclose(par, [min(off_s, one_s / 2, three_s / 4) / 8, off_s / 8])


@pytest.mark.parametrize(
    ("kind", "off_mode", "concurrency"),
    [*(("chat", "warm", n) for n in (1, 16, 90, 256)), ("chat", "kv-only", 16), ("poor", "kv-only", 256)],
)
def test_the_best_fixed_k_earns_what_it_costs(kind: str, off_mode: OffMode, concurrency: int) -> None:
    # One kind of text under three names, as an episode needs several.
    domains = [replace(SHIPPED[kind], name=name) for name in ("one", "two", "three")]
    profile = CostProfile.load("h200-llama3-8b")
    if off_mode == "kv-only":
        with_draft = profile.document["prefill"]["speculative"]
        without = [(tokens, 0.8 * time) for tokens, time in with_draft]
        profile = with_kv_only_prefill(profile, without)
    scenario = Scenario(low=concurrency, high=concurrency, rounds=400)
    num_servers = max(12, 96 // concurrency)
    options = ServerOptions(off_mode, mid_flight=True)
    episodes = Episodes(num_servers, [profile], FittedAcceptance(domains), scenario, options=[options])
    gains = []
    for tier in range(len(profile.tiers)):
        episodes.begin(np.arange(num_servers), range(num_servers))
        earned_s = elapsed_s = 0.0
        for _ in range(scenario.rounds):
            step = episodes.advance(np.full(num_servers, tier))
            earned_s += float((step.reward * step.round_s).sum())
            elapsed_s += float(episodes.engine.servers["step_decode_s"].sum())
        gains.append(earned_s / elapsed_s)
    assert max(gains) == pytest.approx(0.0, abs=0.02)


def test_par_includes_what_small_prefills_cost_on_top(
    make_bank: Callable[..., AcceptanceBank],
    make_profile: Callable[..., CostProfile],
    make_requests: Callable[..., RequestList],
) -> None:
    bank = make_bank({"right": [[3] * 8]})
    requests = make_requests([50], concurrency=[1])
    flat, linear = (
        par_of(make_profile(prefill_ms=knots), ServerOptions(lag=1), bank, Scenario(high=1))
        for knots in (((1000, 40.0), (2000, 80.0)), LINEAR_PREFILL)
    )
    assert flat.prefill_token_s == pytest.approx(linear.prefill_token_s)
    # A prompt of some 400 tokens alone costs 40 ms instead of 16, which some 280 output tokens share.
    added_s = flat.of(requests)[0] - linear.of(requests)[0]
    np.testing.assert_allclose(added_s, 0.024 / 280, rtol=0.2)


@pytest.mark.parametrize(("drafts", "is_charged"), [(3, True), (0, False)], ids=["speculates", "off"])
def test_running_the_draft_over_prompts_is_charged_to_those_who_speculate(
    drafts: int,
    is_charged: bool,
    make_bank: Callable[..., AcceptanceBank],
    make_profile: Callable[..., CostProfile],
    make_requests: Callable[..., RequestList],
) -> None:
    bank, requests = make_bank({"a": [[drafts] * 8]}), make_requests([50], concurrency=[1])
    plain = assumed_kv_only(make_profile(prefill_ms=LINEAR_PREFILL), "assumed", 0.2, 0.01)
    priced = with_kv_only_prefill(plain, ((1, 0.03), (300, 9.0)))
    options, scenario = ServerOptions(off_mode="kv-only", lag=1), Scenario(high=1)
    free, charged = (par_of(profile, options, bank, scenario) for profile in (plain, priced))
    assert free.prefill_token_s == pytest.approx(40e-6) and charged.prefill_token_s == pytest.approx(30e-6)
    added_s = charged.of(requests)[0] - free.of(requests)[0]
    # A prompt token costs 0.01 ms more with the draft, which the request's output tokens share.
    lengths = scenario.length_model
    prompt_per_output = lengths.mean_prompt_tokens / lengths.mean_output_tokens
    np.testing.assert_allclose(added_s, is_charged * 10e-6 * prompt_per_output, rtol=0.05, atol=1e-9)


def test_requests_of_one_token_have_a_par_all_the_same(
    make_bank: Callable[..., AcceptanceBank],
    make_profile: Callable[..., CostProfile],
    make_requests: Callable[..., RequestList],
    tmp_path: Path,
) -> None:
    (tmp_path / "one.csv").write_text("arrival_s,input_tokens,output_tokens\n0,20,1\n1,20,1\n")
    scenario = Scenario(high=2, lengths=f"trace:{tmp_path / 'one.csv'}")
    bank = make_bank({"right": [[3] * 8]})
    par, round_s = par_of(make_profile(), ServerOptions(), bank, scenario).of(make_requests([1, 1]))
    assert np.isfinite(par).all() and round_s > 0


def test_servers_of_one_bank_walk_it_once(
    make_profile: Callable[..., CostProfile], monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[tuple[int, int]] = []

    def counted(bank: AcceptanceBank, domain: int, k: int) -> WalkStatistics:
        walks.append((domain, k))
        return walk_statistics(bank, domain, k)

    monkeypatch.setattr(scenarios, "walk_statistics", counted)
    profiles = [make_profile(), make_profile().scaled("slower", 2.0, 2.0)]
    Episodes(4, profiles, FittedAcceptance(["chat", "code"], num_arrays=8), Scenario(high=2, rounds=16))
    assert sorted(walks) == [(domain, k) for domain in range(2) for k in profiles[0].tiers if k]
