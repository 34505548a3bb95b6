"""A server about to start: what the user asked for, what was found, and the command that follows."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from draftdial.controller.errors import UserError
from draftdial.engine_patch.launch_arguments import Finding
from draftdial.engine_patch.settings import BENCHMARK, MODE, MODES, START, STARTS, is_kv_only, one_of


@dataclass(frozen=True)
class Request:
    """What the user asked for on the command line of `serve` or `doctor`."""

    policy: Path | None
    mode: str
    strict: bool
    log: Path | None
    arguments: tuple[str, ...]
    """For SGLang's server."""
    kv_only: bool = False
    """Keep the draft's KV at k = 0 without running the draft, whatever the policy reckons with."""
    replay: tuple[str, ...] = ()
    """Files of recorded acceptance to accept by, each `FILE` or `DOMAIN=FILE`."""


@dataclass
class Launch:
    """What was found, and the server that follows from it."""

    findings: list[Finding] = field(default_factory=list)
    arguments: tuple[str, ...] = ()
    """Of `sglang.launch_server`; empty where the user's own ones rule out all of them."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables to set."""

    @property
    def problems(self) -> list[Finding]:
        """Why the server will not be steered, the first one first."""
        return [finding for finding in self.findings if finding.level == "problem"]

    def obstacles(self, strict: bool) -> list[Finding]:
        """Why `serve` does not start it."""
        return [problem for problem in self.problems if strict or not problem.tolerable]

    def command(self, executable: str) -> list[str]:
        """What `serve` becomes."""
        return [executable, "-m", "sglang.launch_server", *self.arguments]


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """The options that `serve` and `doctor` share."""
    parser.add_argument("--mode", choices=MODES, help=f"who decides k (default: {MODE}, or {MODES[0]})")
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--strict",
        action="store_true",
        default=None,
        help=f"refuse a server that cannot be steered (default, unless {START} says warn)",
    )
    start.add_argument(
        "--warn",
        dest="strict",
        action="store_false",
        help="start it all the same, with one k that is safe at every load, or without speculation",
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="record every decision; missing folders are made"
    )
    parser.add_argument(
        "--off-mode",
        choices=("kv-only",),
        help="at k = 0 keep the draft's KV without running the draft (default: as the policy says)",
    )
    parser.add_argument(
        "--replay-acceptance",
        action="append",
        default=[],
        metavar="[DOMAIN=]FILE",
        help=f"for benchmarks only, with {BENCHMARK}=1 in the environment: accept what is recorded in FILE, "
        "one a domain; answers mean nothing",
    )


def request_of(args: argparse.Namespace, environment: Mapping[str, str]) -> Request:
    """The request in parsed arguments; `environment` says what they leave open.

    Raises:
        UserError: no arguments for SGLang, or a variable holds what it may not.
    """
    if not args.engine_arguments:
        raise UserError(
            f"{args.command}: found no arguments for SGLang's server, "
            "allowed: one or more behind --, such as -- --model-path MODEL"
        )
    replay = tuple(args.replay_acceptance)
    mode = args.mode or one_of(environment, MODE, MODES)
    strict = one_of(environment, START, STARTS) == "strict" if args.strict is None else args.strict
    kv_only = args.off_mode == "kv-only" or is_kv_only(environment)
    return Request(args.policy, mode, strict, args.log, tuple(args.engine_arguments), kv_only, replay)
