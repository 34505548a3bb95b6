"""The load driver against a server that streams as SGLang does, and one that misbehaves."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from draftdial.controller.load_run import LoadResult, run_load
from draftdial.controller.stream_client import Answer, StreamClient
from draftdial.envs.workload import RequestList, make_workload


@dataclass
class StreamingServer:
    """Answers `/generate` with an event a token, `tick_s` apart; faults by request id."""

    tick_s: float = 0.002
    piece: int | None = None
    """Write so many bytes at a time, to cut events and chunk headers anywhere."""
    faults: dict[str, str] = field(default_factory=dict)
    connections: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    seen: list[str] = field(default_factory=list)
    closes_when_idle: bool = False

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.seen.append(body["rid"])
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    await self._answer(body, writer)
                finally:
                    self.in_flight -= 1
                if self.closes_when_idle:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        fault = self.faults.get(body["rid"], "")
        if fault == "refuse":
            text = b'{"error": {"message": "too long"}}'
            writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        if fault == "event":  # SGLang 0.5.23 says so inside a stream that began well
            await self._chunk(writer, b'data: {"error": {"message": "too long"}}')
            await self._chunk(writer, b"data: [DONE]")
            writer.write(b"0\r\n\r\n")
            return
        total = body["sampling_params"]["max_new_tokens"]
        for n in range(1, total + 1):
            await asyncio.sleep(self.tick_s)
            reason: Any = None
            if n == total:
                reason = {"type": "abort" if fault == "abort" else "length"}
            meta = {"completion_tokens": n, "finish_reason": reason}
            await self._chunk(
                writer, b"data: " + json.dumps({"output_ids": [7] * n, "meta_info": meta}).encode()
            )
            if fault == "drop" and n == 2:
                writer.transport.abort()
                return
        await self._chunk(writer, b"data: [DONE]")
        writer.write(b"0\r\n\r\n")

    async def _chunk(self, writer: asyncio.StreamWriter, event: bytes) -> None:
        text = event + b"\n\n"
        data = b"%x\r\n%s\r\n" % (len(text), text)
        for at in range(0, len(data), self.piece or len(data)):
            writer.write(data[at : at + (self.piece or len(data))])
            if self.piece:
                await asyncio.sleep(0)


@asynccontextmanager
async def serving(server: StreamingServer) -> AsyncIterator[str]:
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"


def body(rid: str, tokens: int) -> dict[str, Any]:
    return {"input_ids": [3], "sampling_params": {"max_new_tokens": tokens}, "rid": rid}


def asked(server: StreamingServer, *bodies: dict[str, Any], timeout_s: float = 30.0) -> list[Answer]:
    async def ask() -> list[Answer]:
        async with serving(server) as url:
            client = StreamClient(url, None, timeout_s)
            answers = [await client.generate(each) for each in bodies]
            await client.close()
            return answers

    return asyncio.run(ask())


def test_an_answer_is_timed_from_its_first_event_to_its_last() -> None:
    [answer] = asked(StreamingServer(tick_s=0.02), body("a", 6))
    assert (answer.tokens, answer.error) == (6, "")
    # The server sleeps before the first token; how much later it is seen depends on the machine.
    assert answer.sent_s + 0.015 < answer.first_s < answer.last_s


@pytest.mark.parametrize("piece", [1, 3, 17])
def test_bytes_may_come_in_any_pieces(piece: int) -> None:
    answers = asked(StreamingServer(tick_s=0, piece=piece), body("a", 4), body("b", 2))
    assert [(answer.tokens, answer.error) for answer in answers] == [(4, ""), (2, "")]


def test_connections_are_kept() -> None:
    server = StreamingServer()
    asked(server, *(body(str(i), 2) for i in range(5)))
    assert server.connections == 1


def test_a_request_that_meets_a_closed_connection_is_sent_again() -> None:
    server = StreamingServer(closes_when_idle=True)
    answers = asked(server, *(body(str(i), 2) for i in range(4)))
    assert [answer.error for answer in answers] == [""] * 4
    assert server.seen == ["0", "1", "2", "3"]  # and only once


@pytest.mark.parametrize(
    ("fault", "said"),
    [("refuse", "HTTP 400: .*too long"), ("event", "too long"), ("abort", "abort"), ("drop", "Connection")],
)
def test_what_fails_is_in_the_answer_and_the_next_request_is_served(fault: str, said: str) -> None:
    failed, after = asked(StreamingServer(faults={"bad": fault}), body("bad", 4), body("good", 3))
    assert re.search(said, failed.error)
    assert (after.tokens, after.error) == (3, "")


def test_a_server_that_hangs_or_is_not_there_is_an_error() -> None:
    [slow] = asked(StreamingServer(tick_s=5.0), body("a", 2), timeout_s=0.2)
    assert "no whole answer in 0.2 s" in slow.error
    unreachable = asyncio.run(StreamClient("http://127.0.0.1:1", None, 5.0).generate(body("a", 2)))
    assert "Connect" in unreachable.error


def driven(server: StreamingServer, requests: RequestList, tokens: int = 3) -> LoadResult:
    async def drive() -> LoadResult:
        async with serving(server) as url:
            client = StreamClient(url, None, 30.0)
            try:
                return await run_load(client, requests, lambda i: body(str(i), tokens))
            finally:
                await client.close()

    return asyncio.run(drive())


def test_a_closed_loop_keeps_as_many_in_the_system_as_it_says() -> None:
    server = StreamingServer()
    result = driven(server, make_workload("stationary", concurrency=4, num_requests=20).requests(0))
    assert server.most_in_flight == 4 and not result.errors
    assert server.seen == [str(i) for i in range(20)]
    assert (result.tokens == 3).all() and (np.diff(result.arrival_s) >= 0).all()
    assert (result.arrival_s < result.first_s).all() and (result.first_s < result.finish_s).all()


def test_a_load_that_swings_is_followed() -> None:
    server = StreamingServer()
    workload = make_workload("swing", low=1, high=6, num_segments=4, requests_at_one=2.0)
    driven(server, workload.requests(0))
    assert server.most_in_flight == 6


def test_an_open_loop_sends_by_its_clock_however_slow_the_server_is() -> None:
    server = StreamingServer(tick_s=0.1)
    requests = make_workload("poisson", num_requests=12, rate_per_s=100.0).requests(0)
    result = driven(server, requests)
    assert server.most_in_flight == 12
    assert (result.arrival_s == requests.arrival_s).all() and result.lag_s >= 0


def test_failed_requests_are_counted_and_the_run_goes_on() -> None:
    requests = make_workload("stationary", concurrency=3, num_requests=9).requests(0)
    result = driven(StreamingServer(faults={"2": "drop", "5": "refuse"}), requests)
    assert sorted(result.errors) == [2, 5]
    assert [int(n) for n in result.tokens] == [3, 3, 0, 3, 3, 0, 3, 3, 3]
