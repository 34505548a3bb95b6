"""The policy against every fixed k, had the host been equally busy for all of them.

    python3 tests/gpu/equal_host.py --acceptance FILE ... --policy FILE ... BENCH.json ...

A host that changes from run to run makes ratios noisy. Each run's throughput is multiplied by what the
simulator says of that run on the load's average host over what it says of it on the run's own: a
model-assisted difference estimator. Both sides of a ratio are corrected alike, so what the simulator gets
wrong of every host cancels. Prints the policy's ratio to the best fixed k with its 95 % interval, as measured
and so corrected, per load, then the geometric means over the loads of each acceptance. Benches are of runs
that count the host (`host_ms_at_k`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from ratios import POLICY, arms_of, rates_of_fixed

from draftdial.controller.bench_report import Run, paired_logs
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.files import sha256_of
from draftdial.controller.policy_file import PolicyFile, read
from draftdial.controller.signals import FloatArray
from draftdial.controller.statistics import combined_interval
from draftdial.controller.validate_sim_acceptance import GivenAcceptance
from draftdial.controller.validate_sim_bench import ServedBench


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("benches", nargs="+", type=Path)
    parser.add_argument("--profile", default="h200-llama3-8b")
    parser.add_argument("--policy", action="append", default=[], type=Path)
    parser.add_argument("--acceptance", action="append", default=[])
    args = parser.parse_args()
    profile, acceptance = CostProfile.load(args.profile), GivenAcceptance(args.acceptance)
    files = [read(path) for path in args.policy]
    by_sha256 = {sha256_of(file.data): file for file in files}
    print("| acceptance | C | as measured | | host equally busy | |", "|---" * 6 + "|", sep="\n")
    measured: dict[str, list[FloatArray]] = {}
    corrected: dict[str, list[FloatArray]] = {}
    for path in args.benches:
        bench = ServedBench.read(path)
        if bench.work.options.get("switchback"):
            raise UserError(f"{path}: found turns, allowed: runs, in which all arms meet the same requests")
        fair = on_equal_host(bench, profile, acceptance, by_sha256)
        for load in dict.fromkeys(run["load"] for run in bench.runs):
            columns = []
            for runs, found in ((bench.runs, measured), (fair, corrected)):
                best, logs = against_best([run for run in runs if run["load"] == load])
                found.setdefault(",".join(bench.work.options["domains"]), []).append(logs)
                columns += [best, shown([logs])]
            print(f"| {bench.kind} | {load:g} | {' | '.join(columns)} |")
    for kind in measured:
        columns = ["", shown(measured[kind]), "", shown(corrected[kind])]
        print(f"| {kind} | all {len(measured[kind])} | {' | '.join(columns)} |")


def on_equal_host(
    bench: ServedBench,
    profile: CostProfile,
    acceptance: GivenAcceptance,
    policies: dict[str, PolicyFile],
) -> list[Run]:
    """The runs of `bench`, their throughput corrected."""
    bench.check(profile, acceptance)
    found: list[Run] = []
    for arm in bench.document["arms"]:
        own, shared = (
            bench.simulated(arm, profile, acceptance, policies, host) or [] for host in ("own", "shared")
        )
        if not own and (arm == POLICY or arm.startswith("fixed-")):
            raise UserError(f"{bench.source}: {arm}: not simulated: needs its --policy, and host_ms_at_k")
        for (run, here), (_, there) in zip(own, shared, strict=True):
            factor = there["output_tok_s"] / here["output_tok_s"]
            found.append(run | {"output_tok_s": factor * run["output_tok_s"]})
    return found


def against_best(runs: list[Run]) -> tuple[str, FloatArray]:
    """The fixed k of the highest mean of those that ran every time, and logs of the policy's ratios to it."""
    by_arm = arms_of(runs)
    best = next(iter(rates_of_fixed(by_arm)))
    return best, paired_logs(by_arm[best], by_arm[POLICY])


def shown(logs: list[FloatArray]) -> str:
    mean, low, high = map(np.exp, combined_interval(logs))
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
