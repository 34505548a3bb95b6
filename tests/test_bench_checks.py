"""What a benchmark asks and its server cannot answer, found before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_client import FakeSglang, fails, serve  # noqa: F401

from draftdial.controller.bench_checks import check_domains, check_lengths
from draftdial.controller.bench_work import Work
from draftdial.controller.errors import UserError
from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch.acceptance_arrays import AcceptanceArrays, replayed_domains
from draftdial.engine_patch.client import Server
from draftdial.engine_patch.dial import Dial

CONTEXT, DRAFTS = 100, 8
INFO = {"max_req_input_len": CONTEXT - 6, "speculative_num_draft_tokens": DRAFTS, "context_length": None}
"""Of a server with a context of 100 tokens, as 0.5.17 and 0.5.23 answer."""


@pytest.fixture
def fake(
    serve: Callable[..., FakeSglang],  # noqa: F811
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
) -> FakeSglang:
    return serve(make_dial(make_policy_file(1)), info=dict(INFO))


def lengths(folder: Path, prompt: int, output: int) -> str:
    path = folder / "lengths.csv"
    path.write_text(f"arrival_s,input_tokens,output_tokens\n0,9,20\n1,9,20\n2,{prompt},{output}\n")
    return f"trace:{path}"


def replayed(*domains: str) -> str:
    arrays = AcceptanceArrays({name: [np.ones(40, np.uint8)] * 2 for name in domains})
    return f"{arrays}, 9 rounds; outputs are meaningless"


def test_domains_must_be_those_that_the_server_replays() -> None:
    status = {"acceptance_replay": replayed("chat", "code of law")}
    for domains in ((), ("chat",), ("code of law", "chat")):
        check_domains(domains, status, "there")
    with pytest.raises(
        UserError, match="--domains: found chat, poor, allowed: chat, code of law, which there"
    ):
        check_domains(("chat", "poor"), status, "there")
    nothing: dict[str, Any] = {"acceptance_replay": ""}
    check_domains((), nothing, "there")
    for status in (nothing, {}):
        with pytest.raises(UserError, match="--domains: found chat, allowed: none, as there replays no"):
            check_domains(("chat",), status, "there")


def test_a_text_that_was_cut_says_nothing_about_domains() -> None:
    names = [f"domain{i}" for i in range(60)]
    assert replayed_domains(replayed(*names)) == tuple(names)
    cut = replayed(*names)[:500]
    assert replayed_domains(cut) == ()
    check_domains(("domain59",), {"acceptance_replay": cut}, "there")


@pytest.mark.parametrize(
    ("info", "longest"),
    [
        (INFO, CONTEXT - DRAFTS),
        (INFO | {"speculative_num_draft_tokens": None}, CONTEXT - 2),
        ({"max_req_input_len": CONTEXT - 6}, CONTEXT - 2),
        ({"context_length": CONTEXT}, None),
    ],
)
def test_the_longest_request_leaves_room_for_drafts(
    fake: FakeSglang, info: dict[str, Any], longest: int | None
) -> None:
    fake.info = info
    assert Server(fake.url).longest_request() == longest


def test_a_request_may_fill_the_context_and_no_more(fake: FakeSglang, tmp_path: Path) -> None:
    options = {"closed": (1, 2), "requests": 30, "repeats": 2, "seed": 5}
    server = Server(fake.url)
    check_lengths(Work.of(options | {"lengths": lengths(tmp_path, 60, 32)}), server)
    long = Work.of(options | {"lengths": lengths(tmp_path, 61, 32)})
    with pytest.raises(
        UserError,
        match=r"bench: closed C = 1, seed 5: found .* of 61 \+ 32 tokens, allowed: 92 in all on http",
    ):
        check_lengths(long, server)
    fake.info = {}
    check_lengths(long, server)


def test_bench_sends_nothing_to_a_server_that_cannot_answer(
    fake: FakeSglang, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench"
    words = ["bench", fake.url, "--closed", "1", "--requests", "30", "--out", out]
    assert "--domains: found chat, allowed: none" in fails(capsys, 2, *words, "--domains", "chat")
    assert "of 70 + 40 tokens" in fails(capsys, 2, *words, "--lengths", lengths(tmp_path, 70, 40))
    assert fake.posts == [] and not out.exists()


def test_the_server_without_speculation_is_looked_at_too(
    fake: FakeSglang,
    serve: Callable[..., FakeSglang],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = serve(None, has_plugin=False, info={"max_req_input_len": 44})
    words = ["bench", fake.url, "--no-spec", other.url, "--closed", "1", "--requests", "30"]
    words += ["--out", str(tmp_path / "bench"), "--lengths", lengths(tmp_path, 20, 40)]
    assert f"of 20 + 40 tokens, allowed: 48 in all on {other.url}" in fails(capsys, 2, *words)
