"""`draftdial export-rule`: rules as policy files, and refusals that say what is allowed."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.export_rule import add_parser
from draftdial.controller.policy_file import load_policy, read
from draftdial.controller.signals import RoundSignals

MAX_RUNNING = CostProfile.load("h200-llama3-8b").max_running


def export(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["export-rule", *arguments])
    status: int = args.run(args)
    return status


def test_threshold_decides_by_its_definition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rule.safetensors"
    assert export("threshold", "--k", "3", "--batch", "48", "--out", str(path)) == 0

    file, policy = read(path), load_policy(path)
    signals = RoundSignals.zeros(3)
    signals.num_running[:] = (1, 48, 49)
    policy.reset(3)
    np.testing.assert_array_equal(policy.decide(signals), [3, 3, 0])
    assert file.card["name"] == "threshold-k3-batch48"
    assert file.card["fallback"] == {"k": 3, "batch": 48}
    assert capsys.readouterr().out.strip() == (
        f"{path}: threshold-k3-batch48 for h200-llama3-8b, id {file.policy_id}"
    )


@pytest.mark.parametrize("kind", ["greedy", "bandit", "sglang-adaptive"])
@pytest.mark.parametrize("off_mode", ["warm", "skip"])
def test_rules_without_parameters(
    kind: str, off_mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export(kind, "--profile", "seeds-pcie", "--off-mode", off_mode) == 0
    file = read(tmp_path / f"{kind}.safetensors")
    assert (file.card["kind"], file.card["off_mode"]) == (kind, off_mode)
    assert file.card["fallback"] == {"k": 0, "batch": 0}
    assert file.card["cost_profile"]["document"] == CostProfile.load("seeds-pcie").document
    assert load_policy(file).tiers == (0, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fixed", "export-rule fixed: --k: found none, allowed: 0, 1, 2, 3, 5, 7 (h200-llama3-8b)"),
        ("fixed --k 4", "export-rule fixed: --k: found 4, allowed: 0, 1, 2, 3, 5, 7 (h200-llama3-8b)"),
        ("fixed --k 3 --profile seeds-pcie", "export-rule fixed: --k: found 3, allowed: 0, 5 (seeds-pcie)"),
        (
            "threshold --k 3",
            f"export-rule threshold: --batch: found none, allowed: 0 to {MAX_RUNNING} (h200-llama3-8b)",
        ),
        (
            "threshold --k 3 --batch -1",
            f"export-rule threshold: --batch: found -1, allowed: 0 to {MAX_RUNNING} (h200-llama3-8b)",
        ),
        ("greedy --k 3", "export-rule greedy: --k: found 3, allowed: only for fixed and threshold"),
        (
            "greedy --profile h100-llama3-8b --off-mode kv-only",
            "export-rule greedy: --off-mode: found kv-only, allowed: warm, skip (h100-llama3-8b); a server "
            "with --off-mode kv-only takes a policy made for warm, too",
        ),
        ("fixed --k 3 --batch 8", "export-rule fixed: --batch: found 8, allowed: only for threshold"),
    ],
)
def test_bad_values_write_nothing(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        export(*arguments.split())
    assert str(caught.value) == message
    assert not list(tmp_path.iterdir())


def test_missing_folders_are_made_as_the_help_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made" / "later" / "rule.safetensors"
    assert export("fixed", "--k", "1", "--out", str(path)) == 0
    assert read(path).card["name"] == "fixed-k1"
    with pytest.raises(SystemExit):
        export("--help")
    assert "missing folders are made" in " ".join(capsys.readouterr().out.split())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"--out: found .*/file/rule, allowed: a file that can be written"):
        export("fixed", "--k", "1", "--out", str(tmp_path / "file" / "rule"))


def test_unknown_profile_is_named() -> None:
    with pytest.raises(UserError, match="profile: found moon, allowed: "):
        export("greedy", "--profile", "moon")
