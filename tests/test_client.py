"""`draftdial status`, `set` and `deploy` against an HTTP server that answers as SGLang does."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from draftdial.controller.cli import main
from draftdial.controller.errors import UserError
from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch import control, rank_agreement
from draftdial.engine_patch import dial as dials
from draftdial.engine_patch.client import Server
from draftdial.engine_patch.dial import Dial
from draftdial.engine_patch.status import status_of


@dataclass
class FakeSglang:
    """SGLang's two endpoints over the real hooks, one dial per data-parallel replica (None: no dial)."""

    replicas: list[Dial | None]
    has_plugin: bool = True
    api_key: str | None = None
    admin_api_key: str | None = None
    location: str | None = None
    """Where every request is sent on to."""
    keys: list[str | None] = field(default_factory=list)
    """The authorization of every request."""
    raw_answer: bytes | None = None
    delay_s: float = 0.0
    posts: list[dict[str, Any]] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    """What else `/server_info` says."""
    url: str = ""

    def answer(self, path: str, body: bytes, authorization: str | None) -> tuple[int, Any]:
        time.sleep(self.delay_s)
        self.keys.append(authorization)
        if self.location is not None:
            return 307, {}
        key = self.admin_api_key or self.api_key
        if self.admin_api_key is not None and path == "/server_info":
            key = self.api_key
            if authorization != f"Bearer {key}":
                return 401, {"error": "Unauthorized", "sent": authorization}
        if path == "/server_info":
            return 200, {
                **self.info,
                "version": "0.5.23",
                "internal_states": [self._state(dial) for dial in self.replicas],
            }
        if key is not None and authorization != f"Bearer {key}":
            return 401, {"error": "Unauthorized", "sent": authorization}
        if path == "/set_internal_state":
            self.posts.append(json.loads(body)["server_args"])
            return 200, [self._change(dial) for dial in self.replicas]
        return 404, {"detail": "Not Found"}

    def _state(self, dial: Dial | None) -> dict[str, Any]:
        return {"tp_size": 1, **({"draftdial": status_of(dial)} if self.has_plugin else {})}

    def _change(self, dial: Dial | None) -> bool:
        dials.install(dial)
        request = SimpleNamespace(server_args=dict(self.posts[-1]))
        updated: bool = control.around_set_internal_state(_refuse, None, request).updated
        return updated


def _refuse(scheduler: Any, recv_req: Any) -> Any:
    return SimpleNamespace(updated=False)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeSglang]]:
    """Starts fake servers; every replica of theirs has one rank."""
    module = ModuleType("sglang.srt.managers.io_struct")
    module.SetInternalStateReqOutput = type(  # type: ignore[attr-defined]
        "SetInternalStateReqOutput", (SimpleNamespace,), {"__annotations__": {"updated": bool}}
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(rank_agreement, "gather", lambda scheduler, vote: [vote])
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    started = []

    def start(*replicas: Dial | None, **settings: Any) -> FakeSglang:
        fake = FakeSglang(list(replicas), **settings)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(b"")

            def do_POST(self) -> None:
                self._answer(self.rfile.read(int(self.headers["Content-Length"])))

            def _answer(self, body: bytes) -> None:
                code, answer = fake.answer(self.path, body, self.headers.get("Authorization"))
                data = json.dumps(answer).encode() if fake.raw_answer is None else fake.raw_answer
                self.send_response(code)
                if fake.location is not None:
                    self.send_header("Location", fake.location + self.path)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        fake.url = f"http://127.0.0.1:{server.server_port}"
        return fake

    yield start
    for server in started:
        server.shutdown()
        server.server_close()
    dials.install(None)


@pytest.fixture
def dial(make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]) -> Dial:
    return make_dial(make_policy_file(1))


@pytest.fixture
def policy(tmp_path: Path, make_policy_file: Callable[..., PolicyFile]) -> Path:
    """A policy other than that of `dial`."""
    path = tmp_path / "new.safetensors"
    path.write_bytes(make_policy_file(3).data)
    return path


