"""Ctrl-C twice, to a real `draftdial bench`: a server that notices what it is asked presses it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_client import FakeSglang, serve  # noqa: F401

from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch.dial import Dial

BENCH = (
    "import signal, sys\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in what a shell runs behind
    "from draftdial.controller.cli import main\n"
    "sys.exit(main(['bench', *sys.argv[1:]]))"
)
ANSWER = {"meta_info": {"completion_tokens": 4, "finish_reason": {"type": "length"}}}
REACHED_S = 0.3
"""After Ctrl-C, until the process has done with it what it does."""


class Pressing:
    """A server that streams answers, can be paused, and presses Ctrl-C before it answers certain requests."""

    def __init__(self, fake: FakeSglang) -> None:
        self.fake = fake
        self.is_paused = False
        self.presses: list[tuple[str, int]] = []
        """The paths of requests that make it press, in this order, and how often."""
        self.process: subprocess.Popen[bytes] | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                code, content = outer.answer(self.path, body)
                self.send_response(code)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        if path == "/generate":
            time.sleep(0.01)
            return 200, b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(ANSWER).encode()
        code, answer = self._done(path, body)
        if self.presses and self.presses[0][0] == path and self.process is not None:
            _, times = self.presses.pop(0)
            for _ in range(times):
                self.process.send_signal(signal.SIGINT)
                time.sleep(REACHED_S)
        return code, json.dumps(answer).encode()

    def _done(self, path: str, body: bytes) -> tuple[int, Any]:
        if path in ("/pause_generation", "/continue_generation"):
            self.is_paused = path == "/pause_generation"
            return 200, {}
        if path == "/flush_cache":
            return 200, {}
        return self.fake.answer(path, body, None)


@pytest.fixture
def pressing(
    serve: Callable[..., FakeSglang],  # noqa: F811
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
) -> Iterator[Callable[[], Pressing]]:
    started = []

    def start() -> Pressing:
        started.append(Pressing(serve(make_dial(make_policy_file(1)))))
        return started[-1]

    yield start
    for server in started:
        server.http.shutdown()
        server.http.server_close()


def interrupted(folder: Path, server: Pressing, presses: list[tuple[str, int]], *words: str) -> str:
    """What a bench that `server` interrupts says at its end."""
    (folder / "lengths.csv").write_text("arrival_s,input_tokens,output_tokens\n0,9,4\n1,9,4\n")
    words = ("--arms", "fixed-1", "--closed", "1", "--requests", "4", "--repeats", "1", *words)
    words = (*words, "--lengths", f"trace:{folder / 'lengths.csv'}", "--out", str(folder / "bench"))
    server.process = subprocess.Popen(
        [sys.executable, "-c", BENCH, server.url, *words], stderr=subprocess.PIPE
    )
    server.presses = list(presses)
    try:
        _, err = server.process.communicate(timeout=60)
    finally:
        server.process.kill()
    assert server.process.returncode == 130 and server.presses == [], err
    return err.decode()


CHANGE, LOOK, PAUSE = "/set_internal_state", "/server_info", "/pause_generation"
WHEN_PUT_BACK = [(CHANGE, 0), (CHANGE, 1), (LOOK, 1)]
WHEN_HALF_CHANGED = [(CHANGE, 2)]
TURNS = ("--switchback", "0.2")


@pytest.mark.parametrize(
    ("presses", "words"), [(WHEN_PUT_BACK, ()), (WHEN_PUT_BACK, TURNS), (WHEN_HALF_CHANGED, TURNS)]
)
def test_ctrl_c_twice_leaves_the_server_as_it_was(
    presses: list[tuple[str, int]], words: tuple[str, ...], pressing: Callable[[], Pressing], tmp_path: Path
) -> None:
    server = pressing()
    said = interrupted(tmp_path, server, presses, *words)
    assert said == "draftdial: interrupted; putting the server back\n"
    [dial] = server.fake.replicas
    assert dial is not None and (dial.mode, dial.forced_k) == ("steer", None)
    assert {"draftdial_force_k": 1} in server.fake.posts, "it was not so meanwhile"


def test_ctrl_c_twice_leaves_no_server_paused(pressing: Callable[[], Pressing], tmp_path: Path) -> None:
    server, other = pressing(), pressing()
    interrupted(tmp_path, server, [(PAUSE, 2)], *TURNS, "--no-spec", other.url)
    assert not server.is_paused and not other.is_paused
    assert json.loads((tmp_path / "bench" / "bench.json").read_text())["runs"] == []
