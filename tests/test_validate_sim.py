"""`draftdial validate-sim`: errors by cell, the best k on both sides, logs against their own simulation."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cli import main
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.policy_file import PolicyFile
from draftdial.controller.validate_sim_report import as_csv, best_fixed_k, cell_of, summary, table
from draftdial.engine_patch.decision_log import DecisionLog
from draftdial.envs.acceptance import AcceptanceBank
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine
from draftdial.envs.workload import RequestList

Make = Callable[..., Any]


def cell(k: int, load: float, served: float, simulated: float) -> dict[str, Any]:
    """A cell of these throughputs; latency is their inverse."""
    sides = [{"output_tok_s": rate, "e2e_mean_s": 1 / rate} for rate in (served, simulated)]
    return cell_of(f"fixed-{k}", "closed", load, *sides)


def test_errors_and_the_best_k_by_hand() -> None:
    cells = [cell(0, 1, 100, 110), cell(3, 1, 200, 150), cell(0, 64, 400, 400), cell(3, 64, 390, 420)]
    assert cells[0]["error"] == {"output_tok_s": pytest.approx(0.1), "e2e_mean_s": pytest.approx(1 / 1.1 - 1)}
    best = best_fixed_k(cells)
    assert [(row["load"], row["server"], row["simulated"], row["same"]) for row in best] == [
        (1, 3, 3, True),
        (64, 0, 3, False),
    ]
    assert [row["loss"] for row in best] == pytest.approx([0.0, 0.025])
    found = summary(cells, best)
    assert found["throughput_error_mean"] == pytest.approx((0.1 + 0.25 + 0 + 30 / 390) / 4)
    assert found["throughput_error_max"] == pytest.approx(0.25)
    assert found["same_best_k_share"] == 0.5 and found["best_k_loss_max"] == pytest.approx(0.025)
    text = table({"cells": cells, "best_fixed_k": best, "summary": found})
    assert "C = 64: best fixed k: server 0, simulated 3, which loses 2.5% on the server" in text
    assert text.splitlines()[2].split() == "fixed-3, C = 1 200.0 150.0 -25.0% 0.005 0.007 +33.3%".split()
    rows = list(csv.DictReader(as_csv(cells).splitlines()))
    assert [row["server_output_tok_s"] for row in rows] == ["100", "200", "400", "390"]


def test_a_choice_within_the_noise_of_the_best_is_a_tie() -> None:
    def of(k: int, rates: list[float], simulated: float) -> dict[str, Any]:
        sides = [{"output_tok_s": rate} for rate in (sum(rates) / len(rates), simulated)]
        by_repeat = {f"bench {i}": rate for i, rate in enumerate(rates)}
        return cell_of(f"fixed-{k}", "closed", 8, *sides, rates=by_repeat)

    noisy = [of(1, [100, 130, 90, 110], 100), of(3, [120, 100, 105, 95], 101)]
    clear = [of(1, [100, 130, 90, 110], 100), of(3, [80, 104, 73, 88], 101)]
    once = [of(1, [110], 100), of(3, [100], 101)]
    for cells, tie in ((noisy, True), (clear, False), (once, None)):
        [row] = best = best_fixed_k(cells)
        assert (row["server"], row["simulated"], row["same"], row["tie"]) == (1, 3, False, tie)
        found = summary(cells, best)
        assert found["same_best_k_share"] == 0.0 and found["same_or_tied_best_k_share"] == float(tie or 0)
        assert found["e2e_error_mean"] is None
        text = table({"cells": cells, "best_fixed_k": best, "summary": found})
        assert ("a tie within its noise" in text) == bool(tie) and "E2E 0" not in text
    assert as_csv(noisy).count("\n") == 3 and "bench 0" not in as_csv(noisy)


@pytest.fixture
def profile(make_profile: Make, tmp_path: Path) -> tuple[CostProfile, Path]:
    made: CostProfile = make_profile()
    path = tmp_path / "server.json"
    path.write_text(json.dumps(made.document))
    return made, path


@pytest.fixture
def record(
    profile: tuple[CostProfile, Path],
    make_bank: Callable[..., AcceptanceBank],
    make_requests: Callable[..., RequestList],
    make_policy_file: Callable[..., PolicyFile],
    record_server: Callable[..., DecisionLog],
    tmp_path: Path,
) -> Callable[..., Path]:
    """Logs of a simulated server with this profile: forty requests that come every 50 ms or so."""

    def make(file: PolicyFile | None = None, **how: Any) -> Path:
        rng = np.random.default_rng(3)
        bank = make_bank({"only": [rng.integers(0, 5, 200).tolist() for _ in range(6)]})
        lengths = rng.integers(20, 120, 40)
        requests = make_requests(lengths, arrival_s=np.cumsum(rng.exponential(0.05, 40)))
        engine = SimulatedEngine([requests], bank, profile[0], ServerOptions())
        record_server(tmp_path / "server.log", engine, file or make_policy_file(3), **how)
        return tmp_path / "server.log"

    return make


def validated(log: Path, profile: Path, folder: Path) -> dict[str, Any]:
    assert main(["validate-sim", str(log), "--profile", str(profile), "--out", str(folder)]) == 0
    document: dict[str, Any] = json.loads((folder / "validate.json").read_text())
    return document


def test_a_simulated_servers_own_log_is_met_exactly(
    record: Callable[..., Path], profile: tuple[CostProfile, Path], tmp_path: Path
) -> None:
    document = validated(record(), profile[1], tmp_path / "out")
    [found] = document["cells"]
    assert (found["arm"], found["workload"], found["load"]) == ("tiny", "log:server", None)
    assert list(found["error"].values()) == pytest.approx([0.0, 0.0], abs=1e-6)
    assert document["best_fixed_k"] == [] and document["summary"]["same_best_k_share"] is None
    assert len((tmp_path / "out" / "validate.csv").read_text().splitlines()) == 2


def test_one_k_that_was_forced_all_the_while_is_what_runs(
    record: Callable[..., Path], profile: tuple[CostProfile, Path], tmp_path: Path
) -> None:
    document = validated(record(ran=lambda round_id, k: 1), profile[1], tmp_path / "out")
    [found] = document["cells"]
    assert found["arm"] == "fixed-1"
    assert list(found["error"].values()) == pytest.approx([0.0, 0.0], abs=1e-6)


def test_a_profile_that_is_too_slow_shows(
    record: Callable[..., Path], make_profile: Make, tmp_path: Path
) -> None:
    document = make_profile().document
    slow = json.loads(json.dumps(document))
    for row in slow["rows"]:
        for of_batch in row["cells"]:
            of_batch["round_ms"] = [1.5 * ms for ms in of_batch["round_ms"]]
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(slow))
    [found] = validated(record(), path, tmp_path / "out")["cells"]
    assert found["error"]["e2e_mean_s"] > 0.3


@pytest.mark.parametrize(
    ("how", "tiers", "complaint"),
    [
        ({"ran": lambda round_id, k: round_id % 2}, (0, 1, 3), "mode or k was changed on the way"),
        ({"deploys": True}, (0, 1, 3), "found 2 starts and deploys of a policy, allowed: one"),
        ({}, (0, 1, 2), "tiers: found \\[0, 1, 3\\], allowed: \\[0, 1, 2\\], of tiny"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    record: Callable[..., Path],
    make_profile: Make,
    make_policy_file: Callable[..., PolicyFile],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    how: dict[str, Any],
    tiers: tuple[int, ...],
    complaint: str,
) -> None:
    if "deploys" in how:
        how = {"deploys": {9: make_policy_file(1)}}
    path = tmp_path / "other.json"
    path.write_text(json.dumps(make_profile(tiers).document))
    arguments = ["validate-sim", str(record(**how)), "--profile", str(path), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(complaint, error), error
    assert not (tmp_path / "out").exists()


def test_a_server_needs_the_arrays_that_it_replays(
    profile: tuple[CostProfile, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate-sim", "http://127.0.0.1:1", "--profile", str(profile[1])]) == 2
    assert "--acceptance: none given, allowed: the files that the server replays" in capsys.readouterr().err
