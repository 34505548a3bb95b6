"""Two tensor-parallel ranks on GPUs: a soak under swinging load, then throughput steered and at a fixed k.

    python tests/gpu/soak_tp.py URL POLICY --out FILE.json

The server was started with POLICY. Its answers are not checked: weights are random and acceptance is
simulated, so there is nothing right to compare them with (tests/engine/soak_tp.py does). Exit status 1 if
ranks disagree or hang, a request fails, or a change does not come out as it must.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))  # the modules there are no package

import policies
from policy_changes import PolicyChanges
from rank_soak import RankSoak
from swinging_load import Asked, SwingingLoad, post, status_of

from draftdial.controller.policy_export import rule_file
from draftdial.controller.policy_file import PolicyFile, read
from draftdial.controller.rule_cards import rule_from_card
from draftdial.controller.rules import Threshold
from draftdial.engine_patch.control_keys import FORCE_K_KEY, NO_FORCED_K, policy_key

NUM_REQUESTS = 400
SETTLE_S = 1.5


def main() -> int:
    args = _arguments()
    served = read(args.policy)
    began = time.monotonic()
    load = SwingingLoad(args.url, _asked(args))
    run = RankSoak(
        load,
        PolicyChanges(args.url, _files(served), [], num_faulty_ranks=0),
        num_ranks=args.ranks,
        levels=args.levels,
        level_s=args.level_s,
        change_every_s=args.change_every_s,
        hang_s=args.hang_s,
    )
    run.run(args.rounds, args.soak_s)
    result: dict[str, Any] = {"soak": run.summary(), "throughput": []}
    _write(args.out, result)
    print(json.dumps(result["soak"]), flush=True)
    if not run.failures:
        _send(args.url, {policy_key(served.data): 1})
        for level in args.measured_levels:
            result["throughput"].append(compare(args, level))
            print(json.dumps(result["throughput"][-1]), flush=True)
            _write(args.out, result)
    result |= {"seconds": round(time.monotonic() - began, 1), "status": status_of(args.url, args.hang_s)}
    if result["status"].get("ranks_agree") != 1:
        run.failures.append("ranks disagree after the throughput runs")
    _write(args.out, result)
    return 1 if run.failures else 0


def compare(args: argparse.Namespace, level: int) -> dict[str, Any]:
    """Tokens a second of `level` requests in flight: steered, fixed, fixed, steered."""
    load = SwingingLoad(args.url, _asked(args), aborted_share=0.0)
    load.set_level(level)
    windows: list[tuple[str, float, float]] = []
    rounds: dict[str, dict[str, int]] = {}
    for kind in ("steered", "fixed", "fixed", "steered"):
        _send(args.url, {FORCE_K_KEY: args.fixed_k if kind == "fixed" else NO_FORCED_K})
        time.sleep(SETTLE_S)
        before, began = status_of(args.url), time.monotonic()
        time.sleep(args.measure_s)
        ended, after = time.monotonic(), status_of(args.url)
        windows.append((kind, began, ended))
        counted = rounds.setdefault(kind, {})
        for name in before:
            if name.startswith("rounds_at_k."):
                k = name.rpartition(".")[2]
                counted[k] = counted.get(k, 0) + after[name] - before[name]
    _send(args.url, {FORCE_K_KEY: NO_FORCED_K})
    load.drain(args.hang_s)
    rates = {
        kind: [load.tokens_per_s(began, ended) for each, began, ended in windows if each == kind]
        for kind in rounds
    }
    steered, fixed = (sum(rates[kind]) / len(rates[kind]) for kind in ("steered", "fixed"))
    return {
        "requests_in_flight": level,
        "steered_tok_s": [round(rate, 1) for rate in rates["steered"]],
        f"k={args.fixed_k}_tok_s": [round(rate, 1) for rate in rates["fixed"]],
        "steered_over_fixed": round(steered / fixed, 4),
        "rounds_at_k": rounds,
        "errors": load.errors[:3],
    }


def _asked(args: argparse.Namespace) -> list[Asked]:
    rng = random.Random(0)
    return [
        Asked(
            tuple(rng.randrange(3, args.vocabulary) for _ in range(rng.randint(*args.prompt_tokens))),
            rng.randint(*args.new_tokens),
        )
        for _ in range(NUM_REQUESTS)
    ]


def _files(served: PolicyFile) -> list[PolicyFile]:
    """The served policy, goodput-greedy over all its tiers, and networks that change k in every round."""
    greedy = rule_from_card({"kind": "greedy"}, served.profile().tiers, served.profile(), "warm")
    fallback = Threshold(served.profile().tiers, k=3, batch=64)
    return [
        served,
        rule_file(greedy, served.profile(), "warm", name="greedy", fallback=fallback),
        *map(policies.jumping, range(3)),
    ]


def _send(url: str, values: dict[str, int]) -> None:
    answer = post(f"{url}/set_internal_state", {"server_args": values})
    if answer != [True]:
        raise SystemExit(
            f"the server refused {[key[:40] for key in values]}: {status_of(url)['last_control']}"
        )


def _write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("policy", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50_000, help="end the soak after so many")
    parser.add_argument("--soak-s", type=float, default=280.0, help="or after so long")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 4, 2, 32, 1, 8, 3, 128, 1, 16, 2, 64])
    parser.add_argument("--level-s", type=float, default=2.5)
    parser.add_argument("--change-every-s", type=float, default=0.8)
    parser.add_argument("--hang-s", type=float, default=60.0)
    parser.add_argument("--measured-levels", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--measure-s", type=float, default=4.0)
    parser.add_argument("--fixed-k", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=100_000)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[50, 400])
    parser.add_argument("--new-tokens", type=int, nargs=2, default=[50, 300])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