def fails(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """The one line that a command leaves on standard error when it exits with `code`."""
    assert main([str(argument) for argument in arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("draftdial: ") and err.count("\n") == 1
    return err


def test_status_in_words_and_as_json(
    serve: Callable[..., FakeSglang], dial: Dial, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = serve(dial)
    assert main(["status", fake.url]) == 0
    assert f"policy     {dial.policy_id} (tiny)" in capsys.readouterr().out
    assert main(["status", fake.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [status_of(dial)]
    assert main(["status", fake.url, "--report"]) == 0
    assert "no rounds yet" in capsys.readouterr().out


def test_set_changes_every_replica(
    serve: Callable[..., FakeSglang],
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
    capsys: pytest.CaptureFixture[str],
) -> None:
    replicas = [make_dial(make_policy_file(1)) for _ in range(2)]
    fake = serve(*replicas)
    assert main(["set", fake.url, "--mode", "shadow"]) == 0
    assert main(["set", fake.url, "--force-k", "3"]) == 0
    assert [(dial.mode, dial.forced_k) for dial in replicas] == [("shadow", 3)] * 2
    assert "k = 3 forced" in capsys.readouterr().out
    assert main(["set", fake.url, "--force-k", "none", "--json"]) == 0
    assert [replica["forced_k"] for replica in json.loads(capsys.readouterr().out)] == [-1, -1]
    assert [dial.forced_k for dial in replicas] == [None, None]


def test_deploy(
    serve: Callable[..., FakeSglang], dial: Dial, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = serve(dial)
    assert main(["deploy", str(policy), fake.url]) == 0
    assert dial.counters.deploys == 1
    assert f"policy {dial.policy_id} (tiny) is in place" in capsys.readouterr().out


def test_a_stock_server_is_recognised_before_anything_is_sent(
    serve: Callable[..., FakeSglang], policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = serve(None, has_plugin=False)
    for command in (["deploy", policy, fake.url], ["set", fake.url, "--mode", "off"], ["status", fake.url]):
        assert "SGLang 0.5.23 runs here without draftdial" in fails(capsys, 2, *command)
    assert fake.posts == []


def test_one_replica_without_the_plugin_is_enough_to_send_nothing(
    serve: Callable[..., FakeSglang],
    dial: Dial,
    policy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = serve(dial, None)
    dials.install(None, "LoRA is on")
    assert "replica 1: draftdial is inactive: LoRA is on" in fails(capsys, 1, "deploy", policy, fake.url)
    assert fake.posts == [] and dial.counters.deploys == 0


def test_a_refusal_says_what_the_server_said(
    serve: Callable[..., FakeSglang], dial: Dial, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = serve(dial)
    err = fails(capsys, 1, "set", fake.url, "--force-k", 2)
    assert "k = 2" in err and "[0, 1, 3]" in err


def test_a_refusal_of_one_replica_is_told_with_what_the_others_did(
    serve: Callable[..., FakeSglang],
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
    policy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = make_dial(make_policy_file(1, tiers=(0, 1)), built=(0, 1))
    fake = serve(make_dial(make_policy_file(1)), other)
    err = fails(capsys, 1, "deploy", policy, fake.url)
    assert "replica 1: policy file: tiers" in err and "1 of 2 replicas did change" in err


def test_a_deploy_in_between_is_noticed(
    serve: Callable[..., FakeSglang],
    dial: Dial,
    policy: Path,
    make_policy_file: Callable[..., PolicyFile],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, file = serve(dial), make_policy_file(0)
    monkeypatch.setattr(dial, "activate", lambda loaded: Dial.activate(dial, dial.load(file.data)))
    err = fails(capsys, 1, "deploy", policy, fake.url)
    assert f"runs policy {file.policy_id}" in err and "another deploy" in err


def test_a_wrong_policy_file_is_refused_before_the_server_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policy.safetensors"
    path.write_bytes(b"not a policy")
    assert str(path) in fails(capsys, 2, "deploy", path, "http://127.0.0.1:1")


def test_an_api_key_opens_the_door(
    serve: Callable[..., FakeSglang], dial: Dial, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = serve(dial, api_key="sesame")
    assert "HTTP 401" in fails(capsys, 2, "set", fake.url, "--mode", "off")
    assert main(["set", fake.url, "--mode", "off", "--api-key", "sesame"]) == 0
    assert dial.mode == "off"


def test_two_keys_open_two_doors(
    serve: Callable[..., FakeSglang],
    dial: Dial,
    policy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = serve(dial, api_key="sesame", admin_api_key="abracadabra")
    keys = ["--api-key", "sesame", "--admin-api-key", "abracadabra"]
    assert main(["status", fake.url, *keys]) == 0
    assert main(["set", fake.url, "--mode", "off", *keys]) == 0
    assert main(["deploy", str(policy), fake.url, *keys]) == 0
    assert dial.mode == "off" and dial.counters.deploys == 1
    capsys.readouterr()
    err = fails(capsys, 2, "set", fake.url, "--mode", "steer", *keys[:2])
    assert "HTTP 401" in err and "--admin-api-key" in err and "sesame" not in err


def test_a_redirect_is_told_and_not_followed(
    serve: Callable[..., FakeSglang], dial: Dial, capsys: pytest.CaptureFixture[str]
) -> None:
    target = serve(dial)
    fake = serve(dial, location=target.url.replace("://", "://user:secret@"))
    err = fails(capsys, 2, "status", fake.url, "--api-key", "sesame")
    assert "HTTP 307: redirects" in err and target.url.removeprefix("http://") in err
    assert "secret" not in err and "sesame" not in err
    assert target.keys == [] and fake.keys == ["Bearer sesame"]


@pytest.mark.parametrize("key", ["se\nsame", "se\rsame", "sésame"])
def test_a_key_that_no_header_takes_is_refused_and_not_shown(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--api-key", "--admin-api-key"):
        err = fails(capsys, 2, "status", "http://127.0.0.1:1", flag, key)
        assert flag in err and "same" not in err


@pytest.mark.parametrize(
    "url", ["http://user:secret@127.0.0.1:1", "user:secret@127.0.0.1", "http://:secret@["]
)
def test_a_password_in_the_url_is_refused_and_not_shown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = fails(capsys, 2, "status", url)
    assert "no user and no password" in err and "secret" not in err


def test_a_status_of_another_version_is_one_line(
    serve: Callable[..., FakeSglang], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"internal_states": [{"draftdial": {"version": "9.9", "mode": "steer"}}]}
    fake = serve(None, raw_answer=json.dumps(answer).encode())
    assert "another version" in fails(capsys, 2, "status", fake.url)


NO_URLS = ["", "ftp://127.0.0.1", "http://", "http://[", "http://a:b", "http://a?b=c", "a", "127.0.0.1:1"]


@pytest.mark.parametrize("url", NO_URLS)
def test_what_is_no_url_is_said_to_be_none(url: str) -> None:
    with pytest.raises(UserError, match="not the URL of a server"):
        Server(url)


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["set", "--mode", "off"],
        ["deploy", "POLICY"],
        ["bench", "--closed", "1"],
        ["profile", "--out", "x.json"],
    ],
    ids=lambda command: command[0],
)
def test_a_host_alone_is_refused_and_not_waited_for(
    command: list[str],
    policy: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [policy if argument == "POLICY" else argument for argument in command]
    err = fails(capsys, 2, *arguments, "myserver")
    assert "myserver: not the URL of a server, allowed: such as http://" in err
    assert list(tmp_path.iterdir()) == [policy]


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot reach the server" in fails(capsys, 2, "status", "http://127.0.0.1:1")


def test_a_server_that_does_not_answer(
    serve: Callable[..., FakeSglang], dial: Dial, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = serve(dial, delay_s=2.0)
    assert "no answer in 0.2 s" in fails(capsys, 2, "status", fake.url, "--timeout", 0.2)


@pytest.mark.parametrize(
    "answer", [b"<html>", b"[1]", b'{"internal_states": []}', b"\xff", b"", b"[" * 100_000]
)
def test_another_kind_of_server(
    answer: bytes, serve: Callable[..., FakeSglang], capsys: pytest.CaptureFixture[str]
) -> None:
    fake = serve(None, raw_answer=answer)
    assert "no SGLang server" in fails(capsys, 2, "status", fake.url)


@pytest.mark.parametrize(
    "arguments",
    [["--mode", "fast"], ["--force-k", "x"], ["--force-k", "-1"], ["--mode", "off", "--force-k", "1"], []],
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    fails(capsys, 2, "set", "http://127.0.0.1:1", *arguments)
