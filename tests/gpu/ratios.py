"""What benches of the policy come to: python3 tests/gpu/ratios.py FILE... prints a table.

A FILE is a bench.json, or a file of docs/results that holds several under `benches`. Per load: the policy's
output tokens a second, its ratio to the best of `off` and every fixed k, to the server without speculation
and to other policies, each with its 95 % interval and pairs, and what cannot be told from the best; which k
the policy ran, and how long the host was busy in a round of the policy and of the best; last, the
geometric mean over the loads of each acceptance. The policy is `steer`, or `--arm policy:NAME`. Best in
hindsight is the highest mean, a little too high as it is the luckiest, too. An arm that was left out of
repeats is neither the best nor told from it.

Intervals take pairs for independent. Two servers are not slow together, so pairs of neighbouring turns may be
alike: `--block 4` takes the mean of every four of them for one.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from typing import Any

import numpy as np
from unpack import document_of

from draftdial.controller.bench_adjust import adjusted
from draftdial.controller.bench_report import Run, paired_logs, throughput
from draftdial.controller.host_time import HostTime
from draftdial.controller.signals import FloatArray
from draftdial.controller.statistics import combined_interval

POLICY, NO_SPEC = "steer", "no-spec"

COLUMNS = (
    *("acceptance", "C", "repeats", "policy, tok/s", "best fixed", "policy ÷ best"),
    *("÷ no speculation", "÷ other policies", "off ÷ no speculation", "policy's k", "host busy, ms"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+")
    parser.add_argument("--only", nargs="+", help="these benches of a file that holds several")
    parser.add_argument("--block", type=int, default=1, help="consecutive pairs that count as one")
    parser.add_argument("--arm", default=POLICY, help="the policy")
    args = parser.parse_args()
    if args.block < 1:
        parser.error(f"--block: found {args.block}, allowed: 1 or more")
    rows: list[str] = []
    by_kind: dict[str, list[FloatArray]] = {}
    names: dict[str, None] = {}
    arms: dict[str, None] = {}
    for path in args.files:
        for name, bench in benches_of(path).items():
            names[name] = None
            if args.only and name not in args.only:
                continue
            kind = ",".join(bench["options"]["domains"])
            for load in dict.fromkeys(run["load"] for run in bench["runs"]):
                runs = [run for run in bench["runs"] if run["load"] == load]
                if bench["options"].get("switchback"):
                    runs = adjusted(runs)
                by_arm = arms_of(runs)
                arms |= dict.fromkeys(by_arm)
                if args.arm not in by_arm:
                    continue
                rows.append(f"| {kind} | {load:g} | {row(by_arm, args.arm, args.block)} |")
                rates = rates_of_fixed(by_arm)
                pairs = pairs_of(by_arm, next(iter(rates)), args.arm, args.block) if rates else []
                if len(pairs):
                    by_kind.setdefault(kind, []).append(pairs)
    if unknown := [name for name in args.only or () if name not in names]:
        sys.exit(f"--only: found {unknown[0]}, allowed: {', '.join(names)}")
    if not rows:
        sys.exit(f"--arm: found {args.arm}, allowed: an arm that answered a request: {', '.join(arms)}")
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows, sep="\n")
    for kind, loads in by_kind.items():
        print(f"| {kind} | all {len(loads)} | | | | {interval(combined_interval(loads))} | | | | | |")


def benches_of(path: str) -> dict[str, Any]:
    """By name, or by its path the one that `path` is; in open loops throughput says nothing of the server."""
    document = document_of(path)
    benches: dict[str, Any] = document.get("benches", {path: document})
    for bench in benches.values():
        if "options" not in bench or any(run["mode"] != "closed" for run in bench["runs"]):
            sys.exit(f"{path}: found no bench of closed loops, allowed: one, or several as `benches`")
    return benches


def arms_of(runs: list[Run]) -> dict[str, list[Run]]:
    by_arm: dict[str, list[Run]] = {}
    for run in runs:
        if not run["failed"]:
            by_arm.setdefault(run["arm"], []).append(run)
    return by_arm


def rates_of_fixed(by_arm: dict[str, list[Run]]) -> dict[str, float]:
    """Mean throughput of `off` and every fixed k that ran in all repeats, the highest first."""
    fixed = {arm: runs for arm, runs in by_arm.items() if arm == "off" or arm.startswith("fixed-")}
    most = max(map(len, fixed.values()), default=0)
    whole = {arm: runs for arm, runs in fixed.items() if len(runs) == most}
    rates = {arm: float(np.mean([throughput(run) for run in runs])) for arm, runs in whole.items()}
    return dict(sorted(rates.items(), key=lambda item: -item[1]))


def row(by_arm: dict[str, list[Run]], policy: str, block: int) -> str:
    columns: list[Any] = [len(by_arm[policy]), f"{np.mean([throughput(run) for run in by_arm[policy]]):,.0f}"]
    compared = [policy]
    if rates := rates_of_fixed(by_arm):
        best = next(iter(rates))
        compared.append(best)
        near = [arm for arm in rates if arm != best and ratio(by_arm, arm, best)[2] >= 0]
        columns += [best + (f" ({', '.join(near)})" if near else ""), shown(by_arm, policy, best, block)]
    else:
        columns += ["", ""]
    others = [arm for arm in by_arm if arm != policy and (arm == POLICY or arm.startswith("policy:"))]
    columns.append(shown(by_arm, policy, NO_SPEC, block))
    columns.append(", ".join(f"{arm} {shown(by_arm, policy, arm, block)}" for arm in others))
    columns.append(shown(by_arm, "off", NO_SPEC, block))
    columns += [share_of_k(by_arm[policy]), " / ".join(host_ms(by_arm[arm]) for arm in compared)]
    return " | ".join(map(str, columns))


def shown(by_arm: dict[str, list[Run]], arm: str, rival: str, block: int) -> str:
    pairs = pairs_of(by_arm, rival, arm, block)
    return interval(combined_interval([pairs]), f"; {len(pairs)}") if len(pairs) > 1 else ""


def pairs_of(by_arm: dict[str, list[Run]], rival: str, arm: str, block: int) -> FloatArray:
    """Log of the ratio of each `block` consecutive pairs; what is left over at the end is left out."""
    pairs = paired_logs(by_arm.get(rival, []), by_arm.get(arm, []))
    whole = len(pairs) // block * block
    means: FloatArray = pairs[:whole].reshape(-1, block).mean(axis=1)
    return means


def share_of_k(runs: list[Run]) -> str:
    """Of the rounds, those of 1 % and more."""
    rounds: Counter[str] = Counter()
    for run in runs:
        rounds.update(run.get("rounds_at_k", {}))
    shares = {k: 100 * number / rounds.total() for k, number in rounds.most_common()}
    return ", ".join(f"{k}: {share:.1f} %" for k, share in shares.items() if share >= 1)


def host_ms(runs: list[Run]) -> str:
    """In a round with drafts, or at k = 0 where only that is known."""
    host = HostTime.of(runs)
    ms = host.off_ms if host.drafts_ms is None else host.drafts_ms
    return "?" if ms is None else f"{ms:.1f}"


def ratio(by_arm: dict[str, list[Run]], arm: str, rival: str) -> tuple[float, float, float]:
    """Logarithm of the throughput of `arm` over that of `rival`, paired over cycles, with its interval."""
    return combined_interval([paired_logs(by_arm[rival], by_arm[arm])])


def interval(logs: tuple[float, float, float], more: str = "") -> str:
    mean, low, high = map(math.exp, logs)
    return f"{mean:.2f} ({low:.2f} to {high:.2f}{more})"


if __name__ == "__main__":
    main()
