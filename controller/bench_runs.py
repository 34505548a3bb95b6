"""The runs of a benchmark: every arm under every load, again and again."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftdial.controller.bench_arms import NO_SPEC, Arm, SteeredArms
from draftdial.controller.bench_loads import Asking, Load, closed_loads, lengths_of
from draftdial.controller.bench_metrics import figures, policy_figures
from draftdial.controller.bench_report import SCHEMA
from draftdial.controller.errors import UserError
from draftdial.controller.files import atomic_write
from draftdial.controller.load_run import LoadResult, run_load
from draftdial.controller.measured_server import flush_cache
from draftdial.controller.stream_client import StreamClient
from draftdial.engine_patch.client import Server
from draftdial.envs.workload import RequestList

SHOWN_ERRORS = 3
WARM_UP = 4
"""Requests in flight, twice as many in all, before anything is measured: connections and caches."""


class Bench:
    """All runs of one benchmark; the document on disk grows with each."""

    def __init__(
        self,
        args: argparse.Namespace,
        steered: SteeredArms,
        arms: dict[str, Arm],
        loads: Sequence[Load],
        asking: Asking,
    ) -> None:
        self.args = args
        self.steered = steered
        self.arms = arms
        self.loads = loads
        self.asking = asking
        self._other = Server(args.no_spec, args.api_key) if args.no_spec else None
        self._count = 0

    def begin(self, names: Sequence[str], baseline: str) -> dict[str, Any]:
        """The document without results."""
        args = self.args
        facts = self.steered.server.states()[0]
        options = ("lengths", "requests", "repeats", "seed", "slo_ttft", "slo_tpot", "stop_at_eos")
        return {
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["draftdial", *sys.argv[1:]]),
            "versions": {"draftdial": version("draftdial"), "server": self.steered.status()["version"]},
            "title": Path(str(facts.get("model_path"))).name,
            "off_mode": "as-served",
            "server": {key: facts.get(key) for key in ("model_path", "tp_size", "max_running_requests")}
            | {"status": self.steered.status()},
            "options": {name: getattr(args, name) for name in options} | {"prompts": str(args.prompts or "")},
            "arms": list(names),
            "baseline": baseline,
            "loads": [load.label for load in self.loads],
            "runs": [],
            "cells": [],
        }

    def run(self, document: dict[str, Any]) -> None:
        """Every arm under every load in every repeat: arms in an order that rotates."""
        args, names = self.args, document["arms"]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("warm-up", total=args.repeats * len(self.loads) * len(names))
            self._warm_up(names)
            for repeat in range(args.repeats):
                for place, load in enumerate(self.loads):
                    requests = self.asking.requests(load, args.seed + repeat)
                    turn = (repeat + place) % len(names)
                    for name in names[turn:] + names[:turn]:
                        progress.update(bar, description=f"{name}, {load.label}, repeat {repeat + 1}")
                        found = self._measure(name, load, requests, args.seed + repeat)
                        document["runs"].append(found | {"repeat": repeat, "seed": args.seed + repeat})
                        self.write(document)
                        progress.advance(bar)

    def write(self, document: dict[str, Any]) -> None:
        atomic_write(self.args.out / "bench.json", json.dumps(document, indent=1) + "\n")

    def _warm_up(self, names: Sequence[str]) -> None:
        [load] = closed_loads([WARM_UP], 2 * WARM_UP, lengths=lengths_of(self.args.lengths))
        requests = self.asking.requests(load, self.args.seed)
        for server in {self._server(name) for name in names}:
            result = self._send(server, requests, self.args.seed)
            if len(result.errors) == requests.num_requests:
                raise UserError(f"{server.url}: cannot be driven: {next(iter(result.errors.values()))}")

    def _measure(self, name: str, load: Load, requests: RequestList, seed: int) -> dict[str, Any]:
        server = self._server(name)
        is_steered = name in self.arms
        if is_steered:
            self.steered.set(self.arms[name])
        flush_cache(server)  # the same prompts come again
        before = self.steered.status() if is_steered else {}
        result = self._send(server, requests, seed)
        after = self.steered.status() if is_steered else {}
        for i, error in list(result.errors.items())[:SHOWN_ERRORS]:
            print(f"draftdial: {name}, {load.label}: request {i}: {error}", file=sys.stderr)
        run = {"arm": name, "workload": load.workload, "mode": load.mode, "load": load.value}
        run |= figures(result, requests.warmup, self.args.slo_ttft, self.args.slo_tpot)
        return run | policy_figures(before, after)

    def _send(self, server: Server, requests: RequestList, seed: int) -> LoadResult:
        self._count += 1
        bodies = self.asking.bodies(requests, seed, f"bench-{os.getpid()}-{self._count}")

        async def send() -> LoadResult:
            client = StreamClient(server.url, self.args.api_key, self.args.timeout)
            try:
                return await run_load(client, requests, bodies)
            finally:
                await client.close()

        return asyncio.run(send())

    def _server(self, name: str) -> Server:
        return self._other if name == NO_SPEC and self._other is not None else self.steered.server
