"""The decision benchmark drives the real dial, the same way every time, and needs no training software."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftdial.controller.bench_decide import CONCURRENCIES, ROUNDS_AT_EACH, _Server, bench
from draftdial.controller.cli import main
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.policy_export import rule_file
from draftdial.controller.policy_file import PolicyFile, load_policy
from draftdial.controller.rules import FixedK, Threshold
from draftdial.controller.seeded_policy import seeded_policy
from draftdial.controller.signals import RoundSignals

CYCLE = len(CONCURRENCIES) * ROUNDS_AT_EACH


@pytest.fixture
def policy(make_policy_file: Callable[..., PolicyFile]) -> PolicyFile:
    return make_policy_file(name="bench")


def test_times_differ_and_decisions_do_not(policy: PolicyFile) -> None:
    first, second = bench(policy, 1), bench(policy, 1)
    assert first["decision_hash"] == second["decision_hash"] != 0
    assert first["decisions"] == CYCLE  # whole cycles through the loads, whatever was asked for
    for result in (first, second):
        assert 0 < result["median_us"] <= result["p99_us"]
        assert 0 < result["undisturbed_decisions"] <= CYCLE
        assert result["observe_median_us"] > 0
        assert result["policy"] == "bench"


def test_a_policy_for_another_off_mode_is_timed_on_a_server_with_it(
    make_profile: Callable[..., CostProfile],
) -> None:
    tiers = (0, 1, 3)
    rule, fallback = FixedK(tiers, 0), Threshold(tiers, k=1, batch=2)
    result = bench(rule_file(rule, make_profile(tiers), "skip", name="off", fallback=fallback), 1)
    assert result["median_us"] > 0
    assert result["observe_median_us"] is None  # no round had drafts


def test_the_server_is_one_that_the_policy_was_made_for(policy: PolicyFile) -> None:
    for file in (policy, seeded_policy()):
        server, limit = _Server(file), file.profile().max_running
        running = []
        for _ in range(CYCLE):
            server.run_round()
            running.append(len(server.running_batch.reqs))
        assert server.dial.last_signals.max_running[0] == limit
        assert max(running) == min(limit, max(CONCURRENCIES))


def test_decisions_leave_nothing_behind(policy: PolicyFile) -> None:
    """One object kept per decision would show as 8,000; the requests in flight differ by a few."""
    assert abs(bench(policy, 4 * CYCLE)["allocated_blocks_growth"]) < 200


@pytest.mark.parametrize("is_named", [True, False])
def test_the_command_prints_json_without_the_training_software(
    is_named: bool, policy: PolicyFile, tmp_path: Path
) -> None:
    """Without a policy file, too: the bare command works anywhere."""
    (tmp_path / "policy.safetensors").write_bytes(policy.data)
    named = ["policy.safetensors"] if is_named else []
    code = (
        "import sys\n"
        "for name in ('torch', 'gymnasium', 'numba', 'scipy', 'hydra'): sys.modules[name] = None\n"
        "from draftdial.controller.cli import main\n"
        f"sys.exit(main(['bench-decide', *{named!r}, '--decisions', '1', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["decisions"] == CYCLE and result["policy"] == ("bench" if is_named else "seeded")


def test_the_seeded_policy_is_the_same_every_time_and_not_constant() -> None:
    first = seeded_policy()
    assert first.data == seeded_policy().data
    policy, signals = load_policy(first), RoundSignals.zeros(1)
    policy.reset(1)
    signals.max_running[0] = 258
    chosen = set()
    for signals.round_id[0], signals.num_running[0] in enumerate((1, 8, 64, 256)):
        chosen.add(int(policy.decide(signals)[0]))
    assert len(chosen) > 1


def test_standing_in_for_a_trained_policy_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench-decide", "--decisions", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no runs/demo/policy.safetensors here: fixed random weights")
    assert f"policy: seeded, {CYCLE:,} decisions under loads of 1 to 256 requests\n" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
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
