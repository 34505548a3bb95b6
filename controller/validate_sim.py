"""`draftdial validate-sim`: one load on a real server and in simulation, and how far they part."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.files import atomic_write
from draftdial.controller.number_arguments import count, counts, positive
from draftdial.controller.validate_sim_log import log_cells
from draftdial.controller.validate_sim_report import SCHEMA, as_csv, best_fixed_k, summary, table
from draftdial.controller.validate_sim_server import server_cells
from draftdial.engine_patch.client import ServerRefused


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `validate-sim` to the commands."""
    parser = subparsers.add_parser(
        "validate-sim",
        help="compare the simulator with a server, on one load",
        epilog="docs/fidelity.md says what is compared, and what the simulator leaves out.",
    )
    parser.add_argument(
        "of",
        metavar="URL|LOG",
        help="a server that replays recorded acceptance and that nobody else uses, or a decision log",
    )
    parser.add_argument("--profile", required=True, metavar="P", help="of that server: a name or FILE.json")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/validate-sim"), metavar="FOLDER", help="(%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the document instead of the table")
    served = parser.add_argument_group("with a URL")
    served.add_argument(
        "--acceptance",
        action="append",
        default=[],
        metavar="[DOMAIN=]FILE",
        help="what the server replays, as it was given to `draftdial serve`",
    )
    served.add_argument(
        "--closed", type=counts, default=(1, 8, 64), metavar="C,C", help="requests in the system (1,8,64)"
    )
    served.add_argument("--policy", type=Path, metavar="FILE", help="an arm beside the fixed k")
    served.add_argument(
        "--deployed", type=Path, metavar="FILE", help="with --policy: the server's own policy, to put back"
    )
    served.add_argument("--requests", type=count, default=200, help="at least, per run (%(default)s)")
    served.add_argument("--lengths", default="general", help="general, short-chat, agentic, trace:FILE")
    served.add_argument("--repeats", type=count, default=1, help="(%(default)s)")
    served.add_argument("--seed", type=int, default=0, help="of the first repeat's requests (%(default)s)")
    served.add_argument("--timeout", type=positive, default=600.0, metavar="S", help="of a request (600)")
    served.add_argument("--api-key", metavar="KEY", help="the server's --admin-api-key, or its --api-key")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write validate.json and validate.csv; 1 if a request failed, or the server refused."""
    profile = CostProfile.load(args.profile)
    is_server = not Path(args.of).is_file()
    if is_server and not args.acceptance:
        raise UserError("--acceptance: none given, allowed: the files that the server replays")
    try:
        cells = server_cells(args, profile) if is_server else log_cells(Path(args.of), profile)
    except ServerRefused as refused:
        print(f"draftdial: validate-sim: {args.of}: {refused}", file=sys.stderr)
        return 1
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["draftdial", *sys.argv[1:]]),
        "versions": {"draftdial": version("draftdial")},
        "profile": profile.name,
        "of": args.of,
        "cells": cells,
        "best_fixed_k": best_fixed_k(cells),
    }
    document["summary"] = summary(document)
    atomic_write(args.out / "validate.json", json.dumps(document, indent=1) + "\n")
    atomic_write(args.out / "validate.csv", as_csv(cells))
    print(json.dumps(document) if args.json else table(document))
    print(f"{args.out}: validate.json, validate.csv", file=sys.stderr)
    return 0
