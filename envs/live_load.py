"""The load of a live episode: sent from a thread of its own, and called off when the episode is cut."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from draftdial.controller.errors import UserError
from draftdial.controller.load_run import send_all
from draftdial.controller.stream_client import Answer, StreamClient
from draftdial.envs.workload import RequestList

TIMEOUT_S = 3600.0
"""Of a request: in lockstep a server is as slow as what decides for it."""


class LiveLoad:
    """Requests on their way to a server."""

    def __init__(self, url: str, requests: RequestList, body_of: Callable[[int], dict[str, Any]]) -> None:
        """Begin; `body_of(i)` is the i-th request, for `/generate`."""
        self._url = url
        self._client = _Sender(url)
        self._thread = threading.Thread(target=self._run, args=(requests, body_of), daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Has every request been answered or called off?"""
        return not self._thread.is_alive()

    @property
    def is_under_way(self) -> bool:
        """Is there a request that the server has not answered?"""
        return bool(self._client.in_flight)

    def call_off(self) -> list[str]:
        """Send nothing more; the ids of the requests that are to be aborted."""
        self._client.is_closing = True
        return list(self._client.in_flight)

    def check(self) -> None:
        """Raise UserError if a request failed that was not called off."""
        if self._client.error:
            raise UserError(f"{self._url}: {self._client.error}")

    def _run(self, requests: RequestList, body_of: Callable[[int], dict[str, Any]]) -> None:
        async def send() -> None:
            try:
                await send_all(self._client, requests, body_of)
            finally:
                await self._client.close()

        try:
            asyncio.run(send())
        except Exception as error:
            self._client.error = f"cannot be driven: {error!r}"


class _Sender(StreamClient):
    """Knows which requests are under way, and what went wrong first."""

    def __init__(self, url: str) -> None:
        super().__init__(url, None, TIMEOUT_S)
        self.in_flight: set[str] = set()
        self.is_closing = False
        self.error = ""

    async def generate(self, body: dict[str, Any]) -> Answer:
        """As the client does; nothing is sent once the load is called off."""
        if self.is_closing:
            return Answer(asyncio.get_running_loop().time(), error="called off")
        self.in_flight.add(body["rid"])
        try:
            answer = await super().generate(body)
        finally:
            self.in_flight.discard(body["rid"])
        if answer.error and not self.is_closing and not self.error:
            self.error = f"request {body['rid']} failed: {answer.error}"
        return answer
