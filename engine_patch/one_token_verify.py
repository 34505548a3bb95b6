"""FlashAttention 3 over the one token of a round at k = 0, scheduled once for all layers as for a decode.

SGLang verifies that token as it verifies drafts, and then every layer launches a kernel that works out how
sequences are split among multiprocessors (`prepare_varlen_num_blocks`; 0.11 ms in a round of Llama-3.1-8B at
batch 32 on an H200). A decoding server computes that once a round. Here a verification of one token goes
through the backend's own decode attention. It reads and writes the same KV.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from draftdial.engine_patch import compat

logger = logging.getLogger(__name__)

RELEASES = ("0.5.17",)
"""Those on which it has run on a GPU; on others such a round keeps SGLang's way."""

_BACKEND = "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend"

num_graphs = 0
"""CUDA graphs of this process whose round at k = 0 is scheduled once."""


def after_decode_metadata(
    _result: Any, backend: Any, forward_batch: Any, in_capture: bool, *_args: Any, **_kwargs: Any
) -> None:
    """AFTER `FlashAttentionBackend._init_full_cg_decode_metadata`, which prepares a capture or a replay of
    a CUDA graph: give a verification of one token the schedule that a decode has.

    Where that cannot be had at a capture, the graph keeps SGLang's way. At a replay an exception goes out: a
    graph that reads a schedule must not run with that of another round.
    """
    global num_graphs
    if not in_capture:
        if _is_scheduled(backend) and _is_one_token(backend, forward_batch):
            _schedule(backend, forward_batch)
        return
    try:
        if _is_one_token(backend, forward_batch) and _schedule(backend, forward_batch):
            num_graphs += 1
    except Exception as error:
        logger.warning("draftdial: k = 0 attends as SGLang has it: %s: %s", type(error).__name__, error)


def around_forward_extend(
    original: Callable[..., Any],
    backend: Any,
    q: Any,
    k: Any,
    v: Any,
    layer: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND `FlashAttentionBackend.forward_extend`: the attention of one layer."""
    if _is_scheduled(backend) and _is_one_token(backend, forward_batch):
        return backend.forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)
    return original(backend, q, k, v, layer, forward_batch, *args, **kwargs)


def hooks(release: str) -> list[compat.Hook]:
    """What is hooked for it, in a release in which it has been tried."""
    if release not in RELEASES:
        return []
    return [
        compat.Hook(f"{_BACKEND}._init_full_cg_decode_metadata", "after", after_decode_metadata),
        compat.Hook(f"{_BACKEND}.forward_extend", "around", around_forward_extend),
    ]


def _schedule(backend: Any, forward_batch: Any) -> bool:
    """How this round's sequences are split, where its graph reads it; False where SGLang computes none."""
    metadata = backend.forward_metadata
    schedule = backend._compute_scheduler_metadata(
        forward_batch.batch_size, backend.max_context_len, metadata.cache_seqlens_int32, metadata.cu_seqlens_q
    )
    if schedule is None:
        return False
    size = len(schedule)
    kept = backend._sched_meta_buf  # a backend that verifies decodes nothing besides
    kept[:size] = schedule
    kept[size:] = 0
    metadata.scheduler_metadata = kept[:size]
    return True


def _is_scheduled(backend: Any) -> bool:
    return getattr(backend.forward_metadata, "scheduler_metadata", None) is not None


def _is_one_token(backend: Any, forward_batch: Any) -> bool:
    """A chain without drafts, in attention that has neither windows nor kernels of another kind."""
    return bool(
        forward_batch.forward_mode.is_target_verify()
        and backend.speculative_num_draft_tokens == 1
        and backend.topk <= 1
        and backend.fa_impl_ver == 3
        and not (backend.use_mla or backend.has_swa or backend.has_local_attention)
        and not backend.is_prefill_aware_swa
        and getattr(forward_batch.spec_info, "ragged_verify_layout", None) is None
    )
