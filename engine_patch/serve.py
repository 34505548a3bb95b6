"""`draftdial serve POLICY -- ARGS`: check, complete SGLang's arguments, and become its server."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from draftdial.controller.errors import UserError
from draftdial.engine_patch.examination import examine
from draftdial.engine_patch.launch import Launch, add_launch_options, request_of
from draftdial.engine_patch.settings import INACTIVE
from draftdial.engine_patch.sglang_arguments import InstalledSglang


def add_parser(subparsers: Any) -> None:
    """Add `serve` to the commands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        help="start SGLang with a policy in its decode loop",
        usage="draftdial serve POLICY [--mode MODE] [--strict | --warn] [--log FILE] [--off-mode kv-only]\n"
        "                       [--replay-acceptance [DOMAIN=]FILE] -- ARGS",
        epilog="ARGS are those of `python -m sglang.launch_server`; docs/operations.md says what is added.",
    )
    parser.add_argument("policy", metavar="POLICY", type=Path, help="a policy file")
    add_launch_options(parser)
    parser.set_defaults(run=serve)


def serve(args: argparse.Namespace) -> NoReturn:
    """Replace this process by SGLang's server.

    Raises:
        UserError: the server would not start, or would not be steered and the start is strict.
    """
    environment = dict(os.environ)  # before SGLang, once imported, adds to it
    request = request_of(args, environment)
    launch = examine(request, environment, InstalledSglang(), ends_at_obstacle=True)
    obstacles = launch.obstacles(request.strict)
    if obstacles:
        raise UserError(f"serve: {obstacles[0].subject}: {obstacles[0].text}")
    print_warnings(launch)
    environment.pop(INACTIVE, None)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, launch.command(sys.executable), environment | launch.variables)


def print_warnings(launch: Launch) -> None:
    """One line on standard error for all that is not as it should be."""
    for finding in launch.findings:
        if finding.level != "ok":
            print(f"draftdial: {finding.level}: {finding.subject}: {finding.text}", file=sys.stderr)
    if launch.problems:
        reason = launch.variables.get(INACTIVE, "SGLang's own rule decides")
        print(f"draftdial: not steered: {reason}", file=sys.stderr)
