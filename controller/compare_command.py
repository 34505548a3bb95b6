"""The command line of `draftdial compare`, which explains itself without the training software."""

from __future__ import annotations

import argparse
from pathlib import Path

from draftdial.controller.tune_command import add_setting


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `compare` to the commands."""
    parser = subparsers.add_parser("compare", help="compare policy files with every rival, in simulation")
    parser.add_argument("policy", nargs="+", type=Path, help="policy files, learned or rules")
    add_setting(parser, None)
    parser.add_argument("--against", nargs="+", metavar="RIVAL", help="rivals by name (default: all)")
    parser.add_argument("--seeds", type=int, help="seeds a cell starts with (default: 6, with --full 16)")
    parser.add_argument("--max-seeds", type=int, help="seeds a cell may grow to (default: 6, with --full 48)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/compare"), help="folder for tables and plots, made if missing"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from draftdial.controller.compare import run

    return run(args)
