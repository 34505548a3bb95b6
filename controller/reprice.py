"""`draftdial reprice POLICY BENCH.json`: the same policy, reckoning with the host that a benchmark met."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from draftdial.controller.bench_report import Run, read_document
from draftdial.controller.errors import UserError
from draftdial.controller.host_time import HostTime
from draftdial.controller.policy_export import repriced
from draftdial.controller.policy_file import PolicyFile, read, write
from draftdial.engine_patch.settings import fits

REPRICED = "repriced"
"""In a card's evaluation: the host that a file reckons with. Prices only rise, so none is repriced twice."""
LIGHT = 32
"""Requests in the system. For more a host has more to do, which is no price of a round of few: at 64 it was
busy for 5.3 ms in a round with drafts, at 256 for 8.2 (docs/results.md, "On a quiet host")."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `reprice` to the commands."""
    parser = subparsers.add_parser("reprice", help="make a policy reckon with a busy host")
    parser.add_argument("policy", type=Path, help="the policy file")
    parser.add_argument("bench", type=Path, help="bench.json of its server, with light load and forced k")
    parser.add_argument("--out", type=Path, required=True, help="file to write; missing folders are made")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the file and say how long a round takes at least.

    Raises:
        UserError: no policy file, no benchmark, or one that does not know how long the host was busy, or of a
            server with another k = 0.
    """
    old = read(args.policy)
    if REPRICED in old.card["evaluation"]:
        raise UserError(f"{args.policy}: found a repriced policy, allowed: the file that it was made from")
    document = read_document(args.bench)
    try:
        runs = [run for run in document["runs"] if not run["failed"]]
        host = host_of_lightest(runs, str(args.bench))
        off_mode = document.get("server", {}).get("status", {}).get("off_mode", old.card["off_mode"])
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{args.bench}: not as `draftdial bench` writes it here: {error!r}") from None
    if not fits(old.card["off_mode"], off_mode):
        raise UserError(
            f"{args.bench}: server.status.off_mode: found {off_mode}, allowed: {old.card['off_mode']}: "
            f"a bench of a server that takes {args.policy}"
        )
    new = on_busy_host(old, host)
    try:
        write(args.out, new)
    except OSError as error:
        raise UserError(
            f"--out: found {args.out}, allowed: a file that can be written ({error.strerror})"
        ) from None
    at_zero = "as before (the benchmark has none)" if host.off_ms is None else f"{host.off_ms:.2f} ms"
    least = f"{host.round_ms(1):.2f} ms with drafts; at k = 0 {at_zero}"
    print(f"{args.out}: {new.card['name']}, id {new.policy_id}; a round takes at least {least}")
    return 0


def on_busy_host(file: PolicyFile, host: HostTime) -> PolicyFile:
    """The same policy where no round is shorter than the host is busy in it."""
    profile = file.profile()
    least_ms = {k: ms for k in profile.tiers if (ms := host.round_ms(k))}
    busier = profile.no_faster_than(least_ms, file.card["off_mode"])
    return repriced(file, busier, {REPRICED: asdict(host)})


def host_of_lightest(runs: Sequence[Run], source: str) -> HostTime:
    """How long the host was busy under the lightest closed loop.

    Raises:
        UserError: the runs do not say it of rounds with drafts, or under no light load.
    """
    closed = [run for run in runs if run["mode"] == "closed"]
    for load in sorted({run["load"] for run in closed}):
        host = HostTime.of([run for run in closed if run["load"] == load])
        if host.drafts_ms is None:
            continue
        if load > LIGHT:
            raise UserError(
                f"{source}: found no load lighter than C = {load:g}, allowed: one of at most {LIGHT} "
                f"requests, where the host sets the pace"
            )
        return host
    raise UserError(
        f"{source}: host_ms_at_k: found none of a k above 0 in a closed loop, needed: runs with drafts on a "
        f"server whose scheduler overlaps with the GPU"
    )
