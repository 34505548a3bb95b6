"""A scheduler that does with requests what SGLang's does, as far as the plugin can see, with no model.

It admits all that wait, decodes, and reads results `lag` - 1 rounds late, as the overlap loop does.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from draftdial.engine_patch.dial import Dial
from draftdial.engine_patch.round_outcomes import FinishedRound
from draftdial.engine_patch.scheduler_signals import SchedulerSignals

POOL_TOKENS = 1000


class Mode:
    """SGLang's `ForwardMode`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def is_extend(self) -> bool:
        return self._name == "extend"

    def is_decode(self) -> bool:
        return self._name == "decode"


class Request:
    """SGLang's `Req`."""

    def __init__(self, rid: str, num_prompt: int, num_output: int) -> None:
        self.rid = rid
        self.origin_input_ids = [0] * num_prompt
        self.output_ids: list[int] = []
        self.finished_reason: Any = None
        self.finished_len: int | None = None
        self.is_retracted = False
        self.extend_end: int | None = None
        self.sampling_params = SimpleNamespace(max_new_tokens=num_output)

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)


class SchedulerDouble:
    """What `SchedulerSignals` reads, moved by hand: `queue`, `prefill`, `decode`, `settle`."""

    def __init__(self, lag: int = 1, max_running: int = 16) -> None:
        self.waiting_queue: list[Request] = []
        self.chunked_req: Request | None = None
        self.running_batch = SimpleNamespace(reqs=[])
        self.max_running_requests = max_running
        self.max_total_num_tokens = POOL_TOKENS
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=self._available)
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 0)
        self.server_args = SimpleNamespace(skip_server_warmup=True)
        self.signals = SchedulerSignals(self)
        self.dial: Dial | None = None
        self.over: list[Request] = []
        self._lag = lag
        self._joining: list[Request] = []
        self._in_flight: deque[tuple[Any, Any]] = deque()

    def queue(self, rid: str, num_prompt: int = 10, num_output: int = 100) -> Request:
        """A request arrives."""
        request = Request(rid, num_prompt, num_output)
        self.waiting_queue.append(request)
        self.signals.queued(request, False)
        return request

    def retract(self, request: Request) -> None:
        """A running request goes back to the queue."""
        self.running_batch.reqs = [other for other in self.running_batch.reqs if other is not request]
        request.is_retracted = True
        self.waiting_queue.append(request)
        self.signals.queued(request, True)

    def prefill(self, *requests: Request, chunk_end: int | None = None) -> None:
        """Prefill queued requests whole, or the last of them up to `chunk_end`."""
        self._merge()
        self.waiting_queue = [request for request in self.waiting_queue if request not in requests]
        self.chunked_req = None
        tokens = sum(request.seqlen for request in requests)
        if chunk_end is not None:
            self.chunked_req = requests[-1]
            tokens -= self.chunked_req.seqlen - chunk_end
            self.chunked_req.extend_end = chunk_end
        batch = SimpleNamespace(
            reqs=list(requests),
            forward_mode=Mode("extend"),
            extend_num_tokens=tokens,
            has_grammar=False,
            chunked=self.chunked_req,
        )
        for request in requests:
            request.is_retracted = False
        self._joining = [request for request in requests if request is not self.chunked_req]
        self.signals.launching(batch)
        self._launch(batch, SimpleNamespace())

    def decode(self, accepted: int | None = None) -> int:
        """One decode round, `accepted` drafts for each request (all where None); its k."""
        self._merge()
        self.running_batch.reqs = [r for r in self.running_batch.reqs if r.finished_reason is None]
        batch = SimpleNamespace(
            reqs=list(self.running_batch.reqs), forward_mode=Mode("decode"), has_grammar=False
        )
        self.signals.launching(batch)
        if self.dial is None:
            self.signals.row(len(batch.reqs))
            k, result = 0, SimpleNamespace()
        else:
            k = self.dial.get_steps_for_batch(len(batch.reqs))
            result = SimpleNamespace(speculative_num_draft_tokens=k + 1)
            round_id = self.dial.launched()
            if round_id is not None:
                result.draftdial_round = round_id
        result.num_correct_drafts_per_req_cpu = [k if accepted is None else min(k, accepted)] * len(
            batch.reqs
        )
        self._launch(batch, result)
        return k

    def settle(self) -> None:
        """Read every result that is still out."""
        while self._in_flight:
            self._process(*self._in_flight.popleft())

    def _launch(self, batch: Any, result: Any) -> None:
        self._in_flight.append((batch, result))
        while len(self._in_flight) >= self._lag:
            self._process(*self._in_flight.popleft())

    def _process(self, batch: Any, result: Any) -> None:
        if batch.forward_mode.is_decode():
            finished = FinishedRound.read(result, batch, has_probes=self.signals.has_probes)
            if finished is not None and self.dial is not None:
                self.dial.observe(finished.round_id, finished.k, finished.accepted)
            for request, n in zip(batch.reqs, result.num_correct_drafts_per_req_cpu, strict=True):
                self._commit(request, n + 1)
        else:
            for request in batch.reqs:
                if request is not batch.chunked:
                    self._commit(request, 1)
        self.over += self.signals.processed(batch)

    def _commit(self, request: Request, num_tokens: int) -> None:
        if request.finished_reason is not None or request.is_retracted:
            return
        request.output_ids += [0] * num_tokens
        if len(request.output_ids) >= request.sampling_params.max_new_tokens:
            request.finished_reason = "length"
            request.finished_len = request.sampling_params.max_new_tokens

    def _merge(self) -> None:
        self.running_batch.reqs = [*self.running_batch.reqs, *self._joining]
        self._joining = []

    def _available(self) -> int:
        return POOL_TOKENS - sum(r.seqlen for r in self.running_batch.reqs if r.finished_reason is None)
