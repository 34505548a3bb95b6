"""Ending a server that a command started, while Ctrl-C is pressed again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from draftdial.controller import launched_server
from draftdial.controller.launched_server import LaunchedServer

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def test_ctrl_c_again_leaves_no_server_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []

    def start(command: list[str], **kwargs: Any) -> subprocess.Popen[bytes]:
        kwargs["stdout"] = subprocess.PIPE
        started.append(popen([sys.executable, "-c", DEAF], **kwargs))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(launched_server.subprocess, "Popen", start)
    monkeypatch.setattr(launched_server, "END_S", 1.0)
    monkeypatch.setattr(LaunchedServer, "_is_healthy", lambda self: True)
    again = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="the first"), LaunchedServer(tmp_path, [], tmp_path / "log"):
        [process] = started
        assert process.stdout is not None and process.stdout.readline() == b"\n", "it hears no SIGTERM now"
        again.start()
        raise KeyboardInterrupt("the first")
    again.join()
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()
