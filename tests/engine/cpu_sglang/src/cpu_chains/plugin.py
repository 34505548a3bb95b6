"""Puts the attention of this package where SGLang has none for a CPU."""

from __future__ import annotations

import os
from typing import Any

BACKEND = "torch_native"
_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`; does nothing unless SGLang was told to use the CPU."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # The registry holds functions by value, so a hook on the function would not be seen there.
    ATTENTION_BACKENDS[BACKEND] = _attention
    HookRegistry.register(f"{_FACTORY}.create_decode_backend", _draft_decode, HookType.REPLACE)
    HookRegistry.register(f"{_FACTORY}.create_draft_extend_backend", _draft_extend, HookType.REPLACE)


def _attention(runner: Any) -> Any:
    from cpu_chains.attention import ChainAttention

    return ChainAttention(runner)


def _draft_decode(factory: Any) -> Any:
    """The attention of the drafts after the first; none is needed for 0 or 1 of them."""
    from cpu_chains.attention import DraftChainAttention

    if factory.speculative_num_steps <= 1:
        return None
    backend = DraftChainAttention(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)
    for step in (backend, *backend.attn_backends):
        _name(step)
    return backend


def _draft_extend(factory: Any) -> Any:
    return _name(_attention(factory.draft_model_runner))


def _name(backend: Any) -> Any:
    """SGLang 0.5.23 reads off a draft's backends which ones they are."""
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = BACKEND
    return backend
