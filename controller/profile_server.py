"""`draftdial profile`: measures a running server's rounds and writes its cost profile."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.files import atomic_write
from draftdial.controller.interrupts import uninterrupted
from draftdial.controller.launched_server import LaunchedServer, without_speculation
from draftdial.controller.measured_server import MeasuredServer
from draftdial.controller.number_arguments import count, count_or_none, counts
from draftdial.controller.policy_export import rule_file
from draftdial.controller.profile_build import ProfileBuilder, profile_name
from draftdial.controller.profile_measurements import Grid, Measurements
from draftdial.controller.profile_sweep import Sweep
from draftdial.controller.profile_warnings import warnings_of
from draftdial.controller.rules import FixedK, Threshold
from draftdial.engine_patch.client import Server, ServerRefused
from draftdial.engine_patch.settings import OFF_MODE

DEFAULT_CONTEXTS = (500, 2000, 8000)
DEFAULT_ROUNDS = 32
DEFAULT_REPEATS = 2
DEFAULT_HELD_OUT = 6
MOST_BATCHES = 16
"""Of the batches with CUDA graphs, measured unless `--batches` says otherwise; the rest is interpolated."""
START_PROFILE = "h200-llama3-8b"
"""Gives a server that this command starts its tiers and limits; no time of it is used."""
PATIENT_S = 3600.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `profile` to the commands."""
    parser = subparsers.add_parser(
        "profile",
        help="measure a server and write its cost profile",
        usage="draftdial profile (URL | [--policy FILE] [--off-mode MODE] -- ARGS) --out FILE.json [options]",
        epilog="The server must serve nobody else meanwhile. ARGS are SGLang's, for a server started here.",
    )
    parser.add_argument(
        "url", nargs="?", metavar="URL", help="a steered server: `draftdial serve` started it"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE.json",
        help="profile to write; missing folders are made",
    )
    parser.add_argument("--no-spec", metavar="URL", help="`draftdial serve --warn` without speculation")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="with ARGS: gives the server its tiers")
    parser.add_argument(
        "--off-mode", choices=("kv-only",), help="with ARGS: as of `draftdial serve`; also measured"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the servers' --admin-api-key, or their --api-key")
    parser.add_argument("--batches", type=counts, metavar="N,N", help="default: those with CUDA graphs")
    parser.add_argument(
        "--contexts",
        type=counts,
        default=DEFAULT_CONTEXTS,
        metavar="N,N",
        help=f"prompt tokens (default {','.join(map(str, DEFAULT_CONTEXTS))})",
    )
    parser.add_argument("--rounds", type=count, default=DEFAULT_ROUNDS, help="per k and repeat (%(default)s)")
    parser.add_argument(
        "--repeats",
        type=count,
        default=DEFAULT_REPEATS,
        help="passes over everything; the fastest counts (%(default)s)",
    )
    parser.add_argument(
        "--held-out", type=count_or_none, default=DEFAULT_HELD_OUT, help="cells to test on (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and orders (%(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the profile and say how good it is; 0, or 1 where the server refused."""
    importlib.import_module("rich")  # what it needs is missed now, not once a server has started
    name = profile_name(args.out)
    if bool(args.url) == bool(args.engine_arguments):
        raise UserError("profile: give the URL of a server, or -- and SGLang's arguments for one")
    if args.engine_arguments and args.no_spec:
        raise UserError("--no-spec: not with ARGS: that server is started here, too")
    if args.url and args.off_mode:
        raise UserError("--off-mode: not with a URL, allowed: `draftdial serve --off-mode kv-only` starts it")
    if len(args.contexts) < 2:
        raise UserError(f"--contexts: found {len(args.contexts)}, allowed: two or more")
    try:
        document, advice, warnings = _measure(args, name)
    except ServerRefused as refused:
        print(f"draftdial: profile: {refused}", file=sys.stderr)
        return 1
    atomic_write(args.out, json.dumps(document, indent=1) + "\n")
    print(f"{args.out}: {document['description']}{advice}")
    for warning in warnings:
        print(f"draftdial: warning: {warning}", file=sys.stderr)
    return 0


def _measure(args: argparse.Namespace, name: str) -> tuple[dict[str, object], str, list[str]]:
    """The document, advice on it, and warnings of what repeats disagree about and of what the host set."""
    with ExitStack() as stack:
        with _told():
            url = stack.enter_context(_server(args, is_speculative=True))
            speculative = _measured(url, args)
        if 0 not in speculative.tiers or len(speculative.tiers) < 2:
            found = ", ".join(map(str, speculative.tiers)) or "none"
            raise UserError(f"{url}: tiers: found {found}, needed: 0 and another; is it steered?")
        if args.off_mode and not speculative.has_kv_only:
            reason = speculative.status["kv_only_fallback"]
            raise UserError(f"--off-mode kv-only: not on this server, where k = 0 is warm: {reason}")
        grid = _grid(args, speculative)
        measurements = Measurements.open(_measurements_path(args.out), grid, speculative.facts_that_last)
        _sweep(Sweep(speculative, grid, "speculative"), measurements)
        speculative.check_kv_only()
    if args.no_spec or args.engine_arguments:
        with ExitStack() as stack:
            with _told(measurements):
                url = stack.enter_context(_server(args, is_speculative=False))
                nospec = _measured(url, args)
            if nospec.facts["speculates"]:
                raise UserError(f"--no-spec {url}: this server speculates: leave out --speculative-algorithm")
            _sweep(Sweep(nospec, grid, "nospec"), measurements)
    builder = ProfileBuilder(
        measurements, name, speculative.tiers, speculative.arguments, _command(), _versions()
    )
    document = builder.document()
    return document, builder.advice(document), warnings_of(measurements)


@contextmanager
def _server(args: argparse.Namespace, is_speculative: bool) -> Iterator[str]:
    """URL of the server to measure, started here where that was asked for."""
    if not args.engine_arguments:
        yield args.url if is_speculative else args.no_spec
        return
    arguments = list(args.engine_arguments)
    side = "speculative" if is_speculative else "nospec"
    with ExitStack() as stack:
        policy = args.policy
        if policy is None:
            policy = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "start.safetensors"
            atomic_write(policy, _start_policy())
        log = args.out.with_suffix(f".{side}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        chosen = arguments if is_speculative else without_speculation(arguments)
        variables = {OFF_MODE: args.off_mode} if args.off_mode else {}
        print(f"draftdial profile: {side}: the server starts, its log is {log}", file=sys.stderr, flush=True)
        yield stack.enter_context(LaunchedServer(policy, chosen, log, variables)).url


def _start_policy() -> bytes:
    """A policy that gives a server tiers to measure, and speculates nowhere if it is not steered."""
    profile = CostProfile.load(START_PROFILE)
    off = Threshold(profile.tiers, k=0, batch=0)
    return rule_file(FixedK(profile.tiers, 0), profile, "warm", name="measured", fallback=off).data


def _measured(url: str, args: argparse.Namespace) -> MeasuredServer:
    return MeasuredServer(Server(url, args.api_key), Server(url, args.api_key, PATIENT_S), args.seed)


def _grid(args: argparse.Namespace, server: MeasuredServer) -> Grid:
    # With speculation SGLang admits one request less than it is given.
    most = server.facts["max_running"] - 1
    captured = [batch for batch in server.facts["captured_batches"] if batch <= most]
    batches = args.batches or _thinned(captured) or _powers_of_two(most)
    too_large = [batch for batch in batches if batch > most]
    if too_large:
        raise UserError(f"--batches: found {too_large[0]}, allowed: up to {most}, which can run at once")
    return Grid(
        batches=tuple(sorted(set(batches))),
        contexts=tuple(sorted(set(args.contexts))),
        rounds=args.rounds,
        repeats=args.repeats,
        held_out=args.held_out,
        seed=args.seed,
    )


def _sweep(sweep: Sweep, measurements: Measurements) -> None:
    """Measure all that is not there yet; the server's policy decides again afterwards, whatever happens."""
    from draftdial.controller.measuring_progress import measuring_progress

    total = sweep.grid.repeats * len(sweep.tasks())
    try:
        with (
            _told(measurements, "; putting the server back"),
            measuring_progress("profile", sweep.side, total) as progress,
        ):
            for tasks in sweep.passes(measurements):
                num_done = sum(len(measurements.result(task).repeats) for task in sweep.tasks())
                progress.begin_pass(num_done, len(tasks))
                for task in tasks:
                    progress.measuring(task.id)
                    measurements.add(task, sweep.run(task))
                    progress.measured()
    finally:
        with uninterrupted():
            sweep.server.close()


@contextmanager
def _told(measurements: Measurements | None = None, what_follows: str = "") -> Iterator[None]:
    """Where Ctrl-C ends the block, say what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = " before it measured anything"
        if measurements is not None and measurements.path.exists():
            kept = f"; {measurements.path} keeps what was measured, and the same command goes on"
        print(f"draftdial profile: interrupted{kept}{what_follows}", file=sys.stderr)
        raise


def _thinned(batches: Sequence[int]) -> list[int]:
    """At most `MOST_BATCHES` of them, evenly by ratio, the first and the last among them."""
    if len(batches) <= MOST_BATCHES:
        return list(batches)
    wanted = [
        batches[0] * (batches[-1] / batches[0]) ** (i / (MOST_BATCHES - 1)) for i in range(MOST_BATCHES)
    ]
    return sorted({min(batches, key=lambda batch: abs(batch - place)) for place in wanted})


def _powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _measurements_path(out: Path) -> Path:
    """Where measurements are kept: to go on after an interruption, and to look at afterwards."""
    return out.with_suffix(".measurements.json")


def _command() -> str:
    return shlex.join(["draftdial", *sys.argv[1:]])


def _versions() -> dict[str, str]:
    return {"draftdial": version("draftdial")}
