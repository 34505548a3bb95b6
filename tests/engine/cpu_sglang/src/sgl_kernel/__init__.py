"""The CPU operators that SGLang imports from `sgl_kernel`, in torch, for draft chains (topk = 1).

No wheel of SGLang's CPU build of that package is published. Names and signatures are SGLang's; what each
writes follows from its call sites. Arguments marked "out" are written in place.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Enter new slots, packed request after request, at [start, end) of each row of `req_to_token` (out)."""
    lengths = (end_offset - start_offset).tolist()
    starts = start_offset.tolist()
    new_slots = out_cache_loc.to(req_to_token.dtype).split(lengths)
    for row, start, slots in zip(req_pool_indices.tolist(), starts, new_slots, strict=True):
        req_to_token[row, start : start + len(slots)] = slots


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Pack the slots at [start, end) of each row, request after request, in `out_cache_loc` (out)."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    slots = torch.cat([req_to_token[row, start:end] for row, start, end in spans])
    out_cache_loc[: len(slots)] = slots.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """The `topk * num_steps` slots after each request's committed tokens, in `out_cache_loc` (out)."""
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.long()[:, None], columns]
    out_cache_loc.copy_(slots.flatten())


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int
) -> None:
    """Each request's last accepted token, of the `stride` stored for it, in `bonus_tokens` (out)."""
    first = torch.arange(len(accept_lens)) * stride
    bonus_tokens.copy_(accept_tokens.flatten()[first + accept_lens.long() - 1])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """The slots that `accept_index` names, without its -1 entries, packed in `accept_out_cache_loc` (out)."""
    flat = accept_index.flatten()
    slots = out_cache_loc[flat[flat >= 0].long()]
    accept_out_cache_loc[: len(slots)] = slots


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy rows from `src_loc` to `tgt_loc` in every layer's buffer, given its address and bytes a row.

    A chain never moves rows; SGLang calls this once to warm up.
    """
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * stride, stride) for row in src_loc.tolist()]
        for target, row in zip(tgt_loc.tolist(), rows, strict=True):
            ctypes.memmove(address + target * stride, row, stride)


def rotate_input_ids_cpu(*_args: Any, **_kwargs: Any) -> None:
    """Multi-layer EAGLE, which SGLang imports with the rest."""
    raise NotImplementedError("multi-layer EAGLE does not run on this stand-in")


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """A chain: node i of a request has the one child i + 1 and sees the nodes up to itself (outs)."""
    if topk != 1:
        raise NotImplementedError("trees do not run on this stand-in: use --speculative-eagle-topk 1")
    num_requests, node = len(verified_seq_len), torch.arange(draft_token_num)
    first = torch.arange(num_requests)[:, None] * draft_token_num
    retrieve_index.copy_(first + node)
    retrieve_next_token.copy_(torch.where(node + 1 < draft_token_num, node + 1, -1).expand(num_requests, -1))
    retrieve_next_sibling.fill_(-1)
    positions.copy_((verified_seq_len.long()[:, None] + node).flatten())
    causal = node[:, None] >= node
    tree_mask[: num_requests * causal.numel()] = causal.flatten().repeat(num_requests)


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept each chain's drafts up to the first that is not the target's choice (first three are outs).

    `candidates` and `target_predict` have shape (requests, nodes); node 0 is the token already committed.
    """
    chosen = target_predict.view_as(candidates)
    as_target = candidates[:, 1:] == chosen[:, :-1]
    accepted = as_target.long().cumprod(dim=1).sum(dim=1)
    on_path = torch.arange(candidates.shape[1]) <= accepted[:, None]
    nodes = retrive_index[on_path].long()
    predicts[nodes] = chosen[on_path].to(predicts.dtype)
    accept_index[on_path[:, : accept_index.shape[1]]] = nodes.to(accept_index.dtype)
    accept_token_num.copy_(accepted)
