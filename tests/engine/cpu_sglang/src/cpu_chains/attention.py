"""Attention for prefill, decode, verifying a chain and drafting one, by torch's own kernel."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class ChainAttention(TorchNativeAttnBackend):
    """Causal self-attention over the KV pool; all requests at once where they bring equally many queries.

    SGLang's backend of this name knows neither verification nor drafting: there `seq_lens` does not count
    the tokens under way.
    """

    num_drafted = 0
    """Drafts of the coming chain that are already in the pool when this backend decodes, itself included."""

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **_kwargs: Any,
    ) -> Tensor:
        """Attention of one layer; see SGLang's `AttentionBackend`."""
        if save_kv_cache and k is not None:
            slots = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        num_queries, num_keys = self._lengths(forward_batch)
        rows = forward_batch.req_pool_indices.long()
        if isinstance(num_queries, int):
            stacked = queries.view(len(rows), num_queries, *queries.shape[1:])
            return self._attend(stacked, rows, num_keys, layer).reshape(len(queries), -1)
        parts = [
            self._attend(own[None], rows[i : i + 1], num_keys[i : i + 1], layer).flatten(0, 1)
            for i, own in enumerate(queries.split(num_queries))
        ]
        return torch.cat(parts).reshape(len(queries), -1)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """Decoding is extending by one token each."""
        return self.forward_extend(*args, **kwargs)

    def _lengths(self, batch: Any) -> tuple[int | list[int], Tensor]:
        """Queries of each request (one number if all are alike), and keys, shape (requests,)."""
        if batch.forward_mode.is_target_verify():
            width = int(batch.spec_info.draft_token_num)
            return width, batch.seq_lens + width
        if batch.forward_mode.is_decode():
            return 1, batch.seq_lens + self.num_drafted
        return batch.extend_seq_lens.tolist(), batch.seq_lens

    def _attend(self, queries: Tensor, rows: Tensor, num_keys: Tensor, layer: Any) -> Tensor:
        """What the last `width` tokens of each request see; queries (requests, width, heads, dim)."""
        width, longest = queries.shape[1], int(num_keys.max())
        # Beyond a request's own keys the table names slots of older requests; they are masked.
        slots = self.req_to_token_pool.req_to_token[rows, :longest].long()
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[slots]
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)[slots]
        last = num_keys[:, None, None] - width + torch.arange(width)[:, None]
        seen = torch.arange(longest) <= last
        attended = scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=seen[:, None],
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        return attended.transpose(1, 2)


class DraftChainAttention:
    """One `ChainAttention` for each draft after the first: the n-th of them sees n drafts."""

    def __init__(self, model_runner: Any, topk: int, num_steps: int) -> None:
        if topk != 1:
            raise NotImplementedError("trees do not run on this stand-in: use --speculative-eagle-topk 1")
        self.attn_backends = [ChainAttention(model_runner) for _ in range(num_steps - 1)]
        for num_drafted, backend in enumerate(self.attn_backends, 1):
            backend.num_drafted = num_drafted
        self.needs_cpu_seq_lens = True

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare every step."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)
