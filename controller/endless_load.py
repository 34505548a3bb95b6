"""A closed loop that goes on until it is stopped."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from draftdial.controller.bench_loads import Load
from draftdial.controller.bench_work import Work
from draftdial.controller.stream_client import Delivered, StreamClient
from draftdial.engine_patch.client import Server

PAUSE_S = 0.1
"""A slot waits so long after a request that failed."""


class EndlessLoad:
    """Keeps the requests of a closed loop in one server, `async with`.

    When the list of a seed has been sent, that of the next seed follows.
    """

    def __init__(
        self,
        server: Server,
        api_key: str | None,
        timeout_s: float,
        work: Work,
        load: Load,
        seed: int,
        run: str,
    ) -> None:
        """`run` makes the requests' ids unlike those of any other load."""
        self.server = server
        self.delivered = Delivered()
        self.errors: list[str] = []
        self.seed = seed
        """Of the list that the newest request is from."""
        self.concurrency = int(load.value or 0)
        self._bodies = self._drawn(work, load, seed, run)
        self._client = StreamClient(server.url, api_key, timeout_s, self.delivered)
        self._slots: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._slots = [asyncio.create_task(self._keep_full()) for _ in range(self.concurrency)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give up what runs: connections close, and the server aborts it."""
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await self._client.close()

    def take_errors(self) -> list[str]:
        """Those since the last call."""
        errors, self.errors = self.errors, []
        return errors

    async def _keep_full(self) -> None:
        while True:
            answer = await self._client.generate(next(self._bodies))
            if answer.error:
                self.errors.append(answer.error)
                await asyncio.sleep(PAUSE_S)

    def _drawn(self, work: Work, load: Load, first: int, run: str) -> Iterator[dict[str, Any]]:
        for seed in itertools.count(first):
            requests = work.requests(load, seed)
            body_of = work.asking.bodies(requests, seed, f"{run}-{seed}")
            for i in range(requests.num_requests):
                self.seed = seed
                yield body_of(i)
