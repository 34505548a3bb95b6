"""`draftdial set URL`: change the mode of a running server, or force one k."""

from __future__ import annotations

import argparse
import json
from typing import Any

from draftdial.engine_patch.client import Server, add_server_arguments, change_everywhere, run_against_server
from draftdial.engine_patch.control_keys import FORCE_K_KEY, MODE_KEY, NO_FORCED_K
from draftdial.engine_patch.settings import MODES


def add_parser(subparsers: Any) -> None:
    """Add `set` to the commands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "set", help="change a running server's mode, or force k"
    )
    add_server_arguments(parser)
    change = parser.add_mutually_exclusive_group(required=True)
    change.add_argument("--mode", choices=MODES, help="steer, shadow (SGLang's rule acts) or off (k = 0)")
    change.add_argument(
        "--force-k",
        type=_k_or_none,
        metavar="K|none",
        help="use this k in every round; none: as the mode says",
    )
    parser.set_defaults(run=lambda args: run_against_server(args, _set))


def _set(server: Server, args: argparse.Namespace) -> None:
    if args.mode is not None:
        replicas = change_everywhere(server, MODE_KEY, MODES.index(args.mode))
    else:
        replicas = change_everywhere(server, FORCE_K_KEY, args.force_k)
    if args.json:
        print(json.dumps(replicas))
        return
    forced_k = replicas[0]["forced_k"]
    forced = "" if forced_k == NO_FORCED_K else f", k = {forced_k} forced"
    print(f"{server.url}: mode {replicas[0]['mode']}{forced}")


def _k_or_none(text: str) -> int:
    if text == "none":
        return NO_FORCED_K
    if not text.isdecimal() or int(text) > 255:
        raise argparse.ArgumentTypeError(f"found {text}, allowed: draft tokens from 0 to 255, or none")
    return int(text)
