"""Off mode `kv-only`: the draft's KV and what it drafts are as if every round had run the draft.

The draft attends to earlier tokens, so that wrong entries show, and has all the norms and the bias that
EAGLE-3 drafts may have. As a control the projection is made to write nothing: the same checks must see it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import policies
import pytest
from cpu_server import draft_arguments, target_arguments
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from steered_server import SteeredServer, shares
from test_draft_kv import GAP, PROMPT, walk
from tiny_models import HIDDEN
from traffic import Reference, Request, Sending, random_requests, tokens_of

from draftdial.engine_patch.compat import version

CHUNK = 32
OUTPUT = 700
CLOSE = 1e-3
"""Sums in another order are off by 1e-5 at most; entries are around 1."""


@pytest.fixture(scope="module")
def server(models: Path, release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteeredServer]:
    """Prefills in chunks; retracts a request in every tenth round that has two or more."""
    folder = tmp_path_factory.mktemp("kv-only")
    write_full_draft(
        models / "context-draft", models / "full-draft", norm_before_fc=version(release) >= (0, 5, 17)
    )
    policy = policies.saved(policies.jumping(seed=1, in_turn=True), folder / "policy.safetensors")
    arguments = [*target_arguments(models), *draft_arguments(models, "full-draft")]
    environment = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"}
    serve = [str(policy), "--off-mode", "kv-only", "--log", str(folder / "decisions.log")]
    with SteeredServer(
        [*arguments, "--chunked-prefill-size", str(CHUNK)], folder, serve=serve, environment=environment
    ) as server:
        yield server


@pytest.fixture(autouse=True)
def _sound(server: SteeredServer) -> Iterator[None]:
    """Each test begins with a policy that decides 0, 1, 2, 3 in turn, and a projection that works."""
    assert server.set(draftdial_force_k=-1)
    assert server.set(probe_kv_only=0)
    assert server.deploy(policies.jumping(seed=1, in_turn=True))
    yield
    assert server.status()["errors"] == 0


def write_full_draft(source: Path, folder: Path, *, norm_before_fc: bool) -> None:
    """The draft in `source` with a norm before its fc, one for each hidden state, and a bias."""
    config, tensors = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )
    rng = np.random.default_rng(7)
    config |= {"bias": True, "fc_norm": True}
    tensors["fc.bias"] = rng.normal(size=HIDDEN).astype(np.float32)
    for i in range(3):
        tensors[f"fc_norm.{i}.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    if norm_before_fc:
        config["eagle_config"]["norm_before_fc"] = True
        tensors["input_norm.weight"] = rng.uniform(0.5, 1.5, 3 * HIDDEN).astype(np.float32)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def write_small_vocabulary(source: Path, folder: Path, *, size: int) -> None:
    """The draft in `source`, able to propose every other one of the target's first `2 * size` tokens."""
    config, tensors = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )
    proposed = 2 * np.arange(size)
    config["draft_vocab_size"] = size
    tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"][proposed])
    tensors["d2t"] = (proposed - np.arange(size)).astype(np.int64)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def entries(server: SteeredServer, name: str) -> NDArray[np.float32]:
    """The draft's keys and values of a finished request, `(tokens, 2, heads, width)`."""
    kv = np.load(server.folder / f"kv-{name}.npz")
    return np.stack([kv["keys"], kv["values"]], axis=1)


def stale(server: SteeredServer, names: Sequence[str], texts: Sequence[Sequence[int]]) -> list[int]:
    """For each finished request: how many entries are not those of a prefill of all that was said.

    The last rounds may have gone beyond the answer, with other tokens than the prefill has there.
    """
    server.flush()
    Sending(server, [Request(tuple(text), 2) for text in texts], name=f"kv-again-{names[0]}").answers()
    counts = []
    for i, (name, text) in enumerate(zip(names, texts, strict=True)):
        kept = len(text) - 1 - max(policies.TIERS)
        is_other = (
            np.abs(entries(server, name)[:kept] - entries(server, f"again-{names[0]}-{i}")[:kept]) > CLOSE
        )
        counts.append(int(is_other.any(axis=(1, 2, 3)).sum()))
    return counts


