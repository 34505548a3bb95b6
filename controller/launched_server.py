"""Servers that a command starts for itself and ends when it is done."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from draftdial.controller.errors import UserError
from draftdial.controller.interrupts import uninterrupted
from draftdial.engine_patch.settings import POLICY

START_S = 1800.0
"""Loading a large model and capturing graphs for every tier takes long."""
END_S = 30.0


class LaunchedServer(AbstractContextManager["LaunchedServer"]):
    """`draftdial serve POLICY --warn -- ARGS` on a free port of this machine; `url` is where it answers."""

    def __init__(
        self,
        policy: Path,
        arguments: Sequence[str],
        log: Path,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start it, with environment `variables` on top of this process's; what it prints goes to `log`.

        It is healthy once the block is entered.
        """
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        place = ["--host", "127.0.0.1", "--port", str(port)]
        command = [sys.executable, "-m", "draftdial.controller.cli", "serve", str(policy), "--warn"]
        environment = {name: value for name, value in os.environ.items() if name != POLICY}
        environment |= variables
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--", *arguments, *place],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its processes form a group, to end as one
            )

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_S
        try:
            while not self._is_healthy():
                if self._process.poll() is not None:
                    raise UserError(f"the server did not start: see {self._log}: {self._last_line()}")
                if time.monotonic() > deadline:
                    raise UserError(f"the server was not healthy after {START_S:.0f} s: see {self._log}")
                time.sleep(0.5)
        except BaseException:
            with uninterrupted():
                self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with uninterrupted():
            self._end()

    def _is_healthy(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=10).close()
        except (OSError, urllib.error.URLError):
            return False
        return True

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it printed nothing")

    def _end(self) -> None:
        for end in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, end)
            except ProcessLookupError:
                break
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()


def without_speculation(arguments: Sequence[str]) -> list[str]:
    """SGLang's arguments but those that begin with `--speculative`, and their values."""
    kept: list[str] = []
    is_dropping = False
    for argument in arguments:
        if argument.startswith("--"):
            is_dropping = argument.startswith("--speculative")
        if not is_dropping:
            kept.append(argument)
    return kept


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
