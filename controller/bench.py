"""`draftdial bench`: drives a running server and compares ways to steer it."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from functools import partial
from pathlib import Path

from draftdial.controller.bench_arms import ALLOWED, NO_SPEC, Arm, SteeredArms
from draftdial.controller.bench_checks import check_domains, check_lengths
from draftdial.controller.bench_loads import PER_SLOT
from draftdial.controller.bench_report import cells, table, write_report
from draftdial.controller.bench_runs import Bench, Limits
from draftdial.controller.bench_switchback import SwitchbackBench
from draftdial.controller.bench_work import DEFAULTS, Work
from draftdial.controller.errors import UserError
from draftdial.controller.number_arguments import count, counts, positive, positives, share, span
from draftdial.engine_patch.client import Server, ServerRefused


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to the commands."""
    parser = subparsers.add_parser(
        "bench",
        help="drive a server and compare how it is steered",
        epilog="Each arm meets the same requests in every repeat, in an order that rotates; with "
        "--switchback arms share one load, in a random order. docs/measuring.md says when to take which.",
    )
    parser.add_argument("url", metavar="URL", help="a steered server that nobody else uses meanwhile")
    parser.add_argument(
        "--arms", nargs="+", default=["steer", "off"], metavar="ARM", help=f"{ALLOWED} (steer off)"
    )
    parser.add_argument("--no-spec", metavar="URL", help="a server without speculation, as another arm")
    parser.add_argument("--baseline", metavar="ARM", help="what the others are compared with (the last arm)")
    parser.add_argument("--deployed", type=Path, metavar="FILE", help="the server's own policy, to put back")
    loads = parser.add_argument_group("loads")
    loads.add_argument("--closed", type=counts, default=(), metavar="C,C", help="requests in the system")
    loads.add_argument(
        "--rates", type=positives, default=(), metavar="R,R", help="requests a second, open loop"
    )
    loads.add_argument("--arrivals", default="poisson", metavar="NAME", help="of --rates (poisson)")
    loads.add_argument("--swing", type=span, metavar="LOW:HIGH", help="closed loop that jumps between two C")
    loads.add_argument("--trace", type=Path, metavar="FILE", help="arrivals and lengths as recorded")
    loads.add_argument("--time-scale", type=positive, default=1.0, help="of --trace: 0.5 doubles its load")
    work = parser.add_argument_group("requests")
    work.add_argument("--requests", type=count, default=200, help="at least, per run (%(default)s)")
    work.add_argument(
        "--per-slot",
        type=count,
        metavar="N",
        help=f"with --closed: at least so many for each in the system ({PER_SLOT})",
    )
    work.add_argument(
        "--lengths", default="general", help="general, short-chat, agentic, trace:FILE (general)"
    )
    work.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="in place of random token ids")
    work.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="for prompts that hold text")
    work.add_argument("--stop-at-eos", action="store_true", help="let answers end where the model ends them")
    work.add_argument(
        "--domains",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="A,B",
        help="of a server that replays recorded acceptance",
    )
    work.add_argument(
        "--domain-span",
        type=span,
        metavar="MIN:MAX",
        help="with --domains: one at a time, another one after so many requests (each request draws)",
    )
    parser.add_argument("--repeats", type=count, default=3, help="(%(default)s)")
    parser.add_argument(
        "--switchback",
        type=positive,
        metavar="S",
        help="with --closed: one load that does not end, --repeats turns of S seconds for each arm",
    )
    parser.add_argument(
        "--drop",
        type=share,
        metavar="SHARE",
        help="leave out an arm under a load in later repeats where its best throughput so far is more than "
        "this below the best arm's lowest; with --switchback, where its interval is (none)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat's requests (%(default)s)")
    parser.add_argument(
        "--slo-ttft", type=positive, default=Limits.ttft_s, metavar="S", help="limit (%(default)s)"
    )
    parser.add_argument(
        "--slo-tpot", type=positive, default=Limits.tpot_s, metavar="S", help="limit (%(default)s)"
    )
    parser.add_argument(
        "--timeout", type=positive, default=Limits.timeout_s, metavar="S", help="of a request (%(default)g)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the servers' --admin-api-key, or their --api-key")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench"), metavar="FOLDER", help="(%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the document instead of the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write bench.json, bench.csv and plots; 1 if a request was lost or failed, or the server refused."""
    arms = Arm.parse_all(args.arms)
    names = [arm.name for arm in arms] + ([NO_SPEC] if args.no_spec else [])
    baseline = args.baseline or names[-1]
    if baseline not in names:
        raise UserError(f"--baseline: found {baseline}, allowed: {', '.join(names)}")
    if args.switchback is not None and (args.rates or args.swing or args.trace):
        raise UserError("--switchback: found --rates, --swing or --trace, allowed: --closed alone")
    if args.repeats > 1:
        importlib.import_module(
            "draftdial.controller.statistics"
        )  # what it needs is missed now, not after hours
    work = Work.of({name: getattr(args, name) for name in DEFAULTS})
    steered = SteeredArms(Server(args.url, args.api_key), arms, args.deployed)
    check_domains(work.asking.domains, steered.status(), args.url)
    for url in filter(None, (args.url, args.no_spec)):
        check_lengths(work, Server(url, args.api_key))
    limits = Limits(args.slo_ttft, args.slo_tpot, args.timeout)
    kind = Bench if args.switchback is None else partial(SwitchbackBench, window_s=args.switchback)
    bench = kind(
        steered,
        arms,
        work,
        args.out,
        limits=limits,
        drop=args.drop,
        api_key=args.api_key,
        no_spec=args.no_spec,
    )
    try:
        document = bench.measured(baseline)
    except ServerRefused as refused:
        print(f"draftdial: bench: {steered.server.url}: {refused}", file=sys.stderr)
        return 1
    document["cells"] = cells(document["runs"], baseline)
    bench.write(document)
    written = write_report(document, args.out)
    print(json.dumps(document) if args.json else table(document))
    print(f"{args.out}: bench.json, {', '.join(path.name for path in written)}", file=sys.stderr)
    failed = sum(run["failed"] for run in document["runs"])
    if failed:
        print(
            f"draftdial: bench: {failed} requests were lost or failed: these runs are void", file=sys.stderr
        )
    return 1 if failed else 0
