"""Lengths of KV as plain numbers, where SGLang 0.5.16 to 0.5.18 read them off a tensor one by one.

Before every round of a speculating server the host notes how much KV each request has got, with an index into
a tensor for each. Since 0.5.19 SGLang makes a list of it first. Here it does so on these releases, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftdial.engine_patch import compat

RELEASES = ("0.5.16", "0.5.17", "0.5.18")


def around_alloc_for_spec_decode(
    original: Callable[..., Any], tree_cache: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `alloc_for_spec_decode`: with pages of one token nothing but that loop reads the lengths."""
    lengths = kwargs.get("nxt_kv_lens_cpu")
    if lengths is not None and tree_cache.token_to_kv_pool_allocator.page_size == 1:
        kwargs["nxt_kv_lens_cpu"] = lengths.tolist()
    return original(tree_cache, *args, **kwargs)


def hooks(release: str) -> list[compat.Hook]:
    """What is hooked for it, in a release that needs it."""
    if release not in RELEASES:
        return []
    target = "sglang.srt.speculative.eagle_utils.alloc_for_spec_decode"
    return [compat.Hook(target, "around", around_alloc_for_spec_decode)]
