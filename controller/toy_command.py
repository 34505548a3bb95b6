"""The command line of `draftdial toy`, which explains itself without the training software."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    """`draftdial toy [--seeds N] [--json]`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "toy", help="PPO against the exact optimum of a small decode queue (docs/toy.md)"
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="training seeds (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from draftdial.controller.toy import run

    return run(args)
