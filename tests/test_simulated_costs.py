"""What the simulator bills is what the cost profile says, in every tier, batch, context and off mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile, OffMode, shipped_profiles
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine

Factory = Callable[..., Any]
ROOMY = 1 << 30


def full_batches(
    profiles: list[CostProfile],
    contexts: list[int],
    options: ServerOptions,
    make_bank: Factory,
    make_requests: Factory,
) -> SimulatedEngine:
    """One server for each profile, context and number of running requests up to `max_running`.

    They stand at their first decision; every request has a context of its own, `contexts` on average.
    """
    lists, owners = [], []
    for profile in profiles:
        for context in contexts:
            for n in range(1, profile.max_running + 1):
                prompts = np.full(n, context - 1)
                prompts[: n // 2] += context // 3  # unequal, the mean rounded down is not theirs
                lists.append(make_requests(np.full(n, 200), prompt_tokens=prompts, concurrency=n))
                owners.append(profile)
    return SimulatedEngine(lists, make_bank({"a": [[1, 0, 2, 5, 0]]}), owners, options)


@pytest.mark.parametrize("off_mode", ["warm", "skip", "nospec"])
@pytest.mark.parametrize("names", [("h200-llama3-8b", "h100-llama3-8b", "qwen3-235b-a22b"), ("seeds-pcie",)])
def test_rounds_cost_what_the_shipped_profiles_say(
    off_mode: OffMode, names: tuple[str, ...], make_bank: Factory, make_requests: Factory
) -> None:
    assert {"h200-llama3-8b", "h100-llama3-8b", "qwen3-235b-a22b", "seeds-pcie"} == set(shipped_profiles())
    profiles = [CostProfile.load(name) for name in names]
    options = ServerOptions(off_mode, kv_pool_tokens=ROOMY)
    engine = full_batches(profiles, [40, 900, 12_000], options, make_bank, make_requests)
    servers, signals = engine.servers, engine.signals()
    ends = np.cumsum([3 * profile.max_running for profile in profiles])
    of_profile = [slice(end - 3 * p.max_running, end) for p, end in zip(profiles, ends, strict=True)]
    for tier, k in enumerate(engine.tiers):
        engine.reset()
        for then in (0, 1):  # the first round, and one with ghosts, other contexts and no switch
            running, context = signals.num_running.copy(), signals.mean_context_tokens.copy()
            expected = np.concatenate(
                [
                    p.round_s(running[rows], context[rows], off_mode)[:, : engine.num_tiers]
                    for p, rows in zip(profiles, of_profile, strict=True)
                ]
            )
            if then == 0:
                for p, rows in zip(profiles, of_profile, strict=True):
                    assert (running[rows] == np.tile(np.arange(1, p.max_running + 1), 3)).all()
            np.testing.assert_allclose(engine.round_s(), expected, rtol=1e-12)
            engine.run_round(np.full(engine.num_servers, k))
            np.testing.assert_allclose(servers["step_decode_s"], expected[:, tier], rtol=1e-12)


def test_prefill_costs_what_the_shipped_profiles_say(make_bank: Factory, make_requests: Factory) -> None:
    bank = make_bank({"a": [[0]]})
    for name in shipped_profiles():
        profile = CostProfile.load(name)
        knots, _ = profile.prefill_knots("warm")
        tokens = np.unique(np.concatenate([np.geomspace(1, 8192, 40).astype(int), knots[:-1].astype(int)]))
        tokens = tokens[tokens <= profile.chunked_prefill_tokens]
        for off_mode in ("warm", "nospec"):
            engine = SimulatedEngine(
                [make_requests([5], prompt_tokens=int(n)) for n in tokens],
                bank,
                profile,
                ServerOptions(off_mode, kv_pool_tokens=ROOMY),
            )
            expected = profile.prefill_s(tokens, off_mode)
            np.testing.assert_allclose(engine.servers["step_prefill_s"], expected, rtol=1e-12)
            np.testing.assert_allclose(engine.results().first_token_s[:, 0], expected, rtol=1e-12)


def test_padding_staircase_and_eager_cliff_by_hand(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    profile = make_profile(ms_per_token=0.01, max_running=8)
    engine = full_batches([profile], [300], ServerOptions(), make_bank, make_requests)
    n = np.arange(1, 9)
    context = engine.signals().mean_context_tokens
    captured = np.array([1, 2, 4, 4, 4, 4, 4, 4])
    for tier, base in enumerate((10.0, 12.0, 16.0)):
        # Padding rows compute but read no KV; beyond batch 4 half of the growth is paid, and 3 ms.
        padded = base + captured + 0.01 * context * np.minimum(n / captured, 1.0)
        by_hand = np.where(n > 4, padded * (1 + 0.5 * (n / 4 - 1)) + 3.0, padded)
        assert 1e3 * engine.round_s()[:, tier] == pytest.approx(by_hand)


def test_short_contexts_cost_a_fifth_of_the_first_measured_time_at_least(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    profile = make_profile(ms_per_token=0.02, least_context=900)
    other = make_profile(ms_per_token=0.02)
    bank, requests = make_bank({"a": [[0]]}), make_requests([40] * 2, prompt_tokens=349, concurrency=2)
    engine = SimulatedEngine([requests] * 2, bank, [profile, other])
    # Straight on from 900 tokens down to 350 would be 11 ms less: 1, 3 and 7 ms at batch 2.
    assert 1e3 * engine.round_s()[0] == pytest.approx([0.2 * 12, 3.0, 7.0])
    assert 1e3 * engine.round_s()[1] == pytest.approx([12 + 7, 14 + 7, 18 + 7])


def test_profiles_off_modes_and_options_of_one_engine_do_not_mix(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    """Tables of unequal size are stacked: each server must still read its own."""
    shipped = CostProfile.load("h200-llama3-8b")
    profiles = [make_profile(shipped.tiers), shipped, make_profile(shipped.tiers, max_running=64), shipped]
    options = [
        ServerOptions("skip"),
        ServerOptions("warm"),
        ServerOptions("warm", lag=1),
        ServerOptions("skip"),
    ]
    lists = [make_requests([40] * 12, prompt_tokens=7000, concurrency=6)] * 4
    bank = make_bank({"a": [[0, 1, 2, 3]]})
    together = SimulatedEngine(lists, bank, profiles, options)
    alone = [SimulatedEngine([r], bank, p, o) for r, p, o in zip(lists, profiles, options, strict=True)]
    rng = np.random.default_rng(0)
    while not together.servers["done"].all():
        k = rng.choice(together.tiers, 4)
        together.run_round(k)
        for s, engine in enumerate(alone):
            engine.run_round(k[s : s + 1])
            assert engine.servers["clock_s"][0] == together.servers["clock_s"][s]
    assert len(set(together.servers["clock_s"].tolist())) == 4


def test_a_switch_costs_once_each_way(
    make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    engine = SimulatedEngine(
        [make_requests([60])], make_bank({"a": [[0]]}), make_profile(switch_ms=2.0), ServerOptions()
    )
    seconds = []
    for k in (1, 1, 0, 0, 3, 1):
        engine.run_round(np.array([k]))
        seconds.append(1e3 * float(engine.servers["step_decode_s"][0]))
    assert seconds == pytest.approx([13, 13, 11 + 2, 11, 17 + 2, 13 + 2])


@pytest.mark.parametrize("prompt_tokens", [20, 40])
def test_a_busy_host_sets_the_pace_of_a_round_and_of_prefills_with_the_round_behind_them(
    prompt_tokens: int, make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    """Two requests, the second one, which arrives while the first decodes, read in one prefill or in two."""
    profile = make_profile((0, 1, 3), chunked_prefill_tokens=20)
    requests = make_requests([40, 40], prompt_tokens=[20, prompt_tokens], arrival_s=[0.0, 0.1])
    bank = make_bank({"a": [[0]]})
    quick_s = profile.round_s(2, 60, "warm").max()
    prefill_s = float(profile.prefill_s(20, "warm"))
    host_s = (2 * quick_s, 3 * quick_s, 0.0)
    for host_prefill_s in (0.5 * prefill_s, prefill_s + 5 * quick_s):
        options = ServerOptions(host_round_s=host_s, host_prefill_s=host_prefill_s)
        engine = SimulatedEngine([requests], bank, profile, options)
        server, behind = engine.servers[0], 0
        while not server["done"]:
            tier = int(server["round_id"]) % 3
            table_s = profile.round_s(int(server["num_running"]), int(server["mean_context_tokens"]), "warm")
            num_prefills = round(server["step_prefill_s"] / prefill_s)
            late_s = num_prefills * max(0.0, host_prefill_s - prefill_s)
            behind += num_prefills
            expected_s = max(table_s[tier], host_s[tier] + late_s)
            np.testing.assert_allclose(engine.round_s()[0, tier], expected_s, rtol=1e-12)
            switches = server["last_tier"] not in (-1, tier)
            engine.run_round(np.array([engine.tiers[tier]]))
            np.testing.assert_allclose(
                server["step_decode_s"], expected_s + switches * profile.switch_s, rtol=1e-12
            )
        assert behind == 1 + prompt_tokens // 20
