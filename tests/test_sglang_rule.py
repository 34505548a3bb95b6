"""SGLang's adaptive rule on traces worked out by hand from its documented behaviour."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from draftdial.controller.errors import UserError
from draftdial.controller.rule_cards import rule_from_card
from draftdial.controller.sglang_rule import DEFAULT_CONFIG, SglangRule, tuning_grid
from draftdial.controller.signals import RoundOutcome, RoundSignals

TIERS = (0, 1, 2, 3, 5, 7)


def k_at(rule: SglangRule, *batches: int) -> list[int]:
    """What the rule decides for each of its servers at these batch sizes."""
    signals = RoundSignals.zeros(len(batches))
    signals.num_running[:] = batches
    return rule.decide(signals).tolist()


def feed(rule: SglangRule, k: int, accepted: list[int], times: int = 1) -> None:
    """Outcomes of `times` rounds of one server, `accepted` drafts for each request."""
    for _ in range(times):
        rule.observe(RoundOutcome.from_num_accepted(0, k, accepted, TIERS[-1]))


def started(config: Any = None, tiers: tuple[int, ...] = TIERS, num_servers: int = 1) -> SglangRule:
    rule = SglangRule(tiers, config)
    rule.reset(num_servers)
    return rule


def test_every_slot_of_the_default_config_starts_at_the_servers_default_step() -> None:
    # The built steps are 0, 1, 3, 5, 7, so the server starts at 3; a slot without 3 at its middle.
    rule = started(num_servers=9)
    assert k_at(rule, 0, 1, 7, 8, 31, 32, 63, 64, 300) == [3, 3, 3, 3, 3, 1, 1, 0, 0]


def test_full_acceptance_climbs_one_threshold_at_a_time() -> None:
    rule = started()
    feed(rule, 3, [3], times=14)
    assert k_at(rule, 1) == [3]  # 10 rounds of warm-up, then one decision in 5
    feed(rule, 3, [3])
    assert k_at(rule, 1) == [5]  # average 3 - 0.8 ** 15 = 2.96, above 3 - 0.5
    feed(rule, 5, [5], times=5)
    assert k_at(rule, 1) == [5]  # 5 - 2.04 * 0.8 ** 5 = 4.33, not above 5 - 0.5
    feed(rule, 5, [5], times=5)
    assert k_at(rule, 1) == [7]  # 5 - 2.04 * 0.8 ** 10 = 4.78


def test_no_acceptance_flaps_between_off_and_the_smallest_step() -> None:
    rule = started()
    feed(rule, 3, [0] * 8, times=15)
    ks = []
    for _ in range(1000):
        ks.append(k_at(rule, 8)[0])
        feed(rule, ks[-1], [0] * 8)
    assert ks[:15] == [0] * 5 + [1] * 5 + [0] * 5
    assert (np.diff(ks) != 0).sum() == 199


def test_a_drop_can_pass_several_steps_and_needs_the_hysteresis() -> None:
    steps = {"candidate_steps": [1, 3, 5], "down_hysteresis": -0.25, "ema_alpha": 1.0}
    rule = started({"1": steps, "warmup_batches": 0, "update_interval": 1})
    assert k_at(rule, 1) == [3]
    feed(rule, 3, [3, 2, 3])
    assert k_at(rule, 1) == [5]
    feed(rule, 5, [2, 3, 2, 3])
    assert k_at(rule, 1) == [5]  # 2.5 is not below 3 - 0.5 - 0.25
    feed(rule, 5, [0, 0, 0, 1])
    assert k_at(rule, 1) == [1]  # 0.25 is as low as dropping to 1 asks, 1 - 0.5 - 0.25


def test_the_ceiling_caps_a_step_that_does_not_rise() -> None:
    steps = {"candidate_steps": [1, 3, 5], "ceiling_coeff": 0.5, "ema_alpha": 1.0}
    rule = started({"1": steps, "warmup_batches": 0, "update_interval": 1})
    feed(rule, 3, [3])
    assert k_at(rule, 1) == [5]  # a rise is never capped
    feed(rule, 5, [4])
    assert k_at(rule, 1) == [1]  # ceil(4 * 0.5) = 2 caps staying at 5


def test_outcomes_belong_to_the_slot_of_their_own_batch_size() -> None:
    rule = started()
    for _ in range(15):
        assert k_at(rule, 4) == [3]
        feed(rule, 1, [0] * 40)
    assert k_at(rule, 4) == [3]
    assert k_at(rule, 40) == [0]


def test_late_outcomes_are_read_in_the_light_of_the_slots_present_step() -> None:
    config = {"1": {"candidate_steps": [0, 1]}, "ema_alpha": 0.3, "warmup_batches": 0, "update_interval": 2}
    rule = started({**config, "down_hysteresis": 0.0})
    seven_of_ten = [1] * 7 + [0] * 3
    feed(rule, 1, seven_of_ten, times=2)
    assert k_at(rule, 1) == [0]  # 0, 0.21, 0.357: not above 0.5
    feed(rule, 1, [1] * 10, times=2)  # launched before the slot moved: counted, not averaged
    assert k_at(rule, 1) == [1]  # probes after two rounds, average still 0.357
    feed(rule, 0, [0] * 10)  # launched before the probe, yet averaged as no acceptance
    feed(rule, 1, [1] * 10)
    # 0.25, 0.475; it would be 0.64 with the two rounds above, 0.55 without the zeros.
    assert k_at(rule, 1) == [0]


def test_a_server_row_learns_from_its_own_outcomes_only() -> None:
    rule = started(num_servers=3)
    counts = np.zeros((3, 8), np.int64)
    counts[0, 3] = counts[1, 0] = counts[2, 3] = 1
    for _ in range(15):
        rule.observe(RoundOutcome(np.array([5, 5, -1]), np.full(3, 3), counts))
    assert k_at(rule, 1, 1, 1) == [5, 1, 3]


def test_candidate_steps_that_are_no_tier_are_left_out() -> None:
    assert k_at(started(tiers=(0, 1, 2)), 1) == [1]
    # A slot that would be empty keeps its meaning: the nearest tier upward, else the largest.
    assert k_at(started(tiers=(0, 16), num_servers=2), 1, 8) == [16, 0]
    assert k_at(started(tiers=(1, 3), num_servers=2), 1, 64) == [3, 1]
    assert k_at(started({"1": {"candidate_steps": [7]}}, tiers=(0, 1, 3)), 1) == [3]


def test_configs_are_dealt_to_the_servers_in_turn() -> None:
    deep = {"1": {"candidate_steps": [7]}}
    shallow = {"1": {"candidate_steps": [0]}, "16": {"candidate_steps": [2]}}
    rule = started([deep, shallow], num_servers=4)
    assert k_at(rule, 20, 20, 1, 1) == [7, 2, 7, 0]
    with pytest.raises(UserError, match="2 configs cannot be shared evenly by 3 servers"):
        rule.reset(3)


def test_the_tuning_grid_holds_distinct_valid_configs() -> None:
    grid = tuning_grid()
    assert len({json.dumps(config, sort_keys=True) for config in grid}) == len(grid)
    rule = started(grid, num_servers=len(grid))
    assert set(k_at(rule, *[128] * len(grid))) == {0, 1, 2}
    for config in grid:
        card = {"kind": "sglang-adaptive", "config": config}
        assert SglangRule(TIERS, json.loads(json.dumps(config))).card() == card


def test_without_a_config_the_card_spells_out_the_default() -> None:
    assert SglangRule(TIERS).card() == {"kind": "sglang-adaptive", "config": DEFAULT_CONFIG}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ema_alpha": 0.1}, r'needs a batch-size key such as "1", got \[\'ema_alpha\'\]'),
        ({"8": {"steps": [1]}}, "slot 8: candidate_steps must be a list of integers from 0 up, got None"),
        ({"8": {"candidate_steps": []}}, r"slot 8: candidate_steps .* got \[\]"),
        ({"8": {"candidate_steps": [0, -1]}}, r"got \[0, -1\]"),
        ({"8": {"candidate_steps": [1], "ema_alpha": "fast"}}, "ema_alpha must be a number, got 'fast'"),
        (
            {"8": {"candidate_steps": [1]}, "update_interval": 0},
            "update_interval must be a number, 1 or more",
        ),
    ],
)
def test_a_bad_config_is_refused_with_slot_field_and_value(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rule_from_card({"kind": "sglang-adaptive", "config": config}, TIERS, None, "warm")  # type: ignore[arg-type]
