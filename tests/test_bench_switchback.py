"""What turns of a switchback benchmark are made into: adjusted throughput, and arms that are left out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from draftdial.controller.bench_adjust import adjusted
from draftdial.controller.bench_drop import left_behind
from draftdial.controller.bench_report import ADJUSTED, cells, table

PREFILL_S, ANSWER = 0.01, 300.0


def turns_of(speeds: dict[str, float], cycles: int, seed: int, noise: float = 0.0) -> list[dict[str, Any]]:
    """Turns of a second; decoding at an arm's speed fills what prefills, a Poisson number, leave of it."""
    rng = np.random.default_rng(seed)
    turns = []
    for cycle in range(cycles):
        for arm, speed in speeds.items():
            per_s = 1 / (ANSWER / speed + PREFILL_S)
            prefills = int(rng.poisson(per_s))
            rate = speed * max(0.1, 1.0 - PREFILL_S * prefills) * math.exp(noise * rng.normal())
            turns.append(
                {
                    "arm": arm,
                    "workload": "closed",
                    "mode": "closed",
                    "load": 64.0,
                    "repeat": cycle,
                    "failed": 0,
                    "requests": prefills,
                    "window_s": 1.0,
                    "output_tok_s": rate,
                }
            )
    return turns


def test_prefills_that_fall_into_a_turn_by_chance_are_taken_out() -> None:
    speeds = {"slow": 9000.0, "fast": 9900.0}
    slow, fast = (ANSWER / (ANSWER / speed + PREFILL_S) for speed in speeds.values())
    errors: dict[str, list[float]] = {"output_tok_s": [], ADJUSTED: []}
    for seed in range(60):
        turns = adjusted(turns_of(speeds, 12, seed))
        for name, of_name in errors.items():
            ratios = [a[name] / b[name] for a, b in zip(turns[::2], turns[1::2], strict=True)]
            of_name.append(float(np.mean(np.log(ratios))) - math.log(slow / fast))
    assert np.std(errors["output_tok_s"]) > 4 * np.std(errors[ADJUSTED])
    assert abs(np.mean(errors[ADJUSTED])) < 0.003, "adjusting favours nobody"


def test_a_prefill_gives_back_as_much_time_whatever_the_arm() -> None:
    for seed in range(10):
        turns = adjusted(turns_of({"slow": 2000.0, "fast": 10000.0}, 12, seed))
        for arm in ("slow", "fast"):
            rates = [turn[ADJUSTED] for turn in turns if turn["arm"] == arm]
            assert max(rates) < 1.01 * min(rates), "without noise all turns of an arm are alike"


def test_turns_of_as_many_prefills_each_are_not_told_apart_by_them() -> None:
    rng = np.random.default_rng(7)
    turns = turns_of({"slow": 60.0, "fast": 300.0}, 3, 0)
    for turn in turns:  # as three short turns with one request in flight may be
        turn["requests"] = int(turn["arm"] == "fast")
        turn["output_tok_s"] *= math.exp(0.02 * rng.normal())
    for turn in adjusted(turns):
        assert turn[ADJUSTED] == pytest.approx(turn["output_tok_s"], rel=0.05)


def test_adjusting_leaves_alone_what_it_knows_nothing_of() -> None:
    turns = turns_of({"a": 9000.0, "b": 8000.0}, 3, 1)
    void = turns[0] | {"failed": 2}
    assert ADJUSTED not in adjusted([void, *turns[1:]])[0]
    without = [turn | {"requests": 0} for turn in turns]
    assert [turn[ADJUSTED] for turn in adjusted(without)] == pytest.approx(
        [turn["output_tok_s"] for turn in without]
    )
    other = [turn | {"load": 128.0, "output_tok_s": 2 * turn["output_tok_s"]} for turn in turns]
    assert adjusted([*turns, *other])[: len(turns)] == adjusted(turns), "each load by itself"


def test_a_table_of_turns_compares_adjusted_throughput_and_has_no_latencies() -> None:
    turns = adjusted(turns_of({"a": 9000.0, "b": 9900.0}, 12, 3))
    found = {cell["arm"]: cell for cell in cells(turns, "b")}
    expected = [math.log(b[ADJUSTED] / a[ADJUSTED]) for a, b in zip(turns[::2], turns[1::2], strict=True)]
    assert found["a"]["vs_baseline"]["ratio"] == pytest.approx(math.exp(np.mean(expected)))
    text = table({"arms": ["b", "a"], "baseline": "b", "cells": list(found.values())})
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["b", "a"], "as they were named"
    assert "adjusted" in text and "TTFT" not in text and "E2E" not in text


def test_what_is_surely_behind_is_left_out() -> None:
    speeds = {"best": 10000.0, "near": 9900.0, "far": 8000.0}
    assert left_behind(turns_of(speeds, 2, 5, 0.02), 0.03) == set(), "two turns are too few"
    assert left_behind(turns_of(speeds, 8, 5, 0.02), 0.03) == {"far"}
    assert left_behind(turns_of(speeds, 8, 5, 0.02), 0.3) == set(), "not so far behind"
    turns = turns_of(speeds, 8, 5, 0.02)
    assert left_behind([turn | {"failed": int(turn["arm"] == "far")} for turn in turns], 0.03) == set()
    dropped = 0
    for seed in range(200):
        dropped += bool(left_behind(turns_of({"a": 1e4, "b": 1e4, "c": 1e4}, 6, seed, 0.05), 0.03))
    assert dropped <= 10, "of arms that are alike hardly any"


def test_an_arm_that_is_out_is_not_the_fastest_because_the_host_was() -> None:
    speeds = {"best": 10000.0, "far": 9000.0}
    early = turns_of({arm: 1.5 * speed for arm, speed in speeds.items()} | {"out": 12000.0}, 3, 5, 0.02)
    late = [turn | {"repeat": 3 + turn["repeat"]} for turn in turns_of(speeds, 9, 6, 0.02)]
    assert left_behind([*early, *late], 0.03) == {"far"}


def test_turns_of_no_common_cycle_say_nothing() -> None:
    turns = turns_of({"a": 10000.0, "b": 5000.0}, 8, 5, 0.02)
    odd = [turn | {"failed": int((turn["arm"] == "a") == (turn["repeat"] % 2 == 0))} for turn in turns]
    assert left_behind(odd, 0.03) == set()
