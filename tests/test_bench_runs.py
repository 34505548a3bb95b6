"""Which arms run in which repeat: real arms on a server that answers at a speed that the test sets."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_client import FakeSglang, serve  # noqa: F401

from draftdial.controller import bench_runs, progress_lines
from draftdial.controller.bench_arms import Arm, SteeredArms
from draftdial.controller.bench_drop import out_of_reach
from draftdial.controller.bench_report import cells, table
from draftdial.controller.bench_runs import Bench
from draftdial.controller.bench_work import Work
from draftdial.controller.load_run import LoadResult
from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch.client import Server
from draftdial.engine_patch.dial import Dial
from draftdial.envs.workload import RequestList

SEED = 5
SPEEDS = {
    "steer": (20.0,) * 4,
    "off": (20.0,) * 4,
    "no-spec": (20.0,) * 4,
    "fixed-1": (74.0,) * 4,
    "fixed-3": (100.0, 99.0, 60.0, 98.0),
    "sglang-adaptive": (76.0, 70.0, 90.0, 80.0),
}
"""Requests a second of every arm at C = 4, by repeat; at C = 1 all are alike."""


class Paced(Bench):
    """Its requests go to no server: one after the other, each takes the time that the running arm needs."""

    def _send(self, server: Server, requests: RequestList, seed: int) -> LoadResult:
        pace_s = 1.0
        if requests.concurrency.max() == 4 and seed >= SEED:
            pace_s = 1 / SPEEDS[self._running(server)][seed - SEED]
        arrival_s = pace_s * np.arange(requests.num_requests)
        first_s, finish_s = arrival_s + pace_s / 4, arrival_s + pace_s
        return LoadResult(arrival_s, first_s, finish_s, requests.output_tokens, {}, 0.0, 0.0)

    def _running(self, server: Server) -> str:
        if server is not self.steered.server:
            return "no-spec"
        status = self.steered.status()
        if status["forced_k"] != -1:
            return f"fixed-{status['forced_k']}"
        return {"steer": "steer", "off": "off", "shadow": "sglang-adaptive"}[status["mode"]]


@pytest.fixture
def measured(
    serve: Callable[..., FakeSglang],  # noqa: F811
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[[float | None], dict[str, Any]]:
    """The document of four repeats of all arms, as it is on disk."""
    monkeypatch.setattr(bench_runs, "flush_cache", lambda server: None)
    (tmp_path / "lengths.csv").write_text("arrival_s,input_tokens,output_tokens\n0,20,16\n0.1,20,16\n")
    options = {"closed": (1, 4), "requests": 32, "lengths": f"trace:{tmp_path / 'lengths.csv'}"}

    def measure(drop: float | None) -> dict[str, Any]:
        server, other = serve(make_dial(make_policy_file(1))), serve(make_dial(make_policy_file(1)))
        arms = [Arm.parse(name) for name in SPEEDS if name != "no-spec"]
        work = Work.of(options | {"seed": SEED, "repeats": 4})
        steered = SteeredArms(Server(server.url), arms, None)
        Paced(steered, arms, work, tmp_path, drop=drop, no_spec=other.url).measured("off")
        document: dict[str, Any] = json.loads((tmp_path / "bench.json").read_text())
        return document

    return measure


def arms_by_repeat(document: dict[str, Any], load: float) -> list[list[str]]:
    runs = [run for run in document["runs"] if run["load"] == load]
    return [[run["arm"] for run in runs if run["repeat"] == repeat] for repeat in range(4)]


def test_an_arm_that_cannot_win_is_left_out_of_later_repeats_under_that_load(
    measured: Callable[[float | None], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    document = measured(0.25)
    assert document["options"]["drop"] == 0.25
    assert [set(arms) for arms in arms_by_repeat(document, 1.0)] == [set(SPEEDS)] * 4
    first, *later = arms_by_repeat(document, 4.0)
    # 74 is out of 100's reach, and stays out where 100 falls to 60; 76 is in reach, though 70 is not.
    kept = {"steer", "off", "no-spec", "fixed-3", "sglang-adaptive"}
    assert set(first) == set(SPEEDS) and [set(arms) for arms in later] == [kept] * 3
    assert len({arms[0] for arms in later}) == 3, "those that are left take turns"
    assert capsys.readouterr().err == "draftdial: closed C = 4: left out from here on: fixed-1\n"


def test_a_bench_says_now_and_then_how_far_it_is(
    measured: Callable[[float | None], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_lines, "LINE_EVERY_S", 0.0)
    runs = measured(0.25)["runs"]
    total = 4 * 2 * len(SPEEDS)
    lines = capsys.readouterr().err.splitlines()
    [gone] = [line for line in lines if "left out from here on" in line]
    lines.remove(gone)
    told = rf"draftdial bench: runs: (\d+) of {total} measured(?:, [\d:.]+ left)?\n"
    text = "".join(f"{line}\n" for line in lines)
    assert re.fullmatch(f"(?:{told})+", text), text
    counts = [int(count) for count in re.findall(told, text)]
    assert counts == sorted(counts) and counts[-1] == total == len(runs) + 3, "3 were left out"


def test_what_is_left_out_keeps_its_means_and_its_pairs(
    measured: Callable[[float | None], dict[str, Any]],
) -> None:
    document = measured(0.25)
    document["cells"] = cells(document["runs"], "off")
    by_arm = {cell["arm"]: cell for cell in document["cells"] if cell["load"] == 4.0}
    assert {arm: cell["repeats"] for arm, cell in by_arm.items()} == dict.fromkeys(SPEEDS, 4) | {"fixed-1": 1}
    out = by_arm["fixed-1"]["vs_baseline"]
    assert out["ratio"] == pytest.approx(20 / 74) and out["low"] is None
    assert by_arm["fixed-3"]["vs_baseline"]["high"] is not None
    all_alike, differing = table(document).strip().split("\n\n")
    assert "repeats" not in all_alike
    lines = [line.split() for line in differing.splitlines()[1:]]
    assert lines[0][-1] == "repeats"
    assert {line[0]: line[-1] for line in lines[1:]} == dict.fromkeys(SPEEDS, "4") | {"fixed-1": "1"}


def test_unless_asked_every_arm_runs_in_every_repeat(
    measured: Callable[[float | None], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    document = measured(None)
    assert document["options"]["drop"] is None and capsys.readouterr().err == ""
    for load in (1.0, 4.0):
        assert [set(arms) for arms in arms_by_repeat(document, load)] == [set(SPEEDS)] * 4


def run_of(arm: str, rate: float, failed: int = 0) -> dict[str, Any]:
    return {"arm": arm, "output_tok_s": rate, "failed": failed}


def test_out_of_reach_by_hand() -> None:
    runs = [run_of("best", 100.0), run_of("near", 75.0), run_of("far", 74.9)]
    assert out_of_reach(runs, 0.25) == {"far"} and out_of_reach(runs, 0.26) == set()
    assert out_of_reach([*runs, run_of("best", 99.0)], 0.25) == set(), "three quarters of 99 are less"
    assert out_of_reach([*runs, run_of("far", 80.0)], 0.25) == set(), "its best run counts"
    void = run_of("far", 10.0, failed=1)
    assert out_of_reach([*runs[:2], void], 0.25) == set() == out_of_reach([void], 0.25)
    assert out_of_reach([run_of("best", 500.0, failed=3), *runs], 0.25) == {"far"}, "a void run is no bar"


def drawn(rng: np.random.Generator, noise: float) -> list[dict[str, Any]]:
    """A run of each arm, whose speed is its own times a lognormal that is all noise."""
    speeds = {"off": 0.37, "a": 0.6, "b": 0.72, "c": 0.8, "d": 0.9, "e": 0.95, "best": 1.0}
    return [run_of(arm, speed * math.exp(noise * rng.normal())) for arm, speed in speeds.items()]


def test_what_is_in_reach_once_stays_in_reach() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        runs = drawn(rng, 0.2)
        for _ in range(4):
            before, runs = out_of_reach(runs, 0.1), runs + drawn(rng, 0.2)
            assert out_of_reach(runs, 0.1) <= before


@pytest.mark.parametrize(
    ("share", "noise", "low", "high"),
    [(0.25, 0.03, 0, 0), (0.25, 0.1, 0.006, 0.012), (0.25, 0.2, 0.17, 0.20), (0.4, 0.1, 0, 0.001)],
)
def test_how_often_noise_costs_the_best_arm(share: float, noise: float, low: float, high: float) -> None:
    """The figures of docs/measuring.md."""
    rng = np.random.default_rng(3)
    lost = ["best" in out_of_reach(drawn(rng, noise), share) for _ in range(10_000)]
    assert low <= np.mean(lost) <= high
