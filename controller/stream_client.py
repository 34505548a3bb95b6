"""Streams answers from SGLang's `/generate` with as little work per token as Python allows.

A load driver that is slow makes the server look slow. At 256 streams every decode round brings 256 events,
so a connection is an `asyncio.Protocol` that looks at bytes as they arrive: it notes the time of the first
and of the last event, and parses only the last one. The standard library has all that takes; a general HTTP
client costs about twice as much per event (docs/measuring.md has the figures).
"""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.parse
from dataclasses import dataclass
from functools import partial
from typing import Any

from draftdial.controller.errors import UserError

_END_OF_HEAD = b"\r\n\r\n"
_END_OF_EVENT = b"\n\n"
_DONE = b"data: [DONE]"
_TOKENS = b'"completion_tokens":'
_MOST_ERROR = 300


@dataclass
class Answer:
    """One request's outcome; times are the event loop's, in seconds."""

    sent_s: float
    first_s: float = 0.0
    """The first event: at least one token."""
    last_s: float = 0.0
    tokens: int = 0
    """Output tokens by the server's count."""
    error: str = ""
    """Why there is no whole answer; empty where there is."""


@dataclass
class Delivered:
    """What has come so far of all answers of a client."""

    tokens: int = 0
    """Output tokens by the server's count."""
    begun: int = 0
    """Answers of which something has come."""

    def count(self, answer: Answer, event: bytes) -> None:
        """Add what `event` brings of `answer`; what says nothing of tokens brings none."""
        at = event.rfind(_TOKENS) + len(_TOKENS)
        if at < len(_TOKENS):
            return
        tokens = int(event[at : at + 12].replace(b"}", b",").split(b",", 1)[0])
        self.begun += not answer.tokens
        self.tokens += tokens - answer.tokens
        answer.tokens = tokens


class StreamClient:
    """Keeps connections open and uses each for one request at a time."""

    def __init__(
        self, url: str, api_key: str | None, timeout_s: float, delivered: Delivered | None = None
    ) -> None:
        """`delivered` is kept up to date with every event, which costs some time for each."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url}: not the URL of a server, allowed: such as http://127.0.0.1:30000")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout_s = timeout_s
        secret = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {parts.path.rstrip('/')}/generate HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Content-Type: application/json\r\n{secret}Content-Length: "
        )
        self._delivered = delivered
        self._idle: list[_Connection] = []

    async def generate(self, body: dict[str, Any]) -> Answer:
        """Stream the answer to one request; errors are in it, not raised."""
        content = json.dumps(body | {"stream": True}).encode()
        message = f"{self._head}{len(content)}\r\n\r\n".encode() + content
        answer = Answer(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(message, answer)
        except TimeoutError:
            answer.error = f"no whole answer in {self._timeout_s:g} s"
        except (OSError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"[:_MOST_ERROR]
        return answer

    async def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, message: bytes, answer: Answer) -> None:
        while self._idle:
            connection = self._idle.pop()
            try:
                await self._use(connection, message, answer)
                return
            except ConnectionError:
                # The server may close an idle connection while a request is on its way to it.
                if answer.first_s:
                    raise
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            partial(_Connection, self._delivered), self._host, self._port, ssl=self._tls
        )
        await self._use(connection, message, answer)

    async def _use(self, connection: _Connection, message: bytes, answer: Answer) -> None:
        try:
            await connection.send(message, answer)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)


class _Connection(asyncio.Protocol):
    """One exchange at a time: a request out, a response of events in chunks back."""

    def __init__(self, delivered: Delivered | None) -> None:
        self.is_open = False
        self._delivered = delivered
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._answer = Answer(0.0)
        self._clear()

    async def send(self, message: bytes, answer: Answer) -> None:
        """Send a request and wait for the end of its answer.

        Raises:
            ConnectionError: the connection broke.
            ValueError: the response is not what SGLang sends.
        """
        if not self.is_open or self._transport is None:
            raise ConnectionResetError("the server closed the connection")
        self._answer = answer
        self._clear()
        self._waiter = self._loop.create_future()
        self._transport.write(message)
        await self._waiter
        self._finish()

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._settle(error or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            if self._parse():
                self._settle(None)
        except ValueError as error:
            self._settle(error)

    def _clear(self) -> None:
        self._buffer = bytearray()
        self._status = 0
        self._remaining: int | None = None
        """Bytes of the body that are to come; None while it comes in chunks."""
        self._tail = b""
        self._last_event = b""

    def _settle(self, error: Exception | None) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)

    def _parse(self) -> bool:
        """Take what has come; is the response complete?"""
        if not self._status and not self._parse_head():
            return False
        return self._parse_chunks() if self._remaining is None else self._parse_plain()

    def _parse_head(self) -> bool:
        head, separator, rest = bytes(self._buffer).partition(_END_OF_HEAD)
        if not separator:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
        self._status = int(first.split(" ", 2)[1])
        if fields.get("transfer-encoding", "").lower() != "chunked":
            self._remaining = int(fields.get("content-length", "0"))
        if fields.get("connection", "").lower() == "close":
            self.is_open = False
        self._buffer = bytearray(rest)
        return True

    def _parse_chunks(self) -> bool:
        buffer, at = self._buffer, 0
        while True:
            end = buffer.find(b"\r\n", at)
            if end < 0:
                break
            size = int(buffer[at:end].partition(b";")[0], 16)
            begin = end + 2
            if len(buffer) < begin + size + 2:
                break
            if size == 0:
                return True
            self._take(bytes(buffer[begin : begin + size]))
            at = begin + size + 2
        del buffer[:at]
        return False

    def _parse_plain(self) -> bool:
        assert self._remaining is not None
        self._tail += bytes(self._buffer)
        self._remaining -= len(self._buffer)
        self._buffer.clear()
        return self._remaining <= 0

    def _take(self, payload: bytes) -> None:
        """Note the events in a piece of the body."""
        *events, self._tail = (self._tail + payload).split(_END_OF_EVENT)
        for event in events:
            if event != _DONE:
                self._answer.last_s = self._loop.time()
                if not self._last_event:
                    self._answer.first_s = self._answer.last_s
                self._last_event = event
                if self._delivered is not None:
                    self._delivered.count(self._answer, event)

    def _finish(self) -> None:
        """Read the outcome off the last event."""
        answer = self._answer
        if self._status != 200 or not self._last_event.startswith(b"data: "):
            said = (self._last_event or self._tail).decode("utf-8", "replace")
            answer.error = f"HTTP {self._status}: {' '.join(said.split())[:_MOST_ERROR]}"
            return
        event = json.loads(self._last_event[len(b"data: ") :])
        meta = event.get("meta_info") if isinstance(event, dict) else None
        if not isinstance(meta, dict):
            answer.error = " ".join(self._last_event.decode("utf-8", "replace").split())[:_MOST_ERROR]
            return
        answer.tokens = int(meta.get("completion_tokens", 0))
        reason = meta.get("finish_reason")
        if not isinstance(reason, dict) or reason.get("type") not in ("length", "stop"):
            answer.error = f"ended with finish_reason {reason}"[:_MOST_ERROR]
