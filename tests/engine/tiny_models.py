"""A Llama of four small layers and EAGLE-3 drafts for it, made of seeded random weights.

They are shaped so that speculation has something to do. The target mostly answers a token with its successor
in a fixed permutation; its layers disturb that, rarely after *plain* tokens, whose embeddings are long, and
often after the others. The draft knows the permutation and little of the disturbance, so it is right in
plain stretches and wrong elsewhere. Successors mostly stay on their side.

    python tiny_models.py FOLDER      writes FOLDER/target, FOLDER/draft and FOLDER/context-draft
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[np.float32]
Tensors = dict[str, Array]

VOCAB, HIDDEN, MLP, LAYERS = 1024, 128, 256, 4
HEADS, KV_HEADS, HEAD = 4, 2, 32
DISTURBANCE = 4.0
"""Scale of what a layer adds to the residual stream."""
PLAIN_LENGTH = 8.0
"""Length of plain tokens' embeddings; 1 for the others."""
CROSSING = 0.15
"""Share of tokens whose successor is of the other kind."""
CONTEXT_HEADS = 2
"""Heads of the context draft that look at whichever earlier tokens a random projection picks. The other draft
attends to its own position alone, and would not notice if all that came before were wrong."""

COMMON = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TARGET = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
}
DRAFT = {
    **COMMON,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "num_key_value_heads": HEADS,
    "draft_vocab_size": VOCAB,
    # SGLang's choice of three layers would take one of them twice in a target as shallow as this.
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}


def write_models(folder: Path, seed: int = 0) -> None:
    """Write the target and both drafts, 3.4 MB and 1.6 MB each."""
    rng = np.random.default_rng(seed)
    embedding, head = _vocabulary(rng)
    draft = _draft(rng, head)
    query = draft["midlayer.self_attn.q_proj.weight"].copy()
    query[-CONTEXT_HEADS * HEAD :, :HIDDEN] = 2 * _linear(rng, CONTEXT_HEADS * HEAD, HIDDEN)
    in_context = {**draft, "midlayer.self_attn.q_proj.weight": query}
    _write(folder / "target", TARGET, _target(rng, embedding, head))
    _write(folder / "draft", DRAFT, draft)
    _write(folder / "context-draft", DRAFT, in_context)


def _vocabulary(rng: np.random.Generator) -> tuple[Array, Array]:
    """Embeddings and the head that answers each with its successor, both (VOCAB, HIDDEN)."""
    directions = _normal(rng, VOCAB, HIDDEN)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    half = VOCAB // 2
    successor = np.concatenate([rng.permutation(half), half + rng.permutation(half)])
    crossing = rng.choice(half, int(CROSSING * half), replace=False)
    successor[crossing], successor[crossing + half] = successor[crossing + half], successor[crossing]
    head = np.empty_like(directions)
    head[successor] = directions
    length = np.where(np.arange(VOCAB) < half, PLAIN_LENGTH, 1.0) * np.sqrt(HIDDEN)
    return (directions * length[:, None]).astype(np.float32), head


def _target(rng: np.random.Generator, embedding: Array, head: Array) -> Tensors:
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": head,
    }
    for i in range(LAYERS):
        layer = {
            "input_layernorm": np.ones(HIDDEN, np.float32),
            "post_attention_layernorm": np.ones(HIDDEN, np.float32),
            "self_attn.q_proj": 2 * _linear(rng, HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": 2 * _linear(rng, KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": _linear(rng, KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": DISTURBANCE * _linear(rng, HIDDEN, HEADS * HEAD),
            "mlp.gate_proj": _linear(rng, MLP, HIDDEN),
            "mlp.up_proj": _linear(rng, MLP, HIDDEN),
            "mlp.down_proj": DISTURBANCE * _linear(rng, HIDDEN, MLP),
        }
        tensors |= {f"model.layers.{i}.{name}.weight": weight for name, weight in layer.items()}
    return tensors


def _draft(rng: np.random.Generator, head: Array) -> Tensors:
    """One layer that copies the embedding it is given, less some of the hidden state beside it.

    Its projections take [embedding, hidden state], (.., 2 * HIDDEN). Queries and keys read the embedding
    alone, so that attention is sharpest on the own position.
    """
    identity = np.eye(HIDDEN, dtype=np.float32)
    looks = np.concatenate([2 * identity, 0 * identity], axis=1)
    layer = {
        "hidden_norm": np.ones(HIDDEN, np.float32),
        "input_layernorm": np.ones(HIDDEN, np.float32),
        "post_attention_layernorm": np.ones(HIDDEN, np.float32),
        "self_attn.q_proj": looks,
        "self_attn.k_proj": looks.copy(),
        "self_attn.v_proj": np.concatenate([identity, -0.3 * identity], axis=1),
        "self_attn.o_proj": identity,
        "mlp.gate_proj": _linear(rng, MLP, HIDDEN),
        "mlp.up_proj": _linear(rng, MLP, HIDDEN),
        "mlp.down_proj": 0.1 * _linear(rng, HIDDEN, MLP),
    }
    return {
        "fc.weight": 0.1 * _linear(rng, HIDDEN, 3 * HIDDEN),
        "norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": head,
        **{f"midlayer.{name}.weight": weight for name, weight in layer.items()},
    }


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


def _linear(rng: np.random.Generator, rows: int, columns: int) -> Array:
    """Weights that keep the length of what they are applied to."""
    return _normal(rng, rows, columns) / np.float32(np.sqrt(columns))


def _write(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(
        {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
