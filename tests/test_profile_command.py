"""What `draftdial profile` says: how far it is, what Ctrl-C leaves, and how good the profile is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_profile_build import FACTS, World

from draftdial.controller import measuring_progress, profile_server, progress_lines
from draftdial.controller.cli import main

NUM_MEASURED = 2 * 10
"""Six cells, two between them, prefills and switches, twice each."""
NUM_WITHOUT_SPECULATION = 2 * 9


class Served(World):
    """A server as the command meets it; `before` is called before everything that is measured there."""

    def __init__(self, side: str, before: Callable[[], None]) -> None:
        super().__init__(side)
        self.facts = FACTS | {"speculates": int(side == "speculative")}
        self.facts_that_last = FACTS
        self.before = before
        self.is_closed = False

    def run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.before()
        return super().run(*args, **kwargs)

    def check_kv_only(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Machine:
    """Both servers, and a clock that every measurement moves by `step_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.now_s = 0.0
        self.step_s = 4.0
        self.ctrl_c_at = ""
        """Where Ctrl-C is pressed: as a server is met (its URL), or after so many measurements."""
        self.num_asked = 0
        self.between = 1.0
        """How much longer rounds of the batches between those of the grid take."""
        self.served = {"http://a": "speculative", "http://b": "nospec"}
        self.servers: list[Served] = []
        self.arguments = ["profile", "http://a", "--no-spec", "http://b", "--out", str(out)]
        self.arguments += "--batches 1,4,8 --contexts 100,400 --rounds 8 --held-out 2".split()
        for module in (measuring_progress, progress_lines):
            monkeypatch.setattr(module, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(profile_server, "_measured", self.meet)

    def meet(self, url: str, args: Any) -> Served:
        if url == self.ctrl_c_at:
            raise KeyboardInterrupt
        server = Served(self.served[url], self.measuring)
        server.slowness = lambda number, batch, row: self.between if batch in (3, 6) else 1.0
        self.servers.append(server)
        return server

    def measuring(self) -> None:
        if str(self.num_asked) == self.ctrl_c_at:
            raise KeyboardInterrupt
        self.num_asked += 1
        self.now_s += self.step_s


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return Machine(monkeypatch, tmp_path / "tiny.json")


def progress_in(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("draftdial profile: ")]


def test_a_pipe_hears_how_far_it_is(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(machine.arguments) == 0
    expected = [("speculative", done, NUM_MEASURED) for done in range(3, NUM_MEASURED + 1, 3)]
    expected += [
        ("nospec", done, NUM_WITHOUT_SPECULATION) for done in range(3, NUM_WITHOUT_SPECULATION + 1, 3)
    ]
    assert progress_in(capsys.readouterr().err) == [
        f"draftdial profile: {side}: {done} of {total} measured, 0:{4 * (total - done) // 60:02}:"
        f"{4 * (total - done) % 60:02} left"
        for side, done, total in expected
    ]


def test_the_time_left_is_not_known_before_it_is(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.step_s = 90.0
    assert main(machine.arguments) == 0
    first, second, *_ = progress_in(capsys.readouterr().err)
    assert first == f"draftdial profile: speculative: 1 of {NUM_MEASURED} measured"
    assert second == f"draftdial profile: speculative: 2 of {NUM_MEASURED} measured, 0:27:00 left"


def test_a_terminal_shows_a_bar_and_no_lines(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes a pipe for a terminal by
    assert main(machine.arguments) == 0
    err = capsys.readouterr().err
    assert f"/{NUM_MEASURED}" in err and progress_in(err) == []


@pytest.mark.parametrize("at", [5, NUM_MEASURED + 3])
def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(
    at: int, machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.ctrl_c_at = str(at)
    assert main(machine.arguments) == 130
    said = progress_in(capsys.readouterr().err)[-1]
    kept = tmp_path / "tiny.measurements.json"
    assert said == (
        f"draftdial profile: interrupted; {kept} keeps what was measured, and the same command goes on"
        "; putting the server back"
    )
    assert all(server.is_closed for server in machine.servers) and not (tmp_path / "tiny.json").exists()
    machine.ctrl_c_at = ""
    assert main(machine.arguments) == 0
    assert machine.num_asked == NUM_MEASURED + NUM_WITHOUT_SPECULATION, "nothing is measured twice"


def test_ctrl_c_as_the_second_server_starts_keeps_what_was_measured_on_the_first(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.ctrl_c_at = "http://b"
    assert main(machine.arguments) == 130
    assert progress_in(capsys.readouterr().err)[-1].endswith(
        "tiny.measurements.json keeps what was measured, and the same command goes on"
    )
    machine.ctrl_c_at = ""
    assert main(machine.arguments) == 0
    assert machine.num_asked == NUM_MEASURED + NUM_WITHOUT_SPECULATION


@pytest.mark.parametrize(("at", "what_follows"), [("http://a", ""), ("0", "; putting the server back")])
def test_ctrl_c_before_anything_is_measured_promises_nothing(
    at: str, what_follows: str, machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.ctrl_c_at = at
    assert main(machine.arguments) == 130
    assert capsys.readouterr() == (
        "",
        f"draftdial profile: interrupted before it measured anything{what_follows}\n",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("between", "is_advised"), [(1.05, False), (0.95, True), (1.2, True)])
def test_a_profile_that_predicts_badly_comes_with_advice(
    between: float, is_advised: bool, machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.between = between
    assert main(machine.arguments) == 0
    [line] = capsys.readouterr().out.splitlines()
    advice = "Above 5% mean error, measure more batches (--batches): round times are stairs in the batch."
    assert line.endswith(advice) == is_advised and "mean error of" in line
    assert advice not in (tmp_path / "tiny.json").read_text(), "it is no property of the profile"
