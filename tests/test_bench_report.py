"""What a benchmark says: figures by formula, paired ratios, arms that are set and put back."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_client import FakeSglang, serve  # noqa: F401

from draftdial.controller.bench_arms import Arm, SteeredArms
from draftdial.controller.bench_loads import Asking, closed_loads, open_loads, swing_load
from draftdial.controller.bench_metrics import figures, policy_figures
from draftdial.controller.bench_report import cells, table, write_report
from draftdial.controller.chat_prompts import ChatPrompt
from draftdial.controller.cli import main
from draftdial.controller.errors import UserError
from draftdial.controller.files import sha256_of
from draftdial.controller.load_run import LoadResult
from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch.acceptance_arrays import tagged_rid
from draftdial.engine_patch.client import Server
from draftdial.engine_patch.dial import Dial


def result(errors: dict[int, str] | None = None) -> LoadResult:
    """Six requests a second apart: half a second to the first token, 2 s more for 11 tokens."""
    arrival_s = np.arange(6.0)
    return LoadResult(
        arrival_s=arrival_s,
        first_s=arrival_s + 0.5,
        finish_s=arrival_s + 2.5,
        tokens=np.full(6, 11),
        errors=errors or {},
        lag_s=0.001,
        cpu_share=0.1,
    )


def test_figures_follow_their_formulas() -> None:
    found = figures(result(), warmup=1, ttft_limit_s=0.6, tpot_limit_s=0.2)
    assert (found["requests"], found["failed"]) == (4, 0)
    assert found["ttft_mean_s"] == 0.5 and found["e2e_p99_s"] == 2.5 and found["tpot_p50_s"] == 0.2
    # From 1 to 6.5 s: requests 1 to 4 whole, 10 tokens a 2 s of request 0 from 1 s on, and of request 5 all
    # up to 6.5 s: its first token and 0.5 of 2 s.
    inside = 4 * 11 + 10 * 1.5 / 2 + 1 + 10 * 1.0 / 2
    assert found["output_tok_s"] == pytest.approx(inside / 5.5)
    assert found["slo_attainment"] == 1.0
    assert figures(result(), 1, 0.4, 0.2)["slo_attainment"] == 0.0


def test_failed_requests_are_counted_and_in_no_mean() -> None:
    found = figures(result({2: "lost"}), warmup=1, ttft_limit_s=1, tpot_limit_s=1)
    assert (found["requests"], found["failed"]) == (3, 1)
    none_left = figures(result(dict.fromkeys(range(6), "lost")), 1, 1, 1)
    assert none_left["failed"] == 6 and "e2e_mean_s" not in none_left


def test_what_the_policy_did_is_the_difference_of_two_statuses() -> None:
    before = {"decisions": 10, "switches": 1, "drafted": 5, "wasted": 5, "fallbacks": 0, "rounds_at_k.3": 4}
    after = {
        "decisions": 60,
        "switches": 6,
        "drafted": 105,
        "wasted": 30,
        "fallbacks": 0,
        "rounds_at_k.3": 50,
    }
    found = policy_figures(before, after)
    assert found["rounds_at_k"] == {"3": 46} and found["switches_per_1k_rounds"] == 100.0
    assert found["wasted_draft_share"] == 0.25
    assert "host_ms_at_k" not in found, "nothing overlaps"
    steady = {"steady_rounds_at_k": 40, "steady_seconds_at_k": 0.5, "steady_waited_s_at_k": 0.3}
    before |= {f"{name}.1": 10.0 for name in steady}
    after |= {f"{name}.3": value for name, value in steady.items()} | {f"{name}.1": 10.0 for name in steady}
    after |= {"rounds_at_k.1": 0}
    before |= {"rounds_at_k.1": 0}
    found = policy_figures(before, after)
    assert found["host_ms_at_k"] == {"3": pytest.approx(5.0)} and "host_ms_in_prefill" not in found
    before |= {"launch_seconds": 5.0, "launch_waited_s": 2.0, "launch_prefills": 3}
    after |= {"launch_seconds": 5.7, "launch_waited_s": 2.4, "launch_prefills": 13}
    # 300 ms in all, 46 rounds of 5, ten prefills.
    assert policy_figures(before, after)["host_ms_in_prefill"] == pytest.approx((300 - 46 * 5) / 10)
    assert policy_figures({}, {}) == {}


def run_of(arm: str, repeat: int, tok_s: float, failed: int = 0) -> dict[str, Any]:
    run: dict[str, Any] = {"arm": arm, "workload": "closed", "mode": "closed", "load": 4.0, "repeat": repeat}
    run |= figures(result(), 1, 1, 1)
    return run | {"output_tok_s": tok_s, "failed": failed, "rounds_at_k": {"3": 7}}


RUNS = [
    *(run_of("steer", repeat, tok_s) for repeat, tok_s in enumerate((200.0, 220.0, 180.0))),
    *(run_of("off", repeat, tok_s) for repeat, tok_s in enumerate((100.0, 110.0, 100.0))),
]


def test_ratios_are_paired_over_repeats() -> None:
    steer, off = cells(RUNS, "off")
    expected = math.exp(np.mean([math.log(0.5), math.log(0.5), math.log(100 / 180)]))
    assert steer["vs_baseline"]["ratio"] == pytest.approx(expected)
    assert steer["vs_baseline"]["low"] < expected < steer["vs_baseline"]["high"]
    assert off["vs_baseline"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    assert steer["metrics"]["output_tok_s"] == 200.0


def test_void_runs_are_in_no_ratio() -> None:
    steer, _ = cells([*RUNS[:2], run_of("steer", 2, 1.0, failed=2), *RUNS[3:]], "off")
    assert steer["repeats"] == 2 and steer["failed"] == 2
    assert steer["vs_baseline"]["ratio"] == pytest.approx(0.5)
    void, _ = cells([run_of("steer", 0, 1.0, failed=1), run_of("off", 0, 1.0)], "off")
    assert void["vs_baseline"] is None and "metrics" not in void


def document(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "title": "tiny",
        "off_mode": "as-served",
        "arms": ["steer", "off"],
        "baseline": "off",
        "runs": runs,
        "cells": cells(runs, "off"),
    }


def test_the_table_has_a_line_for_every_arm() -> None:
    lines = table(document(RUNS)).splitlines()
    assert lines[0] == "closed loop, C = 4"
    assert [line.split()[:2] for line in lines[2:4]] == [["steer", "200"], ["off", "103"]]
    assert "to" in lines[2] and lines[2].endswith(" 0")


def test_the_report_holds_every_run_and_the_curves(tmp_path: Path) -> None:
    other = [run | {"load": 8.0} for run in RUNS]
    names = {path.name for path in write_report(document([*RUNS, *other]), tmp_path)}
    assert names == {"bench.csv", "load_tiny_closed_as-served.png"}
    lines = list(csv.DictReader(io.StringIO((tmp_path / "bench.csv").read_text())))
    assert len(lines) == 12 and lines[0]["rounds_at_k3"] == "7" and lines[0]["arm"] == "steer"


def test_an_arm_whose_runs_are_all_void_is_in_the_report(tmp_path: Path) -> None:
    void = [run | {"failed": 1} if run["arm"] == "steer" else run for run in RUNS]
    found = document([*void, *(run | {"load": 8.0} for run in void)])
    write_report(found, tmp_path)
    assert [line.split()[:2] for line in table(found).splitlines()[2:4]] == [["steer", "-"], ["off", "103"]]


def test_arms_are_named(tmp_path: Path, make_policy_file: Callable[..., PolicyFile]) -> None:
    assert Arm.parse("off").mode == "off" and Arm.parse("sglang-adaptive").mode == "shadow"
    assert Arm.parse("fixed-3").forced_k == 3
    path = tmp_path / "mine.safetensors"
    path.write_bytes(make_policy_file(1).data)
    assert Arm.parse(f"policy:{path}").name == "policy:mine"
    for wrong in ("fixed-", "fixed-x", "shadow", "policy:none.safetensors"):
        with pytest.raises(UserError):
            Arm.parse(wrong)


@pytest.fixture
def steered(
    serve: Callable[..., FakeSglang],  # noqa: F811
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
) -> tuple[Dial, Server]:
    dial = make_dial(make_policy_file(1))
    dial.set_mode("shadow")
    return dial, Server(serve(dial).url)


def test_arms_are_set_one_after_the_other_and_the_server_is_put_back(
    steered: tuple[Dial, Server], tmp_path: Path, make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial, server = steered
    own, other = tmp_path / "own.safetensors", tmp_path / "other.safetensors"
    own.write_bytes(dial.file.data)
    other.write_bytes(make_policy_file(3).data)
    arms = [Arm.parse(text) for text in ("off", "fixed-3", f"policy:{other}", "steer")]
    with pytest.raises(UserError, match="--deployed"):
        SteeredArms(server, arms, None)
    steering = SteeredArms(server, arms, own)
    seen = []
    for arm in arms:
        steering.set(arm)
        seen.append((dial.mode, dial.forced_k, dial.policy_id))
    own_id, other_id = seen[0][2], make_policy_file(3).policy_id
    assert seen == [
        ("off", None, own_id),
        ("steer", 3, own_id),
        ("steer", None, other_id),
        ("steer", None, own_id),
    ]
    steering.set(arms[2])
    steering.restore()
    assert (dial.mode, dial.forced_k) == ("shadow", None)
    assert sha256_of(dial.file.data) == sha256_of(own.read_bytes())


def test_an_arm_that_cannot_run_is_refused_before_anything_is_sent(steered: tuple[Dial, Server]) -> None:
    with pytest.raises(UserError, match="fixed-2: k = 2"):
        SteeredArms(steered[1], [Arm.parse("fixed-2")], None)


def test_bodies_are_the_same_in_every_arm_and_ids_are_not() -> None:
    [load] = closed_loads([2], 16, lengths="agentic", domains=(0, 1))
    asking = Asking(domains=("chat", "code"))
    requests = asking.requests(load, 5)
    first, again = asking.bodies(requests, 5, "run1")(3), asking.bodies(requests, 5, "run2")(3)
    assert first["input_ids"] == again["input_ids"] and len(first["input_ids"]) == requests.prompt_tokens[3]
    domain = ("chat", "code")[requests.domain[3]]
    assert again["rid"] == tagged_rid("run2-3", domain, int(requests.request_hash[3]))
    assert first["sampling_params"]["ignore_eos"] is True
    assert asking.bodies(requests, 6, "run1")(3)["input_ids"] != first["input_ids"]


def test_prompts_come_all_before_one_comes_again() -> None:
    prompts = tuple(ChatPrompt(str(i), "d", (i, i)) for i in range(5))
    asking = Asking(prompts)
    [load] = closed_loads([1], 10, lengths="general")
    requests = asking.requests(load, 0)
    asked = [asking.bodies(requests, 0, "r")(i)["input_ids"][0] for i in range(10)]
    assert sorted(asked[:5]) == sorted(asked[5:]) == [0, 1, 2, 3, 4]
    assert (requests.prompt_tokens == 2).all()


def test_loads_are_the_simulators_workloads() -> None:
    closed, large = closed_loads([4, 100], 40, lengths="general")
    assert closed.label == "closed C = 4" and closed.source.requests(0).num_requests == 40
    assert large.source.requests(0).num_requests == 800
    [poisson] = open_loads("poisson", [2.0], 30, lengths="general")
    assert poisson.label == "poisson 2/s" and poisson.source.requests(0).mode == "open"
    swing = swing_load(1, 8, 100, lengths="general").source.requests(0)
    assert set(swing.concurrency) == {1, 8} and 80 <= swing.num_requests <= 120
    with pytest.raises(UserError, match="--arrivals"):
        open_loads("noon", [1.0], 10)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no load"),
        (["--closed", "0"], "found 0"),
        (["--swing", "8:2"], "LOW not above HIGH"),
        (["--closed", "1", "--arms", "steer", "steer"], "each once"),
        (["--closed", "1", "--baseline", "no-spec"], "--baseline"),
        (["--closed", "1", "--drop", "1"], "--drop: found 1, allowed: a number above 0 and below 1"),
        (["--closed", "1", "--lengths", "endless"], "lengths"),
        (["--closed", "1"], "cannot reach the server"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "http://127.0.0.1:1", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
