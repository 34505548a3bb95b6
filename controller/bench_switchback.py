"""A benchmark that switches back and forth: arms take turns of a second under a load that does not end.

What a machine does for minutes, such as a slow host, then falls on all arms alike, and all arms serve
requests of the same list. Switchback experiments compare policies of marketplaces and of networks in the
same way (Bojinov, Simchi-Levi, Zhao 2023, "Design and Analysis of Switchback Experiments").
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Any, TypeVar

import numpy as np

from draftdial.controller.bench_adjust import adjusted
from draftdial.controller.bench_arms import Arm
from draftdial.controller.bench_drop import left_behind
from draftdial.controller.bench_loads import Load
from draftdial.controller.bench_metrics import policy_figures
from draftdial.controller.bench_report import Run
from draftdial.controller.bench_runs import Bench, check_off_mode
from draftdial.controller.bench_work import fingerprint
from draftdial.controller.endless_load import EndlessLoad
from draftdial.controller.errors import UserError
from draftdial.controller.measured_server import flush_cache
from draftdial.engine_patch.client import Server, ServerRefused

SETTLE_S = 0.2
"""Between a switch and what is counted: rounds that were under way, and what a tier's first rounds cost."""
WARM_UP_BEGUN = 2
"""Requests of each slot that begin before anything is counted, so that their ages mix."""

Result = TypeVar("Result")
Told = Callable[[str, Load, int], None]
"""Takes the arm, the load and the cycle of a turn that has ended."""


