"""`draftdial demo`: train the default policy, export it, and compare it, in a few minutes."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from draftdial.controller import compare_command
from draftdial.controller.errors import UserError

NEWEST = Path("runs/demo")


def add_parser(subparsers: Any) -> None:
    """`draftdial demo [--json]`."""
    parser: argparse.ArgumentParser = subparsers.add_parser("demo", help="train, export and compare")
    parser.add_argument("--json", action="store_true", help="print the comparison as one JSON object only")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from draftdial.controller.compare import run as compare
    from draftdial.controller.train import main as train

    if NEWEST.exists() and not NEWEST.is_symlink():
        raise UserError(f"demo: found {NEWEST}, allowed: none or a link, as it will point to the newest demo")
    words = sys.stderr if args.json else sys.stdout
    folder = NEWEST.parent / datetime.now().strftime("demo-%Y-%m-%d-%H-%M-%S")
    print(f"training on a measured server profile: {folder}", file=words)
    policy = train([], folder=folder) / "policy.safetensors"
    print("comparing it with the static threshold and its rivals", file=words)
    parser = argparse.ArgumentParser()
    compare_command.add_parser(parser.add_subparsers())
    asked = ["compare", str(policy), "--out", str(folder / "compare"), *(["--json"] if args.json else [])]
    status = compare(parser.parse_args(asked))
    link = NEWEST.with_name(f".{NEWEST.name}-{os.getpid()}")
    link.symlink_to(folder.name)
    link.replace(NEWEST)
    print(f"policy: {NEWEST / 'policy.safetensors'}", file=words)
    return status
