"""Goodput-greedy: what it believes, what it picks and when it probes.

The tiny profile takes `10 + batch + 2 k` ms a round at captured batches 1, 2 and 4, so at a batch of
4: 14 ms off, 16 at k = 1, 20 at k = 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.greedy import GoodputGreedy
from draftdial.controller.signals import RoundOutcome, RoundSignals

MakeProfile = Callable[..., CostProfile]


def decide(rule: GoodputGreedy, num_running: int = 4, context: int = 100) -> int:
    signals = RoundSignals.zeros(1)
    signals.num_running[:], signals.mean_context_tokens[:] = num_running, context
    return int(rule.decide(signals)[0])


def feed(rule: GoodputGreedy, k: int, accepted: list[int]) -> None:
    rule.observe(RoundOutcome.from_num_accepted(0, k, accepted, rule.tiers[-1]))


def started(profile: CostProfile, off_mode: Any = "warm", **parameters: Any) -> GoodputGreedy:
    rule = GoodputGreedy(profile.tiers, profile, off_mode, **parameters)
    rule.reset(1)
    return rule


def play(rule: GoodputGreedy, rounds: int, accepted: int, num_requests: int = 4) -> list[int]:
    """Decisions of rounds in which every request would have `accepted` drafts accepted; lag 2."""
    ks: list[int] = []
    for round_id in range(rounds):
        ks.append(decide(rule, num_requests))
        if round_id:
            feed(rule, ks[-2], [min(accepted, ks[-2])] * num_requests)
    return ks


def test_it_climbs_one_tier_past_the_deepest_depth_reached(make_profile: MakeProfile) -> None:
    rule = started(make_profile((0, 1, 3, 7)))
    assert decide(rule) == 1  # nothing is known: 2 / 16 ms beats 1 / 14 ms, and 3 is two tiers past
    feed(rule, 1, [1, 1, 1, 0])
    # Depth 1: (3 + 20) / (4 + 20) = 0.958, depths 2 and 3 extrapolated: 3.757 / 20 ms > 1.958 / 16 ms.
    assert decide(rule) == 3
    feed(rule, 3, [3, 3, 3, 3])
    assert decide(rule) == 7


def test_depths_that_were_not_reached_teach_nothing(make_profile: MakeProfile) -> None:
    rule = started(make_profile(), half_life_samples=1e6, prior_samples=1e-6)
    feed(rule, 3, [0] * 60 + [3] * 40)
    # p_1 = 0.4 and p_2 = p_3 = 1, learned from 40 requests: 2.2 / 20 ms beats 1.4 / 16 ms; with
    # rates over all 100 requests, 1 + 0.4 + 0.16 + 0.064 would not.
    assert decide(rule) == 3
    feed(rule, 1, [1] * 100)
    # p_1 = 0.7: 1 + 3 * 0.7 = 3.1 beats 1.7.
    assert decide(rule) == 3
    feed(rule, 3, [1] * 400)
    # p_2 = 40 / 440: about 2.0 / 20 ms loses to 1.9 / 16 ms.
    assert decide(rule) == 1


def test_estimates_equal_their_closed_form(make_profile: MakeProfile) -> None:
    profile, half_life, prior = make_profile((0, 1, 2, 3, 5, 7)), 30.0, 8.0
    rule = started(profile, half_life_samples=half_life, prior_samples=prior, probe_interval=0)
    generator = np.random.default_rng(5)
    samples: list[list[bool]] = [[] for _ in range(7)]  # per depth, in rounds, newest last
    rounds: list[list[int]] = [[] for _ in range(7)]  # how many samples each round brought
    for round_id in range(200):
        num_running = int(generator.integers(1, 5))
        k = decide(rule, num_running)
        rate, survival, tokens = 1.0, 1.0, [1.0]
        for depth in range(7):
            # A round's samples share one weight: halved for every half-life of samples after it.
            after = np.cumsum([0, *rounds[depth][:0:-1]])[::-1] if rounds[depth] else []
            weights = np.repeat(0.5 ** (np.array(after) / half_life), rounds[depth])
            reached, accepted = weights.sum(), weights @ np.array(samples[depth], float)
            rate = (accepted + prior * rate) / (reached + prior)
            survival *= rate
            tokens.append(tokens[-1] + survival)
        times = profile.round_s(np.array([num_running]), np.array([100]), "warm")[0]
        frontier = sum(map(bool, rounds))
        allowed = sum(tier <= frontier for tier in profile.tiers) + 1
        goodput = [tokens[tier] / times[i] for i, tier in enumerate(profile.tiers[:allowed])]
        assert k == profile.tiers[int(np.argmax(goodput))], f"round {round_id}"

        # Forced k now and then, as a profiler would: evidence of depths the rule would not try.
        k = int(generator.choice(profile.tiers)) if generator.random() < 0.3 else k
        outcome = np.minimum(generator.geometric(0.4, num_running) - 1, k).tolist()
        feed(rule, k, outcome)
        for depth in range(min(k, max(outcome) + 1)):
            reaching = [n for n in outcome if n >= depth]
            samples[depth] += [n > depth for n in reaching]
            rounds[depth].append(len(reaching))


@pytest.mark.parametrize("num_running", [1, 16, 64, 256])
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.7, 0.9])
def test_it_settles_on_the_best_k_for_a_known_acceptance(num_running: int, rate: float) -> None:
    profile = CostProfile.load("h200-llama3-8b")
    rule, generator = started(profile), np.random.default_rng(2)
    times = profile.round_s(np.array([num_running]), np.array([500]), "warm")[0]
    goodput = np.array([sum(rate**d for d in range(k + 1)) for k in profile.tiers]) / times
    time_share, rounds = np.zeros(len(profile.tiers)), 3000 if num_running == 1 else 600
    for round_id in range(rounds):
        k = decide(rule, num_running, context=500)
        feed(rule, k, np.minimum(generator.geometric(1 - rate, num_running) - 1, k).tolist())
        if round_id >= rounds // 3:
            time_share[profile.tiers.index(k)] += times[profile.tiers.index(k)]
    achieved = goodput @ time_share / time_share.sum()
    assert achieved >= 0.98 * goodput.max()


@pytest.mark.parametrize(
    ("interval", "longest", "gaps"),
    [(8, 64, [8, 16, 32, 64, 64, 64]), (16, 16, [16] * 6), (5, 20, [5, 10, 20, 20, 20, 20])],
)
def test_probes_back_off_while_they_change_nothing(
    make_profile: MakeProfile, interval: int, longest: int, gaps: list[int]
) -> None:
    rule = started(make_profile(), probe_interval=interval, max_probe_interval=longest)
    ks = play(rule, 600, accepted=0)
    off_from = next(i for i in range(600) if ks[i : i + 2] == [0, 0])
    probes = [i for i in range(off_from, 600) if ks[i]]
    assert {ks[i] for i in probes} == {1}
    assert np.diff([off_from - 1, *probes])[:6].tolist() == gaps


def test_a_probe_below_the_top_tries_the_next_tier_up(make_profile: MakeProfile) -> None:
    rule = started(make_profile((0, 1, 3, 7)), probe_interval=8, max_probe_interval=8)
    play(rule, 60, accepted=1)
    settled = play(rule, 32, accepted=1)
    assert sorted(set(settled)) == [1, 3]
    assert np.diff(np.flatnonzero(np.array(settled) == 3)).tolist() == [8] * 3


def test_without_probes_it_never_comes_back_from_off(make_profile: MakeProfile) -> None:
    rule = started(make_profile(), probe_interval=0, max_probe_interval=0)
    assert play(rule, 100, accepted=0)[-1] == 0
    assert set(play(rule, 500, accepted=3)) == {0}


def test_a_change_of_choice_brings_the_first_interval_back(make_profile: MakeProfile) -> None:
    rule = started(make_profile(), probe_interval=8, max_probe_interval=64)
    play(rule, 400, accepted=0)  # backed off to 64
    recovering = play(rule, 400, accepted=3)
    assert recovering[-1] == 3
    ks = play(rule, 400, accepted=0)
    off_from = next(i for i in range(400) if ks[i : i + 2] == [0, 0])
    assert ks[off_from : off_from + 8] == [0] * 7 + [1]


def test_idle_decisions_leave_choice_and_probe_schedule_alone(make_profile: MakeProfile) -> None:
    # Depth 1 at 0.16 is worth drafting at a batch of 4 and not with the round times of an idle server.
    rule, idle_now_and_then = (
        started(make_profile(), prior_samples=1e-6, probe_interval=8) for _ in range(2)
    )
    for each in (rule, idle_now_and_then):
        feed(each, 1, [1] * 16 + [0] * 84)
    ks = []
    for round_id in range(100):
        for _ in range(round_id % 5):
            decide(idle_now_and_then, num_running=0)
        ks.append(decide(rule))
        assert decide(idle_now_and_then) == ks[-1], f"round {round_id}"
    assert np.flatnonzero(np.array(ks) == 3).tolist() == [7, 23, 55]


def test_the_off_row_follows_the_servers_off_mode(make_profile: MakeProfile) -> None:
    # Break-even at a batch of 4: p_1 = 2 / 14 against off-warm, 3 / 13 against off-skip.
    for off_mode, k in (("warm", 1), ("skip", 0)):
        rule = started(make_profile((0, 1)), off_mode, prior_samples=1e-6)
        feed(rule, 1, [1] + [0] * 4)
        assert decide(rule) == k


def test_hysteresis_keeps_a_choice_that_is_nearly_as_good(make_profile: MakeProfile) -> None:
    for hysteresis, k in ((0.0, 0), (0.02, 1)):
        rule = started(make_profile((0, 1)), prior_samples=1e-6, hysteresis=hysteresis)
        assert decide(rule) == 1
        feed(rule, 1, [1] * 13 + [0] * 87)  # 1.13 / 16 ms: 1.1 % less than 1 / 14 ms
        assert decide(rule) == k


def test_a_grid_of_parameters_runs_as_one_batch(make_profile: MakeProfile) -> None:
    profile = make_profile()
    grid = GoodputGreedy(
        profile.tiers, profile, half_life_samples=[20.0, 200.0], probe_interval=[0, 4], max_probe_interval=16
    )
    grid.reset(2)
    singles = [
        started(profile, half_life_samples=20.0, probe_interval=0, max_probe_interval=16),
        started(profile, half_life_samples=200.0, probe_interval=4, max_probe_interval=16),
    ]
    signals = RoundSignals.zeros(2)
    signals.num_running[:] = 4
    signals.mean_context_tokens[:] = 100
    for round_id in range(200):
        accepted = 3 if round_id // 50 % 2 else 0
        k = grid.decide(signals)
        assert k.tolist() == [decide(rule) for rule in singles]
        counts = np.zeros((2, 4), np.int64)
        counts[np.arange(2), np.minimum(accepted, k)] = 4
        grid.observe(RoundOutcome(np.full(2, round_id), k, counts))
        for rule, own in zip(singles, k.tolist(), strict=True):
            feed(rule, own, [min(accepted, own)] * 4)
