"""Is the host fast enough to be measured on? Exit status 1 if the GPU waits for it.

    python3 tests/gpu/host_check.py URL --out FILE.jsonl         # appends what launching rounds took

Two requests decode at k = 1, the round with drafts that hides least of the host: on a quiet one
launching takes 3 to 4 ms of its 5.5; on a shared one it has been seen to take 5 to 7 for minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from draftdial.controller.cell_timings import WARM_UP_ROUNDS
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.measured_server import MeasuredServer
from draftdial.engine_patch.client import Server
from draftdial.engine_patch.measurement_plan import Phase

BATCH, CONTEXT, ROUNDS = 2, 100, 150
SLOW = 1.05
"""Times the profile's round."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--profile", default="h200-llama3-8b")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    server = MeasuredServer(Server(args.url), Server(args.url, timeout_s=60.0), seed=0)
    k = min(k for k in server.tiers if k)
    try:
        report = server.run([Phase(k, WARM_UP_ROUNDS + ROUNDS)], BATCH, CONTEXT, (k + 1) * ROUNDS + 100)
    finally:
        server.close()
    rounds = np.array([times for _, place, *times in report["rounds"] if place >= WARM_UP_ROUNDS])
    period_ms, launch_ms, _, context = rounds.T
    profile = CostProfile.load(args.profile)
    column = profile.tiers.index(k)
    expected_s = profile.round_s(np.array([BATCH]), np.array([round(context.mean())]), "warm")[0, column]
    found = {
        "at_s": round(time.time()),
        "launch_ms": np.quantile(launch_ms, [0.1, 0.5, 0.9]).round(3).tolist(),
        "period_ms": np.quantile(period_ms, [0.1, 0.5, 0.9]).round(3).tolist(),
        "median_over_profile": round(float(np.median(period_ms)) / (1e3 * float(expected_s)), 4),
    }
    with args.out.open("a") as file:
        file.write(json.dumps(found) + "\n")
    print(found)
    return int(found["median_over_profile"] > SLOW)


if __name__ == "__main__":
    sys.exit(main())
