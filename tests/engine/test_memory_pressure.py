"""Prefills in chunks, requests sent back to the queue, a KV pool that is full: outputs stay the same."""

from __future__ import annotations

import re
from pathlib import Path

import policies
import pytest
from cpu_server import draft_arguments, target_arguments
from steered_server import SteeredServer, num_switches
from traffic import Reference, Sending, random_requests, tokens_of

CHUNK = 32
FULL = "KV cache pool is full"
CAUSES = {
    "Testing retraction": (["--max-total-tokens", "4096"], {"SGLANG_TEST_RETRACT": "1"}),
    # Admission that reserves next to nothing for the outputs to come.
    FULL: (["--max-total-tokens", "2048", "--schedule-conservativeness", "0.05"], {}),
}
"""By how SGLang's log line about it begins: arguments and environment that bring retraction about."""


@pytest.mark.parametrize("cause", CAUSES)
def test_retracted_and_chunked_requests_end_the_same(
    models: Path, tmp_path: Path, reference: Reference, release: str, cause: str
) -> None:
    if cause == FULL and release != "0.5.17":
        pytest.skip("this release does not let its pool fill up under this load")
    requests = reference.choose(
        random_requests(seed=81, prompt_tokens=(40, 150), new_tokens=(150, 250), spread_s=0.0), 16
    )
    policy = policies.saved(policies.jumping(seed=1), tmp_path / "policy.safetensors")
    more, environment = CAUSES[cause]
    arguments = [
        *target_arguments(models),
        *draft_arguments(models),
        "--chunked-prefill-size",
        str(CHUNK),
        *more,
    ]
    serve = [str(policy), "--log", str(tmp_path / "decisions.log")]
    with SteeredServer(arguments, tmp_path, serve=serve, environment=environment) as server:
        sending = Sending(server, requests)
        assert tokens_of(sending.answers()) == reference.tokens(requests)
        retracted = [int(n) for n in re.findall(rf"{cause}.* #retracted_reqs: (\d+)", server.log_text())]
        assert sum(retracted) >= 1
        status = server.status()
        assert (status["fallback"], status["errors"]) == ("", 0)
        assert num_switches(server.rounds()) > 0.5 * len(server.rounds())
        prefills = [int(n) for n in re.findall(r"Prefill batch.*#new-token: (\d+)", server.log_text())]
        assert max(prefills) == CHUNK
        assert len(prefills) > sum(len(request.prompt) for request in requests) / CHUNK
        for line in server.signals():
            seen, counted = line["seen"], line["counted"]
            assert seen["num_running"] == counted["num_running"]
            assert seen["num_waiting"] == counted["num_waiting"] + counted["is_chunking"]
            assert seen["mean_context_tokens"] == counted["mean_context_tokens"]
