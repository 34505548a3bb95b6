"""The same requests, with the same acceptance and lengths, on a server and in simulation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftdial.controller.bench_arms import Arm, SteeredArms
from draftdial.controller.bench_loads import Asking, Load, closed_loads, lengths_of
from draftdial.controller.bench_runs import Bench
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.policy import Policy
from draftdial.controller.policy_file import load_policy
from draftdial.controller.rules import FixedK
from draftdial.controller.validate_sim_report import FIGURES, WASTED, Cell, cell_of
from draftdial.engine_patch.acceptance_arrays import AcceptanceArrays
from draftdial.engine_patch.client import Server, ServerRefused
from draftdial.envs.evaluate import evaluate
from draftdial.envs.replayed_acceptance import ReplayedAcceptance
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine


def server_cells(args: argparse.Namespace, profile: CostProfile) -> list[Cell]:
    """A cell for each arm at each concurrency, the mean over the repeats. The server is put back in the end.

    Raises:
        UserError: the server cannot be compared with this profile and these files.
        ServerRefused: it refused an arm, or a request failed.
    """
    server = Server(args.of, args.api_key)
    status = server.replicas()[0]
    paths = dict(_named(text) for text in args.acceptance)
    _check(args.of, status, profile, paths)
    arms = [Arm.parse(f"fixed-{k}") for k in profile.tiers]
    if args.policy is not None:
        arms.append(Arm.parse(f"policy:{args.policy}"))
    lengths = lengths_of(args.lengths)
    loads = closed_loads(args.closed, args.requests, lengths=lengths, domains=tuple(range(len(paths))))
    asking = Asking(domains=tuple(paths))
    measured = _served(args, server, arms, loads, asking)
    options = ServerOptions(
        off_mode=status["off_mode"],
        lag=1 if server.states()[0].get("disable_overlap_schedule") else 2,
    )
    cells: list[Cell] = []
    for arm in arms:
        simulated = _simulated(arm, loads, args, asking, profile, options, paths)
        for load, of_load in zip(loads, simulated, strict=True):
            served = _means([run for run in measured if (run["arm"], run["load"]) == (arm.name, load.value)])
            assert load.value is not None
            cells.append(cell_of(arm.name, load.workload, load.value, served, of_load))
    return cells


def _check(url: str, status: dict[str, Any], profile: CostProfile, paths: dict[str, Path]) -> None:
    """UserError unless both sides mean the same tiers and the same arrays."""
    replayed = str(status.get("acceptance_replay", ""))
    if not replayed:
        raise UserError(
            f"{url}: replays no recorded acceptance: start it with `draftdial serve --replay-acceptance`"
        )
    sha256 = AcceptanceArrays.read(paths.items()).sha256[:12]
    if sha256 not in replayed:
        raise UserError(
            f"--acceptance: found arrays of sha256 {sha256}, allowed: what {url} replays: {replayed}"
        )
    tiers = [int(k) for k in status["tiers"].split(",")]
    if tiers != list(profile.tiers):
        raise UserError(f"{url}: tiers: found {tiers}, allowed: {list(profile.tiers)}, of {profile.name}")


def _served(
    args: argparse.Namespace, server: Server, arms: Sequence[Arm], loads: Sequence[Load], asking: Asking
) -> list[dict[str, Any]]:
    """The figures of every run, which `bench.json` in the folder keeps."""
    steered = SteeredArms(server, arms, args.deployed)
    settings = argparse.Namespace(
        **{name: getattr(args, name) for name in ("api_key", "lengths", "requests", "repeats", "seed")},
        **{"timeout": args.timeout, "out": args.out, "no_spec": None, "prompts": None},
        **{"slo_ttft": 1.0, "slo_tpot": 0.02, "stop_at_eos": False},
    )
    names = [arm.name for arm in arms]
    bench = Bench(settings, steered, {arm.name: arm for arm in arms}, loads, asking)
    document = bench.begin(names, names[0])
    try:
        bench.run(document)
    finally:
        steered.restore()
    runs: list[dict[str, Any]] = document["runs"]
    failed = sum(run["failed"] for run in runs)
    if failed:
        raise ServerRefused(f"{failed} requests were lost or failed, so nothing can be compared")
    return runs


def _simulated(
    arm: Arm,
    loads: Sequence[Load],
    args: argparse.Namespace,
    asking: Asking,
    profile: CostProfile,
    options: ServerOptions,
    paths: dict[str, Path],
) -> list[dict[str, float]]:
    """Figures for each load, the mean over the repeats' lists."""
    seeds = range(args.seed, args.seed + args.repeats)
    lists = [asking.requests(load, seed) for load in loads for seed in seeds]
    engine = SimulatedEngine(lists, ReplayedAcceptance(paths).bank(0), profile, options)
    metrics = evaluate(_policy(arm, profile), engine)
    of_loads = {
        name: getattr(metrics, name).reshape(len(loads), args.repeats).mean(axis=1) for name in FIGURES
    }
    figures = [{name: float(values[i]) for name, values in of_loads.items()} for i in range(len(loads))]
    if arm.forced_k != 0:
        wasted = metrics.wasted_draft_share.reshape(len(loads), args.repeats).mean(axis=1)
        for of_load, share in zip(figures, wasted.tolist(), strict=True):
            of_load[WASTED] = share
    return figures


def _policy(arm: Arm, profile: CostProfile) -> Policy:
    """The policy of an arm; one from a file prices by its own card, as it does on the server."""
    return FixedK(profile.tiers, arm.forced_k) if arm.policy is None else load_policy(arm.policy)


def _means(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    known = [name for name in (*FIGURES, WASTED) if runs[0].get(name) is not None]
    return {name: float(np.mean([run[name] for run in runs])) for name in known}


def _named(text: str) -> tuple[str, Path]:
    """The domain and the path in `[DOMAIN=]FILE`, as `draftdial serve` reads it."""
    domain, equals, path = text.partition("=")
    return (domain, Path(path)) if equals else (Path(text).stem, Path(text))
