"""`draftdial record-acceptance`: what the offline walk of chains says is what a server accepts."""

from __future__ import annotations

import json
from pathlib import Path

import policies
import torch
from cpu_server import draft_arguments, target_arguments
from steered_server import SteeredServer
from traffic import Reference, Sending, random_requests

from draftdial.controller.chat_prompts import ChatPrompt
from draftdial.controller.eagle3 import Eagle3, captured_layers
from draftdial.controller.llama import Llama
from draftdial.controller.teacher_forced import DEPTH, Answered, acceptance_lines

LARGEST = max(policies.TIERS)


def test_chains_in_plain_torch_accept_what_the_server_does(
    models: Path, reference: Reference, tmp_path: Path
) -> None:
    policy = policies.saved(policies.learned(seed=0), tmp_path / "policy.safetensors")
    arguments = [*target_arguments(models), *draft_arguments(models, "context-draft")]
    serve = [str(policy), "--log", str(tmp_path / "decisions.log")]
    requests = reference.choose(random_requests(seed=5, new_tokens=(60, 120), spread_s=0.0), 12)
    with SteeredServer(arguments, tmp_path, serve=serve) as server:
        assert server.set(draftdial_force_k=LARGEST)
        answers = [Sending(server, [request]).answers()[0].tokens for request in requests]
        server.recorded()
        out = tmp_path / "acceptance.jsonl"
        told = ["--target", "T", "--draft", "D", "--sampling", "greedy", "--prompts", "random"]
        log = str(tmp_path / "decisions.log")
        done = server.command("record-acceptance", log, *told, "--out", str(out))
        assert done.returncode == 0, done.stderr
    logged = [json.loads(line) for line in out.read_text().splitlines()[1:]][: len(requests)]

    cpu = torch.device("cpu")
    target = Llama.load(models / "target", torch.float32, cpu, captured_layers(models / "context-draft"))
    draft = Eagle3.load(models / "context-draft", torch.float32, cpu)
    answered = [
        Answered(ChatPrompt(str(i), "random", request.prompt), answer)
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]
    offline = dict(acceptance_lines(target, draft, answered, 120, DEPTH))
    seen = []
    for i, line in enumerate(logged):
        assert line["prompt_len"] == len(requests[i].prompt)
        # The last rounds may have made tokens past those asked for, which were not delivered.
        known = [start for start in line["starts"] if start + LARGEST <= len(answers[i])]
        assert [line["acc"][start] for start in known] == [
            min(offline[i]["acc"][start], LARGEST + 1) for start in known
        ], f"request {i}"
        seen += [line["acc"][start] for start in known]
    assert len(seen) > 300 and set(seen) == set(range(1, LARGEST + 2))
