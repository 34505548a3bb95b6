"""What benches of the policy come to: python3 tests/gpu/ratios.py [--by-rounds] FILE... prints a table.

A FILE is a bench.json, or a file of docs/results that holds several under `benches`. Per load: the policy's
output tokens a second, its ratio to the best of `off` and every fixed k, to the server without speculation
and to SGLang's rule, each with its 95 % interval and pairs, and what cannot be told from the best.

--by-rounds: for h200-turns-2026-11-30.json, whose tokens were counted at the client, which favours rounds of
few tokens (docs/decisions.md, 34). A steered turn's tokens are then C (rounds + drafts accepted per request).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from draftdial.controller.bench_adjust import adjusted
from draftdial.controller.bench_report import Run, paired_logs, throughput
from draftdial.controller.statistics import combined_interval

POLICY, NO_SPEC, RULE = "steer", "no-spec", "policy:sglang-adaptive"


COLUMNS = (
    *("acceptance", "C", "repeats", "policy, tok/s", "best fixed", "policy ÷ best", "÷ no speculation"),
    *("÷ adaptive", "off ÷ no speculation"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="+", metavar="FILE")
    parser.add_argument("--by-rounds", action="store_true")
    args = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n")
    for path in args.paths:
        document = json.loads(Path(path).read_text())
        for bench in document.get("benches", {path: document}).values():
            kind = ",".join(bench["options"]["domains"])
            for load in dict.fromkeys(run["load"] for run in bench["runs"]):
                runs = [run for run in bench["runs"] if run["load"] == load]
                if args.by_rounds:
                    runs = [counted_by_rounds(run) for run in runs]
                if bench["options"].get("switchback"):
                    runs = adjusted(runs)
                print(f"| {kind} | {load:g} | {row(runs)} |")


def counted_by_rounds(run: Run) -> Run:
    if "rounds" not in run:
        return run
    drafts = sum(int(k) * rounds for k, rounds in run["rounds_at_k"].items())
    accepted = drafts * (1 - (run["wasted_draft_share"] or 0.0))
    return run | {"output_tok_s": run["load"] * (run["rounds"] + accepted) / run["window_s"]}


def row(runs: list[Run]) -> str:
    by_arm: dict[str, list[Run]] = {}
    for run in runs:
        if not run["failed"]:
            by_arm.setdefault(run["arm"], []).append(run)
    rates = {arm: float(np.mean([throughput(run) for run in of_arm])) for arm, of_arm in by_arm.items()}
    fixed = [arm for arm in rates if arm == "off" or arm.startswith("fixed-")]
    columns: list[Any] = [len(by_arm[POLICY]), f"{rates[POLICY]:,.0f}"]
    if fixed:
        best = max(fixed, key=lambda arm: rates[arm])
        near = [arm for arm in fixed if arm != best and 1 <= ratio(by_arm, arm, best)[2] < math.inf]
        columns += [best + (f" ({', '.join(near)})" if near else ""), shown(by_arm, best)]
    else:
        columns += ["", ""]
    columns += [shown(by_arm, NO_SPEC), shown(by_arm, RULE), shown(by_arm, NO_SPEC, "off")]
    return " | ".join(map(str, columns))


def shown(by_arm: dict[str, list[Run]], rival: str, arm: str = POLICY) -> str:
    if rival not in by_arm or arm not in by_arm:
        return ""
    mean, low, high = ratio(by_arm, arm, rival)
    pairs = len(paired_logs(by_arm[rival], by_arm[arm]))
    return f"{mean:.2f} ({low:.2f} to {high:.2f}; {pairs})"


def ratio(by_arm: dict[str, list[Run]], arm: str, rival: str) -> tuple[float, float, float]:
    """Throughput of `arm` over that of `rival`, paired over cycles, with its interval."""
    mean, low, high = combined_interval([paired_logs(by_arm[rival], by_arm[arm])])
    return math.exp(mean), math.exp(low), math.exp(high)


if __name__ == "__main__":
    main()
