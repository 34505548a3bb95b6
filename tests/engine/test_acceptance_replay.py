"""A server that replays recorded acceptance: what it accepts equals the arrays at every output position."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import policies
import pytest
from cpu_server import CpuServer, draft_arguments, target_arguments
from steered_server import SteeredServer, num_switches
from tiny_models import VOCAB
from traffic import Answer, Request, Sending

from draftdial.controller.acceptance_file import AcceptedDrafts, write_requests
from draftdial.engine_patch.acceptance_arrays import AcceptanceArrays, tagged_rid
from draftdial.engine_patch.acceptance_replay import TOKEN
from draftdial.engine_patch.log_format import REQUEST_KINDS
from draftdial.engine_patch.log_reader import RecordedLog

DOMAINS = ("good", "poor")
MEANS = (3.0, 0.6)
LENGTHS = (40, 75, 400, 60, 33, 90)
BENCHMARK = {"DRAFTDIAL_BENCHMARK": "1"}


class Tagged(Sending):
    """Requests whose ids say by their number what they walk: by domain and hash, by row, by neither."""

    def _send(self, request: Request, rid: str | None) -> Answer:
        return super()._send(request, rid_of(request))


def rid_of(request: Request) -> str:
    """The id of a request, which is known by the length of its prompt."""
    number = len(request.prompt)
    if number % 3 == 0:
        return tagged_rid(f"r{number}", DOMAINS[number % 2], number << 57 | 12345)
    return f"r{number}#row={number % 12}" if number % 3 == 1 else f"r{number}"


def numbered_requests(first: int, count: int, *, new_tokens: int, spread_s: float = 0.0) -> list[Request]:
    """Requests with prompts of `first`, `first` + 1, ... tokens."""
    rng = random.Random(first)
    return [
        Request(tuple(rng.randrange(3, VOCAB) for _ in range(n)), new_tokens, rng.random() * spread_s)
        for n in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Six recorded requests of each domain, most of them shorter than the answers."""
    rng = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("arrays")
    paths = {domain: folder / f"{domain}.jsonl" for domain in DOMAINS}
    for path, mean in zip(paths.values(), MEANS, strict=True):
        write_requests(path, [rng.poisson(mean, length).astype(np.uint8) for length in LENGTHS])
    return paths


def serve_arguments(folder: Path, files: dict[str, Path]) -> list[str]:
    """Of `draftdial serve`: a policy that switches in every round, a log, and the files."""
    policy = policies.saved(policies.jumping(seed=1), folder / "policy.safetensors")
    replayed = [word for name, path in files.items() for word in ("--replay-acceptance", f"{name}={path}")]
    return [str(policy), "--log", str(folder / "decisions.log"), *replayed]


@pytest.fixture(scope="module")
def server(
    models: Path, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SteeredServer]:
    folder = tmp_path_factory.mktemp("replayed")
    arguments = [*target_arguments(models), *draft_arguments(models)]
    with SteeredServer(
        arguments, folder, serve=serve_arguments(folder, files), environment=BENCHMARK
    ) as started:
        yield started


def arrays_of(files: dict[str, Path], requests: Sequence[Request]) -> dict[int, AcceptedDrafts]:
    """What each request, by its number, is to accept after 1, 2, ... output tokens."""
    arrays = AcceptanceArrays.read(files.items())
    return {len(r.prompt): arrays.accepted(rid_of(r), r.new_tokens + 8) for r in requests}


def check_log(log: RecordedLog, expected: dict[int, AcceptedDrafts]) -> dict[int, list[tuple[int, int, int]]]:
    """Every recorded acceptance of these requests is the one expected; their (position, k, accepted)."""
    arrived = log.requests[log.requests["kind"] == REQUEST_KINDS.index("arrived")]
    number_of = dict(zip(arrived["request_id"].tolist(), arrived["prompt_tokens"].tolist(), strict=True))
    walks: dict[int, list[tuple[int, int, int]]] = {number: [] for number in expected}
    for row in log.accepts:
        number = number_of[int(row["request_id"])]
        if number in walks:
            walks[number].append((int(row["position"]), int(row["k"]), int(row["accepted"])))
    for number, walk in walks.items():
        assert walk
        for position, k, accepted in walk:
            assert accepted == min(expected[number][position - 1], k), (number, position, k)
    return walks


def check_answers(answers: Sequence[Answer], requests: Sequence[Request]) -> None:
    """All as long as they were asked to be."""
    for answer, request in zip(answers, requests, strict=True):
        assert answer.meta["finish_reason"]["type"] == "length"
        assert len(answer.tokens) == request.new_tokens


@pytest.mark.parametrize("k", [0, 1, 3])
def test_histograms_are_the_predicted_ones(server: SteeredServer, files: dict[str, Path], k: int) -> None:
    assert server.set(draftdial_force_k=k)
    requests = numbered_requests(20 + 10 * k, 8, new_tokens=300)
    answers = Tagged(server, requests).answers()
    assert server.set(draftdial_force_k=-1)
    check_answers(answers, requests)
    if k > 0:
        assert {token for answer in answers for token in answer.tokens[1:]} == {TOKEN}
    expected = arrays_of(files, requests)
    for answer, request in zip(answers, requests, strict=True):
        histogram, emitted = [0] * (k + 1), 1
        while emitted < request.new_tokens:
            n = min(int(expected[len(request.prompt)][emitted - 1]), k)
            histogram[n] += 1
            emitted += n + 1
        seen = answer.meta["spec_correct_drafts_histogram"]
        assert seen + [0] * (k + 1 - len(seen)) == histogram
        assert answer.meta["spec_verify_ct"] == sum(histogram)


