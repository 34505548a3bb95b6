"""Two ranks decide separately and alike, also while k jumps and policies are swapped."""

from __future__ import annotations

import json
from pathlib import Path

import policies
from cpu_server import draft_arguments, target_arguments
from steered_server import SteeredServer, num_switches
from traffic import Reference, Sending, random_requests, tokens_of


def test_ranks_agree_while_toggling_and_deploying(models: Path, tmp_path: Path, reference: Reference) -> None:
    requests = reference.choose(random_requests(seed=71), 24)
    policy = policies.saved(policies.jumping(seed=0), tmp_path / "policy.safetensors")
    files = [policies.jumping(seed) for seed in (1, 2)]
    damaged = policies.learned(seed=0)
    arguments = [*target_arguments(models), *draft_arguments(models), "--tp-size", "2"]
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with SteeredServer(arguments, tmp_path, serve=[str(policy)], environment=environment) as server:
        sending = Sending(server, requests)
        made = server.while_busy(
            sending, *[lambda file=file: server.deploy(file) for file in files], every_s=0.5
        )
        assert tokens_of(sending.answers()) == reference.tokens(requests)
        assert made >= 2
        states = json.loads(server.get("/server_info"))["internal_states"]
        for state in states:
            status = state["draftdial"]
            assert (status["deploys"], status["fallback"], status["errors"]) == (made, "", 0)
        assert not server.set(**{f"draftdial_policy:{'0' * 64}:{damaged.data[:90].hex()}": 1})
        assert server.status()["policy_id"] == files[(made - 1) % 2].policy_id
        assert tokens_of(Sending(server, requests[:4]).answers()) == reference.tokens(requests[:4])
    first, second = server.rounds(0), server.rounds(1)
    assert num_switches(first) > 0.5 * len(first)
    assert first == second
