"""Sends one list of requests to a server, by its concurrency or by its clock, and measures every answer."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftdial.controller.signals import FloatArray, IntArray
from draftdial.controller.stream_client import Answer, StreamClient
from draftdial.envs.workload import RequestList


@dataclass(frozen=True, eq=False)
class LoadResult:
    """What came of a list; every array has shape `(num_requests,)`, times are seconds from the start."""

    arrival_s: FloatArray
    """Open loop: as the list has it. Closed loop: when the request was sent."""
    first_s: FloatArray
    finish_s: FloatArray
    tokens: IntArray
    errors: dict[int, str]
    """Requests that were lost or failed, and why."""
    lag_s: float
    """Open loop: the 99th percentile of how late requests were sent; the driver's own doing."""
    cpu_share: float
    """Of one core, used by this process."""


async def run_load(
    client: StreamClient, requests: RequestList, body_of: Callable[[int], dict[str, Any]]
) -> LoadResult:
    """`send_all` as precisely as this process can: it must do nothing else meanwhile."""
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would stop all streams at once
    try:
        return await send_all(client, requests, body_of)
    finally:
        gc.enable()
        gc.unfreeze()


async def send_all(
    client: StreamClient, requests: RequestList, body_of: Callable[[int], dict[str, Any]]
) -> LoadResult:
    """Send every request and wait for all answers; `body_of(i)` is the i-th, for `/generate`."""
    loop = asyncio.get_running_loop()
    begin_s, cpu_s = loop.time(), time.process_time()
    send = _closed if requests.mode == "closed" else _open
    answers = await send(client, requests, body_of, begin_s)
    wall_s = loop.time() - begin_s
    sent_s = np.array([answer.sent_s for answer in answers]) - begin_s
    is_open = requests.mode == "open"
    return LoadResult(
        arrival_s=requests.arrival_s if is_open else sent_s,
        first_s=np.array([answer.first_s for answer in answers]) - begin_s,
        finish_s=np.array([answer.last_s for answer in answers]) - begin_s,
        tokens=np.array([answer.tokens for answer in answers], np.int64),
        errors={i: answer.error for i, answer in enumerate(answers) if answer.error},
        lag_s=float(np.quantile(sent_s - requests.arrival_s, 0.99)) if is_open else 0.0,
        cpu_share=(time.process_time() - cpu_s) / wall_s,
    )


async def _closed(
    client: StreamClient, requests: RequestList, body_of: Callable[[int], dict[str, Any]], begin_s: float
) -> list[Answer]:
    """The next request goes out when fewer are in the system than its `concurrency` says."""
    tasks: list[asyncio.Task[Answer]] = []
    free = asyncio.Event()
    in_system = 0

    def leave(_: asyncio.Task[Answer]) -> None:
        nonlocal in_system
        in_system -= 1
        free.set()

    for i, concurrency in enumerate(requests.concurrency.tolist()):
        while in_system >= concurrency:
            free.clear()
            await free.wait()
        in_system += 1
        task = asyncio.create_task(client.generate(body_of(i)))
        task.add_done_callback(leave)
        tasks.append(task)
    return await asyncio.gather(*tasks)


async def _open(
    client: StreamClient, requests: RequestList, body_of: Callable[[int], dict[str, Any]], begin_s: float
) -> list[Answer]:
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[Answer]] = []
    for i, arrival_s in enumerate(requests.arrival_s.tolist()):
        body = body_of(i)
        delay_s = begin_s + arrival_s - loop.time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        tasks.append(asyncio.create_task(client.generate(body)))
    return await asyncio.gather(*tasks)