@pytest.mark.parametrize("fault", [0, 1], ids=["works", "writes nothing"])
def test_off_and_on_again_drafts_as_if_never_off(server: SteeredServer, fault: int) -> None:
    prompts = random_requests(seed=61, prompt_tokens=(PROMPT, PROMPT))
    task, other = (Request(next(prompts).prompt, OUTPUT) for _ in range(2))
    before = server.status()
    # Slots are handed out in the same order again: what is not written keeps another request's KV.
    walk(server, other, f"other-{fault}", has_gap=False)
    assert server.set(probe_kv_only=fault)
    gap = walk(server, task, f"gap-{fault}", has_gap=True)
    plain = walk(server, task, f"plain-{fault}", has_gap=False)
    after = server.status()
    # The server's first round at k = 0 runs the draft, to prove the projection.
    assert after["kv_only_rounds"] - before["kv_only_rounds"] >= GAP - 1
    assert after["kv_only_restarts"] - before["kv_only_restarts"] == 1
    assert plain.answer.tokens == gap.answer.tokens
    off = [position for position, (k, _) in gap.accepted.items() if k == 0]
    both = [p for p in gap.accepted.keys() & plain.accepted.keys() if p > max(off)]
    assert len(both) >= 50
    same_drafts = np.mean([gap.accepted[p] == plain.accepted[p] for p in both])
    [num_stale] = stale(server, [f"gap-{fault}-0"], [task.prompt + tuple(gap.answer.tokens)])
    if fault == 0:
        assert (num_stale, same_drafts) == (0, 1.0)
    else:
        assert num_stale >= 150 and same_drafts < 0.95


def test_kv_is_kept_through_retraction_chunks_aborts_and_swaps(
    server: SteeredServer, reference: Reference
) -> None:
    requests = reference.choose(
        random_requests(seed=62, prompt_tokens=(20, 100), new_tokens=(150, 200), spread_s=1.0), 12
    )
    doomed = reference.choose(random_requests(seed=63, new_tokens=(900, 1000), spread_s=0.5), 2)
    before, start = server.status(), len(server.rounds())
    aborted = Sending(server, doomed, name="doomed")
    sending = Sending(server, requests, name="kv-load")
    files = [policies.jumping(seed, in_turn=True) for seed in (2, 3)]
    made = 0
    while not sending.done():  # by rounds, not by time: a policy begins anew with every swap
        assert server.deploy(files[made % 2])
        made, seen = made + 1, len(server.rounds())
        while len(server.rounds()) < seen + 12 and not sending.done():
            time.sleep(0.02)
    for i in range(2):
        server.post("/abort_request", {"rid": f"doomed-{i}"})
    assert tokens_of(sending.answers()) == reference.tokens(requests)
    for answer, whole in zip(aborted.answers(), reference.tokens(doomed), strict=True):
        assert answer.tokens == whole[: len(answer.tokens)]
    assert made >= 2
    after, ran = server.status(), shares(server.rounds()[start:])
    assert after["kv_only_rounds"] - before["kv_only_rounds"] >= 6
    assert after["kv_only_restarts"] - before["kv_only_restarts"] >= 6
    assert min(ran.get(k, 0.0) for k in (0, 2, 3)) > 0.05  # 1 follows 0, and has to wait
    assert re.search(r"Testing retraction.* #retracted_reqs: [1-9]", server.log_text())
    assert max(int(n) for n in re.findall(r"Prefill batch.*#new-token: (\d+)", server.log_text())) == CHUNK
    texts = [
        request.prompt + tuple(tokens)
        for request, tokens in zip(requests, reference.tokens(requests), strict=True)
    ]
    assert stale(server, [f"load-{i}" for i in range(12)], texts) == [0] * 12


