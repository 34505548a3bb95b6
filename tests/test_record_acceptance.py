"""`draftdial record-acceptance`: what a decision log saw, and what a draft would have got right."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftdial.controller.cli import main
from draftdial.controller.eagle3 import Eagle3
from draftdial.controller.llama import Llama
from draftdial.controller.model_folder import LlamaShape
from draftdial.engine_patch.decision_log import MIN_BYTES, DecisionLog

TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "eos_token_id": 2,
}  # fmt: skip
TOLD = ["--target", "T", "--draft", "D", "--sampling", "temperature=0", "--prompts", "GSM8K"]


def recorded(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the requests of a file."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    header, *lines = map(json.loads, text.splitlines())
    return header, lines


@pytest.fixture
def log(tmp_path: Path) -> DecisionLog:
    return DecisionLog.open(tmp_path / "log", MIN_BYTES, {"tiers": [0, 1, 3], "sglang": "0.5.17"})


def test_a_log_gives_exact_starts_and_fills_in_the_rest(log: DecisionLog, tmp_path: Path) -> None:
    log.request("arrived", 4, 0.0, 9, 0)
    log.accepts(1, 3, [4], [1], [2])  # 3 tokens at positions 1..3
    log.accepts(2, 3, [4], [4], [3])  # all accepted: 4 or more
    log.accepts(3, 1, [4], [8], [0])
    log.request("finished", 4, 1.0, 9, 9)
    log.close()
    out = tmp_path / "acc.jsonl"
    assert main(["record-acceptance", str(tmp_path / "log"), *TOLD, "--out", str(out)]) == 0

    header, (line,) = recorded(out)
    assert line == {
        "id": 4, "prompt_len": 9, "gen_len": 9, "acc": [1, 3, 2, 1, 4, 3, 2, 1, 1],
        "starts": [1, 4, 8], "censored": [4],
    }  # fmt: skip
    assert header["format"] == "draftdial.acceptance/1" and header["max_k"] == 3
    assert header["target"] == "T" and header["prompts"] == "GSM8K"
    assert header["engine"]["sglang"] == "0.5.17"


def test_requests_that_the_log_saw_in_part_are_left_out(
    log: DecisionLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.request("arrived", 1, 0.0, 9, 0)
    log.accepts(1, 3, [1], [1], [2])
    log.accepts(3, 3, [1], [6], [2])  # the round between is missing
    log.request("finished", 1, 1.0, 9, 8)
    log.accepts(4, 3, [2], [1], [3])
    log.request("finished", 2, 1.0, 9, 5)  # never seen to arrive
    log.request("arrived", 3, 0.0, 9, 0)
    log.accepts(5, 3, [3], [1], [3])  # still running
    log.close()
    out = tmp_path / "acc.jsonl"
    assert main(["record-acceptance", str(tmp_path / "log"), *TOLD, "--out", str(out)]) == 2
    assert "found no request whose every round is in the log" in capsys.readouterr().err
    assert not out.exists()


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Arguments that name a random target, a random draft and two prompts of token ids."""
    torch.manual_seed(1)
    own = {"target": {"tie_word_embeddings": True}, "draft": {"num_hidden_layers": 1, "draft_vocab_size": 40}}
    for folder, config in own.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(TINY | config))
        shape = LlamaShape.load(tmp_path / folder)
        model = Llama(shape) if folder == "target" else Eagle3(shape, 40)
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if folder == "target":
            del tensors["lm_head.weight"]
            tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        save_file(tensors, tmp_path / folder / "model.safetensors")
    # The longer one first, so that the order of the work is not that of the file.
    prompts = [{"id": f"p{n}", "category": "maths", "ids": list(range(3, 3 + n))} for n in (9, 4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return [str(tmp_path / name) for name in ("target", "draft", "prompts.jsonl")]


def test_teacher_forced_arrays_follow_the_prompts_and_repeat(pair: list[str], tmp_path: Path) -> None:
    arguments = ["record-acceptance", "--teacher-forced", *pair, "--max-new", "12", "--temperature", "0.8"]
    first, second = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    assert main([*arguments, "--out", str(first)]) == 0
    assert main([*arguments, "--out", str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()
    header, lines = recorded(first)
    assert [(line["id"], line["prompt_len"]) for line in lines] == [("p9", 9), ("p4", 4)]
    for line in lines:
        assert len(line["acc"]) == len(line["p1"]) == line["gen_len"] <= 12
        assert line["acc"][0] == 1 and min(line["acc"]) >= 1 and max(line["acc"]) <= header["max_k"] + 1
    assert header["sampling"] == {"temperature": 0.8, "max_new": 12, "seed": 0}
    assert header["prompts"]["count"] == 2 and len(header["target"]["sha256"]) == 64


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"id": "x", "category": "a"', "line 1: not JSON"),
        ('{"id": "x", "turns": ["hello"]}', "field category: expected a string"),
        ('{"id": "x", "category": "a", "ids": [5]}', "field ids: expected a list of two or more token ids"),
        ('{"id": "x", "category": "a", "turns": []}', "no tokenizer"),
        ("", "found no line"),
    ],
)
def test_wrong_prompts_end_in_one_line(
    pair: list[str], tmp_path: Path, line: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(pair[2]).write_text(line)
    out = tmp_path / "acc.jsonl"
    if complaint == "no tokenizer":
        pytest.importorskip("tokenizers", reason="reads text prompts with tokenizers, which is not installed")
    assert main(["record-acceptance", "--teacher-forced", *pair, "--out", str(out)]) == 2
    assert complaint in capsys.readouterr().err
    assert not out.exists()


def test_either_a_log_or_a_pair_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record-acceptance", "--out", "x.jsonl"]) == 2
    assert "either a decision log or --teacher-forced" in capsys.readouterr().err


def test_a_log_needs_its_provenance(
    log: DecisionLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.close()
    assert main(["record-acceptance", str(tmp_path / "log"), *TOLD[:4], "--out", "x.jsonl"]) == 2
    assert "needs --sampling, --prompts beside it" in capsys.readouterr().err
