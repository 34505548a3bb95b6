"""Real SGLang serves the real pair on this CPU: `REAL_PAIR=FOLDER make test-real-pair`."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from draftdial.controller.chat_prompts import ChatPrompt, chat_encoder
from draftdial.controller.cli import main
from draftdial.controller.eagle3 import Eagle3
from draftdial.controller.llama import Llama
from draftdial.controller.teacher_forced import DEPTH, Answered, acceptance_lines

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))  # the modules there are no package

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "A box holds 12 eggs. How many eggs are in 7 boxes?",
    "Write a short letter to a friend about the sea.",
    "Translate to French: the house is small.",
    "Name three uses of copper.",
)
NEW_TOKENS = 32
COUNT = 4


@pytest.fixture(scope="module")
def pair() -> Path:
    if "REAL_PAIR" not in os.environ:
        pytest.skip("REAL_PAIR names no folder of the pair (tests/real_pair/README.md)")
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed here: make test-real-pair")
    return Path(os.environ["REAL_PAIR"])


def test_speculation_changes_no_token_and_accepts_what_the_arrays_say(pair: Path, tmp_path: Path) -> None:
    from cpu_server import CpuServer, draft_arguments, target_arguments
    from steered_server import SteeredServer
    from traffic import Reference, Request, Sending, tokens_of

    encode = chat_encoder(pair / "target")
    candidates = (Request(tuple(encode(question)), NEW_TOKENS) for question in itertools.cycle(QUESTIONS))
    with CpuServer(target_arguments(pair), tmp_path / "reference.log") as server:
        reference = Reference(server)
        requests = reference.choose(candidates, COUNT)
        expected = reference.tokens(requests)

    rule = tmp_path / "rule.safetensors"
    assert main(["export-rule", "threshold", "--k", "7", "--batch", "16", "--out", str(rule)]) == 0
    log = tmp_path / "decisions.log"
    arguments = [*target_arguments(pair), *draft_arguments(pair)]
    with SteeredServer(arguments, tmp_path, serve=[str(rule), "--log", str(log)]) as server:
        assert server.set(draftdial_force_k=DEPTH)
        answers = tokens_of(Sending(server, [request]).answers()[0] for request in requests)
        server.recorded()
    assert answers == expected

    out = tmp_path / "acceptance.jsonl"
    told = ["--target", "SmolLM2", "--draft", "EAGLE-3", "--sampling", "greedy", "--prompts", "this file"]
    assert main(["record-acceptance", str(log), *told, "--out", str(out)]) == 0
    logged = [json.loads(line) for line in out.read_text().splitlines()[1:]][:COUNT]
    cpu = torch.device("cpu")
    target = Llama.load(pair / "target", torch.float32, cpu)
    draft = Eagle3.load(pair / "draft", torch.float32, cpu)
    answered = [
        Answered(ChatPrompt(str(i), "chat", request.prompt), answer)
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]
    offline = dict(acceptance_lines(target, draft, answered, NEW_TOKENS, DEPTH))
    rounds = 0
    for i, line in enumerate(logged):
        for start in line["starts"]:
            left = NEW_TOKENS - start  # what a round accepts beyond the answer is unknown offline
            assert min(line["acc"][start] - 1, left) == min(offline[i]["acc"][start] - 1, left)
            rounds += 1
    tokens_per_round = COUNT * (NEW_TOKENS - 1) / rounds
    assert tokens_per_round > 1.5, "a draft that does not guess"
