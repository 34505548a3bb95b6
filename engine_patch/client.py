"""Talks to a running server over SGLang's own HTTP endpoints."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from draftdial.controller.errors import UserError

Status = dict[str, Any]
"""The `draftdial` part of one replica's internal state, see `status.py`."""

TIMEOUT_S = 30.0


class ServerRefused(Exception):
    """The server answered, and its answer was no. Commands print it in one line and exit with 1."""


class Server:
    """A server at `url`, such as `http://127.0.0.1:30000`; without a scheme, http is meant.

    Methods raise `UserError` if the server cannot be reached or is not what they need.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        if not _is_server_url(self.url):
            raise UserError(f"{url}: not the URL of a server, allowed: such as http://127.0.0.1:30000")
        self._api_key, self._timeout_s = api_key, timeout_s

    def replicas(self) -> list[Status]:
        """The status of every data-parallel replica, one each.

        Raises:
            UserError: a server without draftdial, too.
        """
        info = self._ask("/server_info", None)
        states = info.get("internal_states") if isinstance(info, dict) else None
        if not isinstance(states, list) or not states:
            raise UserError(f"{self.url}: /server_info holds no internal_states, so this is no SGLang server")
        replicas = [state.get("draftdial") if isinstance(state, dict) else None for state in states]
        if any(not isinstance(replica, dict) for replica in replicas):
            raise UserError(
                f"{self.url}: SGLang {info.get('version', '')} runs here without draftdial: "
                "start it with `draftdial serve`"
            )
        return [replica for replica in replicas if replica is not None]

    def change(self, key: str, value: int) -> list[bool]:
        """Ask every replica for one change; whether each of them made it."""
        answer = self._ask("/set_internal_state", {"server_args": {key: value}})
        if not isinstance(answer, list) or not all(isinstance(updated, bool) for updated in answer):
            raise UserError(
                f"{self.url}: /set_internal_state answered {_shown(answer)}, not a list of booleans"
            )
        return answer

    def states(self) -> list[dict[str, Any]]:
        """The internal state of every data-parallel replica, SGLang's own fields among them."""
        states: list[dict[str, Any]] = self._ask("/server_info", None)["internal_states"]
        return states

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The answer of `path` to a JSON body, whatever it is."""
        return self._fetch(path, body)

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        content = self._fetch(path, body)
        try:
            return json.loads(content)
        except ValueError as error:
            raise UserError(f"{self.url}{path}: {_shown(str(error))}, so this is no SGLang server") from None

    def _fetch(self, path: str, body: dict[str, Any] | None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            said = _shown(error.read(2000).decode("utf-8", "replace"))
            hint = "; give --api-key" if error.code in (401, 403) else ""
            raise UserError(f"{self.url}{path}: HTTP {error.code}: {said}{hint}") from None
        except TimeoutError:
            raise UserError(f"{self.url}{path}: no answer in {self._timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise UserError(f"{self.url}: cannot reach the server: {_shown(str(reason))}") from None
        except ValueError as error:
            raise UserError(f"{self.url}{path}: {_shown(str(error))}, so this is no SGLang server") from None


def change_everywhere(server: Server, key: str, value: int) -> list[Status]:
    """Make one change on every replica; their statuses afterwards.

    Raises:
        ServerRefused: a replica is not steered, or did not make the change; it says why.
    """
    before = server.replicas()
    for i, replica in enumerate(before):
        if replica.get("mode") == "inactive":
            raise ServerRefused(f"{where(i, before)}draftdial is inactive: {replica.get('reason', '')}")
    updated = server.change(key, value)
    after = server.replicas()
    if not len(updated) == len(before) == len(after):
        raise ServerRefused(f"{len(updated)} of {len(before)} replicas answered: ask `draftdial status`")
    for i, replica in enumerate(after):
        if "status_error" in replica:
            raise ServerRefused(f"{where(i, after)}its status cannot be read: {replica['status_error']}")
    refused = [i for i, done in enumerate(updated) if not done]
    if refused:
        reasons = [f"{where(i, after)}{after[i].get('last_control') or 'refused'}" for i in refused]
        changed = len(updated) - len(refused)
        rest = f"; {changed} of {len(updated)} replicas did change" if changed else ""
        raise ServerRefused("; ".join(reasons) + rest)
    return after


def where(replica: int, replicas: list[Status]) -> str:
    """`replica 1: `, or nothing where there is only one."""
    return f"replica {replica}: " if len(replicas) > 1 else ""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command that asks a server takes."""
    parser.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:30000")
    parser.add_argument("--api-key", metavar="KEY", help="the server's --admin-api-key, or its --api-key")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT_S,
        metavar="S",
        help="wait so long (default: %(default)g s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def run_against_server(
    args: argparse.Namespace, command: Callable[[Server, argparse.Namespace], None]
) -> int:
    """Run `command`; 0, or 1 after one line where the server refused."""
    server = Server(args.url, args.api_key, args.timeout)
    try:
        command(server, args)
    except ServerRefused as refused:
        print(f"draftdial: {server.url}: {_shown(str(refused), 1000)}", file=sys.stderr)
        return 1
    return 0


def _is_server_url(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and port_is_right
        and not (parts.query or parts.fragment)
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 86400:
        raise argparse.ArgumentTypeError(f"found {text}, allowed: seconds above 0")
    return value


def _shown(value: object, limit: int = 300) -> str:
    """On one line, without control characters: a server's answer must not drive the terminal."""
    text = " ".join(str(value).split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= limit else f"{text[:limit]}..."
