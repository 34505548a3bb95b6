"""The rules that do not learn, and what holds for every rule."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.rule_cards import FIELDS, Rule, rule_from_card
from draftdial.controller.rules import FixedK, Threshold
from draftdial.controller.signals import IntArray, RoundOutcome, RoundSignals

TIERS = (0, 1, 2, 3, 5, 7)
PROFILE = CostProfile.load("h200-llama3-8b")
CARDS: list[dict[str, Any]] = [
    {"kind": "fixed", "k": 3},
    {"kind": "threshold", "k": 3, "batch": 48},
    {"kind": "sglang-adaptive"},
    {"kind": "greedy"},
    {"kind": "greedy", "probe_interval": 4, "max_probe_interval": 16, "hysteresis": 0.02},
    {"kind": "bandit"},
    {"kind": "bandit", "exploration": 1.0, "lock_rounds": 2},
]
IDS = [f"{card['kind']}-{len(card)}" for card in CARDS]


def make(card: dict[str, Any]) -> Rule:
    return rule_from_card(card, TIERS, PROFILE, "warm")


class World:
    """Batches and acceptance that drift per server; a row's world depends on its own seed alone."""

    def __init__(self, seeds: list[int], rounds: int) -> None:
        self.num_servers, self.rounds = len(seeds), rounds
        generators = [np.random.default_rng(seed) for seed in seeds]
        self.batch = np.array([self._drift(g, np.exp(g.uniform(0, 5.5, rounds))) for g in generators], int)
        self.rate = np.array([self._drift(g, g.uniform(0.05, 0.95, rounds)) for g in generators])
        self.missing = np.array([g.random(rounds) < 0.1 for g in generators])
        # One drawn run of acceptable drafts per request and round; k only truncates it.
        self.runs = [
            [g.geometric(1 - p, n) - 1 for p, n in zip(rate, batch, strict=True)]
            for g, rate, batch in zip(generators, self.rate, self.batch, strict=True)
        ]

    @staticmethod
    def _drift(generator: np.random.Generator, fresh: np.ndarray) -> np.ndarray:
        jumps = np.where(generator.random(len(fresh)) < 0.05, np.arange(len(fresh)), 0)
        return fresh[np.maximum.accumulate(jumps)]

    def signals(self, round_id: int) -> RoundSignals:
        signals = RoundSignals.zeros(self.num_servers)
        signals.round_id[:] = round_id
        signals.num_running[:] = self.batch[:, round_id]
        signals.mean_context_tokens[:] = 400 + round_id
        return signals

    def outcome(self, round_id: int, k: IntArray) -> RoundOutcome:
        """The round's outcome; where it goes missing, round_id is -1 and the rest is garbage."""
        accepted = [np.minimum(self.runs[s][round_id], k[s]) for s in range(self.num_servers)]
        counts = np.stack([np.bincount(row, minlength=TIERS[-1] + 1) for row in accepted])
        missing = self.missing[:, round_id]
        return RoundOutcome(
            np.where(missing, -1, round_id), np.where(missing, 99, k), np.where(missing[:, None], 7, counts)
        )

    def play(self, rule: Rule) -> IntArray:
        """Decisions, shape `(rounds, num_servers)`; the lag changes between 1 and 2 on the way."""
        rule.reset(self.num_servers)
        decisions, in_flight = [], []
        for round_id in range(self.rounds):
            k = rule.decide(self.signals(round_id))
            decisions.append(k.copy())
            in_flight.append(self.outcome(round_id, k))
            lag = 1 + round_id // 40 % 2
            while len(in_flight) >= lag:
                rule.observe(in_flight.pop(0))
        return np.array(decisions)


@pytest.mark.parametrize("card", CARDS, ids=IDS)
def test_a_row_of_a_batch_decides_as_it_would_alone(card: dict[str, Any]) -> None:
    seeds = [3, 14, 15, 92, 65]
    together = World(seeds, rounds=300).play(make(card))
    for row, seed in enumerate(seeds):
        alone = World([seed], rounds=300).play(make(card))
        np.testing.assert_array_equal(together[:, row], alone[:, 0])


@pytest.mark.parametrize("card", CARDS, ids=IDS)
def test_a_rule_is_a_function_of_the_history_since_reset(card: dict[str, Any]) -> None:
    world, rule = World([1, 2, 3], rounds=200), make(card)
    first = world.play(rule)
    World([7, 8], rounds=50).play(rule)
    np.testing.assert_array_equal(world.play(rule), first)
    assert np.isin(first, TIERS).all()


