"""Lengths of KV that a speculating server notes before a round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftdial.engine_patch import kv_lengths
from draftdial.engine_patch.kv_lengths import around_alloc_for_spec_decode


@pytest.mark.parametrize(("page_size", "kind"), [(1, list), (16, np.ndarray)])
def test_lengths_become_a_list_where_only_the_loop_reads_them(page_size: int, kind: type) -> None:
    cache = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(page_size=page_size))
    seen: dict[str, Any] = {}

    def original(tree_cache: Any, pool: str, *, nxt_kv_lens_cpu: Any, num_needed_tokens: int) -> str:
        seen.update(cache=tree_cache, pool=pool, lengths=nxt_kv_lens_cpu, needed=num_needed_tokens)
        return "done"

    lengths = np.array([7, 9])
    done = around_alloc_for_spec_decode(original, cache, "pool", nxt_kv_lens_cpu=lengths, num_needed_tokens=3)
    assert done == "done" and (seen["cache"], seen["pool"], seen["needed"]) == (cache, "pool", 3)
    assert isinstance(seen["lengths"], kind) and list(seen["lengths"]) == [7, 9]


def test_releases_that_make_a_list_themselves_are_left_alone() -> None:
    assert [len(kv_lengths.hooks(f"0.5.{n}")) for n in range(14, 24)] == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