@pytest.mark.parametrize("fault", [0, 1], ids=["works", "writes nothing"])
def test_prompts_read_while_off_have_kv_that_is_right(
    server: SteeredServer, reference: Reference, fault: int
) -> None:
    """In chunks, beside requests that decode; retracted ones are read again."""
    before = server.status()
    assert server.set(draftdial_force_k=0)
    assert server.set(probe_kv_only=fault)
    requests = reference.choose(
        random_requests(seed=67 + fault, prompt_tokens=(20, 100), new_tokens=(400, 450), spread_s=0.5), 6
    )
    start = len(server.rounds())
    sending = Sending(server, requests, name=f"kv-prompt-{fault}")
    server.await_batch(len(requests), start)
    server.await_rounds(20)
    assert server.set(draftdial_force_k=-1)
    assert tokens_of(sending.answers()) == reference.tokens(requests)
    after = server.status()
    assert after["kv_only_prefills"] - before["kv_only_prefills"] >= len(requests)
    texts = [
        request.prompt + tuple(tokens)
        for request, tokens in zip(requests, reference.tokens(requests), strict=True)
    ]
    num_stale = stale(server, [f"prompt-{fault}-{i}" for i in range(len(requests))], texts)
    assert max(num_stale) == 0 if fault == 0 else sum(num_stale) >= 100


def test_second_turns_inherit_kv_that_is_right(server: SteeredServer, reference: Reference) -> None:
    first = reference.choose(random_requests(seed=64, new_tokens=(60, 90), spread_s=0.2), 4)
    assert tokens_of(Sending(server, first).answers()) == reference.tokens(first)
    longer = (
        Request((*request.prompt, *tokens, *range(5, 5 + n)), 40)
        for n, (request, tokens) in enumerate(zip(first, reference.tokens(first), strict=True), 1)
    )
    second = reference.choose(chain(longer, random_requests(seed=65)), 4)
    answers = Sending(server, second, name="kv-second").answers()
    assert tokens_of(answers) == reference.tokens(second)
    assert sum(answer.meta["cached_tokens"] >= 60 for answer in answers) >= 3
    texts = [request.prompt + tuple(answer.tokens) for request, answer in zip(second, answers, strict=True)]
    assert stale(server, [f"second-{i}" for i in range(4)], texts) == [0] * 4


def test_a_measurement_may_speculate_right_after_off_with_a_small_draft_vocabulary(
    models: Path, tmp_path: Path
) -> None:
    """Then the draft begins with what `kv-only` left it, which must be tokens that it has."""
    write_small_vocabulary(models / "draft", tmp_path / "small", size=512)
    policy = policies.saved(policies.jumping(seed=1, in_turn=True), tmp_path / "policy.safetensors")
    arguments = [
        *target_arguments(models),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(tmp_path / "small")),
    ]
    grid = ["--batches", "1,2", "--contexts", "32,96", "--rounds", "4", "--held-out", "0"]
    with SteeredServer(arguments, tmp_path, serve=[str(policy), "--off-mode", "kv-only"]) as server:
        request = Request(tuple(range(900, 960)), 60)
        assert len(Sending(server, [request]).answers()[0].tokens) == 60
        measured = server.command("profile", server.url, "--out", str(tmp_path / "tiny.json"), *grid)
        assert measured.returncode == 0, measured.stderr
        status = server.status()
        assert (status["kv_only_fallback"], status["errors"]) == ("", 0)


def test_a_failing_projection_leaves_the_server_warm(server: SteeredServer, reference: Reference) -> None:
    """The last test here: there is no way back."""
    requests = reference.choose(random_requests(seed=66, spread_s=0.2), 6)
    assert server.set(probe_kv_only=2)
    sending = Sending(server, requests, name="kv-fault")
    assert tokens_of(sending.answers()) == reference.tokens(requests)
    status = server.status()
    assert (status["off_mode"], status["kv_only_fallback"]) == ("kv-only", "RuntimeError: injected by a test")
    [line] = re.findall(r"draftdial: off mode kv-only: k = 0 stays warm: .*", server.log_text())
    assert line.endswith("injected by a test")
    texts = [
        request.prompt + tuple(tokens)
        for request, tokens in zip(requests, reference.tokens(requests), strict=True)
    ]
    # What was owed when it failed is lost: with this policy one round's.
    assert max(stale(server, [f"fault-{i}" for i in range(6)], texts)) <= 1
    assert server.set(draftdial_force_k=0)
    start = len(server.rounds())
    assert tokens_of(Sending(server, requests[:1]).answers()) == reference.tokens(requests[:1])
    assert set(shares(server.rounds()[start:])) == {0}
    assert server.status()["kv_only_rounds"] == status["kv_only_rounds"]
