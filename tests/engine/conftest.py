"""Servers that the tests of real SGLang share. Where SGLang is not installed these tests are skipped."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the modules beside this one are no package

import policies  # noqa: E402
from cpu_server import CpuServer, draft_arguments, target_arguments  # noqa: E402
from steered_server import SteeredServer  # noqa: E402
from tiny_models import write_models  # noqa: E402
from traffic import Reference  # noqa: E402


def pytest_configure() -> None:
    # A time limit ends pytest by SIGTERM: like Ctrl-C, it must end the servers too.
    if importlib.util.find_spec("sglang") is not None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is None:
        skip = pytest.mark.skip(reason="SGLang is not installed here: make test-engine")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def release() -> str:
    """SGLang's."""
    return importlib.metadata.version("sglang")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny models."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture(scope="session")
def reference(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """The target's own answers."""
    log = tmp_path_factory.mktemp("reference") / "server.log"
    with CpuServer(target_arguments(models), log) as server:
        yield Reference(server)


@pytest.fixture(scope="session")
def steered(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteeredServer]:
    """A server started by `draftdial serve`, which probes itself, keeps a log and shows metrics."""
    folder = tmp_path_factory.mktemp("steered")
    policy = policies.saved(policies.learned(seed=0), folder / "policy.safetensors")
    with SteeredServer(
        [*target_arguments(models), *draft_arguments(models), "--enable-metrics"],
        folder,
        serve=[str(policy), "--log", str(folder / "decisions.log")],
    ) as server:
        yield server
