"""`draftdial doctor`: exit codes, the report in words and as JSON, known defects."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from draftdial.controller import cli
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.policy_export import rule_file
from draftdial.controller.policy_file import write
from draftdial.controller.rules import Threshold
from draftdial.engine_patch import compat, doctor
from draftdial.engine_patch.launch_arguments import Given
from draftdial.engine_patch.launch_checks import known_defects
from draftdial.engine_patch.sglang_arguments import Resolved

ARGUMENTS = ("--model-path", "a model", "--speculative-algorithm", "EAGLE3")


class Installation:
    """SGLang 0.5.17, which switches tiers unless two-batch overlap is asked for."""

    def version(self) -> str:
        return "0.5.17"

    def plugins(self) -> dict[str, str]:
        return {"draftdial": "the:plugin"}

    def parse(self, arguments: Sequence[str]) -> Given:
        values = {"speculative_algorithm": "EAGLE3"}
        return Given(tuple(arguments), values | ({"max_running_requests": 9} if "9" in arguments else {}))

    def resolve(self, arguments: Sequence[str]) -> Resolved:
        overlap = "--enable-two-batch-overlap" in arguments
        return Resolved("two-batch overlap" if overlap else None, 48, 64, False, "cuda", "fa3")


def shell_words(report: str) -> list[str]:
    """What a shell makes of the end of a report."""
    return shlex.split(report.split("serve would become:")[1].replace("\\\n", ""))


@pytest.fixture
def policy(make_profile: Callable[..., CostProfile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "InstalledSglang", Installation)
    rule = Threshold((0, 1, 3), 1, 2)
    path = tmp_path / "a policy.safetensors"
    write(path, rule_file(rule, make_profile(max_running=64), "warm", name="rule", fallback=rule))
    return str(path)


def test_a_server_that_will_be_steered(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", policy, "--", *ARGUMENTS]) == 0
    report = capsys.readouterr().out
    lines = report.splitlines()
    assert lines[0] == "ok       sglang: 0.5.17"
    assert "ok       max running: 48" in lines and "ok       CUDA graphs: up to batch 64" in lines
    assert "ok       tiers: k = 0, 1, 3" in lines
    assert "This server will be steered." in lines
    # The end can be pasted into a shell.
    words = shell_words(report)
    assert words[:3] == [f"DRAFTDIAL_POLICY={policy}", "DRAFTDIAL_MODE=steer", "DRAFTDIAL_START=strict"]
    assert words[3 : 6 + len(ARGUMENTS)] == [sys.executable, "-m", "sglang.launch_server", *ARGUMENTS]
    assert Path(words[words.index("--speculative-adaptive-config") + 1]).is_file()


def test_a_server_that_will_not_be(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    overlap = [*ARGUMENTS, "--enable-two-batch-overlap"]
    assert cli.main(["doctor", policy, "--", *overlap]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "problem  adaptive: two-batch overlap: leave that out, or start with --warn, not steered" in lines
    assert lines[-2:] == ["This server will not be steered.", "serve would refuse to start it."]

    assert cli.main(["doctor", policy, "--warn", "--", *overlap]) == 1
    report = capsys.readouterr().out
    assert "This server will not be steered." in report
    words = shell_words(report)
    assert "DRAFTDIAL_INACTIVE=two-batch overlap; serving with no speculation" in words
    assert words[-3:] == ["--model-path", "a model", "--enable-two-batch-overlap"]


def test_the_same_as_json(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", policy, "--json", "--", *ARGUMENTS]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steered"] and report["starts"]
    assert report["environment"]["DRAFTDIAL_POLICY"] == policy
    assert report["command"][3 : 3 + len(ARGUMENTS)] == list(ARGUMENTS)
    assert {"level": "ok", "subject": "sglang", "text": "0.5.17", "tolerable": False} in report["findings"]

    assert cli.main(["doctor", policy, "--json", "--", *ARGUMENTS, "--enable-two-batch-overlap"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["steered"] and not report["starts"]
    assert report["command"] is None and report["environment"] is None


@pytest.mark.usefixtures("policy")
def test_without_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--", *ARGUMENTS]) == 0
    report = capsys.readouterr().out
    assert "warning  policy: none given" in report and "/POLICY stands for the file to give" in report
    assert shell_words(report)[0] == "DRAFTDIAL_POLICY=/POLICY" and "tiers: k = 0, 1, 3, 5, 7" in report
    assert "warning  max running: SGLang allows 48 under speculation unless told otherwise" in report
    assert cli.main(["doctor", "--", *ARGUMENTS, "--max-running-requests", "9"]) == 0
    assert "ok       max running" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--"], ["doctor", "--mode", "fly", "--", "x"]])
def test_wrong_input(arguments: list[str], policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("release", "dies_at_start"),
    [("0.5.14", False), ("0.5.15.post1", True), ("0.5.18", True), ("0.5.23", False)],
)
def test_known_defects_name_their_shim(release: str, dies_at_start: bool) -> None:
    texts = [finding.text for finding in known_defects(release)]
    assert [text.rpartition("compat.")[2] for text in texts] == [
        shim.hook.__name__ for shim in compat.hooks(release)
    ]
    assert any("#30549" in text for text in texts) == dies_at_start
    assert all(len(text) > 60 for text in texts)
