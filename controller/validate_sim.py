"""`draftdial validate-sim`: one load on a real server and in simulation, and how far they part."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from draftdial.controller.bench_arms import Arm
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.files import atomic_write
from draftdial.controller.number_arguments import count, counts, positive
from draftdial.controller.validate_sim_report import SCHEMA, Cell, as_csv, best_fixed_k, summary, table
from draftdial.engine_patch.client import ServerRefused
from draftdial.engine_patch.log_format import is_decision_log


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `validate-sim` to the commands."""
    parser = subparsers.add_parser(
        "validate-sim",
        help="compare the simulator with a server, on one load",
        epilog="docs/fidelity.md says what is compared, and what the simulator leaves out.",
    )
    parser.add_argument(
        "of",
        nargs="+",
        metavar="URL|BENCH.json|LOG",
        help="a server that replays recorded acceptance and that nobody else uses; or what `draftdial bench` "
        "measured on such; or a decision log",
    )
    parser.add_argument("--profile", required=True, metavar="P", help="of that server: a name or FILE.json")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/validate-sim"), metavar="FOLDER", help="(%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the document instead of the table")
    both = parser.add_argument_group("with a URL or a BENCH.json")
    both.add_argument(
        "--acceptance",
        action="append",
        default=[],
        metavar="[DOMAIN=]FILE",
        help="what the server replays, as it was given to `draftdial serve`",
    )
    both.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="FILE",
        help="an arm beside the fixed k; of a BENCH.json, the arms that ran just this file: policy:NAME, and "
        "steer where the server had it",
    )
    served = parser.add_argument_group("with a URL")
    served.add_argument(
        "--closed", type=counts, default=(1, 8, 64), metavar="C,C", help="requests in the system (1,8,64)"
    )
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
    try:
        cells = _cells(args, profile)
    except ServerRefused as refused:
        print(f"draftdial: validate-sim: {args.of[0]}: {refused}", file=sys.stderr)
        return 1
    best = best_fixed_k(cells)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["draftdial", *sys.argv[1:]]),
        "versions": {"draftdial": version("draftdial")},
        "profile": profile.name,
        "of": args.of,
        "cells": cells,
        "best_fixed_k": best,
        "summary": summary(cells, best),
    }
    atomic_write(args.out / "validate.json", json.dumps(document, indent=1) + "\n")
    atomic_write(args.out / "validate.csv", as_csv(cells))
    print(json.dumps(document) if args.json else table(document))
    print(f"{args.out}: validate.json, validate.csv", file=sys.stderr)
    return 0


def _cells(args: argparse.Namespace, profile: CostProfile) -> list[Cell]:
    from draftdial.controller.validate_sim_acceptance import GivenAcceptance
    from draftdial.controller.validate_sim_bench import ServedBench
    from draftdial.controller.validate_sim_cells import bench_cells
    from draftdial.controller.validate_sim_log import log_cells
    from draftdial.controller.validate_sim_server import served

    kinds = {_kind(text) for text in args.of}
    if len(args.of) > 1 and kinds != {"bench"}:
        raise UserError(
            f"validate-sim: found {' '.join(args.of)}, allowed: one URL, one log, or one bench.json or more"
        )
    [kind] = kinds
    if kind == "log":
        return log_cells(Path(args.of[0]), profile)
    acceptance = GivenAcceptance(args.acceptance)
    _check_each_once("file", [str(Path(text).resolve()) for text in args.of])
    _check_each_once("--policy", [str(Path(path).resolve()) for path in args.policy])
    policies = Arm.parse_all([f"policy:{path}" for path in args.policy])
    if kind == "url":
        benches = [served(args, args.of[0], profile, acceptance, policies)]
    else:
        benches = [ServedBench.read(Path(path)) for path in args.of]
    return bench_cells(benches, profile, acceptance, policies)


def _check_each_once(name: str, found: Sequence[str]) -> None:
    if len(set(found)) < len(found):
        raise UserError(f"validate-sim: {name}: found {', '.join(found)}, allowed: each once")


def _kind(text: str) -> Literal["url", "bench", "log"]:
    """What a user named.

    Raises:
        UserError: a file that is not there, or neither of the two kinds.
    """
    path = Path(text)
    if "://" in text:
        return "url"
    if path.is_file():
        return "log" if is_decision_log(path) else "bench"
    if path.is_dir():
        raise UserError(f"{text}: a folder, allowed: a file, such as its bench.json")
    raise UserError(f"{text}: no such file, and no URL, which is written http://HOST:PORT")
