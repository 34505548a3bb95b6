"""What one scheduler process shows to the tests beyond its rounds."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from draftdial.engine_patch import kv_only


class Probe:
    """The hooks' target; see `engine_probe.plugin` for what it writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.worker: Any = None
        self.scheduler: Any = None
        self.signals: TextIO | None = None
        self.kv_lengths: TextIO | None = None
        self.newest_round = -1

    def controller_made(self, _result: Any, controller: Any, *_args: Any, **_kwargs: Any) -> None:
        self.worker = controller.worker

    def scheduler_ready(self, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        self.scheduler = scheduler
        rank = torch.distributed.get_rank(scheduler.tp_cpu_group)
        self.signals = (self.folder / f"signals-{rank}.jsonl").open("w", buffering=1)
        self.kv_lengths = (self.folder / f"kv-lengths-{rank}.txt").open("w", buffering=1)

    def allocating(self, *_args: Any, nxt_kv_lens_cpu: Any, **_kwargs: Any) -> None:
        if self.kv_lengths is not None:
            self.kv_lengths.write(f"{type(nxt_kv_lens_cpu).__name__}\n")

    def signals_read(self, _result: Any, dial: Any, batch_size: int, *_args: Any) -> None:
        """The batch of the coming round is the scheduler's running one: count everything anew from it."""
        if self.signals is None or dial.signals is None or dial.signals.round_id == self.newest_round:
            return  # a round of health checks has no signals
        self.newest_round, row = dial.signals.round_id, dial.signals.values
        seen = {field.name: getattr(row, field.name)[0].item() for field in fields(row)}
        line = {"seen": seen, "counted": self._count(batch_size)}
        self.signals.write(json.dumps(line) + "\n")

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
