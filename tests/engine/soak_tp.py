"""A long run of real SGLang on two tensor-parallel ranks, which decide separately and must decide alike.

    python tests/engine/soak_tp.py [--rounds 50000] [--limit 1500] [--off-mode kv-only]

The load swings while policies are swapped, modes and forced k change, requests are aborted, broken policies
are offered, the golden vectors of sound ones fail on one rank, and policies fail on both. SGLang's own rank
consensus checker is on where the release has it. Prints a JSON summary. Exit status 1 if ranks disagree or
hang, an output differs from the target's own, or a change does not come out as it must.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import policies
from cpu_server import CpuServer, draft_arguments, target_arguments
from policy_changes import PolicyChanges, WrongOutcome, misfit
from rank_soak import RankSoak
from steered_server import SteeredServer
from swinging_load import Asked, SwingingLoad, post
from tiny_models import write_models
from traffic import ABORT_OVERSHOOT, Reference, random_requests

from draftdial.controller.cost_profile import OffMode
from draftdial.controller.policy_file import PolicyFile

NUM_RANKS = 2
LEVELS = (1, 3, 12, 2, 6, 24, 1, 8, 2)
"""Requests in flight; the server runs 16 at once."""
LEVEL_S, CHANGE_EVERY_S, HANG_S = 2.0, 0.8, 240.0
NUM_REQUESTS = 60
CHECKER_S = 120.0
ENVIRONMENT = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}


def soak(
    folder: Path,
    models: Path,
    reference: Reference,
    num_rounds: int,
    limit_s: float = float("inf"),
    off_mode: OffMode = "warm",
) -> dict[str, Any]:
    """Run a server in `folder` and compare what its two ranks have done; a summary with its `failures`."""
    asked = _asked(reference)
    policy = policies.saved(policies.jumping(seed=0), folder / "policy.safetensors")
    arguments = [*target_arguments(models), *draft_arguments(models), "--tp-size", str(NUM_RANKS)]
    with SteeredServer(
        arguments,
        folder,
        serve=[
            str(policy),
            *("--log", str(folder / "decisions.log")),
            *(("--off-mode", "kv-only") if off_mode == "kv-only" else ()),
        ],
        environment=ENVIRONMENT,
    ) as server:
        changes = PolicyChanges(
            server.url, _files(), [misfit(policies.jumping(0))], num_faulty_ranks=NUM_RANKS, hang_s=HANG_S
        )
        run = RankSoak(
            SwingingLoad(server.url, asked),
            changes,
            num_ranks=NUM_RANKS,
            levels=LEVELS,
            level_s=LEVEL_S,
            change_every_s=CHANGE_EVERY_S,
            hang_s=HANG_S,
            is_kv_only=off_mode == "kv-only",
        )
        run.run(num_rounds, limit_s)
        recorded = run.compare_records(folder)
        is_checked = "Rank consensus checker is enabled" in server.log_text()
        if not run.failures:
            try:
                changes.diverge()
            except WrongOutcome as error:
                run.failures.append(str(error))
        if not run.failures and is_checked and not _checker_notices(server):
            run.failures.append("SGLang's checker did not notice a rank that had decided otherwise")
    if run.num_rounds < num_rounds:
        run.failures.append(f"fewer rounds than asked for: {run.num_rounds}")
    return {
        "sglang": importlib.metadata.version("sglang"),
        "off_mode": off_mode,
        **run.summary(),
        **recorded,
        "consensus_checker": is_checked,
    }


def _checker_notices(server: SteeredServer) -> bool:
    """Does SGLang's own checker end a server whose rank 1 has diverged?"""
    body = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 20}}
    try:
        post(f"{server.url}/generate", body, CHECKER_S)
    except OSError:
        return "Found rank divergence" in server.log_text()
    return False


def _asked(reference: Reference) -> list[Asked]:
    longer = reference.choose(
        random_requests(seed=1, prompt_tokens=(3, 60), new_tokens=(30, 200)), NUM_REQUESTS
    )
    return [
        Asked(request.prompt, request.new_tokens - ABORT_OVERSHOOT, right)
        for request, right in zip(longer, reference.tokens(longer), strict=True)
    ]


def _files() -> list[PolicyFile]:
    return [
        *map(policies.jumping, range(8)),
        *map(policies.learned, range(2)),
        policies.rule("greedy"),
        policies.rule("sglang-adaptive"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50_000, help="decode rounds (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds at most (default: %(default)g)")
    parser.add_argument("--off-mode", choices=("warm", "kv-only"), default="warm")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_models(folder)
        with CpuServer(target_arguments(folder), folder / "reference.log") as target:
            summary = soak(folder, folder, Reference(target), args.rounds, args.limit, args.off_mode)
    print(json.dumps(summary | {"seconds_with_starts": round(time.monotonic() - began, 1)}, indent=1))
    return 1 if summary["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
