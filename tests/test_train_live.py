"""What `draftdial train engine=live` makes of a configuration, before there is a server."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from draftdial.controller.cli import main as draftdial
from draftdial.controller.errors import UserError
from draftdial.controller.launched_server import LaunchedServer
from draftdial.controller.train import main as train
from draftdial.controller.train_config import load_config, resumed_kind

LIVE = ["engine=live", "engine.url=http://127.0.0.1:9"]


def test_a_live_run_is_short_and_of_one_server() -> None:
    config, _ = load_config([*LIVE, "profile=randomised", "profile.names=[h200-llama3-8b]"])
    assert (config.engine.kind, config.ppo.num_servers, config.profile.num_random) == ("live", 1, 0)
    assert config.ppo.total_rounds < 100_000 and config.ppo.width == 64


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["engine=live"], "give engine.url of a server, or engine.command"),
        ([*LIVE, "engine.command=--model x"], "give engine.url of a server, or engine.command"),
        ([*LIVE, "profile.names=[h200-llama3-8b,h100-llama3-8b]"], "allowed with engine=live: the server's"),
        ([*LIVE, "profile.num_random=3"], "profile.names: h200-llama3-8b; allowed with engine=live"),
        ([*LIVE, "ppo.num_servers=2", "ppo.batch_size=512"], "ppo.num_servers: 2; allowed: 1"),
        ([*LIVE, "scenario=open", "objective=latency"], "objective.name: latency; allowed: throughput"),
        (["engine.kind=imagined"], "engine.kind"),
    ],
)
def test_what_cannot_be_live_is_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load_config(overrides)


@pytest.fixture(scope="module")
def simulated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    train(["experiment=smoke", "ppo.width=16", "ppo.tau_s=0.07", "scenario.high=4"], folder=folder)
    return folder


def test_a_run_that_goes_on_live_keeps_what_it_is(simulated_run: Path) -> None:
    config, _ = load_config([f"resume={simulated_run}", *LIVE, "ppo.total_rounds=900"])
    assert resumed_kind(config) == "simulated" and config.engine.kind == "live"
    assert (config.ppo.width, config.ppo.tau_s, config.scenario.high) == (16, 0.07, 4)
    assert (config.ppo.num_servers, config.ppo.total_rounds) == (1, 900)
    with pytest.raises(UserError, match="a run resumes its own groups"):
        load_config([f"resume={simulated_run}", "engine=skip"])


def test_a_server_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert draftdial(["train", *LIVE]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "cannot reach the server" in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def test_ctrl_c_while_the_server_starts_leaves_nothing(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: LaunchedServer) -> bool:
        assert [path.name for path in temporary.glob("draftdial-live-*/*")]
        raise KeyboardInterrupt

    monkeypatch.setattr(LaunchedServer, "_is_healthy", interrupted)
    assert draftdial(["train", "engine=live", "engine.command='--model-path /nowhere'"]) == 130
    assert list(temporary.iterdir()) == [] and not (temporary.parent / "runs").exists()


def test_a_server_that_does_not_start_is_one_line(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no SGLang in the environment of these tests, and no such model."""
    assert draftdial(["train", "engine=live", "engine.command='--model-path /nowhere'"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    assert "the server did not start: see " in captured.err
    [log] = temporary.glob("draftdial-live-*/server.log")
    assert str(log) in captured.err and log.read_text(), "what it printed is kept"
    assert not (temporary.parent / "runs").exists()
