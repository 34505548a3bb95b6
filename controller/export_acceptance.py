"""`draftdial export-acceptance DOMAIN...`: fitted acceptance as files, to replay it in a server."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from draftdial.controller.acceptance_file import MIN_POSITIONS, MIN_REQUESTS, write_requests
from draftdial.controller.errors import UserError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `export-acceptance` to the commands."""
    parser = subparsers.add_parser("export-acceptance", help="write fitted acceptance as recorded arrays")
    parser.add_argument(
        "domains", nargs="+", metavar="DOMAIN", help="of the fitted source: docs/acceptance.md"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the bank (default 0)")
    parser.add_argument("--arrays", type=int, default=512, help="requests of each domain (default 512)")
    parser.add_argument("--positions", type=int, default=512, help="of an ordinary request (default 512)")
    parser.add_argument(
        "--out", type=Path, default=Path(), help="folder for DOMAIN.jsonl, made if missing (here)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write one file for each domain; read back, they are the bank that the fitted source draws.

    Raises:
        UserError: no such domain, a number out of range, or a folder that cannot be written.
    """
    from draftdial.envs.fitted_acceptance import FittedAcceptance

    for name, found, least in (
        ("--seed", args.seed, 0),
        ("--arrays", args.arrays, MIN_REQUESTS),
        ("--positions", args.positions, MIN_POSITIONS),
    ):
        if found < least:
            raise UserError(f"export-acceptance: {name}: found {found}, allowed: {least} or more")
    source = FittedAcceptance(list(dict.fromkeys(args.domains)), args.arrays, args.positions)
    bank = source.bank(args.seed)
    arrays = np.split(bank.accepted, bank.array_start[1:])
    for index, domain in enumerate(bank.domain_names):
        path = args.out / f"{domain}.jsonl"
        write_requests(path, arrays[bank.arrays_of(index)])
        print(f"{path}: {args.arrays} requests of {domain}, seed {args.seed}")
    return 0
