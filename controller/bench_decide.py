"""`draftdial bench-decide`: what a decision costs on the launch path of a server."""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import sys
import time
from collections import deque
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from draftdial.controller.errors import UserError
from draftdial.controller.policy_file import PolicyFile, read
from draftdial.controller.seeded_policy import PROFILE, SEEDED, seeded_policy
from draftdial.controller.signals import FloatArray
from draftdial.engine_patch.dial import Dial
from draftdial.engine_patch.scheduler_signals import SchedulerSignals

DEFAULT_POLICY = Path("runs/demo/policy.safetensors")
DECISIONS = 100_000
CONCURRENCIES = (1, 4, 16, 64, 256, 32, 8, 2)
"""As far as a server that the policy was made for admits so many."""
ROUNDS_AT_EACH = 250
MEAN_PROMPT_TOKENS = 600
MEAN_OUTPUT_TOKENS = 250
ACCEPTANCE = 0.7
POOL_TOKENS = 1_000_000
LAG = 2
SETTLING_ROUNDS = 3
"""Rounds from losing the core to another process until the caches are warm again."""


class _Request:
    """As much of an SGLang request as is read."""

    finished_reason: str | None = None
    is_retracted = False

    def __init__(self, rid: str, prompt_tokens: int, output_tokens: int) -> None:
        self.rid = rid
        self.origin_input_ids = range(prompt_tokens)
        self.output_ids = range(1)
        self.last_token = output_tokens

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)


class _Batch:
    """A batch, its own forward mode."""

    has_grammar = False

    def __init__(self, reqs: list[_Request], extend_num_tokens: int | None) -> None:
        self.reqs = reqs
        self.extend_num_tokens = extend_num_tokens
        self.forward_mode = self

    def is_extend(self) -> bool:
        return self.extend_num_tokens is not None

    def is_decode(self) -> bool:
        return self.extend_num_tokens is None


class _Steps:
    """Stands where SGLang's own rule does."""

    def __init__(self, tiers: tuple[int, ...]) -> None:
        self.candidate_steps = list(tiers)


