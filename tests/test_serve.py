"""`draftdial serve` up to the moment it becomes SGLang's server: arguments, environment, refusals.

SGLang itself is not needed: `Installation` answers as it does. The engine tests start real servers.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from draftdial.controller import cli
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.policy_export import rule_file
from draftdial.controller.policy_file import write
from draftdial.controller.rules import Threshold
from draftdial.controller.sglang_rule import SglangRule
from draftdial.controller.signals import RoundSignals
from draftdial.engine_patch import serve as serve_command
from draftdial.engine_patch.adaptive_config import adaptive_config, configured_tiers
from draftdial.engine_patch.decision_log import MIN_BYTES, DecisionLog
from draftdial.engine_patch.examination import examine
from draftdial.engine_patch.launch import Launch, Request
from draftdial.engine_patch.launch_arguments import Given
from draftdial.engine_patch.settings import Settings
from draftdial.engine_patch.sglang_arguments import Resolved

EAGLE = ("--model-path", "m", "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "d")
UNSUPPORTED = "enable_pdmux=True is not supported (...)"

RESOLVED = Resolved(
    unsupported=None,
    max_running=8,
    captured=8,
    rejection_sampling=False,
    device="cuda",
    attention_backend="fa3",
)


@dataclass
class Installation:
    """An SGLang whose answers a test chooses."""

    release: str | None = "0.5.23"
    entry_points: dict[str, str] = field(default_factory=lambda: {"draftdial": "the:plugin"})
    resolved: Resolved = RESOLVED
    refuses: Sequence[str] = ()
    """Words on a command line with which it does not start."""
    asked: list[tuple[str, ...]] = field(default_factory=list)

    def version(self) -> str | None:
        return self.release

    def plugins(self) -> dict[str, str]:
        return self.entry_points

    def parse(self, arguments: Sequence[str]) -> Given:
        parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
        for flag in ("model-path", "speculative-algorithm", "speculative-draft-model-path"):
            parser.add_argument(f"--{flag}")
        for flag in ("eagle-topk", "num-steps", "num-draft-tokens"):
            parser.add_argument(f"--speculative-{flag}", type=int)
        parser.add_argument("--speculative-adaptive-config")
        parser.add_argument("--disaggregation-mode")
        for flag in (
            "speculative-adaptive",
            "speculative-use-rejection-sampling",
            "enable-pdmux",
            "enable-lora",
        ):
            parser.add_argument(f"--{flag}", action="store_true")
        parser.add_argument("--max-running-requests", type=int)
        parser.add_argument("--cuda-graph-max-bs-decode", type=int)
        parser.add_argument("--cuda-graph-bs-decode", type=int, nargs="+")
        return Given(tuple(arguments), vars(parser.parse_args(arguments)))

    def resolve(self, arguments: Sequence[str]) -> Resolved:
        self.asked.append(tuple(arguments))
        if all(word in arguments for word in self.refuses) and self.refuses:
            raise UserError(f"SGLang refuses these arguments: {' '.join(self.refuses)}")
        values = self.parse(arguments).values
        return replace(
            self.resolved,
            unsupported=UNSUPPORTED if "--enable-pdmux" in arguments else self.resolved.unsupported,
            max_running=values.get("max_running_requests", 48),
            captured=values.get("cuda_graph_max_bs_decode", 256),
            rejection_sampling="--speculative-use-rejection-sampling" in arguments,
        )


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def make_policy(make_profile: Callable[..., CostProfile], tmp_path: Path) -> Callable[..., Path]:
    """Policy files for tiers 0, 1, 3 of a profile with 8 running requests and graphs up to batch 4."""

    def make(
        *, fallback: tuple[int, int] = (1, 2), off_mode: str = "warm", tiers: Sequence[int] = (0, 1, 3)
    ) -> Path:
        rule = Threshold(tiers, *fallback)
        path = tmp_path / f"rule-{fallback[0]}-{fallback[1]}-{off_mode}-{len(tiers)}.safetensors"
        profile = make_profile()
        write(path, rule_file(rule, profile, off_mode, name="rule", fallback=rule))  # type: ignore[arg-type]
        return path

    return make


def prepare(
    policy: Path | None,
    *arguments: str,
    mode: str = "steer",
    strict: bool = True,
    log: Path | None = None,
    environment: dict[str, str] | None = None,
    sglang: Installation | None = None,
    kv_only: bool = False,
) -> Launch:
    request = Request(policy, mode, strict, log, arguments, kv_only)
    return examine(request, environment or {}, sglang or Installation())


def value_of(launch: Launch, flag: str) -> str:
    assert launch.arguments.count(flag) == 1, launch.arguments
    return launch.arguments[launch.arguments.index(flag) + 1]


def problems(launch: Launch) -> list[str]:
    return [f"{problem.subject}: {problem.text}" for problem in launch.problems]


# What is added.


def test_what_the_policy_needs_is_added_to_the_users_arguments(make_policy: Callable[..., Path]) -> None:
    policy = make_policy()
    launch = prepare(policy, *EAGLE)
    assert launch.problems == [] and launch.arguments[: len(EAGLE)] == EAGLE
    assert "--speculative-adaptive" in launch.arguments
    assert value_of(launch, "--speculative-num-steps") == "3"
    assert value_of(launch, "--speculative-num-draft-tokens") == "4"
    assert value_of(launch, "--speculative-eagle-topk") == "1"
    # The profile knows 8 running requests, but graphs only up to batch 4.
    assert value_of(launch, "--max-running-requests") == "4"
    assert value_of(launch, "--cuda-graph-max-bs-decode") == "4"
    assert configured_tiers(value_of(launch, "--speculative-adaptive-config")) == (0, 1, 3)
    assert launch.variables == {
        "DRAFTDIAL_POLICY": str(policy),
        "DRAFTDIAL_MODE": "steer",
        "DRAFTDIAL_START": "strict",
    }


def test_what_the_user_chose_stays_where_it_is_compatible(
    make_policy: Callable[..., Path], tmp_path: Path
) -> None:
    own = tmp_path / "own.json"
    own.write_text(
        '{"1": {"candidate_steps": [0, 1, 3, 5]}, "8": {"candidate_steps": [0]}, "ema_alpha": 0.1}'
    )
    chosen = (
        *EAGLE,
        *(
            "--speculative-adaptive",
            "--speculative-adaptive-config",
            str(own),
            "--speculative-num-steps",
            "5",
        ),
        *("--max-running-requests", "6", "--cuda-graph-max-bs-decode", "6"),
    )
    launch = prepare(make_policy(), *chosen)
    assert launch.problems == []
    added = launch.arguments[len(chosen) :]
    assert added == ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "6")


@pytest.mark.parametrize(
    ("chosen", "running", "graphs"),
    [
        ((), "4", "4"),
        (("--max-running-requests", "2"), "2", "2"),
        (("--max-running-requests", "100"), "100", "4"),
        (("--cuda-graph-max-bs-decode", "6"), "6", "6"),
        (("--cuda-graph-max-bs-decode", "100"), "8", "100"),
        (("--cuda-graph-bs-decode", "1", "2"), "2", None),
    ],
)
def test_both_limits_are_set_together(
    chosen: tuple[str, ...], running: str, graphs: str | None, make_policy: Callable[..., Path]
) -> None:
    launch = prepare(make_policy(), *EAGLE, *chosen)
    assert value_of(launch, "--max-running-requests") == running
    if graphs is None:
        assert "--cuda-graph-max-bs-decode" not in launch.arguments
    else:
        assert value_of(launch, "--cuda-graph-max-bs-decode") == graphs


def test_more_requests_than_the_profile_knows_are_a_warning(make_policy: Callable[..., Path]) -> None:
    launch = prepare(make_policy(), *EAGLE, "--max-running-requests", "100")
    warnings = {finding.subject: finding.text for finding in launch.findings if finding.level == "warning"}
    assert "profile ends at 8" in warnings["max running"]
    assert "up to batch 4, but 100 may run" in warnings["CUDA graphs"]
    assert launch.problems == []


def test_settings_are_absolute_and_readable_by_the_plugin(
    make_policy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy()
    monkeypatch.chdir(tmp_path)
    launch = prepare(
        Path(policy.name),
        *EAGLE,
        mode="shadow",
        strict=False,
        log=Path("rounds.log"),
        environment={"DRAFTDIAL_LOG_MB": "5"},
    )
    read_back = Settings.from_environment({**launch.variables, "DRAFTDIAL_LOG_MB": "5"})
    assert read_back == Settings(policy, "shadow", False, None, tmp_path / "rounds.log", 5 << 20)


@pytest.mark.parametrize(("off_mode", "value"), [("warm", None), ("skip", "1")])
def test_the_off_mode_of_the_policy_is_set(
    off_mode: str, value: str | None, make_policy: Callable[..., Path]
) -> None:
    launch = prepare(make_policy(off_mode=off_mode), *EAGLE)
    assert launch.variables.get("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND") == value


def test_kv_only_can_be_asked_for_where_the_policy_reckons_with_warm(
    make_policy: Callable[..., Path],
) -> None:
    assert "DRAFTDIAL_OFF_MODE" not in prepare(make_policy(), *EAGLE).variables
    launch = prepare(make_policy(), *EAGLE, kv_only=True)
    assert (problems(launch), launch.variables["DRAFTDIAL_OFF_MODE"]) == ([], "kv-only")
    assert problems(prepare(make_policy(off_mode="skip"), *EAGLE, kv_only=True)) == [
        "off mode: kv-only, but the policy was made for skip"
    ]
    environment = {"SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND": "1"}
    assert problems(prepare(make_policy(), *EAGLE, kv_only=True, environment=environment)) == [
        "off mode: SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND=1, but asked for is off mode kv-only: "
        "unset the variable"
    ]


def test_rejection_sampling_leaves_zero_out(make_policy: Callable[..., Path]) -> None:
    rejection = (*EAGLE, "--speculative-use-rejection-sampling")
    launch = prepare(make_policy(off_mode="skip"), *rejection)
    assert launch.problems == []
    assert configured_tiers(value_of(launch, "--speculative-adaptive-config")) == (1, 3)
    assert "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND" not in launch.variables
    assert problems(prepare(make_policy(), *rejection, mode="off")) == [
        "mode: off needs k = 0, which is none of the tiers 1, 3"
    ]


# The adaptive configuration.


@pytest.mark.parametrize("tiers", [(0, 1, 2, 3, 5, 7), (0, 5), (1, 3), (0, 1, 3, 5, 7)])
def test_the_stock_rule_of_the_server_is_that_of_the_simulator(tiers: tuple[int, ...]) -> None:
    config = json.loads(adaptive_config(tiers))
    assert {k for slot in config.values() for k in slot["candidate_steps"]} == set(tiers)
    ours, default = SglangRule(tiers, config), SglangRule(tiers)
    signals = RoundSignals.zeros(5)
    signals.num_running[:] = (1, 8, 31, 64, 1000)
    for rule in (ours, default):
        rule.reset(5)
    assert ours.decide(signals).tolist() == default.decide(signals).tolist()


def test_a_cache_that_cannot_be_written_is_one_line(
    make_policy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set XDG_CACHE_HOME to a folder that can be written"):
        prepare(make_policy(), *EAGLE)


# Refusals, whatever the start.


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        (
            "--speculative-eagle-topk 4",
            "--speculative-eagle-topk 4: steering needs chains: leave it out, or give 1",
        ),
        ("--speculative-num-steps 1", "--speculative-num-steps 1: a server starts at its largest tier"),
        (
            "--speculative-num-draft-tokens 8",
            "the largest tier, 3, verifies one token more: leave it out, or give 4",
        ),
        ("--speculative-adaptive-config few.json", "builds k = 1, 3, not 0, which the policy uses"),
        ("--speculative-adaptive-config none.json", "none.json: No such file or directory"),
        ("--speculative-adaptive-config list.json", "list.json: not an object of slots with candidate_steps"),
        (
            "--speculative-adaptive-config text.json",
            "candidate_steps: found ['a'], allowed: whole numbers from 0",
        ),
        (
            "--speculative-adaptive-config empty.json",
            "candidate_steps: found [], allowed: whole numbers from 0",
        ),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_contradictory_flags_are_refused_with_the_remedy(
    chosen: str,
    says: str,
    strict: bool,
    make_policy: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.json").write_text('{"1": {"candidate_steps": [1]}, "8": {"candidate_steps": [3]}}')
    Path("list.json").write_text("[1, 2]")
    Path("text.json").write_text('{"1": {"candidate_steps": ["a"]}}')
    Path("empty.json").write_text("{}")
    sglang = Installation()
    launch = prepare(make_policy(), *EAGLE, *chosen.split(), strict=strict, sglang=sglang)
    (problem,) = launch.obstacles(strict)
    assert says in problem.text
    assert sglang.asked == [] and launch.arguments == ()


def test_zero_in_the_users_configuration_is_refused_under_rejection_sampling(
    make_policy: Callable[..., Path], tmp_path: Path
) -> None:
    own = tmp_path / "own.json"
    own.write_text('{"1": {"candidate_steps": [0, 1, 3]}}')
    rejection = ("--speculative-use-rejection-sampling", "--speculative-adaptive-config", str(own))
    (problem,) = prepare(make_policy(), *EAGLE, *rejection).obstacles(False)
    assert "builds k = 0, which stops a server with rejection sampling" in problem.text


def test_a_policy_that_never_speculates_has_nothing_to_steer(make_policy: Callable[..., Path]) -> None:
    (problem,) = prepare(make_policy(tiers=(0,), fallback=(0, 0)), *EAGLE).obstacles(False)
    assert "no tier above 0" in problem.text


@pytest.mark.parametrize(("off_mode", "value"), [("warm", "true"), ("skip", "0")])
def test_another_off_mode_in_the_environment_is_refused(
    off_mode: str, value: str, make_policy: Callable[..., Path]
) -> None:
    environment = {"SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND": value}
    launch = prepare(make_policy(off_mode=off_mode), *EAGLE, environment=environment)
    assert problems(launch) == [
        f"off mode: SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND={value}, but the policy was made for off mode "
        f"{off_mode}: unset the variable"
    ]


def test_a_forced_k_must_be_a_tier(make_policy: Callable[..., Path]) -> None:
    launch = prepare(make_policy(), *EAGLE, environment={"DRAFTDIAL_FORCE_K": "2"})
    assert problems(launch) == ["mode: DRAFTDIAL_FORCE_K=2 is none of the tiers 0, 1, 3"]
    with pytest.raises(UserError, match="DRAFTDIAL_FORCE_K: found 'x'"):
        prepare(make_policy(), *EAGLE, environment={"DRAFTDIAL_FORCE_K": "x"})


def test_a_log_that_cannot_be_written_is_refused(make_policy: Callable[..., Path], tmp_path: Path) -> None:
    thesis, pipe = tmp_path / "thesis", tmp_path / "pipe"
    thesis.write_text("my thesis")
    os.mkfifo(pipe)
    for log, says in (
        (thesis / "rounds.log", "cannot be written: Not a directory"),
        (tmp_path, "no regular file"),
        (pipe, "no regular file"),
        (Path("/dev/null"), "no regular file"),
        (thesis, "found a file of another kind"),
    ):
        launch = prepare(make_policy(), *EAGLE, log=log)
        assert says in problems(launch)[0] and launch.obstacles(strict=False)
    assert problems(prepare(make_policy(), *EAGLE, log=tmp_path / "made" / "later" / "rounds.log")) == []
    with pytest.raises(UserError, match="DRAFTDIAL_LOG_MB: found '3', allowed: a whole number from 4"):
        prepare(make_policy(), *EAGLE, environment={"DRAFTDIAL_LOG_MB": "3"})


def test_a_log_that_another_server_writes_is_refused(
    make_policy: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "rounds.log"
    log = DecisionLog.open(path, MIN_BYTES, {"tiers": [0, 1]})
    assert "another server writes it" in problems(prepare(make_policy(), *EAGLE, log=path))[0]
    log.close()
    assert problems(prepare(make_policy(), *EAGLE, log=path)) == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_disaggregation_is_not_steered(role: str, make_policy: Callable[..., Path]) -> None:
    chosen = (*EAGLE, "--disaggregation-mode", role)
    (problem,) = prepare(make_policy(), *chosen).obstacles(strict=True)
    assert f"{role}: prefill/decode disaggregation is not supported" in problem.text
    warn = prepare(make_policy(), *chosen, strict=False)
    assert warn.obstacles(strict=False) == [] and "--speculative-adaptive" not in warn.arguments
    assert "disaggregation is not supported" in warn.variables["DRAFTDIAL_INACTIVE"]
    assert problems(prepare(make_policy(), *EAGLE, "--disaggregation-mode", "null")) == []


def test_a_user_without_a_home_is_told_what_to_set(
    make_policy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UserError, match="no home folder: set XDG_CACHE_HOME"):
        prepare(make_policy(), *EAGLE)


def test_arguments_that_sglang_refuses_anyway_are_refused(make_policy: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="SGLang refuses these arguments: --model-path"):
        prepare(make_policy(), *EAGLE, strict=False, sglang=Installation(refuses=["--model-path"]))


def test_sglang_must_be_there(make_policy: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="this Python has no sglang"):
        prepare(make_policy(), *EAGLE, sglang=Installation(release=None))


# Servers that cannot be steered: refused, or started by a rule that is safe.


@pytest.mark.parametrize(
    ("sglang", "environment", "says"),
    [
        (Installation(entry_points={}), {}, "plugin: this Python has no such plugin"),
        (
            Installation(),
            {"SGLANG_PLUGINS": "a, b"},
            "plugin: SGLANG_PLUGINS=a,b leaves it out: add draftdial",
        ),
        (Installation(), {"SGLANG_PLUGINS": "a,draftdial"}, None),
    ],
)
def test_the_plugin_must_be_found(
    sglang: Installation, environment: dict[str, str], says: str | None, make_policy: Callable[..., Path]
) -> None:
    launch = prepare(make_policy(), *EAGLE, environment=environment, sglang=sglang)
    assert [problem.startswith(says or "-") for problem in problems(launch)] == [True] * bool(says)
    # Without the plugin SGLang's own rule decides among the same tiers, which is safe.
    assert launch.obstacles(strict=False) == [] and "--speculative-adaptive" in launch.arguments


@pytest.mark.parametrize(
    ("fallback", "chosen", "served"),
    [
        ((1, 8), (), "k = 1 in every round"),
        ((1, 2), (), "no speculation"),  # it stops below the 4 that may run
        ((1, 2), ("--max-running-requests", "2"), "k = 1 in every round"),
        ((3, 8), (), "no speculation"),  # never the largest tier
        ((0, 0), (), "no speculation"),
    ],
)
def test_what_sglang_will_not_switch_is_served_with_one_safe_k(
    fallback: tuple[int, int], chosen: tuple[str, ...], served: str, make_policy: Callable[..., Path]
) -> None:
    policy = make_policy(fallback=fallback)
    strict = prepare(policy, *EAGLE, *chosen, "--enable-pdmux")
    assert problems(strict) == [f"adaptive: {UNSUPPORTED}: leave that out, or start with --warn, not steered"]

    warn = prepare(policy, *EAGLE, *chosen, "--speculative-adaptive", "--enable-pdmux", strict=False)
    assert warn.obstacles(strict=False) == []
    assert warn.variables["DRAFTDIAL_INACTIVE"] == f"{UNSUPPORTED}; serving with {served}"
    assert "--speculative-adaptive" not in warn.arguments and "--enable-pdmux" in warn.arguments
    if served == "no speculation":
        assert not any(word.startswith("--speculative") or word in ("EAGLE3", "d") for word in warn.arguments)
    else:
        assert value_of(warn, "--speculative-num-steps") == "1"
        assert value_of(warn, "--speculative-num-draft-tokens") == "2"
        assert "--max-running-requests" in warn.arguments


def test_a_refusal_that_only_steering_brings_counts_as_not_steered(make_policy: Callable[..., Path]) -> None:
    sglang = Installation(refuses=["--enable-lora", "--speculative-adaptive"])
    launch = prepare(make_policy(), *EAGLE, "--enable-lora", strict=False, sglang=sglang)
    assert "--enable-lora --speculative-adaptive" in launch.variables["DRAFTDIAL_INACTIVE"]
    assert launch.arguments == ("--model-path", "m", "--enable-lora")


def test_another_algorithm_stays_as_the_user_set_it_up(make_policy: Callable[..., Path]) -> None:
    ngram = ("--model-path", "m", "--speculative-algorithm", "NGRAM", "--speculative-num-steps", "3")
    sglang = Installation(resolved=replace(RESOLVED, unsupported="speculative_algorithm=NGRAM (...)"))
    launch = prepare(make_policy(), *ngram, strict=False, sglang=sglang)
    assert launch.arguments == ngram


@pytest.mark.parametrize(
    ("release", "backend", "says"),
    [
        ("0.5.9", "fa3", "0.5.9 cannot switch k by batch"),
        ("0.5.13.post1", "fa3", "cannot switch k by batch"),
        ("0.5.17", "flashmla", "#35275"),
        ("0.5.14", "fa3", None),
        ("0.5.19", "flashmla", None),
        ("0.6.0", "fa3", None),
    ],
)
def test_releases(release: str, backend: str, says: str | None, make_policy: Callable[..., Path]) -> None:
    sglang = Installation(release=release, resolved=replace(RESOLVED, attention_backend=backend))
    launch = prepare(make_policy(), *EAGLE, strict=False, sglang=sglang)
    if says is None:
        assert launch.problems == [] and "DRAFTDIAL_INACTIVE" not in launch.variables
    else:
        assert says in problems(launch)[0] and says in launch.variables["DRAFTDIAL_INACTIVE"]
    assert (launch.findings[0].level == "warning") == (release == "0.6.0")


def test_a_policy_that_cannot_be_read_leaves_sglangs_rule(tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"no policy")
    launch = prepare(path, *EAGLE, strict=False)
    assert launch.obstacles(strict=True) and not launch.obstacles(strict=False)
    assert configured_tiers(value_of(launch, "--speculative-adaptive-config")) == (0, 1, 3, 5, 7)
    assert value_of(launch, "--speculative-num-steps") == "7"
    assert launch.variables["DRAFTDIAL_POLICY"] == str(path)  # the plugin says what is wrong with it
    assert "--max-running-requests" not in launch.arguments


# The command.


def test_serve_becomes_the_server(
    make_policy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    became: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(serve_command, "InstalledSglang", Installation)
    monkeypatch.setattr(os, "execve", lambda *call: became.append(call))
    monkeypatch.setenv("DRAFTDIAL_INACTIVE", "left over")
    monkeypatch.setenv("KEPT", "yes")
    policy = str(make_policy())

    cli.main(["serve", policy, "--mode", "shadow", "--", *EAGLE, "--max-running-requests", "100"])
    ((executable, command, environment),) = became
    assert command[:3] == [executable, "-m", "sglang.launch_server"]
    assert command[3 : 3 + len(EAGLE)] == list(EAGLE)
    assert environment["DRAFTDIAL_MODE"] == "shadow" and environment["KEPT"] == "yes"
    assert "DRAFTDIAL_INACTIVE" not in environment
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(
        "draftdial: warning: max running: 100, but the policy's profile ends at 8"
    )

    assert cli.main(["serve", policy, "--", *EAGLE, "--enable-pdmux"]) == 2
    assert cli.main(["serve", policy]) == 2
    assert cli.main(["serve", policy, *EAGLE[:2]]) == 2
    assert len(became) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"draftdial: serve: adaptive: {UNSUPPORTED}: leave that out, or start with --warn, not steered",
        "draftdial: serve: found no arguments for SGLang's server, allowed: one or more behind --, such as "
        "-- --model-path MODEL",
        "draftdial: serve: found --model-path m, allowed: what --help lists; SGLang's own go behind --",
    ]

    cli.main(["serve", policy, "--warn", "--", *EAGLE, "--enable-pdmux"])
    assert became[1][2]["DRAFTDIAL_INACTIVE"] == f"{UNSUPPORTED}; serving with no speculation"
    assert "draftdial: not steered: enable_pdmux" in capsys.readouterr().err


def test_a_bad_policy_is_refused_before_sglang_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(Installation):
        def parse(self, arguments: Sequence[str]) -> Given:
            raise AssertionError("importing SGLang takes seconds")

    monkeypatch.setattr(serve_command, "InstalledSglang", Slow)
    policy = tmp_path / "bad.safetensors"
    policy.write_bytes(b"no policy")
    assert cli.main(["serve", str(policy), "--", *EAGLE]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"draftdial: serve: policy: {policy}: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "mode", "start"),
    [
        ([], "shadow", "warn"),
        (["--mode", "steer"], "steer", "warn"),
        (["--strict"], "shadow", "strict"),
        (["--mode", "off", "--warn"], "off", "warn"),
    ],
)
def test_the_environment_says_what_the_flags_do_not(
    flags: list[str],
    mode: str,
    start: str,
    make_policy: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    became: list[dict[str, str]] = []
    monkeypatch.setattr(serve_command, "InstalledSglang", Installation)
    monkeypatch.setattr(os, "execve", lambda *call: became.append(call[2]))
    monkeypatch.setenv("DRAFTDIAL_MODE", "shadow")
    monkeypatch.setenv("DRAFTDIAL_START", "warn")
    command = ["serve", str(make_policy()), *flags, "--", *EAGLE]
    cli.main(command)
    assert (became[0]["DRAFTDIAL_MODE"], became[0]["DRAFTDIAL_START"]) == (mode, start)
    # A start by the environment is as lenient as one by the flag.
    cli.main([*command, "--enable-pdmux"])
    assert len(became) == (2 if start == "warn" else 1)
    capsys.readouterr()
    for name in ("DRAFTDIAL_MODE", "DRAFTDIAL_START"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "fast")
            patch.delenv("DRAFTDIAL_MODE" if name == "DRAFTDIAL_START" else "DRAFTDIAL_START")
            assert cli.main(["serve", str(make_policy()), "--", *EAGLE]) == 2
        assert f"{name}: found 'fast', allowed: " in capsys.readouterr().err
