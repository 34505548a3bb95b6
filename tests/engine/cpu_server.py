"""A real SGLang HTTP server on this machine's CPU, started, asked and stopped by tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_S = 1200.0
"""Far above the 10 to 20 seconds of an idle machine (250 were seen at a load of 20): only a hang must end."""
ANSWER_S = 240.0
COMMAND_S = 1200.0
"""Measuring a server takes half a minute on an idle machine."""

CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",  # two threads on two busy cores are an order of magnitude slower than one
    "TORCHDYNAMO_DISABLE": "1",  # else the first draft waits for a C++ compiler
    "SGLANG_DISABLE_REQUEST_LOGGING": "1",
}


def target_arguments(models: Path) -> list[str]:
    """Arguments of `sglang.launch_server` for the tiny target; later ones override them."""
    return [
        *("--model-path", str(models / "target"), "--device", "cpu", "--attention-backend", "torch_native"),
        *("--dtype", "float32", "--skip-tokenizer-init", "--sleep-on-idle", "--random-seed", "1"),
        *("--max-total-tokens", "16384", "--max-running-requests", "16", "--context-length", "4096"),
    ]


def draft_arguments(models: Path, draft: str = "draft") -> list[str]:
    """Those that add EAGLE-3 and leave its tiers to `draftdial serve`."""
    return ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(models / draft)]


def adaptive_arguments(models: Path, config: Path, largest: int, draft: str = "draft") -> list[str]:
    """Those that `draftdial serve` would arrive at, by hand: EAGLE-3 with SGLang's adaptive steps."""
    return [
        *draft_arguments(models, draft),
        *("--speculative-num-steps", str(largest), "--speculative-num-draft-tokens", str(largest + 1)),
        *("--speculative-eagle-topk", "1", "--speculative-adaptive"),
        *("--speculative-adaptive-config", str(config)),
    ]


class ServerDied(AssertionError):
    """The server's process ended before it answered."""


class CpuServer:
    """One server and its processes; a context manager that ends them all."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        serve: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it and wait until it is healthy.

        Args:
            arguments: Of `sglang.launch_server`, host and port apart.
            log: File for what its processes print.
            serve: Arguments of `draftdial serve` to start it through; without them, SGLang itself.
            environment: Variables on top of this process's own, from which `DRAFTDIAL_*` are taken out.

        Raises:
            ServerDied: it ended instead; the message holds the end of its log.
        """
        self.url = f"http://127.0.0.1:{_free_port()}"
        self.log = log
        host, port = self.url.removeprefix("http://").split(":")
        launch = [*arguments, "--host", host, "--port", port]
        if serve is None:
            command = [sys.executable, "-m", "sglang.launch_server", *launch]
        else:
            command = [sys.executable, "-m", "draftdial.controller.cli", "serve", *serve, "--", *launch]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env=_inherited() | CPU_ENVIRONMENT | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group to end as one
            )
        try:
            self._await_health()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the server."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def post(self, path: str, body: Any) -> Any:
        """The JSON answer of `path` to a JSON body."""
        content = self._post(path, json.dumps(body).encode())
        return json.loads(content) if content else None

    def get(self, path: str) -> bytes:
        """The answer of `path`."""
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_S) as answer:
            content: bytes = answer.read()
        return content

    def flush(self) -> None:
        """Forget every cached prefix, once the scheduler has seen that all requests are answered."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                self._post("/flush_cache", b"")
                return
            except urllib.error.HTTPError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.01)

    def internal_state(self) -> dict[str, Any]:
        """What the scheduler says of itself in `/server_info`."""
        state: dict[str, Any] = json.loads(self.get("/server_info"))["internal_states"][0]
        return state

    def status(self) -> dict[str, Any]:
        """What the plugin says of itself in `/server_info`."""
        status: dict[str, Any] = self.internal_state()["draftdial"]
        return status

    def set(self, **values: int) -> bool:
        """Send control values; whether every scheduler took them."""
        answer = self.post("/set_internal_state", {"server_args": values})
        return all(answer if isinstance(answer, list) else [answer["updated"]])

    def command(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `draftdial NAME ARGUMENTS` beside the server."""
        return subprocess.run(
            [sys.executable, "-m", "draftdial.controller.cli", name, *arguments],
            env=_inherited(),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )

    def log_text(self) -> str:
        """What its processes have printed so far."""
        return self.log.read_text(errors="replace")

    def _post(self, path: str, data: bytes) -> bytes:
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            content: bytes = answer.read()
        return content

    def _await_health(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerDied(f"exit {self.process.returncode}\n{self.log_text()[-6000:]}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=10).close()
                return
            except (OSError, urllib.error.URLError):
                time.sleep(0.25)
        raise ServerDied(f"not healthy after {START_S:.0f} s\n{self.log_text()[-6000:]}")


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("DRAFTDIAL_")}


def _free_port() -> int:
    """Below those that Linux gives to connections: the server binds it many seconds later."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