class _Server:
    """A scheduler without a model: requests come, are prefilled, decode and finish, and the dial is told.

    The load jumps between concurrencies; which drafts are right is drawn from a seed. It is its own
    KV allocator and prefix cache.
    """

    chunked_req = None
    max_total_num_tokens = POOL_TOKENS

    def __init__(self, policy: PolicyFile) -> None:
        self.max_running_requests = policy.profile().max_running
        self.concurrencies = [min(concurrency, self.max_running_requests) for concurrency in CONCURRENCIES]
        self._rng = np.random.default_rng(0)
        self._ids = count()
        self.waiting_queue: list[_Request] = []
        self.running_batch = _Batch([], None)
        self.token_to_kv_pool_allocator = self.tree_cache = self
        self._in_flight: deque[tuple[int, int, list[_Request]]] = deque()
        self.num_rounds = 0
        self.dial = Dial(_Steps(tuple(policy.card["tiers"])), None)  # type: ignore[arg-type]
        self.dial.off_mode = policy.card["off_mode"]  # the server that it was made for
        self.dial.activate(self.dial.load(policy.data))
        self._signals = SchedulerSignals(self)
        self.dial.bind(self._signals, None, None)

    def available_size(self) -> int:
        return POOL_TOKENS - MEAN_PROMPT_TOKENS * len(self.running_batch.reqs)

    def evictable_size(self) -> int:
        return 0

    def run_round(self) -> tuple[int, int]:
        """One decode round and the prefill before it: nanoseconds of its decision, and of the feedback of the
        round whose result is read now; 0 where that had no drafts to learn from."""
        self._admit()
        running = self.running_batch
        start = time.perf_counter_ns()
        k = self.dial.get_steps_for_batch(len(running.reqs))
        decision_ns = time.perf_counter_ns() - start
        self._signals.launching(running)
        round_id = self.dial.launched()
        assert round_id is not None, "every round here is decided"
        self._in_flight.append((round_id, k, running.reqs))
        self.num_rounds += 1
        return decision_ns, self._read_result() if len(self._in_flight) == LAG else 0

    def _admit(self) -> None:
        """Fill up to the concurrency of the moment by one prefill batch."""
        concurrency = self.concurrencies[self.num_rounds // ROUNDS_AT_EACH % len(self.concurrencies)]
        missing = concurrency - len(self.running_batch.reqs)
        if missing <= 0:
            return
        prompt, output = self._rng.geometric(
            [[1 / MEAN_PROMPT_TOKENS], [1 / MEAN_OUTPUT_TOKENS]], (2, missing)
        )
        for tokens, last_token in zip(prompt.tolist(), output.tolist(), strict=True):
            request: Any = _Request(str(next(self._ids)), tokens, last_token)
            self.waiting_queue.append(request)
            self._signals.queued(request, False)
        prefill = _Batch(self.waiting_queue, int(prompt.sum()))
        self.waiting_queue = []
        self._signals.launching(prefill)
        self._signals.processed(prefill)
        self.running_batch = _Batch(self.running_batch.reqs + prefill.reqs, None)

    def _read_result(self) -> int:
        round_id, k, reqs = self._in_flight.popleft()
        live = [req for req in reqs if req.finished_reason is None]
        accepted = np.minimum(self._rng.geometric(1.0 - ACCEPTANCE, len(live)) - 1, k).tolist()
        start = time.perf_counter_ns()
        self.dial.observe(round_id, k, accepted)
        feedback_ns = time.perf_counter_ns() - start
        for req, n in zip(live, accepted, strict=True):
            req.output_ids = range(len(req.output_ids) + n + 1)
            if len(req.output_ids) >= req.last_token:
                req.finished_reason = "length"
        self._signals.processed(_Batch(reqs, None))
        self.dial.settled()
        self.running_batch = _Batch(
            [req for req in self.running_batch.reqs if req.finished_reason is None], None
        )
        return feedback_ns if k else 0


def bench(policy: PolicyFile, num_decisions: int = DECISIONS) -> dict[str, Any]:
    """Time `num_decisions` calls of `Dial.get_steps_for_batch`, after a run through every load.

    Raises:
        UserError: the policy cannot be loaded, or it failed.
    """
    server = _Server(policy)
    cycle = len(CONCURRENCIES) * ROUNDS_AT_EACH
    for _ in range(cycle):
        server.run_round()
    num_decisions = math.ceil(num_decisions / cycle) * cycle  # ends under the load it began with
    # Filled, so that their pages are resident from the start.
    times_ns, preempted = np.full((num_decisions, 2), -1), np.full(num_decisions, -1)
    blocks, resident = _allocated_blocks(), _usage().ru_maxrss
    for i in range(num_decisions):
        times_ns[i] = server.run_round()
        preempted[i] = _usage().ru_nivcsw
    blocks = _allocated_blocks() - blocks
    resident = _usage().ru_maxrss - resident
    if server.dial.fallback is not None:
        raise UserError(f"{policy.source}: the policy failed: {server.dial.fallback}")
    decision_us, observe_us = times_ns.T / 1e3
    undisturbed = decision_us[SETTLING_ROUNDS:][preempted[SETTLING_ROUNDS:] == preempted[:-SETTLING_ROUNDS]]
    return {
        "policy": server.dial.policy_name,
        "decisions": num_decisions,
        "most_running": max(server.concurrencies),
        "median_us": _percentile(decision_us, 50),
        "p99_us": _percentile(decision_us, 99),
        "undisturbed_decisions": len(undisturbed),
        "undisturbed_p99_us": _percentile(undisturbed, 99),
        "observe_median_us": _percentile(observe_us[observe_us > 0], 50),
        "allocated_blocks_growth": blocks,
        "resident_kb_growth": resident,
        "decision_hash": server.dial.decision_hash,
    }


def _allocated_blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def _usage() -> resource.struct_rusage:
    return resource.getrusage(resource.RUSAGE_SELF)


def _percentile(values_us: FloatArray, share: float) -> float | None:
    return round(float(np.percentile(values_us, share)), 2) if len(values_us) else None


def add_parser(subparsers: Any) -> None:
    """`draftdial bench-decide [POLICY] [--decisions N] [--json]`."""
    parser: argparse.ArgumentParser = subparsers.add_parser("bench-decide", help="time a decision")
    parser.add_argument(
        "policy",
        nargs="?",
        type=Path,
        metavar="POLICY",
        help=f"default: {DEFAULT_POLICY}, or if there is none, fixed random weights",
    )
    parser.add_argument("--decisions", type=int, default=DECISIONS, metavar="N", help="at least this many")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=_run)


def _policy(path: Path | None) -> PolicyFile:
    """The policy at `path`, or where none is named the default one, or one of the same size."""
    if path is None and not DEFAULT_POLICY.exists():
        return seeded_policy()
    return read(path or DEFAULT_POLICY)


def _run(args: argparse.Namespace) -> int:
    if args.decisions < 1:
        raise UserError(f"--decisions: found {args.decisions}, allowed: 1 or more")
    policy = _policy(args.policy)
    result = bench(policy, args.decisions)
    if args.json:
        print(json.dumps(result))
        return 0
    if args.policy is None and result["policy"] == SEEDED:
        print(f"no {DEFAULT_POLICY} here: fixed random weights for {PROFILE} stand in for a trained policy")
    loads = f"loads of 1 to {result['most_running']} requests"
    print(f"policy: {result['policy']}, {result['decisions']:,} decisions under {loads}")
    print(f"on the launch path: median {result['median_us']} µs, p99 {result['p99_us']} µs")
    share = result["undisturbed_decisions"] / result["decisions"]
    print(
        f"  p99 {result['undisturbed_p99_us']} µs of the {share:.0%} with no other process on the core before"
    )
    if result["observe_median_us"] is not None:
        print(f"off it, to learn from a round with drafts: median {result['observe_median_us']} µs")
    blocks, resident = result["allocated_blocks_growth"], result["resident_kb_growth"]
    print(f"memory since the first ones: {blocks:+,} blocks allocated, {resident:+,} kB resident at the peak")
    return 0
