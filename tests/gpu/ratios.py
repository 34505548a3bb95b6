"""What benches of the policy come to: python3 tests/gpu/ratios.py FILE... prints a table.

A FILE is a bench.json, or a file of docs/results that holds several under `benches`. Per load: the policy's
output tokens a second, its ratio to the best of `off` and every fixed k, to the server without speculation
and to SGLang's rule, each with its 95 % interval and pairs, and what cannot be told from the best; last, the
geometric mean over the loads of each acceptance. Best in hindsight is the highest mean, a little too high as
it is the luckiest, too. An arm that was left out of repeats is neither the best nor told from it.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from draftdial.controller.bench_adjust import adjusted
from draftdial.controller.bench_report import Run, paired_logs, throughput
from draftdial.controller.signals import FloatArray
from draftdial.controller.statistics import combined_interval

POLICY, NO_SPEC, RULE = "steer", "no-spec", "policy:sglang-adaptive"


COLUMNS = (
    *("acceptance", "C", "repeats", "policy, tok/s", "best fixed", "policy ÷ best"),
    *("÷ no speculation", "÷ adaptive", "off ÷ no speculation"),
)


def main(paths: list[str]) -> None:
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n")
    by_kind: dict[str, list[FloatArray]] = {}
    for path in paths:
        document = json.loads(Path(path).read_text())
        for bench in document.get("benches", {path: document}).values():
            kind = ",".join(bench["options"]["domains"])
            for load in dict.fromkeys(run["load"] for run in bench["runs"]):
                runs = [run for run in bench["runs"] if run["load"] == load]
                if bench["options"].get("switchback"):
                    runs = adjusted(runs)
                by_arm = arms_of(runs)
                print(f"| {kind} | {load:g} | {row(by_arm)} |")
                if rates := rates_of_fixed(by_arm):
                    best = next(iter(rates))
                    by_kind.setdefault(kind, []).append(paired_logs(by_arm[best], by_arm[POLICY]))
    for kind, loads in by_kind.items():
        print(f"| {kind} | all {len(loads)} | | | | {interval(combined_interval(loads))} | | | |")


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


def row(by_arm: dict[str, list[Run]]) -> str:
    columns: list[Any] = [len(by_arm[POLICY]), f"{np.mean([throughput(run) for run in by_arm[POLICY]]):,.0f}"]
    if rates := rates_of_fixed(by_arm):
        best = next(iter(rates))
        near = [arm for arm in rates if arm != best and ratio(by_arm, arm, best)[2] >= 0]
        columns += [best + (f" ({', '.join(near)})" if near else ""), shown(by_arm, best)]
    else:
        columns += ["", ""]
    columns += [shown(by_arm, NO_SPEC), shown(by_arm, RULE), shown(by_arm, NO_SPEC, "off")]
    return " | ".join(map(str, columns))


def shown(by_arm: dict[str, list[Run]], rival: str, arm: str = POLICY) -> str:
    pairs = paired_logs(by_arm.get(rival, []), by_arm.get(arm, []))
    return interval(combined_interval([pairs]), f"; {len(pairs)}") if len(pairs) > 1 else ""


def ratio(by_arm: dict[str, list[Run]], arm: str, rival: str) -> tuple[float, float, float]:
    """Logarithm of the throughput of `arm` over that of `rival`, paired over cycles, with its interval."""
    return combined_interval([paired_logs(by_arm[rival], by_arm[arm])])


def interval(logs: tuple[float, float, float], more: str = "") -> str:
    mean, low, high = map(math.exp, logs)
    return f"{mean:.2f} ({low:.2f} to {high:.2f}{more})"


if __name__ == "__main__":
    main(sys.argv[1:])
