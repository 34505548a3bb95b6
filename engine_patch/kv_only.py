"""Off mode `kv-only`: rounds at k = 0 and the prefills between them leave out the draft; its KV is made good
before anything reads it.

What the first speculating round needs besides, the draft's hidden state and first token, comes from one
ordinary round at k = 0 just before it: "on" becomes "one warm round, then on". docs/off.md has the reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from draftdial.engine_patch import compat, rank_agreement
from draftdial.engine_patch.kv_only_backlog import Backlog, Owed
from draftdial.engine_patch.kv_only_prefill import Prefill, is_plain
from draftdial.engine_patch.kv_only_projection import DraftKv, obstacle
from draftdial.engine_patch.rank_agreement import Vote
from draftdial.engine_patch.warm_restart import WarmRestart

logger = logging.getLogger(__name__)

_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
TARGET = f"{_WORKER}._draft_extend_for_decode"
PREFILL = f"{_WORKER}._draft_extend_for_prefill"

TOLERANCE = 0.05
"""Most that the projection may differ from what the draft wrote, as a share of the largest entry. Types of
eight bits of mantissa differ by a hundredth; a wrong input differs by as much as the entries themselves."""

_current: KvOnly | None = None


def start(scheduler: Any) -> KvOnly:
    """Make every round at k = 0 of this process a `kv-only` one where that can be.

    A collective: all ranks of a tensor-parallel group must call it.
    """
    global _current
    _current = KvOnly(scheduler)
    return _current


class Projected(NamedTuple):
    """`(rows, num_heads, width of a head)`"""

    key: Any
    value: Any


class KvOnly:
    """This off mode in one process; the same happens on every rank.

    The first round that would leave the draft out runs it all the same and compares what it wrote with the
    projection: only then is that trusted; and so does the first prefill. Any exception makes k = 0 `warm` for
    good; what was owed by then stays unwritten.
    """

    def __init__(self, scheduler: Any) -> None:
        self.fallback = ""
        """Why k = 0 keeps running the draft; empty where it does not."""
        self.num_rounds = 0
        """Decode rounds that left the draft out."""
        self.num_prefills = 0
        """Prefills that did."""
        self.restart = WarmRestart()
        self._scheduler = scheduler
        self._draft_kv: DraftKv | None = None
        self._backlog = Backlog()
        self._proven: set[str] = set()
        """Of `decode` and `prefill`."""
        self._agree(self._prepared)

    def decide(self, k: int) -> int:
        """What the coming round runs, where `k` was decided."""
        if not self.fallback:
            return self.restart.decide(k)
        is_cold, self.restart.is_cold = self.restart.is_cold, False
        return 0 if is_cold else k

    def extend(
        self, original: Callable[..., Any], worker: Any, batch: Any, result: Any, **kwargs: Any
    ) -> Any:
        """In place of SGLang's draft extend after a decode round; see `around_draft_extend_for_decode`."""

        def run() -> Any:
            self.settle()
            return original(worker, batch, result, **kwargs)

        if not self.restart.leaves_out or self.fallback:
            return run()
        owed = _owed(batch, result)
        if "decode" not in self._proven:
            self.restart.is_cold = False
            return self._prove("decode", owed, run)
        self._owe(owed, [request.rid for request in batch.reqs])
        if self._backlog.is_half_full:
            self.settle()  # while the GPU is busy with this round
        if self.fallback:
            return run()
        self._fill(result.next_draft_input, owed)
        self.num_rounds += 1
        return None

    def prefill(
        self,
        original: Callable[..., Any],
        worker: Any,
        batch: Any,
        hidden: Any,
        next_token_ids: Any,
        embeds: Any = None,
        **kwargs: Any,
    ) -> Any:
        """In place of SGLang's draft extend after a prefill; see `around_draft_extend_for_prefill`."""

        def run() -> Any:
            self.settle()  # it reads prefixes, and reuses the slots of requests that have ended
            return original(worker, batch, hidden, next_token_ids, embeds, **kwargs)

        if not self.restart.is_cold or self.fallback or not is_plain(batch, embeds):
            return run()
        assert self._draft_kv is not None
        try:
            prefill = Prefill(worker, batch, hidden, next_token_ids)
            after = prefill.draft_input(self._draft_kv.width)
        except Exception as error:
            self._fall_back(f"{type(error).__name__}: {error}")
            return run()
        if "prefill" not in self._proven:
            return self._prove("prefill", prefill.owed, run) if prefill.proves else run()
        self._owe(prefill.owed, None)
        if self.fallback:
            return run()
        self.num_prefills += 1
        return after

    def settle(self) -> None:
        """Write all of the draft's KV that is owed: something is about to read it, or to reuse its slots."""
        taken = self._backlog.take()
        if taken is not None:
            self._attempt(self._write, *taken)

    def _prepared(self) -> str:
        """Get hold of the draft's projections; why that cannot be, if so."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        missing = {TARGET, PREFILL} - set(getattr(HookRegistry, "_patched", {TARGET, PREFILL}))
        if missing:
            return f"this SGLang has no {min(missing)}"
        arguments = self._scheduler.server_args
        if arguments.enable_hierarchical_cache or arguments.disaggregation_mode != "null":
            return "this server copies KV elsewhere"
        runner = self._scheduler.model_worker.draft_worker.draft_runner
        is_multimodal = bool(getattr(self._scheduler.model_config, "is_multimodal", False))
        reason = obstacle(runner, compat.release(), is_multimodal=is_multimodal)
        if not reason:
            self._draft_kv = DraftKv(runner)
        return reason

    def _prove(self, what: str, owed: Owed, run: Callable[[], Any]) -> Any:
        """Run the draft, and compare what it writes with the projection made before."""
        projected, reason = None, ""
        try:
            projected = self._projected(owed)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        returned = run()
        self._proven.add(what)
        self._agree(lambda: reason or self._difference(projected, owed.slots))
        return returned

    def _owe(self, owed: Owed, requests: list[str] | None) -> None:
        """Keep what a round or a prefill needs, or write it where it is too much to be kept."""
        if not self._backlog.takes(owed):
            self.settle()
        if self.fallback:
            return
        if self._backlog.takes(owed):
            self._attempt(self._backlog.add, owed, requests)
        else:
            self._attempt(self._write, owed, [slice(None)])

    def _attempt(self, step: Callable[..., None], *args: Any) -> None:
        try:
            step(*args)
        except Exception as error:
            self._fall_back(f"{type(error).__name__}: {error}")

    def _write(self, owed: Owed, parts: list[slice]) -> None:
        assert self._draft_kv is not None
        key, value = self._projected(owed)
        for part in parts:
            self._draft_kv.write(owed.slots[part], key[part], value[part])

    def _projected(self, owed: Owed) -> Projected:
        assert self._draft_kv is not None
        fused = self._draft_kv.fused(owed.hidden)
        return Projected(*self._draft_kv.project(owed.token_ids.long(), fused, owed.positions))

    def _fill(self, after: Any, owed: Owed) -> None:
        """Shape what a next round at k > 0 would begin with. Only a measurement begins one without the draft
        having run, and then any value will do that the draft's vocabulary has."""
        import torch

        assert self._draft_kv is not None
        after.topk_index = torch.zeros_like(owed.token_ids, dtype=torch.int64)[:, None]
        after.topk_p = torch.ones_like(after.topk_index, dtype=torch.float32)
        after.hidden_states = owed.hidden[:, : self._draft_kv.width]

    def _difference(self, projected: Projected | None, slots: Any) -> str:
        """How the projection differs from what the draft has just written; empty if it does not."""
        assert self._draft_kv is not None and projected is not None
        mine = projected.key, projected.value
        for name, ours, theirs in zip(("keys", "values"), mine, self._draft_kv.written(slots), strict=True):
            largest = float(theirs.abs().max())
            difference = float((ours - theirs).abs().max())
            if not difference <= TOLERANCE * largest:
                return f"the draft's {name} differ from their projection by {difference:.3g} of {largest:.3g}"
        return ""

    def _agree(self, check: Callable[[], str]) -> None:
        """Fall back on all ranks if `check` finds a reason to on any; a collective."""
        try:
            reason = check()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        self._fall_back(rank_agreement.refusal(rank_agreement.gather(self._scheduler, Vote(reason, "", ""))))

    def _fall_back(self, reason: str) -> None:
        if reason:
            self.fallback = reason
            logger.warning("draftdial: off mode kv-only: k = 0 stays warm: %s", reason)


def _owed(batch: Any, result: Any) -> Owed:
    """Of the token that a round has added to each of its requests."""
    hidden = result.logits_output.hidden_states
    return Owed(hidden, result.next_token_ids, batch.seq_lens, batch.out_cache_loc)


def around_draft_extend_for_decode(
    original: Callable[..., Any], worker: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `EagleDraftWorker._draft_extend_for_decode`, which runs the draft after verification."""
    if _current is None or args:
        return original(worker, batch, result, *args, **kwargs)
    return _current.extend(original, worker, batch, result, **kwargs)


def around_draft_extend_for_prefill(
    original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `EagleDraftWorker._draft_extend_for_prefill`, which runs the draft over prompts."""
    if _current is None:
        return original(worker, batch, *args, **kwargs)
    return _current.prefill(original, worker, batch, *args, **kwargs)


def hooks() -> list[compat.Hook]:
    """What a server with this off mode hooks besides."""
    return [
        compat.Hook(TARGET, "around", around_draft_extend_for_decode),
        compat.Hook(PREFILL, "around", around_draft_extend_for_prefill),
    ]
