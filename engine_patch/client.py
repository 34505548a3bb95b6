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
from draftdial.controller.number_arguments import positive

Status = dict[str, Any]
"""The `draftdial` part of one replica's internal state, see `status.py`."""

TIMEOUT_S = 30.0

_KEPT_TOKENS = 6
"""`max_req_input_len` is so far below the context length, or below the KV pool where that is smaller."""
_UNUSED_TOKENS = 2
"""So many of the context no request can use, even without drafts."""

_CHANGE = "/set_internal_state"
_REDIRECTS = (301, 302, 303, 307, 308)


class ServerRefused(Exception):
    """The server answered, and its answer was no. Commands print it in one line and exit with 1."""


class Server:
    """A server at `url`, such as `http://127.0.0.1:30000`.

    A change goes with `admin_api_key`, or with `api_key` where there is none; all else with `api_key`.
    Methods raise `UserError` if the server cannot be reached or is not what they need.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        admin_api_key: str | None = None,
    ) -> None:
        if "@" in url:  # not shown: a password may stand before it
            raise UserError("URL: found an @ in it, allowed: no user and no password; --api-key takes a key")
        self.url = url.rstrip("/")
        if not _is_server_url(self.url):
            raise UserError(
                f"{_shown(url)}: not the URL of a server, allowed: such as http://127.0.0.1:30000"
            )
        self._api_key, self._timeout_s = _checked("--api-key", api_key), timeout_s
        self._admin_api_key = _checked("--admin-api-key", admin_api_key)
        self._opener = urllib.request.build_opener(_NoRedirects)

    def replicas(self) -> list[Status]:
        """The status of every data-parallel replica, one each.

        Raises:
            UserError: a server without draftdial, too.
        """
        info = self._info()
        states = info["internal_states"]
        replicas = [state.get("draftdial") if isinstance(state, dict) else None for state in states]
        if any(not isinstance(replica, dict) for replica in replicas):
            raise UserError(
                f"{self.url}: SGLang {_shown(info.get('version', ''))} runs here without draftdial: "
                "start it with `draftdial serve`"
            )
        return [replica for replica in replicas if replica is not None]

    def change(self, key: str, value: int) -> list[bool]:
        """Ask every replica for one change; whether each of them made it."""
        answer = self._ask(_CHANGE, {"server_args": {key: value}})
        if not isinstance(answer, list) or not all(isinstance(updated, bool) for updated in answer):
            raise UserError(f"{self.url}{_CHANGE}: answered {_shown(answer)}, not a list of booleans")
        return answer

    def states(self) -> list[dict[str, Any]]:
        """The internal state of every data-parallel replica, SGLang's own fields among them."""
        states: list[dict[str, Any]] = self._info()["internal_states"]
        return states

    def longest_request(self) -> int | None:
        """Tokens that a prompt and its whole answer may have together; None where the server does not say.

        As SGLang 0.5.14 to 0.5.23 count them: `TpModelWorker.get_worker_info`, and the bounds on
        `max_new_tokens` in `Scheduler` and `TokenizerManager`, which keeps room for a round's drafts. Where
        the KV pool is smaller than the context, the server would answer a few tokens more.
        """
        info = self._info()
        known = info.get("max_req_input_len")
        if not isinstance(known, int):
            return None
        drafts = info.get("speculative_num_draft_tokens") or 0
        return known + _KEPT_TOKENS - max(_UNUSED_TOKENS, drafts)

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The answer of `path` to a JSON body, whatever it is."""
        return self._fetch(path, body)

    def _info(self) -> dict[str, Any]:
        """What `/server_info` says, with a state of one replica at least."""
        info = self._ask("/server_info", None)
        states = info.get("internal_states") if isinstance(info, dict) else None
        if not isinstance(states, list) or not states:
            raise UserError(f"{self.url}: /server_info holds no internal_states, so this is no SGLang server")
        return dict(info)

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        content = self._fetch(path, body)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.url}{path}: {_shown(str(error))}, so this is no SGLang server") from None

    def _fetch(self, path: str, body: dict[str, Any] | None) -> bytes:
        headers = {"Content-Type": "application/json"}
        key = self._key(path)
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with self._opener.open(request, timeout=self._timeout_s) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            raise UserError(f"{self.url}{path}: {self._complaint(path, error)}") from None
        except TimeoutError:
            raise UserError(f"{self.url}{path}: no answer in {self._timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise UserError(f"{self.url}: cannot reach the server: {_shown(str(reason))}") from None
        except ValueError as error:
            raise UserError(f"{self.url}{path}: {_shown(str(error))}, so this is no SGLang server") from None

    def _key(self, path: str) -> str | None:
        return (self._admin_api_key or self._api_key) if path == _CHANGE else self._api_key

    def _complaint(self, path: str, error: urllib.error.HTTPError) -> str:
        """What an answer other than success says, without the key that was sent."""
        target = error.headers.get("Location")
        if error.code in _REDIRECTS and target is not None:
            place = urllib.parse.urljoin(self.url + path, target).rpartition("@")[2].removesuffix(path)
            return f"HTTP {error.code}: redirects, which no key should follow: give that URL: {_shown(place)}"
        try:
            said = error.read(2000).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            said = error.reason
        for key in filter(None, (self._api_key, self._admin_api_key)):
            said = said.replace(key, "***")
        flags = "--admin-api-key or --api-key" if path == _CHANGE else "--api-key"
        hint = f"; give the right {flags}" if error.code in (401, 403) else ""
        return f"HTTP {error.code}: {_shown(said)}{hint}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows none: urllib would send the key along, to whatever host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


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
    parser.add_argument("--api-key", metavar="KEY", help="the server's --api-key")
    parser.add_argument(
        "--admin-api-key",
        metavar="KEY",
        help="the server's --admin-api-key, sent with a change (default: KEY of --api-key)",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=TIMEOUT_S,
        metavar="S",
        help="wait so long (default: %(default)g s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def run_against_server(
    args: argparse.Namespace, command: Callable[[Server, argparse.Namespace], None]
) -> int:
    """Run `command`; 0, or 1 after one line where the server refused.

    Raises:
        UserError: no access, or a status that lacks what this version of draftdial expects in it.
    """
    server = Server(args.url, args.api_key, args.timeout, args.admin_api_key)
    try:
        command(server, args)
    except ServerRefused as refused:
        print(f"draftdial: {server.url}: {_shown(str(refused), 1000)}", file=sys.stderr)
        return 1
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{server.url}: draftdial there is of another version, its status cannot be read here "
            f"({_shown(repr(error))}): use that version, or `status --json`"
        ) from None
    return 0


def _checked(flag: str, key: str | None) -> str | None:
    """The key, which is not shown."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise UserError(f"{flag}: found a character in it that is not printable ASCII, allowed: no such")
    return key


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


def _shown(value: object, limit: int = 300) -> str:
    """On one line, without control characters: a server's answer must not drive the terminal."""
    text = " ".join(str(value).split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= limit else f"{text[:limit]}..."
