"""`draftdial compare`: policies against every rule worth comparing with, on the same simulated work."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draftdial.controller.comparison import build, seeds_needed, to_json
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.files import sha256_of, short_names
from draftdial.controller.plots import Trace
from draftdial.controller.policy_card import canonical
from draftdial.controller.policy_file import PolicyFile, read
from draftdial.controller.report import print_report, write_report
from draftdial.controller.rivals import Scores, rival_names, rivals
from draftdial.controller.tune import Bar, Tuned, cached_tune, checked_jobs, progress_bar
from draftdial.envs.contenders import Contender, Exported, Server, deployed
from draftdial.envs.simulated_engine import ServerOptions
from draftdial.envs.suite import (
    FIRST_SEED,
    SEEDS_PER_CELL,
    Acceptance,
    Cell,
    Suite,
    make_cells,
    notes,
    workload_sha256,
)
from draftdial.envs.trials import Batch, Recording, Trial, Workers

SEED_STEP = 8
"""Seeds are added by this many, as the bounds move with every one."""


@dataclass(frozen=True)
class Contest:
    """Everything that decides what a comparison finds."""

    policies: Mapping[str, PolicyFile]
    server: Server
    workloads: tuple[str, ...]
    acceptance: Acceptance
    suite: Suite
    against: tuple[str, ...] = ()
    """Rivals by name; none means all of them."""


def compare(
    contest: Contest, workers: Workers, bar: Bar, tuned_path: Path | None = None
) -> tuple[dict[str, Any], Trace]:
    """The document `compare.json` and, for a picture, one run of the first policy.

    `tuned_path` holds the tuned rules afterwards; they are taken from there if they fit.
    """
    server, suite, names = contest.server, contest.suite, list(contest.policies)
    cells = make_cells(
        contest.workloads, server.profile, server.options.off_mode, contest.acceptance, suite.report
    )
    recording = _record(cells, contest, workers)
    tuned: Tuned = cached_tune(
        tuned_path, server, contest.workloads, contest.acceptance, suite, workers, bar
    )["rules"]
    field: dict[str, Contender] = {name: Exported(file.data) for name, file in contest.policies.items()}
    field |= {
        name: rival
        for name, rival in rivals(server.profile, tuned).items()
        if name in contest.against or not contest.against
    }

    scores = Scores(cells, server)
    counts = dict.fromkeys(cells, 0)
    wanted = dict.fromkeys(cells, suite.report.seeds)
    while wanted:
        more = {cell: cell.seeds("reporting", n - counts[cell], counts[cell]) for cell, n in wanted.items()}
        scores.play(more, field, not contest.against, workers, bar)
        counts |= wanted
        needed = seeds_needed(scores.data(), names)
        rounded = [min(suite.max_seeds, SEED_STEP * -(-seeds // SEED_STEP)) for seeds in needed]
        open_cells = zip(cells, needed, rounded, strict=True)
        wanted = {cell: n for cell, least, n in open_cells if least > counts[cell] and n > counts[cell]}

    document = build(
        scores.data(),
        names,
        versions={**_versions(), "suite": suite.name},
        hashes=_hashes(contest),
        tuned_rules=tuned,
        seed_ranges=_seed_ranges(cells, counts, suite),
    )
    return document, recording()


def _record(cells: Sequence[Cell], contest: Contest, workers: Workers) -> _Recorded:
    """Start one run of the first policy, where load varies most."""
    cell = next((cell for cell in cells if not cell.is_constant), cells[0])
    cell = next((cell for cell in cells if cell.workload == "drift5"), cell)
    (name, file), *_ = contest.policies.items()
    batch = Batch.of([(cell, cell.seeds("reporting", 1))])
    future = workers.record(Trial(name, Exported(file.data), batch), contest.server)
    load = "" if cell.load is None else f" at load {cell.load:g}"
    return _Recorded(f"{name} on {contest.server.profile.name}, {cell.workload}{load}", future)


@dataclass(frozen=True)
class _Recorded:
    title: str
    future: Future[Recording]

    def __call__(self) -> Trace:
        recording = self.future.result()
        return Trace(self.title, recording.time_s, recording.k, recording.num_running)


def _versions() -> dict[str, str]:
    packages = ("draftdial", "numpy", "numba", "scipy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _hashes(contest: Contest) -> dict[str, Any]:
    profile = canonical(contest.server.profile.to_document()).encode()
    return {
        "policies": {name: sha256_of(file.data) for name, file in contest.policies.items()},
        "profile": sha256_of(profile),
        "workloads": {name: workload_sha256(name) for name in contest.workloads},
        "acceptance": contest.acceptance.identity(contest.workloads),
    }


def _seed_ranges(cells: Sequence[Cell], counts: Mapping[Cell, int], suite: Suite) -> dict[str, Any]:
    """First and last seed by purpose and cell; checkpoints are chosen on seeds of a range of their own."""

    def span(seeds: Sequence[int]) -> list[int]:
        return [seeds[0], seeds[-1]]

    return {
        "checkpoint": [FIRST_SEED["checkpoint"], FIRST_SEED["reporting"] - 1],
        "tuning": {_label(c): span(c.seeds("tuning", suite.tune.seeds)) for c in cells},
        "reporting": {_label(c): span(c.seeds("reporting", counts[c])) for c in cells},
    }


def _label(cell: Cell) -> str:
    return cell.workload if cell.load is None else f"{cell.workload} {cell.load:g}"


def run(args: argparse.Namespace) -> int:
    """Compare, print and write the report; 0, or a `UserError`."""
    contest = contest_of(args)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: found {args.out}, allowed: a folder ({error.strerror})") from None
    with Workers(checked_jobs(args.jobs)) as workers, progress_bar("compare") as bar:
        document, trace = compare(contest, workers, bar, args.out / "tuned_rules.json")
    paths = write_report(document, args.out, trace)
    if args.json:
        sys.stdout.write(to_json(document))
        return 0
    if contest.suite.name != "full":
        print("short run: cells too short for many verdicts; --full runs the whole comparison\n")
    for note in notes(contest.workloads, contest.acceptance):
        print(f"{note}\n")
    print_report(document, sys.stdout)
    print("\n" + "\n".join(map(str, paths)))
    return 0


def contest_of(args: argparse.Namespace) -> Contest:
    """The comparison that the command line asks for; UserError where it cannot be had."""
    files = _read_policies(args.policy)
    server = _server_of(args, files)
    for file in files.values():
        _check_tiers(file, server)
    against = tuple(args.against or ())
    unknown = sorted(set(against) - set(rival_names(server.profile)))
    if unknown:
        allowed = ", ".join(rival_names(server.profile))
        raise UserError(f"--against: found {unknown[0]}, allowed: {allowed}")
    suite = Suite.load("full" if args.full else "demo")
    seeds = suite.report.seeds if args.seeds is None else args.seeds
    max_seeds = max(seeds, suite.max_seeds) if args.max_seeds is None else args.max_seeds
    if not 2 <= seeds <= max_seeds <= SEEDS_PER_CELL:
        raise UserError(
            f"--seeds, --max-seeds: found {seeds}, {max_seeds}, allowed: 2 to {SEEDS_PER_CELL}, ascending"
        )
    suite = replace(suite, max_seeds=max_seeds, report=replace(suite.report, seeds=seeds))
    workloads = tuple(args.workload or suite.workloads)
    for workload in workloads:
        workload_sha256(workload)
    return Contest(files, server, workloads, Acceptance.parse(args.acceptance), suite, against)


def _read_policies(paths: Sequence[Path]) -> dict[str, PolicyFile]:
    """The files by their names in the table."""
    names = ["learned"] if len(paths) == 1 else [f"learned:{name}" for name in short_names(paths)]
    if len(set(names)) < len(names):
        found = " ".join(map(str, paths))
        raise UserError(f"policy files: found {found}, allowed: each once")
    return {name: read(path) for name, path in zip(names, paths, strict=True)}


def _server_of(args: argparse.Namespace, files: Mapping[str, PolicyFile]) -> Server:
    """The server the command line asks for, or the one that all files name."""
    cards = [file.card for file in files.values()]
    profiles = {card["cost_profile"]["sha256"] for card in cards}
    off_modes = {card["off_mode"] for card in cards}
    if args.profile is None and len(profiles) > 1:
        raise UserError("--profile: found none, allowed: a profile, as the policy files name different ones")
    if args.off_mode is None and len(off_modes) > 1:
        raise UserError("--off-mode: found none, allowed: warm, skip or kv-only, as the policy files differ")
    (first, *_) = files.values()
    profile = first.profile() if args.profile is None else CostProfile.load(args.profile)
    options = ServerOptions(off_mode=args.off_mode or off_modes.pop(), lag=args.lag, mid_flight=True)
    limits = next((card["limits"] for card in cards if card["kind"] == "learned"), None)
    if limits is not None:
        options = replace(options, ttft_limit_s=limits["ttft_s"], tpot_limit_s=limits["tpot_s"])
    return Server(profile, options)


def _check_tiers(file: PolicyFile, server: Server) -> None:
    """UserError unless the policy can run on the server."""
    own, built = file.card["tiers"], list(server.profile.tiers)
    fits = own == built if file.card["kind"] == "learned" else set(own) <= set(built)
    if not fits:
        raise UserError(
            f"{file.source}: tiers: found {own}, allowed: {built}, those of {server.profile.name}"
        )
    deployed(file, server)
