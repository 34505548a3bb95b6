"""What one scheduler process shows to the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from draftdial.controller import policy_weights
from draftdial.engine_patch import kv_only
from draftdial.engine_patch.kv_only_projection import DraftKv
from draftdial.engine_patch.lockstep import Lockstep
from draftdial.engine_patch.round_outcomes import FinishedRound

FAULT_KEY = "probe_fault"
"""Control key: the policy's next decision raises (1), is no built tier (2), or is no number (3)."""

GOLDEN_KEY = "probe_golden"
"""Control key: the rank on which the golden vectors of any policy fail from now on, -1 for none."""

DIVERGE_KEY = "probe_diverge"
"""Control key: the rank whose hash of decisions changes now, as if it had decided otherwise once."""


KV_ONLY_KEY = "probe_kv_only"
"""Control key: the projection of off mode `kv-only` writes nothing from now on (1), raises (2), works (0)."""


LATE_KEY = "probe_late"
"""Control key: an environment in lockstep hears of each round one round later (1), or no more (0)."""


class Probe:
    """The hooks' target; see `engine_probe.plugin` for what it writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.worker: Any = None
        self.scheduler: Any = None
        self.rounds: TextIO | None = None
        self.signals: TextIO | None = None
        self.newest_round = -1

    def controller_made(self, _result: Any, controller: Any, *_args: Any, **_kwargs: Any) -> None:
        self.worker = controller.worker

    def scheduler_ready(self, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        self.scheduler = scheduler
        rank = torch.distributed.get_rank(scheduler.tp_cpu_group)
        self.rounds = (self.folder / f"rounds-{rank}.txt").open("w", buffering=1)
        self.signals = (self.folder / f"signals-{rank}.jsonl").open("w", buffering=1)

    def round_decided(self, _result: Any, controller: Any, batch_size: int, *_args: Any) -> None:
        if self.rounds is not None:
            self.rounds.write(f"{batch_size} {controller.worker.speculative_num_steps}\n")

    def signals_read(self, _result: Any, dial: Any, batch_size: int, *_args: Any) -> None:
        """The batch of the coming round is the scheduler's running one: count everything anew from it."""
        if self.signals is None or dial.signals is None or dial.signals.round_id == self.newest_round:
            return  # a round of health checks has no signals
        self.newest_round, row = dial.signals.round_id, dial.signals.values
        seen = {field.name: getattr(row, field.name)[0].item() for field in fields(row)}
        line = {"seen": seen, "counted": self._count(batch_size)}
        self.signals.write(json.dumps(line) + "\n")

    def control(self, _scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
        keys = (FAULT_KEY, GOLDEN_KEY, DIVERGE_KEY, KV_ONLY_KEY, LATE_KEY)
        faults = {key: request.server_args.pop(key, None) for key in keys}
        if all(value is None for value in faults.values()):
            return
        from draftdial.engine_patch import dial

        current = dial.current()
        assert current is not None
        rank = torch.distributed.get_rank(self.scheduler.tp_cpu_group)
        if faults[FAULT_KEY] is not None:
            current.policy.decide = _FAULTS[int(faults[FAULT_KEY])]  # type: ignore[method-assign]
        if faults[GOLDEN_KEY] is not None:
            is_here = faults[GOLDEN_KEY] == rank
            policy_weights.replay_features = _wrong_features if is_here else _replay_features
        if faults[DIVERGE_KEY] == rank:
            current.decision_hash ^= 1
        if faults[LATE_KEY] is not None:
            Lockstep.finished = _late([]) if faults[LATE_KEY] else _finished  # type: ignore[method-assign]
        if faults[KV_ONLY_KEY] is not None:
            DraftKv.write = (_write, lambda *_args: None, _raise)[faults[KV_ONLY_KEY]]  # type: ignore[method-assign]

    def releasing(self, req: Any, *_args: Any, **_kwargs: Any) -> None:
        if self.worker is None or not str(req.rid).startswith("kv-"):
            return
        if kv_only._current is not None:
            kv_only._current.settle()  # as whatever reads the draft's KV next would
        pool = self.worker.draft_worker.draft_runner.token_to_kv_pool
        row = req.kv.req_pool_idx if hasattr(req.kv, "req_pool_idx") else req.req_pool_idx
        num_tokens = len(req.origin_input_ids) + len(req.output_ids) - 1  # the last one was never fed back
        table = self.scheduler.req_to_token_pool.req_to_token
        slots = table[row, :num_tokens].long()
        np.savez(
            self.folder / f"{req.rid}.npz",
            keys=pool.get_key_buffer(0)[slots].float().numpy(),
            values=pool.get_value_buffer(0)[slots].float().numpy(),
        )

    def _count(self, batch_size: int) -> dict[str, float]:
        scheduler = self.scheduler
        waiting = [req.seqlen for req in scheduler.waiting_queue]
        contexts = [len(req.origin_input_ids) + len(req.output_ids) for req in scheduler.running_batch.reqs]
        pool = scheduler.max_total_num_tokens
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        return {
            "num_running": len(contexts),
            "num_waiting": len(waiting),
            "num_waiting_prompt_tokens": sum(waiting),
            "mean_context_tokens": sum(contexts) // max(1, len(contexts)),
            "kv_used_fraction": (pool - free) / pool,
            "max_running": scheduler.max_running_requests,
            "is_chunking": scheduler.chunked_req is not None,
        }


_replay_features = policy_weights.replay_features
_write = DraftKv.write
_finished = Lockstep.finished


def _late(held: list[FinishedRound]) -> Callable[[Lockstep, FinishedRound], None]:
    """What overlap scheduling does on a GPU: the next round is decided before this one's outcome is known."""

    def finished(followed: Lockstep, newest: FinishedRound) -> None:
        if held:
            _finished(followed, held.pop())
        held.append(newest)

    return finished


def _wrong_features(features: Any) -> Any:
    """What a rank with a faulty library might compute."""
    return _replay_features(features) * np.float32(1.001)


def _raise(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError("injected by a test")


_FAULTS: dict[int, Any] = {
    1: _raise,
    2: lambda *_args, **_kwargs: np.array([99]),
    3: lambda *_args, **_kwargs: np.array([np.nan]),
}