class SwitchbackBench(Bench):
    """Every run is a turn: `window_s` seconds of one arm; `repeat` counts the cycles of all arms."""

    def __init__(self, *args: Any, window_s: float, **kwargs: Any) -> None:
        """As `Bench`; `drop`: see `left_behind`."""
        super().__init__(*args, **kwargs)
        self._window_s = window_s
        self.more_options = {"switchback": window_s}
        self._lists: dict[tuple[str, int], str] = {}
        self._paused: set[Server] = set()
        self._busy = threading.Lock()
        """Held by a thread while it changes something."""

    def measured(self, baseline: str) -> dict[str, Any]:
        """As `Bench`; every turn has its adjusted throughput, too."""
        document = super().measured(baseline)
        document["runs"] = adjusted(document["runs"])
        return document

    def _run(self, document: dict[str, Any]) -> None:
        from draftdial.controller.measuring_progress import measuring_progress

        work, arms = self.work, document["arms"]
        rng = np.random.default_rng(work.options["seed"])
        self._warm_up(arms)
        document["server"]["idle_request"] = self._idle_request()
        with measuring_progress("bench", "turns", len(work.seeds) * len(work.loads) * len(arms)) as progress:

            def told(name: str, load: Load, cycle: int) -> None:
                progress.measuring(f"{name}, {load.label}, cycle {cycle + 1}")
                progress.measured()

            for load in work.loads:
                gc.collect()
                gc.freeze()
                gc.disable()  # a collection would stop all streams at once
                try:
                    asyncio.run(self._cycles(load, document, rng, told))
                finally:
                    gc.enable()
                    gc.unfreeze()
                self._give_up(document)
                for server in self._has_cache:
                    flush_cache(server)  # as soon as what was given up is over

    async def _cycles(
        self, load: Load, document: dict[str, Any], rng: np.random.Generator, told: Told
    ) -> None:
        """All turns under one load."""
        arms: list[str] = document["arms"]
        seed = self.work.seeds[0]
        async with AsyncExitStack() as stack:
            loads = {}
            for server in dict.fromkeys(map(self._server, arms)):
                self._count += 1
                run = f"bench-{os.getpid()}-{self._count}"
                loads[server] = await stack.enter_async_context(
                    EndlessLoad(server, self._api_key, self.limits.timeout_s, self.work, load, seed, run)
                )
                await self._mixed(loads[server])
                await self._in_thread(self._pause, server)
            names = arms
            for cycle in range(len(self.work.seeds)):
                names = self._in_play(names, load, document)
                for name in rng.permutation(names).tolist():
                    place = {"arm": name, "workload": load.workload, "mode": load.mode, "load": load.value}
                    turn = await self._turn(name, load, loads[self._server(name)])
                    document["runs"].append(place | turn | {"repeat": cycle})
                    told(name, load, cycle)
                await self._in_thread(self.write, document)

    async def _mixed(self, served: EndlessLoad) -> None:
        """Wait until requests of all ages are in the server."""
        while served.delivered.begun < WARM_UP_BEGUN * served.concurrency:
            if len(served.errors) >= served.concurrency:
                raise UserError(f"{served.server.url}: cannot be driven: {served.errors[0]}")
            await asyncio.sleep(SETTLE_S / 10)

    async def _turn(self, name: str, load: Load, served: EndlessLoad) -> dict[str, Any]:
        """What one arm does in one window."""
        arm = self.arms.get(name)
        held_s = await self._in_thread(self._switch, name)
        await asyncio.sleep(SETTLE_S)
        delivered, seed = served.delivered, served.seed
        # Before the status, which comes when a round ends: behind it the next tokens are a whole round away.
        tokens, begun, begun_s, cpu_s = (
            delivered.tokens,
            delivered.begun,
            time.monotonic(),
            time.process_time(),
        )
        before = await self._begun(arm, held_s, served) if arm is not None else {}
        await asyncio.sleep(self._window_s)
        window_s, cpu_s = time.monotonic() - begun_s, time.process_time() - cpu_s
        tokens, begun = delivered.tokens - tokens, delivered.begun - begun
        cpu_share, client_tok_s = cpu_s / window_s, tokens / window_s
        after = await asyncio.to_thread(self.steered.status) if arm is not None else {}
        if arm is not None:
            check_off_mode(before, after)
            tokens, window_s = _between(before, after)
        errors = served.take_errors()
        if not errors and (tokens <= 0 or window_s <= 0):
            errors = [f"no output token in a turn of {self._window_s:g} s"]
        if errors:
            print(f"draftdial: {name}, {load.label}: {errors[0]}", file=sys.stderr)
        return {
            "seed": seed,
            "list": self._list(load, seed),
            "requests": begun,
            "failed": len(errors),
            "driver_cpu_share": cpu_share,
            "output_tok_s": tokens / window_s if window_s > 0 else 0.0,
            "client_tok_s": client_tok_s,
            "window_s": window_s,
        } | policy_figures(before, after)

    async def _begun(self, arm: Arm, held_s: float | None, served: EndlessLoad) -> dict[str, Any]:
        """The status that a turn begins with, of a result after `held_s`: one before counts the pause in."""
        while True:
            status = await asyncio.to_thread(self.steered.status_of, arm)
            if held_s is None or served.errors or status.get("processed_s") != held_s:
                return status
            await asyncio.sleep(SETTLE_S / 10)

    async def _in_thread(self, change: Callable[..., Result], *args: Any) -> Result:
        """Make a change without stopping the streams; nothing is put back before it is made."""

        def changed() -> Result:
            with self._busy:
                return change(*args)

        return await asyncio.to_thread(changed)

    def _switch(self, name: str) -> float | None:
        """Let one arm go on, and no other; when the steered server's newest result was, if it was paused."""
        server, arm = self._server(name), self.arms.get(name)
        for other in self._has_cache.keys() - {server} - self._paused:
            self._pause(other)
        held_s = None
        if arm is not None and server in self._paused:
            held_s = self.steered.status().get("processed_s")
        if server in self._paused:
            self._resume(server)
        if arm is not None:
            self.steered.set(arm, keeps_memory=True)
        return held_s

    def _pause(self, server: Server) -> None:
        """Keep its requests where they are; nothing to do where there is no other server."""
        if self._other is not None:
            server.post("/pause_generation", {"mode": "in_place"})
            self._paused.add(server)

    def _resume(self, server: Server) -> None:
        server.post("/continue_generation", {})
        self._paused.discard(server)

    def _put_back(self, document: dict[str, Any]) -> None:
        with self._busy, ExitStack() as stack:
            stack.callback(super()._put_back, document)
            self._give_up(document)

    def _give_up(self, document: dict[str, Any]) -> None:
        """Leave no server paused, whichever of them is dead, and write what there is."""
        with ExitStack() as stack:
            stack.callback(self.write, document)
            for server in self._paused:
                stack.callback(self._resume, server)

    def _list(self, load: Load, seed: int) -> str:
        """The fingerprint of a list."""
        if (load.label, seed) not in self._lists:
            self._lists[load.label, seed] = fingerprint(self.work.requests(load, seed))
        return self._lists[load.label, seed]

    def _out(self, runs: Sequence[Run], share: float) -> set[str]:
        return left_behind(runs, share)


def _between(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[int, float]:
    """Output tokens and seconds from the newest result of one status to that of another.

    Not what the client got meanwhile: SGLang sends an answer on where its length is 1 beyond a multiple of
    `--stream-interval`, which rounds of several tokens miss, so that an arm of long rounds begins by keeping
    tokens back and leaves them to the next.

    Raises:
        ServerRefused: the server does not count.
    """
    names = ("output_tokens", "processed_s")
    if not all(name in after for name in names):
        raise ServerRefused("it does not count output tokens: is draftdial there as old as this one?")
    tokens, seconds = (after[name] - before[name] for name in names)
    return tokens, seconds
