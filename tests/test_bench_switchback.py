"""What turns of a switchback benchmark are made into: adjusted throughput, and arms that are left out."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
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


def test_the_published_table_is_what_its_command_prints() -> None:
    root = Path(__file__).parent.parent
    raw = root / "docs" / "results" / "h200-all-loads-2026-11-30.json"
    command = [sys.executable, str(root / "tests" / "gpu" / "ratios.py"), str(raw)]
    header, _, *printed = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {line.count("|") for line in printed} == {header.count("|")}
    text = (root / "docs" / "results.md").read_text()
    section = text.split("## Against every fixed k")[1].split("\n## ")[0]
    shown = [line for line in section.splitlines() if " to " in line and line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed]
    published = [row for row in rows if row[1] not in ("", "all 1")]
    assert len(shown) == len(published) == 23
    for line, row in zip(shown, published, strict=True):
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        ratios = [f"{cell.split(';')[0].rstrip(')')})" if cell else "" for cell in row[5:7]]
        assert [cells[0], cells[1], *cells[3:]] == [row[1], row[3], *ratios], row


def test_the_table_of_two_policies_is_what_its_commands_print() -> None:
    root = Path(__file__).parent.parent
    raw = root / "docs" / "results" / "h200-quiet-host-2026-11-30.json"
    command = [sys.executable, str(root / "tests" / "gpu" / "ratios.py"), str(raw), "--only"]
    command += ["mixed-mid", "mixed-mid-256", "good-mid"]
    of_policy = []
    for more in ([], ["--arm", "policy:start"]):
        printed = subprocess.run([*command, *more], capture_output=True, text=True, check=True).stdout
        of_policy.append([[cell.strip() for cell in line.split("|")] for line in printed.splitlines()[2:]])
    text = (root / "docs" / "results.md").read_text()
    section = text.split("## On a quiet host")[1].split("\n## ")[0]
    lines = [line.split("|") for line in section.splitlines() if " to " in line and line.startswith("|")]
    assert len(lines) == len(of_policy[0]) == 8
    for line, steer, start in zip(lines, *of_policy, strict=True):
        found = [cell.split(";")[0].removeprefix("policy:start ") for cell in (steer[6], steer[8], start[6])]
        ratios = [cell.strip().rstrip(")") for cell in line[5:8]]
        assert [line[2].strip(), line[3].strip(), *ratios] == [
            *(steer[2], steer[4]),
            *(cell.rstrip(")") for cell in found),
        ]


def test_turns_in_a_row_count_as_one_pair() -> None:
    """What the results say of no speculation on the same GPU; the mean stays, the interval is wider."""
    root = Path(__file__).parent.parent
    raw = root / "docs" / "results" / "h200-one-gpu-2026-11-30.json"
    command = [sys.executable, str(root / "tests" / "gpu" / "ratios.py"), str(raw), "--only", "poor-high:256"]
    shown = []
    for more in ([], ["--block", "4"]):
        printed = subprocess.run([*command, *more], capture_output=True, text=True, check=True).stdout
        shown.append([cell.strip() for cell in printed.splitlines()[2].split("|")][7])
    assert shown == ["0.98 (0.95 to 1.01; 24)", "0.98 (0.92 to 1.04; 6)"]
    assert "0.98 (0.92 to 1.04)" in (root / "docs" / "results.md").read_text()


@pytest.mark.parametrize(
    ("file", "words", "complaint"),
    [
        (
            "h200-one-gpu-2026-11-30.json",
            ["--only", "host", "mixed"],
            "--only: found mixed, allowed: poor-high:256,",
        ),
        (
            "h200-one-gpu-2026-11-30.json",
            ["--arm", "start"],
            "--arm: found start, allowed: an arm that answered",
        ),
        ("h200-one-gpu-2026-11-30.json", ["--block", "0"], "--block: found 0, allowed: 1 or more"),
        ("h200-steer-2026-11-29.json", [], "found no bench of closed loops, allowed: one, or"),
        ("smollm2-draft-curve.csv", [], "not a file of JSON"),
    ],
)
def test_what_makes_no_table_is_said(file: str, words: list[str], complaint: str) -> None:
    root = Path(__file__).parent.parent
    script, path = root / "tests" / "gpu" / "ratios.py", root / "docs" / "results" / file
    ran = subprocess.run([sys.executable, str(script), str(path), *words], capture_output=True, text=True)
    assert ran.returncode and not ran.stdout
    assert complaint in ran.stderr.splitlines()[-1] and "Traceback" not in ran.stderr
