"""The decision benchmark drives the real dial, the same way every time, and needs no training software."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftdial.controller.bench_decide import CONCURRENCIES, ROUNDS_AT_EACH, bench
from draftdial.controller.cli import main
from draftdial.controller.policy_file import PolicyFile

CYCLE = len(CONCURRENCIES) * ROUNDS_AT_EACH


@pytest.fixture
def policy(tmp_path: Path, make_policy_file: Callable[..., PolicyFile]) -> Path:
    path = tmp_path / "policy.safetensors"
    path.write_bytes(make_policy_file(name="bench").data)
    return path


def test_times_differ_and_decisions_do_not(policy: Path) -> None:
    first, second = bench(policy, 1), bench(policy, 1)
    assert first["decision_hash"] == second["decision_hash"] != 0
    assert first["decisions"] == CYCLE  # whole cycles through the loads, whatever was asked for
    for result in (first, second):
        assert 0 < result["median_us"] <= result["p99_us"]
        assert 0 < result["undisturbed_decisions"] <= CYCLE
        assert result["observe_median_us"] > 0
        assert result["policy"] == "bench"


def test_decisions_leave_nothing_behind(policy: Path) -> None:
    """One object kept per decision would show as 8,000; the requests in flight differ by a few."""
    assert abs(bench(policy, 4 * CYCLE)["allocated_blocks_growth"]) < 200


def test_the_command_prints_json_without_the_training_software(policy: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'gymnasium', 'numba', 'scipy', 'hydra'): sys.modules[name] = None\n"
        "from draftdial.controller.cli import main\n"
        f"sys.exit(main(['bench-decide', {str(policy)!r}, '--decisions', '1', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["decisions"] == CYCLE


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "no runs/demo/policy.safetensors here"),
        (["missing.safetensors"], "missing.safetensors"),
        (["missing.safetensors", "--decisions", "0"], "--decisions: found 0, allowed: 1 or more"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench-decide", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and complaint in captured.err