def test_a_policy_that_switches_in_every_round_meets_the_same_arrays(
    server: SteeredServer, files: dict[str, Path]
) -> None:
    requests = numbered_requests(70, 12, new_tokens=250) + numbered_requests(
        82, 12, new_tokens=250, spread_s=1.0
    )
    start = len(server.rounds())
    check_answers(Tagged(server, requests).answers(), requests)
    rounds = server.rounds()[start:]
    assert num_switches(rounds) > 0.5 * len(rounds)
    assert max(batch_size for batch_size, _ in rounds) >= 8
    walks = check_log(server.recorded(), arrays_of(files, requests))
    for walk in walks.values():
        assert walk[0][0] == 1, "the prefill made one token"
        assert len({k for _, k, _ in walk}) == len(policies.TIERS)
        for (position, _, accepted), (following, _, _) in pairwise(walk):
            assert following == position + accepted + 1
        position, _, accepted = walk[-1]
        assert position < 250 <= position + accepted + 1
    assert max(accepted for walk in walks.values() for _, _, accepted in walk) == max(policies.TIERS)


def test_aborts_leave_the_others_alone(server: SteeredServer, files: dict[str, Path]) -> None:
    doomed = numbered_requests(100, 6, new_tokens=2000)
    others = numbered_requests(110, 8, new_tokens=200, spread_s=1.0)
    aborted = Tagged(server, doomed)
    server.await_batch(len(doomed))
    sending = Tagged(server, others)
    for request in doomed:
        server.await_rounds(5)
        server.post("/abort_request", {"rid": rid_of(request)})
    assert {answer.meta["finish_reason"]["type"] for answer in aborted.answers()} == {"abort"}
    check_answers(sending.answers(), others)
    check_log(server.recorded(), arrays_of(files, others))


def test_it_says_so(server: SteeredServer) -> None:
    status = server.status()
    told = re.fullmatch(
        r"6 of good, 6 of poor \(sha256 [0-9a-f]{12}\), (\d+) rounds; outputs are meaningless",
        status["acceptance_replay"],
    )
    assert told is not None and int(told[1]) == len(server.rounds())
    assert (status["fallback"], status["errors"]) == ("", 0)
    assert server.recorded().header["acceptance_replay"] == list(DOMAINS)
    assert "outputs are meaningless" in server.command("status", server.url).stdout
    text = server.log_text()
    assert len(re.findall("draftdial: acceptance is replayed from", text)) == 1
    assert len(re.findall("draftdial: warning: acceptance replay: ", text)) == 1


def test_retracted_and_chunked_requests_go_on_where_they_were(
    models: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    requests = numbered_requests(60, 16, new_tokens=200, spread_s=0.5)
    arguments = [*target_arguments(models), *draft_arguments(models), "--chunked-prefill-size", "32"]
    environment = {**BENCHMARK, "SGLANG_TEST_RETRACT": "1"}
    serve = serve_arguments(tmp_path, files)
    with SteeredServer(arguments, tmp_path, serve=serve, environment=environment) as server:
        answers = Tagged(server, requests).answers()
        walks = check_log(server.recorded(), arrays_of(files, requests))
        retracted = re.findall(r"Testing retraction.* #retracted_reqs: (\d+)", server.log_text())
    # A request that comes back has one token more from its second prefill, which is the target's own,
    # as are those from rounds without drafts.
    num_prefilled = 0
    for answer, request in zip(answers, requests, strict=True):
        assert len(answer.tokens) == request.new_tokens
        walk = walks[len(request.prompt)]
        ends = [1, *(position + accepted + 1 for position, _, accepted in walk)]
        starts = [*(position for position, _, _ in walk), max(request.new_tokens, ends[-1])]
        gaps = [start - end for start, end in zip(starts, ends, strict=True)]
        assert min(gaps) >= 0
        num_own = sum(gaps) + sum(k == 0 for _, k, _ in walk)
        assert sum(token != TOKEN for token in answer.tokens[1:]) <= num_own
        num_prefilled += sum(gaps)
    assert num_prefilled >= 1
    assert sum(map(int, retracted)) >= 1


def test_two_ranks_accept_alike(models: Path, files: dict[str, Path], tmp_path: Path) -> None:
    requests = numbered_requests(30, 16, new_tokens=150, spread_s=0.5)
    arguments = [*target_arguments(models), *draft_arguments(models), "--tp-size", "2"]
    environment = {**BENCHMARK, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    serve = serve_arguments(tmp_path, files)
    with SteeredServer(arguments, tmp_path, serve=serve, environment=environment) as server:
        check_answers(Tagged(server, requests).answers(), requests)
        check_log(server.recorded(), arrays_of(files, requests))
        status = server.status()
        assert (status["ranks"], status["ranks_agree"], status["errors"]) == (2, 1, 0)
    assert server.rounds(0) == server.rounds(1)
    assert num_switches(server.rounds(0)) > 0.5 * len(server.rounds(0))


def test_a_server_that_does_not_say_it_is_a_benchmark_does_not_start(
    server: CpuServer, models: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """`server` only lends its command line."""
    arguments = [*target_arguments(models), *draft_arguments(models)]
    done = server.command("serve", *serve_arguments(tmp_path, files), "--", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("draftdial: .*DRAFTDIAL_BENCHMARK=1 says it is a benchmark\n", done.stderr)
