"""Serves what is to be compared: a benchmark of every fixed k, and of policies, on a running server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from draftdial.controller.bench_arms import Arm, SteeredArms
from draftdial.controller.bench_checks import check_lengths
from draftdial.controller.bench_runs import Bench, Limits
from draftdial.controller.bench_work import Work
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.validate_sim_acceptance import GivenAcceptance
from draftdial.controller.validate_sim_bench import ServedBench, check_server
from draftdial.engine_patch.client import Server, ServerRefused

_OF_WORK = ("closed", "requests", "lengths", "repeats", "seed")


def served(
    args: argparse.Namespace,
    url: str,
    profile: CostProfile,
    acceptance: GivenAcceptance,
    policies: Sequence[Arm],
) -> ServedBench:
    """The bench, which `bench.json` in the folder keeps. The server is put back in the end.

    Raises:
        UserError: the server cannot be compared with this profile and these files, or a request is too long.
        ServerRefused: it refused an arm, or a request failed.
    """
    server = Server(url, args.api_key)
    check_server(server.replicas()[0], url, profile, acceptance, acceptance.domains)
    arms = [*(Arm.parse(f"fixed-{k}" if k else "off") for k in profile.tiers), *policies]
    work = Work.of({name: getattr(args, name) for name in _OF_WORK} | {"domains": acceptance.domains})
    check_lengths(work, server)
    steered = SteeredArms(server, arms, args.deployed)
    bench = Bench(steered, arms, work, args.out, limits=Limits(timeout_s=args.timeout), api_key=args.api_key)
    document = bench.measured(arms[0].name)
    failed = sum(run["failed"] for run in document["runs"])
    if failed:
        raise ServerRefused(f"{failed} requests were lost or failed, so nothing can be compared")
    return ServedBench.of(document, url)
