"""The keys and values of a one-layer EAGLE-3 draft, without running the draft.

In such a draft the key and value at position i depend on token i + 1 and the target's hidden states of
position i alone, not on attention: projections, norms and a rotation, no softmax, no MLP, no vocabulary.
SGLang's `models/llama_eagle3.py` says so in all releases from 0.5.14 to 0.5.23; this repeats its steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftdial.engine_patch import compat

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "LlamaForCausalLMEagle3"
POOL = "MHATokenToKVPool"
"""SGLang's plain pool, one key and one value a slot in the model's own type."""


class DraftKv:
    """The draft's projections, and the pool that they are written to.

    Args:
        runner: SGLang's `ModelRunner` of a draft for which `obstacle` found nothing.
    """

    def __init__(self, runner: Any) -> None:
        self._model = runner.model.model
        self._layer = self._model.layers[0]
        self._attention = self._layer.self_attn
        self._pool = runner.token_to_kv_pool
        self.width: int = self._model.config.hidden_size
        """Of the draft's hidden state."""
        # The rotation wants queries beside its keys. As many heads of them as there are of keys will do.
        self._first_row = self._attention.q_size - self._attention.kv_size

    def fused(self, hidden: Tensor) -> Tensor:
        """The target's hidden states as the draft's layer takes them.

        Args:
            hidden: `(num_requests, num_layers * width)`, of the layers that the draft reads.
        """
        import torch

        model = self._model
        if hidden.shape[-1] == model.config.hidden_size:
            return hidden
        if getattr(model, "input_norm", None) is not None:  # from 0.5.17 on
            hidden = model.input_norm(hidden)
        if model.fc_norm is not None:
            chunks = hidden.chunk(model.num_aux_hidden_states, dim=-1)
            hidden = torch.cat([norm(chunk) for norm, chunk in zip(model.fc_norm, chunks, strict=True)], -1)
        fused: Tensor = model.fc(hidden)
        return fused

    def project(self, token_ids: Tensor, fused: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values, each `(num_requests, num_heads, width of a head)`.

        Args:
            token_ids: `(num_requests,)`, the token *after* each position.
            fused: `(num_requests, width)`, see there.
            positions: `(num_requests,)`
        """
        import torch

        layer, attention = self._layer, self._attention
        embedded = layer.input_layernorm(self._model.embed_tokens(token_ids))
        both = torch.cat([embedded, layer.hidden_norm(fused)], dim=-1)
        projected = torch.nn.functional.linear(both, attention.qkv_proj.weight[self._first_row :])
        query, key, value = torch.split(projected, attention.kv_size, dim=-1)
        _, key = attention.rotary_emb(positions, query, key)
        heads = (-1, attention.num_kv_heads, attention.head_dim)
        return key.view(heads), value.view(heads)

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put keys and values into the draft's pool, at `slots`, `(num_requests,)`."""
        self._pool.set_kv_buffer(self._attention.attn, slots, key, value)

    def written(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What the draft's pool holds at `slots`, in the shapes of `project`."""
        layer_id = self._attention.attn.layer_id
        return self._pool.get_key_buffer(layer_id)[slots], self._pool.get_value_buffer(layer_id)[slots]


def obstacle(runner: Any, release: str, *, is_multimodal: bool = False) -> str:
    """Why the draft in SGLang's `ModelRunner` must be run to have its keys and values; empty if it need not.

    Args:
        runner: Of the draft.
        release: SGLang's.
        is_multimodal: Does the target take more than text?
    """
    if not compat.is_supported(release):
        return f"SGLang {release} is none of the releases that it was checked against"
    name = type(runner.model).__name__
    if name != MODEL:
        return f"the draft is a {name}, not a {MODEL}"
    model, pool = runner.model.model, runner.token_to_kv_pool
    if len(model.layers) != 1:
        return f"the draft has {len(model.layers)} layers, not one"
    attention = model.layers[0].self_attn
    linear = attention.qkv_proj
    method = type(linear.quant_method).__name__
    if method != "UnquantizedLinearMethod" or linear.bias is not None or linear.weight.dim() != 2:
        return f"the draft's qkv projection is not plain ({method})"
    if _rows(linear.weight) != attention.q_size + 2 * attention.kv_size:
        return "the draft's qkv projection is laid out in an unknown way"
    if type(pool).__name__ != POOL or getattr(pool, "is_quantized_kv_cache", False):
        return f"the draft's KV is in a {type(pool).__name__}, or quantized"
    if pool.dtype != linear.weight.dtype:
        return f"the draft's KV is kept as {pool.dtype}, its weights as {linear.weight.dtype}"
    if is_multimodal or model.is_mrope_enabled:
        return "the model takes more than text"
    if getattr(runner.model, "_draft_window_size", None) is not None:
        return "--speculative-draft-window-size is set"
    if getattr(runner, "canary_manager", None) is not None:
        return "--kv-canary watches who writes KV"
    if getattr(getattr(runner, "kv_index_translator", None), "is_translating", False):
        return "this server translates KV slots"
    return ""


def _rows(weight: Any) -> int:
    rows: int = weight.shape[0]
    return rows
