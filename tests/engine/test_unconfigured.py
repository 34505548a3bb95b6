"""The plugin installed and not configured changes nothing: the same rounds, the same outputs."""

from __future__ import annotations

import json
from pathlib import Path

from cpu_server import adaptive_arguments, target_arguments
from steered_server import SteeredServer, num_switches
from traffic import Reference, Request, Sending, random_requests, tokens_of

NERVOUS = {
    "1": {"candidate_steps": [0, 1, 2, 3]},
    "ema_alpha": 0.8,
    "update_interval": 1,
    "warmup_batches": 0,
}
"""A configuration of SGLang's rule under which it switches often."""


def served(
    models: Path, folder: Path, plugins: str, requests: list[Request]
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Answers and rounds of a server under SGLang's own rule, with these plugins."""
    folder.mkdir()
    config = folder / "adaptive.json"
    config.write_text(json.dumps(NERVOUS))
    arguments = [*target_arguments(models), *adaptive_arguments(models, config, 3)]
    with SteeredServer(arguments, folder, environment={"SGLANG_PLUGINS": plugins}) as server:
        server.flush()
        start = len(server.rounds())  # health checks at the start vary in number
        # One at a time: when requests arrive together, timing decides their batches.
        answers = [tokens_of(Sending(server, [request]).answers())[0] for request in requests]
        assert "draftdial" not in server.internal_state()
        return answers, server.rounds()[start:]


def test_rounds_and_outputs_are_those_of_a_server_without_it(
    models: Path, tmp_path: Path, reference: Reference
) -> None:
    requests = reference.choose(random_requests(seed=51, new_tokens=(50, 150), spread_s=0.0), 12)
    answers, rounds = served(models, tmp_path / "without", "cpu_chains,engine_probe", requests)
    same = served(models, tmp_path / "loaded", "cpu_chains,engine_probe,draftdial", requests)
    assert same == (answers, rounds)
    assert answers == reference.tokens(requests)
    assert num_switches(rounds) > 50
