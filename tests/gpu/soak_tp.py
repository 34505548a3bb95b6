"""Two tensor-parallel ranks on GPUs: a soak under swinging load, then throughput steered and at a fixed k.

    python tests/gpu/soak_tp.py URL POLICY --log DECISIONS.log --probe FOLDER --out FILE.json

The server was started with POLICY, off mode `kv-only`, that decision log, and the faults of `engine_probe`,
which records its rounds in FOLDER. Its answers are not checked: weights are random and acceptance is
simulated, so there is nothing right to compare them with (tests/engine/soak_tp.py does). FILE.json is whole
at any time. Exit status 1 if ranks disagree or hang, k = 0 runs the draft, a request fails, or a change does
not come out as it must.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))  # the modules there are no package

import policies
from policy_changes import PolicyChanges, misfit
from rank_soak import RankSoak
from swinging_load import Asked, SwingingLoad, post, status_of

from draftdial.controller.files import atomic_write
from draftdial.controller.policy_export import rule_file
from draftdial.controller.policy_file import PolicyFile, read
from draftdial.controller.rule_cards import rule_from_card
from draftdial.controller.rules import Threshold
from draftdial.engine_patch.control_keys import NO_FORCED_K
from draftdial.engine_patch.decision_log import FLUSH_INTERVAL_S
from draftdial.engine_patch.log_reader import read_log

NUM_RANKS, NUM_REQUESTS = 2, 400
VOCABULARY, PROMPT_TOKENS, NEW_TOKENS = 100_000, (50, 300), (100, 600)
LEVEL_S, CHANGE_EVERY_S, HANG_S = 2.5, 1.0, 40.0
MEASURED_LEVELS, MEASURE_S, FIXED_K = (1, 16, 64, 128), 4.0, 3
WINDOWS = ("steered", "fixed", "fixed", "steered")
SETTLE_S, DRAIN_S, END_S = 1.5, 6.0, 12.0
"""Seconds before a window; and those put by for the end of a level, and for that of the soak."""


def main() -> int:
    args = _arguments()
    began = time.monotonic()
    served = read(args.policy)
    changes = PolicyChanges(
        args.url, _files(served), [misfit(served)], num_faulty_ranks=NUM_RANKS, hang_s=HANG_S
    )
    result: dict[str, Any] = {"is_complete": False, "soak": {}, "throughput": []}

    def report() -> None:
        result["soak"] = run.summary()
        _write(args.out, result)

    run = RankSoak(
        SwingingLoad(args.url, _asked()),
        changes,
        num_ranks=NUM_RANKS,
        levels=args.levels,
        level_s=LEVEL_S,
        change_every_s=CHANGE_EVERY_S,
        hang_s=HANG_S,
        is_kv_only=True,
        report=report,
    )
    window_s = len(WINDOWS) * (SETTLE_S + MEASURE_S) + DRAIN_S
    run.run(args.rounds, args.total_s - len(MEASURED_LEVELS) * window_s - END_S)
    report()
    print(json.dumps(result["soak"]), flush=True)
    try:
        changes.settle()
        for level in MEASURED_LEVELS:
            result["throughput"].append(compare(args, changes, level))
            print(json.dumps(result["throughput"][-1]), flush=True)
            report()
        result["status"] = status_of(args.url, HANG_S)
        if result["status"]["ranks_agree"] != 1:
            run.failures.append("ranks disagree after the throughput runs")
        result |= run.compare_records(args.probe)
        changes.diverge()
        result |= {"is_complete": True, "seconds": round(time.monotonic() - began, 1)}
    except (OSError, AssertionError) as error:
        run.failures.append(f"after the soak: {type(error).__name__}: {error}")
    report()
    return 1 if run.failures else 0


def compare(args: argparse.Namespace, changes: PolicyChanges, level: int) -> dict[str, Any]:
    """Tokens a second of `level` requests in flight: steered, fixed, fixed, steered."""
    load = SwingingLoad(args.url, _asked(), aborted_share=0.0)
    load.set_level(level)
    spans = []
    for kind in WINDOWS:
        changes.force_k(FIXED_K if kind == "fixed" else NO_FORCED_K)
        time.sleep(SETTLE_S)
        began = time.time()
        time.sleep(MEASURE_S)
        spans.append((kind, began, time.time()))
    changes.force_k(NO_FORCED_K)
    assert load.drain(HANG_S), f"requests were not answered within {HANG_S:.0f} s"
    assert not load.errors, f"requests failed: {load.errors[:3]}"
    _flush_log(args)
    windows = [{"k": kind} | measured(args.log, began, ended) for kind, began, ended in spans]
    steered, fixed = (
        sum(window["tok_s"] for window in windows if window["k"] == kind) for kind in ("steered", "fixed")
    )
    return {
        "requests_in_flight": level,
        "fixed_k": FIXED_K,
        "windows": windows,
        "steered_over_fixed": round(steered / fixed, 4),
    }


def measured(log: Path, began: float, ended: float) -> dict[str, Any]:
    """Output tokens of the decode rounds that were launched between two times of the wall clock, from the
    server's own log: each request gets those of its accepted drafts and one more."""
    recorded = read_log(log)
    times = recorded.rounds["time_s"]
    rounds = recorded.rounds[(times >= began) & (times < ended)]
    outcomes = recorded.outcomes[np.isin(recorded.outcomes["round_id"], rounds["round_id"])]
    counts = outcomes["accept_counts"].sum(axis=0, dtype=np.int64)
    tokens = int(counts @ (1 + np.arange(len(counts))))
    return {
        "tok_s": round(tokens / (ended - began), 1),
        "seconds": round(ended - began, 2),
        "rounds_at_k": {str(k): count for k, count in sorted(Counter(rounds["acted_k"].tolist()).items())},
    }


def _flush_log(args: argparse.Namespace) -> None:
    """Whatever is due is written when a result is processed."""
    time.sleep(1.1 * FLUSH_INTERVAL_S)
    parameters = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    post(f"{args.url}/generate", {"input_ids": [5, 6, 7], "sampling_params": parameters}, HANG_S)


def _asked() -> list[Asked]:
    rng = random.Random(0)
    return [
        Asked(
            tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(*PROMPT_TOKENS))),
            rng.randint(*NEW_TOKENS),
        )
        for _ in range(NUM_REQUESTS)
    ]


def _files(served: PolicyFile) -> list[PolicyFile]:
    """The served policy, goodput-greedy over all its tiers, and networks that change k in every round."""
    profile, off_mode = served.profile(), served.card["off_mode"]
    greedy = rule_from_card({"kind": "greedy"}, profile.tiers, profile, off_mode)
    fallback = Threshold(profile.tiers, k=3, batch=64)
    return [
        served,
        rule_file(greedy, profile, off_mode, name="greedy", fallback=fallback),
        *map(policies.jumping, range(3)),
    ]


def _write(path: Path, result: dict[str, Any]) -> None:
    atomic_write(path, json.dumps(result, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("policy", type=Path)
    parser.add_argument("--log", type=Path, required=True, help="the server's decision log")
    parser.add_argument("--probe", type=Path, required=True, help="the server's ENGINE_PROBE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--total-s", type=float, required=True, help="seconds for everything")
    parser.add_argument("--rounds", type=int, default=50_000, help="end the soak after so many")
    parser.add_argument("--levels", type=int, nargs="+", required=True, help="requests in flight, in turn")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
