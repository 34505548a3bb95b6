"""Writes configurations of a Llama-3.1-8B target and its EAGLE-3 draft; weights are SGLang's dummies.

python tests/gpu/llama_shapes.py FOLDER     # FOLDER/target, FOLDER/draft
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SHARED = {
    "attention_bias": False,
    "bos_token_id": 128000,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
TARGET = {
    **SHARED,
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "eos_token_id": [128001, 128008, 128009],
}
DRAFT = {
    **SHARED,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "eos_token_id": 128001,
    "pad_token_id": 0,
    "draft_vocab_size": 32000,
}


def write(folder: Path) -> None:
    """Write `folder/target/config.json` and `folder/draft/config.json`."""
    for name, config in (("target", TARGET), ("draft", DRAFT)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
