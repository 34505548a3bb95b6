"""What a Hugging Face model folder says: its configuration and its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftdial.controller.errors import UserError


@dataclass(frozen=True)
class LlamaShape:
    """The numbers of a config.json that the computation needs."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    norm_eps: float
    rope: dict[str, Any]
    """rope_type (`default` or `llama3`), rope_theta, and llama3's own four numbers."""
    tied: bool

    @classmethod
    def load(cls, folder: Path) -> LlamaShape:
        """Read FOLDER/config.json; raises UserError for what this module does not compute."""
        config = read_config(folder)
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope.setdefault("rope_type", rope.pop("type", "default"))
        rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
        allowed = {"hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None)}
        for field, values in allowed.items():
            if config.get(field, values[0]) not in values:
                raise UserError(
                    f"{folder / 'config.json'}: {field}: found {config[field]}, allowed: {values[0]}"
                )
        if rope["rope_type"] not in ("default", "llama3"):
            raise UserError(
                f"{folder / 'config.json'}: rope_type: found {rope['rope_type']}, allowed: default, llama3"
            )
        try:
            heads = config["num_attention_heads"]
            return cls(
                hidden=config["hidden_size"],
                mlp=config["intermediate_size"],
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head=config.get("head_dim") or config["hidden_size"] // heads,
                vocab=config["vocab_size"],
                norm_eps=config["rms_norm_eps"],
                rope=rope,
                tied=config.get("tie_word_embeddings", False),
            )
        except KeyError as error:
            raise UserError(f"{folder / 'config.json'}: {error.args[0]} is missing") from None


def read_config(folder: Path) -> dict[str, Any]:
    """FOLDER/config.json of a model; raises UserError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot read it as JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected a JSON object")
    return config


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of FOLDER/*.safetensors; raises UserError where there are none or they cannot be read."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"{folder}: no .safetensors file; allowed: a Hugging Face model directory")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot read it ({error})") from None
    return tensors


def end_tokens(folder: Path) -> frozenset[int]:
    """Tokens that end an answer, by config.json; raises UserError where it names none."""
    end = read_config(folder).get("eos_token_id")
    ends = end if isinstance(end, list) else [end]
    if not ends or not all(type(token) is int for token in ends):
        raise UserError(f"{folder / 'config.json'}: eos_token_id: found {end}, allowed: a token id or some")
    return frozenset(ends)
