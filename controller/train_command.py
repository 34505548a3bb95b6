"""The command line of `draftdial train`, which explains itself without the training software."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from draftdial.controller.interrupts import unmasked


def add_parser(subparsers: Any) -> None:
    """`draftdial train [--json] [OVERRIDE ...]`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train", help="train a policy; overrides use Hydra's syntax (docs/training.md)"
    )
    parser.add_argument("overrides", nargs="*", metavar="group.key=value", help="see conf/train.yaml")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    with nothing_to_keep():
        from draftdial.controller.train import main

    folder = main(args.overrides, args.json)
    if not args.json:
        print(f"policy: {folder / 'policy.safetensors'}")
    return 0


@contextmanager
def nothing_to_keep() -> Iterator[None]:
    """Where Ctrl-C ends the block, say that no policy came of it."""
    try:
        with unmasked():
            yield
    except KeyboardInterrupt:
        print("draftdial train: interrupted before it began; nothing is kept", file=sys.stderr)
        raise
