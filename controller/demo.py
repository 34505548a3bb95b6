"""`draftdial demo`: train the default policy, export it, and compare it, in a few minutes."""

from __future__ import annotations

import argparse
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from draftdial.controller import compare
from draftdial.controller import train as training

NEWEST = Path("runs/demo")


def add_parser(subparsers: Any) -> None:
    """`draftdial demo`."""
    parser: argparse.ArgumentParser = subparsers.add_parser("demo", help="train, export and compare")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    folder = NEWEST.parent / datetime.now().strftime("demo-%Y-%m-%d-%H-%M-%S")
    print(f"training on a measured server profile: {folder}")
    policy = training.main([], folder=folder) / "policy.safetensors"
    print("comparing it with the static threshold and its rivals")
    parser = argparse.ArgumentParser()
    compare.add_parser(parser.add_subparsers())
    status = compare.run(parser.parse_args(["compare", str(policy), "--out", str(folder / "compare")]))
    link = NEWEST.with_name(f".{NEWEST.name}-{os.getpid()}")
    link.symlink_to(folder.name)
    link.replace(NEWEST)
    print(f"policy: {NEWEST / 'policy.safetensors'}")
    return status
