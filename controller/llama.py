"""A Llama in plain torch: what EAGLE-3 needs of its target, with a key-value cache of fixed size.

Layers follow Hugging Face's LlamaForCausalLM, whose directories it loads.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftdial.controller.errors import UserError
from draftdial.controller.model_folder import LlamaShape, read_weights


class KeyValues:
    """Keys and values of `batch` sequences up to `length` positions, for every layer."""

    def __init__(self, shape: LlamaShape, batch: int, length: int, like: Tensor) -> None:
        size = (shape.layers, batch, length, shape.kv_heads, shape.head)
        self.keys, self.values = like.new_zeros(size), like.new_zeros(size)
        self.rows = torch.arange(batch, device=like.device)[:, None]


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, in the type of `x`."""
        return functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Projections of grouped-query attention; `inputs` is the width of what they read."""

    def __init__(self, shape: LlamaShape, inputs: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.hidden, bias=False)

    def project(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `(batch, time, heads, head)`, rotated keys and values with `kv_heads`."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.shape.head))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, rotation), rotate(k, rotation), v


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape, shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = MLP(shape)


class Llama(nn.Module):
    """The target: final hidden states, and those that feed an EAGLE-3 draft."""

    def __init__(self, shape: LlamaShape, aux_layers: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.aux_layers = aux_layers or (2, shape.layers // 2, shape.layers - 3)
        """Layers whose *input* is handed to the draft; the default is SGLang's."""
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.lm_head.weight = self.embed_tokens.weight

    @classmethod
    def load(
        cls, folder: Path, dtype: torch.dtype, device: torch.device, aux_layers: tuple[int, ...] | None = None
    ) -> Llama:
        """Read a Hugging Face directory, frozen; raises UserError where names or shapes do not fit."""
        with torch.device("meta"):
            model = cls(LlamaShape.load(folder), aux_layers)
        tensors = {name.removeprefix("model."): tensor for name, tensor in read_weights(folder).items()}
        if model.shape.tied:
            tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
        try:
            model.load_state_dict(tensors, strict=True, assign=True)
        except RuntimeError as error:
            raise UserError(f"{folder}: not the weights of such a Llama ({error})") from None
        return model.to(device, dtype).requires_grad_(False).eval()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of whole sequences `(batch, time)`, padded on the right.

        Returns the normed final ones `(batch, time, hidden)` and those of `aux_layers` side by side
        `(batch, time, 3 * hidden)`.
        """
        rotation = rotations(self.shape, torch.arange(ids.shape[1], device=ids.device)[None])
        x = self.embed_tokens(ids)
        aux = []
        for index, layer in enumerate(cast("list[Layer]", self.layers)):
            if index in self.aux_layers:
                aux.append(x)
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), rotation)
            mixed = functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
            ).transpose(1, 2)
            x = self._after_attention(layer, x, mixed)
        return self.norm(x), torch.cat(aux, -1)

    def extend(self, ids: Tensor, positions: Tensor, cache: KeyValues, length: int) -> Tensor:
        """Normed final hidden states of new tokens `(batch, time)` at `positions` of sequences in the cache.

        Keys and values are written there; only the first `length` positions of the cache are looked at,
        each token at those up to its own.
        """
        rotation = rotations(self.shape, positions)
        visible = torch.arange(length, device=ids.device) <= positions[..., None]
        groups = self.shape.heads // self.shape.kv_heads
        # Query heads that share keys stand as further queries, so that the cache is read once for all.
        mask = visible.repeat_interleave(groups, 1)[:, None]
        x = self.embed_tokens(ids)
        for index, layer in enumerate(cast("list[Layer]", self.layers)):
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), rotation)
            keys, values = cache.keys[index], cache.values[index]
            keys[cache.rows, positions] = k
            values[cache.rows, positions] = v
            q = q.reshape(*q.shape[:2], -1, groups, q.shape[-1]).permute(0, 2, 1, 3, 4).flatten(2, 3)
            mixed = functional.scaled_dot_product_attention(
                q, keys[:, :length].transpose(1, 2), values[:, :length].transpose(1, 2), attn_mask=mask
            )
            mixed = mixed.reshape(*mixed.shape[:2], -1, groups, mixed.shape[-1])
            mixed = mixed.permute(0, 2, 1, 3, 4).flatten(2, 3)
            x = self._after_attention(layer, x, mixed)
        final: Tensor = self.norm(x)
        return final

    def _after_attention(self, layer: Layer, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + layer.self_attn.o_proj(mixed.flatten(-2))
        out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return out


def rotations(shape: LlamaShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `(.., 1, head)` of rotary embedding at `positions`, in float32."""
    exponent = torch.arange(0, shape.head, 2, device=positions.device, dtype=torch.float32) / shape.head
    frequency: Tensor = shape.rope["rope_theta"] ** -exponent
    if shape.rope["rope_type"] == "llama3":
        frequency = _llama3_frequency(shape.rope, frequency)
    angle = (positions[..., None].float() * frequency)[..., None, :]
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def _llama3_frequency(rope: dict[str, Any], frequency: Tensor) -> Tensor:
    """Slow rotations divided by `factor`, fast ones kept, a linear blend between (Llama 3.1)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    blended: Tensor = frequency * (kept + (1 - kept) / rope["factor"])
    return blended


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of `(.., heads, head)`, halves rotating against each other."""
    cos, sin = rotation
    first, second = x.float().chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
