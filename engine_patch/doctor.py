"""`draftdial doctor [POLICY] -- ARGS`: would this server be steered, and if not, why."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftdial.engine_patch.examination import examine
from draftdial.engine_patch.launch import Launch, add_launch_options, request_of
from draftdial.engine_patch.launch_checks import known_defects
from draftdial.engine_patch.sglang_arguments import InstalledSglang, Sglang


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to the commands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="say whether a server would be steered, and if not, why",
        usage="draftdial doctor [POLICY] [--mode MODE] [--strict | --warn] [--log FILE]\n"
        "                        [--off-mode kv-only] [--replay-acceptance [DOMAIN=]FILE] [--json] -- ARGS",
        epilog="ARGS are those of `python -m sglang.launch_server`. Exit code: 0 if steered, 1 if not.",
    )
    parser.add_argument("policy", metavar="POLICY", type=Path, nargs="?", help="a policy file")
    add_launch_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Print what was found and what `serve` would start; 0 if it will be steered, else 1.

    Raises:
        UserError: SGLang is missing, or would not start with the user's arguments.
    """
    return diagnose(args, InstalledSglang())


def diagnose(args: argparse.Namespace, sglang: Sglang) -> int:
    """As `doctor`, for the installation `sglang`."""
    environment = dict(os.environ)
    request = request_of(args, environment)
    launch = examine(request, environment, sglang)
    launch.findings += known_defects(sglang.version() or "")
    starts = not launch.obstacles(request.strict)
    if args.json:
        report = {
            "steered": not launch.problems,
            "starts": starts,
            "findings": [asdict(finding) for finding in launch.findings],
            "command": launch.command(sys.executable) if starts else None,
            "environment": launch.variables if starts else None,
        }
        print(json.dumps(report))
    else:
        print("\n".join(report_lines(launch, starts)))
    return 1 if launch.problems else 0


def report_lines(launch: Launch, starts: bool) -> list[str]:
    """A line for each finding, the verdict, and the command that `serve` would become."""
    lines = [f"{finding.level:<8} {finding.subject}: {finding.text}" for finding in launch.findings]
    verdict = "will not be steered" if launch.problems else "will be steered"
    lines += ["", f"This server {verdict}."]
    if not starts:
        return [*lines, "serve would refuse to start it."]
    variables = [f"{name}={shlex.quote(value)} \\" for name, value in launch.variables.items()]
    return [*lines, "serve would become:", "", *variables, shlex.join(launch.command(sys.executable))]