@pytest.mark.parametrize("card", CARDS, ids=IDS)
def test_a_card_survives_json_and_builds_the_same_rule(card: dict[str, Any]) -> None:
    world, rule = World([4, 5, 6], rounds=200), make(card)
    again = make(json.loads(json.dumps(rule.card())))
    assert again.card() == rule.card()
    assert set(rule.card()) == {"kind", *FIELDS[card["kind"]]}
    np.testing.assert_array_equal(world.play(again), world.play(rule))


@pytest.mark.parametrize("card", CARDS, ids=IDS)
def test_outcomes_that_did_not_arrive_change_nothing(card: dict[str, Any]) -> None:
    world, rule, twin = World([21, 22], rounds=60), make(card), make(card)
    rule.reset(2)
    twin.reset(2)
    nothing = RoundOutcome(np.full(2, -1), np.full(2, 7), np.full((2, TIERS[-1] + 1), 50))
    for round_id in range(world.rounds):
        signals = world.signals(round_id)
        k = rule.decide(signals)
        np.testing.assert_array_equal(twin.decide(signals), k)
        rule.observe(world.outcome(round_id, k))
        twin.observe(nothing)
        twin.observe(world.outcome(round_id, k))


def test_fixed_k() -> None:
    signals = RoundSignals.zeros(3)
    assert FixedK(TIERS, 5).decide(signals).tolist() == [5, 5, 5]
    with pytest.raises(UserError, match=r"k = 4 is not among the tiers \[0, 1, 2, 3, 5, 7\]"):
        FixedK(TIERS, 4)


def test_threshold_speculates_up_to_and_including_its_batch() -> None:
    signals = RoundSignals.zeros(4)
    signals.num_running[:] = [1, 48, 49, 256]
    rule = Threshold(TIERS, k=3, batch=48)
    rule.reset(4)
    assert rule.decide(signals).tolist() == [3, 3, 0, 0]


def test_threshold_grid_is_evaluated_as_one_batch() -> None:
    signals = RoundSignals.zeros(4)
    signals.num_running[:] = 32
    rule = Threshold(TIERS, k=[1, 1, 7, 7], batch=[16, 32, 31, 64])
    rule.reset(4)
    assert rule.decide(signals).tolist() == [0, 1, 0, 7]
    with pytest.raises(UserError, match=r"one per server \(3\)"):
        rule.reset(3)


def test_threshold_falls_to_the_smallest_tier_of_a_server_that_cannot_switch_off() -> None:
    signals = RoundSignals.zeros(1)
    signals.num_running[:] = 64
    assert Threshold((1, 3), k=3, batch=8).decide(signals).tolist() == [1]


@pytest.mark.parametrize("tiers", [(), (0, 3, 1), (0, 1, 1), (-1, 0)])
def test_tiers_must_ascend_from_zero_up(tiers: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="ascending"):
        FixedK(tiers, 0)


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ({"kind": "oracle"}, "kind is 'oracle', allowed: fixed, threshold"),
        ({"k": 3}, "kind is None"),
        ({"kind": "fixed"}, "fixed: .*'k'"),
        ({"kind": "fixed", "k": 4}, "k = 4 is not among the tiers"),
        ({"kind": "fixed", "k": 2.5}, "k = 2.5 must be whole numbers"),
        ({"kind": "threshold", "k": 3, "batch": 48.5}, "batch = 48.5 must be whole numbers"),
        ({"kind": "threshold", "k": 3, "batch": "many"}, "batch = many must be whole numbers"),
        ({"kind": "threshold", "k": 3, "size": 4}, "unknown field 'size', allowed: k, batch"),
        ({"kind": "greedy", "half_life_samples": 0}, "half_life_samples must be above 0"),
        ({"kind": "greedy", "max_probe_interval": 8}, "max_probe_interval must be probe_interval or more"),
        ({"kind": "bandit", "discount": 1.0}, "discount must lie between 0 and 1"),
    ],
)
def test_a_bad_card_is_refused_with_the_field_and_what_is_allowed(card: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(card)


@pytest.mark.parametrize("kind", ["greedy", "bandit"])
def test_a_tier_that_the_profile_did_not_measure_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match="profile h200-llama3-8b has no tier 4"):
        rule_from_card({"kind": kind}, (0, 1, 4), PROFILE, "warm")
