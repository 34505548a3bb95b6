"""What a policy sees, kept up to date from what SGLang's scheduler does.

`row` is on the launch path and touches neither the queue nor the batch: queued requests are counted as they
come and go, running ones while a result is processed, after the next launch.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from draftdial.controller.signals import RoundSignals

HEALTH_CHECK_PREFIX, HEALTH_CHECK_NEW_TOKENS = "HEALTH_CHECK", 1
"""How the id begins of the requests by which SGLang probes itself, and what they ask for. A client may choose
such an id for a request of its own, which counts if it is longer."""
WARM_UP_NEW_TOKENS = 8
WARM_UP_MOST_PROMPT_TOKENS = 32
"""SGLang's own first request: "The capital city of France is", or three token ids, and eight tokens more."""


class Tracked:
    """What is remembered about a request, in its attribute `draftdial`: it goes when the request goes."""

    __slots__ = ("arrived_round", "id", "is_finished", "is_probe", "queued_tokens")

    def __init__(self, number: int, arrived_round: int, is_probe: bool) -> None:
        self.id = number
        self.arrived_round = arrived_round
        self.is_probe = is_probe
        """A health check or the server's warm-up: never counted, never learned from."""
        self.is_finished = False
        self.queued_tokens = 0


class SchedulerSignals:
    """`RoundSignals` of one row, with the meanings that the simulator gives them (see `envs/kernels.py`).

    Two differ by what a scheduler knows: under overlap `mean_context_tokens` lacks the tokens of the round
    in flight, and a request that ends with its first token counts as admitted.
    """

    def __init__(self, scheduler: Any, *, has_warm_up: bool = False) -> None:
        self._scheduler = scheduler
        self._warm_up_may_come = has_warm_up
        self.values = RoundSignals.zeros(1)
        """The newest row."""
        self.round_id = -1
        """Of the newest row."""
        self.resyncs = 0
        """Times that the queue lost requests unseen (aborts) and was counted anew."""
        self.processed_s = 0.0
        """When the newest result had been read, by the monotonic clock; 0 before the first."""
        self._num_requests = 0
        self._num_probes = 0
        self._tokens_of_finished = 0
        self._waiting: OrderedDict[str, Any] = OrderedDict()
        self._waiting_tokens = 0
        self._gone: list[Any] = []
        """Requests that left the queue unseen since the last result."""
        self._num_live = 0
        self._context_tokens = 0
        self._num_admitted = 0
        self._num_finished = 0
        self._num_prefill_tokens = 0
        self._rows: list[Any] = []
        """Requests of the batch launched last."""
        self.is_prefill = False
        self.has_grammar = False
        """Is there structured output in it? A round then waits for the one before, to know what may come."""
        self._chunked: Any = None
        self._kv_used_tokens = _kv_counter(scheduler)
        self._kv_pool_tokens = int(scheduler.max_total_num_tokens)
        self.values.max_running[0] = scheduler.max_running_requests

    @property
    def has_probes(self) -> bool:
        """Is there a health check or the warm-up among the requests that wait or run?"""
        return self._num_probes > 0

    # The launch path.

    def is_probe_round(self, batch_size: int) -> bool:
        """Does the coming round hold nothing but health checks and warm-up?"""
        return self.has_probes and len(self._rows) > 0 and all(map(is_probe, self._rows))

    def row(self, batch_size: int) -> RoundSignals:
        """The signals before the coming round of `batch_size` requests; the next call overwrites them."""
        scheduler, values = self._scheduler, self.values
        if len(scheduler.waiting_queue) != len(self._waiting):
            self._resync()
        num_waiting, waiting_tokens, oldest = len(self._waiting), self._waiting_tokens, None
        if num_waiting:
            oldest = next(iter(self._waiting.values()))
        chunked = scheduler.chunked_req
        if chunked is not None:
            num_waiting += 1
            waiting_tokens += unfilled_tokens(chunked)
            oldest = chunked
        self.round_id += 1
        values.round_id[0] = self.round_id
        values.num_running[0] = batch_size
        values.num_waiting[0] = num_waiting
        values.num_waiting_prompt_tokens[0] = waiting_tokens
        values.oldest_wait_rounds[0] = 0 if oldest is None else self.round_id - self._arrived_round(oldest)
        values.mean_context_tokens[0] = self._context_tokens // max(1, self._num_live)
        values.kv_used_fraction[0] = self._kv_used_tokens() / self._kv_pool_tokens
        values.num_admitted[0] = self._num_admitted
        values.num_finished[0] = self._num_finished
        values.num_prefill_tokens[0] = self._num_prefill_tokens
        self._num_admitted = self._num_finished = self._num_prefill_tokens = 0
        return values

    def launching(self, batch: Any) -> None:
        """`batch` is about to run: a prefill takes its requests out of the queue and into the server."""
        self._rows, self.is_prefill = batch.reqs, batch.forward_mode.is_extend()
        self.has_grammar = batch.has_grammar
        if not self.is_prefill:
            return
        self._num_prefill_tokens += batch.extend_num_tokens or 0
        before, self._chunked = self._chunked, self._scheduler.chunked_req
        for req in batch.reqs:
            # Others are decoding rows that a mixed batch takes along.
            is_starting = self._leave_queue(req) or req is before
            if is_starting and req is not self._chunked:
                self._num_live += 1
                self._context_tokens += req.seqlen
                self._num_admitted += not is_probe(req)

    # Off the launch path.

    def queued(self, req: Any, is_retracted: bool) -> bool:
        """`req` was offered to the queue, which may have refused it; is it new to the server?"""
        is_new = getattr(req, "draftdial", None) is None
        if is_retracted:
            self._num_live -= 1
            self._context_tokens -= req.seqlen
        queue = self._scheduler.waiting_queue
        if not queue or queue[-1] is not req:
            return False
        if is_new:
            self._track(req)
        self._join_queue(req)
        return is_new

    def processed(self, batch: Any) -> list[Any]:
        """The result of `batch` has been read: the requests that are over since the last one."""
        is_decode = batch.forward_mode.is_decode()
        finished = []
        for req in batch.reqs:
            if req.finished_reason is not None:
                tracked = getattr(req, "draftdial", None)
                if tracked is not None and not tracked.is_finished:
                    tracked.is_finished = True
                    self._num_probes -= tracked.is_probe
                    if not tracked.is_probe:
                        finished.append(req)
                        self._tokens_of_finished += _output_tokens(req)
        if is_decode:
            self._num_finished += len(finished)
        self._num_live, self._context_tokens = 0, 0
        for req in self._live():
            self._num_live += 1
            self._context_tokens += len(req.origin_input_ids) + len(req.output_ids)
        over, self._gone = finished + self._gone, []
        self.processed_s = time.perf_counter()
        return over

    def output_tokens(self) -> int:
        """Of all requests up to the newest result, also of those that go on; without probes. O(requests)."""
        live = [*self._live(), *self._scheduler.waiting_queue]  # those that were sent back keep theirs
        if self._chunked is not None and self._chunked.finished_reason is None:
            live.append(self._chunked)  # also while they are prefilled again
        return self._tokens_of_finished + sum(len(req.output_ids) for req in live if not is_probe(req))

    def recount(self) -> dict[str, int]:
        """The running totals counted from nothing, to compare with `totals`; a debugging aid, O(requests)."""
        queue = self._scheduler.waiting_queue
        live = list(self._live())
        return {
            "num_waiting": len(queue),
            "num_waiting_prompt_tokens": sum(req.seqlen for req in queue),
            "num_live": len(live),
            "context_tokens": sum(req.seqlen for req in live),
        }

    def totals(self) -> dict[str, int]:
        """The running totals as they are kept."""
        return {
            "num_waiting": len(self._waiting),
            "num_waiting_prompt_tokens": self._waiting_tokens,
            "num_live": self._num_live,
            "context_tokens": self._context_tokens,
        }

    def _arrived_round(self, req: Any) -> int:
        tracked: Tracked | None = getattr(req, "draftdial", None)
        return self.round_id if tracked is None else tracked.arrived_round

    def _live(self) -> Iterable[Any]:
        """Requests past their prefill that are not known to have finished."""
        running = self._scheduler.running_batch.reqs
        for req in running:
            if req.finished_reason is None:
                yield req
        if self.is_prefill and self._rows is not running:
            # A prefill in flight joins the running batch only when the next batch is formed.
            seen = set(map(id, running))
            for req in self._rows:
                if req is not self._chunked and req.finished_reason is None and id(req) not in seen:
                    yield req

    def _track(self, req: Any) -> Tracked:
        is_warm_up = (
            self._warm_up_may_come
            and req.sampling_params.max_new_tokens == WARM_UP_NEW_TOKENS
            and len(req.origin_input_ids) <= WARM_UP_MOST_PROMPT_TOKENS
        )
        is_health_check = (
            isinstance(req.rid, str)
            and req.rid.startswith(HEALTH_CHECK_PREFIX)
            and req.sampling_params.max_new_tokens == HEALTH_CHECK_NEW_TOKENS
        )
        if not is_health_check:
            self._warm_up_may_come = False
        self._num_requests += 1
        tracked = Tracked(self._num_requests, self.round_id + 1, is_health_check or is_warm_up)
        self._num_probes += tracked.is_probe
        req.draftdial = tracked
        return tracked

    def _join_queue(self, req: Any) -> None:
        req.draftdial.queued_tokens = req.seqlen
        self._waiting[req.rid] = req
        self._waiting_tokens += req.draftdial.queued_tokens

    def _leave_queue(self, req: Any) -> bool:
        """Count `req` out of the queue; was it there?"""
        was_there = self._waiting.pop(req.rid, None) is not None
        if was_there:
            self._waiting_tokens -= req.draftdial.queued_tokens
        return was_there

    def _resync(self) -> None:
        """Count the queue anew: requests left it unseen. They do so only when aborted, so this is rare."""
        self.resyncs += 1
        before = self._waiting
        self._waiting, self._waiting_tokens = OrderedDict(), 0
        queue = {req.rid: req for req in self._scheduler.waiting_queue}
        stayed, new = [rid for rid in before if rid in queue], [rid for rid in queue if rid not in before]
        for rid in stayed + new:  # as they came: SGLang sorts its queue, by prefix or priority
            req = queue[rid]
            if getattr(req, "draftdial", None) is None:
                self._track(req)
            self._join_queue(req)
        for rid, req in before.items():
            if rid in queue:
                continue
            self._num_probes -= req.draftdial.is_probe
            if not req.draftdial.is_probe:
                self._gone.append(req)
                self._tokens_of_finished += _output_tokens(req)


