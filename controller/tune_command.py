"""The command line of `draftdial tune`, which explains itself without the training software."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from draftdial.controller.cost_profile import SPECULATIVE_OFF_MODES


def add_setting(parser: argparse.ArgumentParser, default_profile: str | None) -> None:
    """Options that say on what server and what work rules are run."""
    note = default_profile or "the policy's own"
    parser.add_argument(
        "--profile", default=default_profile, help=f"a name or a .json file (default: {note})"
    )
    parser.add_argument(
        "--workload", nargs="+", metavar="W", help="names, trace:FILE, log:FILE (default: all)"
    )
    parser.add_argument(
        "--acceptance",
        nargs="+",
        metavar="A",
        help="fitted, smollm2-135m-eagle3, or [DOMAIN=]FILE ... (default: fitted; a log brings its own)",
    )
    parser.add_argument("--off-mode", choices=SPECULATIVE_OFF_MODES, help="what k = 0 does for the draft")
    parser.add_argument("--lag", type=int, choices=(1, 2), default=2, help="rounds until an outcome is seen")
    parser.add_argument("--full", action="store_true", help="cells long enough to decide, not the short ones")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tune` to the commands."""
    parser = subparsers.add_parser("tune", help="find the best parameters of every rule")
    add_setting(parser, "h200-llama3-8b")
    parser.add_argument(
        "--out",
        type=Path,
        help="file to write the result to, and to reuse if it fits; missing folders are made",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from draftdial.controller.tune import run

    return run(args)
