"""Turns of a switchback benchmark, by servers that say what the test sets: pauses, failures, empty turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_client import FakeSglang, serve  # noqa: F401

from draftdial.controller import bench_switchback
from draftdial.controller.bench_arms import Arm, SteeredArms
from draftdial.controller.bench_switchback import SwitchbackBench
from draftdial.controller.bench_work import Work
from draftdial.controller.endless_load import EndlessLoad
from draftdial.controller.errors import UserError
from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch.client import Server
from draftdial.engine_patch.dial import Dial


class Counting:
    """A server that can be paused and says how many output tokens it made by when, a pair a look."""

    def __init__(self, fake: FakeSglang) -> None:
        self.url = fake.url
        self.is_paused = False
        self.algorithm: str | None = None
        self.newest = (100, 5.0)
        self.results: Iterator[tuple[int, float]] = iter(())
        """What it says when it goes on, one look after the other; the last of them from then on."""
        self._answer = fake.answer
        fake.answer = self.answer  # type: ignore[method-assign]

    def answer(self, path: str, body: bytes, authorization: str | None) -> tuple[int, Any]:
        if path in ("/pause_generation", "/continue_generation"):
            self.is_paused = path == "/pause_generation"
            return 200, {}
        code, answer = self._answer(path, body, authorization)
        if path == "/server_info":
            if not self.is_paused:
                self.newest = next(self.results, self.newest)
            names = ("output_tokens", "processed_s")
            [state] = answer["internal_states"]
            state["speculative_algorithm"] = self.algorithm
            state["draftdial"] |= dict(zip(names, self.newest, strict=True))
        return code, answer


@pytest.fixture
def servers(
    serve: Callable[..., FakeSglang],  # noqa: F811
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Counting, Counting]:
    """One that is steered, and one that stands for a server without speculation."""
    monkeypatch.setattr(bench_switchback, "SETTLE_S", 0.0)
    steered, other = (Counting(serve(make_dial(make_policy_file(1)))) for _ in range(2))
    return steered, other


@pytest.fixture
def bench(servers: tuple[Counting, Counting], tmp_path: Path) -> SwitchbackBench:
    return bench_of(servers, tmp_path)


def bench_of(servers: tuple[Counting, Counting], folder: Path) -> SwitchbackBench:
    arms = [Arm.parse("off")]
    work = Work.of({"closed": (1,), "requests": 4, "repeats": 1})
    steered = SteeredArms(Server(servers[0].url), arms, None)
    return SwitchbackBench(steered, arms, work, folder, window_s=0.01, no_spec=servers[1].url)


def turn_of(bench: SwitchbackBench, name: str, *errors: str) -> dict[str, Any]:
    """A turn of an arm under a load of which these requests have failed since the turn before."""

    async def turn() -> dict[str, Any]:
        [load] = bench.work.loads
        served = EndlessLoad(bench._server(name), None, 1.0, bench.work, load, 0, "run")
        served.errors += errors
        found = await bench._turn(name, load, served)
        assert not served.errors, "each counts once"
        return found

    return asyncio.run(turn())


def test_the_seconds_of_a_pause_are_in_no_turn(
    bench: SwitchbackBench, servers: tuple[Counting, Counting]
) -> None:
    steered, _ = servers
    bench._pause(bench.steered.server)
    steered.results = iter([(100, 5.0), (104, 65.0), (204, 66.0)])  # 5.0 was before the pause of a minute
    turn = turn_of(bench, "off")
    assert (turn["output_tok_s"], turn["window_s"]) == (100.0, 1.0)
    assert not steered.is_paused


def test_a_turn_under_which_nothing_was_paused_begins_at_once(
    bench: SwitchbackBench, servers: tuple[Counting, Counting]
) -> None:
    steered, other = servers
    steered.results = iter([(100, 5.0), (110, 7.0)])
    assert turn_of(bench, "off")["output_tok_s"] == 5.0
    assert other.is_paused


def test_what_fails_while_a_server_is_paused_makes_its_next_turn_void(
    bench: SwitchbackBench, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("no-spec", "off"):
        bench._pause(bench._server(name))
        assert turn_of(bench, name, "no whole answer in 1 s", "later")["failed"] == 2
        assert f"{name}, closed C = 1: no whole answer in 1 s\n" in capsys.readouterr().err


def test_a_turn_without_a_token_is_void(
    bench: SwitchbackBench, servers: tuple[Counting, Counting], capsys: pytest.CaptureFixture[str]
) -> None:
    servers[0].results = iter([(100, 5.0), (100, 5.5)])  # such as a part of a long prompt
    for name in ("off", "no-spec"):
        turn = turn_of(bench, name)
        assert (turn["failed"], turn["output_tok_s"]) == (1, 0.0)
        said = f"{name}, closed C = 1: no output token in a turn of 0.01 s\n"
        assert said in capsys.readouterr().err


def test_a_dead_server_leaves_no_other_one_paused(
    bench: SwitchbackBench, servers: tuple[Counting, Counting], tmp_path: Path
) -> None:
    for url in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
        bench._paused.add(Server(url))
    bench._pause(bench.steered.server)
    bench._pause(bench._server("no-spec"))
    with pytest.raises(UserError, match="cannot reach"):
        bench._give_up({"runs": [1]})
    assert not any(server.is_paused for server in servers)
    assert json.loads((tmp_path / "bench.json").read_text()) == {"runs": [1]}


def test_a_server_that_speculates_is_not_taken_for_one_without(
    servers: tuple[Counting, Counting], tmp_path: Path
) -> None:
    servers[1].algorithm = "EAGLE3"  # such as the steered one, under another name
    with pytest.raises(UserError, match=r"--no-spec: found http\S*, which speculates \(EAGLE3\)"):
        bench_of(servers, tmp_path)