def is_probe(req: Any) -> bool:
    """Is `req` a health check or the server's warm-up?"""
    tracked = getattr(req, "draftdial", None)
    return tracked is not None and tracked.is_probe


def _output_tokens(req: Any) -> int:
    """Of a request that is over, without what its last round made beyond the end."""
    end = getattr(req, "finished_len", None)
    return len(req.output_ids) if end is None else int(end)


def unfilled_tokens(req: Any) -> int:
    """Tokens of a request in the middle of a chunked prefill that have not been prefilled."""
    end = getattr(req, "extend_end", None)
    if end is None:  # before 0.5.23 it was a range
        extend_range = getattr(req, "extend_range", None)
        end = 0 if extend_range is None else extend_range.end
    remaining: int = max(0, req.seqlen - end)
    return remaining


def _kv_counter(scheduler: Any) -> Callable[[], int]:
    """A function that counts the KV slots in use, those reserved for drafts among them."""
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    pool_tokens = int(scheduler.max_total_num_tokens)
    available, evictable = allocator.available_size, cache.evictable_size
    try:
        evictable()
    except NotImplementedError:  # caches of models that mix full and sliding-window attention
        evictable = cache.full_evictable_size
        available = getattr(allocator, "full_available_size", available)
    return lambda: pool_tokens - int(available()) - int(evictable())
