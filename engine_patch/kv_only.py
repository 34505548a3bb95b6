"""Off mode `kv-only`: a round at k = 0 keeps the draft's KV and leaves out the rest of the draft.

What the first speculating round needs besides, the draft's hidden state and first token, comes from one
ordinary round at k = 0 just before it: "on" becomes "one warm round, then on". docs/off.md has the reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from draftdial.controller.cost_profile import OffMode
from draftdial.engine_patch import compat, rank_agreement
from draftdial.engine_patch.kv_only_projection import DraftKv, obstacle
from draftdial.engine_patch.rank_agreement import Vote

logger = logging.getLogger(__name__)

TARGET = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode"

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
    """Of one round, a row for each request; tensors."""

    token_ids: Any
    fused: Any
    key: Any
    value: Any


class WarmRestart:
    """Turns "on" into "one warm round, then on". What it says depends on the decisions before alone.

    A decision that had to wait is made good in the next round, also where that one decides 0: else one that
    probes with a single round would never learn anything.
    """

    def __init__(self) -> None:
        self.leaves_out = False
        """Does the newest round leave the draft out?"""
        self.is_cold = False
        """Did it, so that none may speculate next?"""
        self.num_restarts = 0
        """Rounds that a decision above 0 had to wait for."""
        self._owed_k = 0

    def decide(self, k: int) -> int:
        """What the coming round runs, where `k` was decided."""
        self.leaves_out = False
        if k > 0 and self.is_cold:
            self.is_cold, self._owed_k = False, k
            self.num_restarts += 1
            return 0
        k, self._owed_k = k or self._owed_k, 0
        self.leaves_out = self.is_cold = k == 0
        return k

    def measure(self, k: int, off_mode: OffMode) -> None:
        """The coming round runs `k`, in this off mode where that is 0, because a measurement says so."""
        self._owed_k = 0
        self.leaves_out = k == 0 and off_mode == "kv-only"
        self.is_cold = k == 0 and off_mode != "warm"

    def forget(self) -> None:
        """Owe nothing any more: somebody else decides from now on."""
        self._owed_k = 0


class KvOnly:
    """This off mode in one process; the same happens on every rank.

    The first round that would leave the draft out runs it all the same and compares what it wrote with the
    projection: only then is that trusted. Any exception makes k = 0 `warm` for good.
    """

    def __init__(self, scheduler: Any) -> None:
        self.fallback = ""
        """Why k = 0 keeps running the draft; empty where it does not."""
        self.num_rounds = 0
        """Rounds that left the draft out."""
        self.restart = WarmRestart()
        self._scheduler = scheduler
        self._draft_kv: DraftKv | None = None
        self._is_proven = False
        self._agree(self._prepared)

    def decide(self, k: int) -> int:
        """What the coming round runs, where `k` was decided."""
        return k if self.fallback else self.restart.decide(k)

    def extend(
        self, original: Callable[..., Any], worker: Any, batch: Any, result: Any, **kwargs: Any
    ) -> Any:
        """In place of SGLang's draft extend after a decode round; see `around_draft_extend_for_decode`."""
        if not self.restart.leaves_out or self.fallback:
            return original(worker, batch, result, **kwargs)
        if not self._is_proven:
            return self._prove(original, worker, batch, result, **kwargs)
        try:
            self._project(batch, result)
            self.num_rounds += 1
        except Exception as error:
            self._fall_back(f"{type(error).__name__}: {error}")
            return original(worker, batch, result, **kwargs)
        return None

    def _prepared(self) -> str:
        """Get hold of the draft's projections; why that cannot be, if so."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        if TARGET not in getattr(HookRegistry, "_patched", {TARGET}):
            return f"this SGLang has no {TARGET}"
        runner = self._scheduler.model_worker.draft_worker.draft_runner
        is_multimodal = bool(getattr(self._scheduler.model_config, "is_multimodal", False))
        reason = obstacle(runner, compat.release(), is_multimodal=is_multimodal)
        if not reason:
            self._draft_kv = DraftKv(runner)
        return reason

    def _prove(
        self, original: Callable[..., Any], worker: Any, batch: Any, result: Any, **kwargs: Any
    ) -> Any:
        """Run the draft, and compare what it writes with the projection made before."""
        slots, projected, reason = batch.out_cache_loc, None, ""
        try:
            projected = self._projected(batch, result)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        returned = original(worker, batch, result, **kwargs)
        self.restart.is_cold, self._is_proven = False, True
        self._agree(lambda: reason or self._difference(projected, slots))
        return returned

    def _project(self, batch: Any, result: Any) -> None:
        """Write the draft's KV of the token that the round has added to each request.

        What the next round at k > 0 would begin with is filled with what is at hand: none comes before a
        round that runs the draft.
        """
        import torch

        projected = self._projected(batch, result)
        assert self._draft_kv is not None
        self._draft_kv.write(batch.out_cache_loc, projected.key, projected.value)
        after, token_ids = result.next_draft_input, projected.token_ids
        after.topk_index = token_ids[:, None]
        after.topk_p = torch.ones((len(token_ids), 1), dtype=torch.float32, device=token_ids.device)
        after.hidden_states = projected.fused

    def _projected(self, batch: Any, result: Any) -> Projected:
        draft_kv, token_ids = self._draft_kv, result.next_token_ids.long()
        assert draft_kv is not None
        fused = draft_kv.fused(result.logits_output.hidden_states)
        return Projected(token_ids, fused, *draft_kv.project(token_ids, fused, batch.seq_lens))

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


def around_draft_extend_for_decode(
    original: Callable[..., Any], worker: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `EagleDraftWorker._draft_extend_for_decode`, which runs the draft after verification."""
    if _current is None or args:
        return original(worker, batch, result, *args, **kwargs)
    return _current.extend(original, worker, batch, result, **kwargs)


def hooks() -> list[compat.Hook]:
    """What a server with this off mode hooks besides."""
    return [compat.Hook(TARGET, "around", around_draft_extend_for_decode)]
