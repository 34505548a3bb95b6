"""The runs of a benchmark: every arm under every load, again and again."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from draftdial.controller.bench_arms import NO_SPEC, Arm, SteeredArms
from draftdial.controller.bench_drop import out_of_reach
from draftdial.controller.bench_loads import Load, closed_loads, lengths_of
from draftdial.controller.bench_metrics import figures, policy_figures
from draftdial.controller.bench_report import SCHEMA, Run
from draftdial.controller.bench_work import Work, fingerprint
from draftdial.controller.errors import UserError
from draftdial.controller.files import atomic_write, sha256_of
from draftdial.controller.interrupts import uninterrupted
from draftdial.controller.load_run import LoadResult, run_load
from draftdial.controller.measured_server import flush_cache
from draftdial.controller.stream_client import StreamClient
from draftdial.engine_patch.client import Server, ServerRefused
from draftdial.envs.lengths import Lengths, TokenLaw
from draftdial.envs.workload import RequestList

SHOWN_ERRORS = 3
WARM_UP = 4
"""Requests in flight, twice as many in all, before anything is measured: connections and caches."""
IDLE_REQUESTS, IDLE_PROMPT_TOKENS = 11, 64
"""One at a time, for one token each: what a request takes beside its work on the GPU."""


@dataclass(frozen=True)
class Limits:
    """How long a request may take."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05
    """This and `ttft_s`: what it must keep to count as attained."""
    timeout_s: float = 600.0
    """A request that takes longer has failed."""


class Bench:
    """All runs of one benchmark; the document on disk grows with each."""

    more_options: Mapping[str, Any] = {}
    """That the document keeps."""

    def __init__(
        self,
        steered: SteeredArms,
        arms: Sequence[Arm],
        work: Work,
        folder: Path,
        *,
        limits: Limits | None = None,
        drop: float | None = None,
        api_key: str | None = None,
        no_spec: str | None = None,
    ) -> None:
        """`no_spec` is the URL of a server without speculation, which makes another arm.

        `drop`: arms that `out_of_reach` finds by this share are left out of later repeats, see `_in_play`.

        Raises:
            UserError: the server at `no_spec` speculates.
        """
        self.steered = steered
        self.arms = {arm.name: arm for arm in arms}
        self.work = work
        self.folder = folder
        self.limits = limits or Limits()
        self._drop = drop
        self._api_key = api_key
        self._other = Server(no_spec, api_key) if no_spec else None
        facts = {server: server.states()[0] for server in (steered.server, self._other) if server is not None}
        algorithm = facts[self._other].get("speculative_algorithm") if self._other is not None else None
        if algorithm:
            raise UserError(
                f"--no-spec: found {no_spec}, which speculates ({algorithm}), allowed: a server that does not"
            )
        self._has_cache = {server: not known.get("disable_radix_cache") for server, known in facts.items()}
        self._count = 0

    def measured(self, baseline: str) -> dict[str, Any]:
        """The document with every run; the server is put back in the end.

        Raises:
            UserError: a server cannot be driven.
            ServerRefused: it does not do what an arm asks. What was measured before is on disk.
        """
        document = self._begin(baseline)
        try:
            self._run(document)
        except KeyboardInterrupt:
            print("draftdial: interrupted; putting the server back", file=sys.stderr)
            raise
        finally:
            with uninterrupted():
                self._put_back(document)
        return document

    def _put_back(self, document: dict[str, Any]) -> None:
        """Leave the server as it was; every request to it has a timeout."""
        self.steered.restore()

    def write(self, document: dict[str, Any]) -> None:
        """`bench.json`, which a reader finds whole at any time."""
        atomic_write(self.folder / "bench.json", json.dumps(document, indent=1) + "\n")

    def _begin(self, baseline: str) -> dict[str, Any]:
        """The document without results."""
        facts = self.steered.server.states()[0]
        status = self.steered.status()
        shown = ("model_path", "tp_size", "max_running_requests", "disable_overlap_schedule")
        return {
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["draftdial", *sys.argv[1:]]),
            "versions": {"draftdial": version("draftdial"), "server": status["version"]},
            "title": Path(str(facts.get("model_path"))).name,
            "off_mode": "as-served",
            "server": {key: facts.get(key) for key in shown} | {"status": status},
            "options": self.work.options
            | {"slo_ttft": self.limits.ttft_s, "slo_tpot": self.limits.tpot_s, "drop": self._drop}
            | dict(self.more_options),
            "arms": [*self.arms, *([NO_SPEC] if self._other else [])],
            "policies": {
                name: sha256_of(arm.policy.data) for name, arm in self.arms.items() if arm.policy is not None
            },
            "baseline": baseline,
            "loads": [load.label for load in self.work.loads],
            "runs": [],
            "cells": [],
        }

    def _run(self, document: dict[str, Any]) -> None:
        """Every arm under every load in every repeat: arms in an order that rotates."""
        from draftdial.controller.measuring_progress import measuring_progress

        work, arms = self.work, document["arms"]
        in_play = {load.label: arms for load in work.loads}
        with measuring_progress("bench", "runs", len(work.seeds) * len(work.loads) * len(arms)) as progress:
            self._warm_up(arms)
            document["server"]["idle_request"] = self._idle_request()
            for repeat, seed in enumerate(work.seeds):
                for place, load in enumerate(work.loads):
                    requests = work.requests(load, seed)
                    which = {"repeat": repeat, "seed": seed, "list": fingerprint(requests)}
                    names = in_play[load.label] = self._in_play(in_play[load.label], load, document)
                    progress.measured(len(arms) - len(names))
                    turn = (repeat + place) % len(names)
                    for name in names[turn:] + names[:turn]:
                        progress.measuring(f"{name}, {load.label}, repeat {repeat + 1}")
                        document["runs"].append(self._measure(name, load, requests, seed) | which)
                        self.write(document)
                        progress.measured()

    def _in_play(self, names: list[str], load: Load, document: dict[str, Any]) -> list[str]:
        """Those of `names` that go on under a load, by what was measured under it so far.

        The baseline, the server's own policy and `no-spec` always do: the others are compared with them.
        """
        if self._drop is None:
            return names
        place = (load.workload, load.value)
        runs = [run for run in document["runs"] if (run["workload"], run["load"]) == place]
        dropped = self._out(runs, self._drop) - {document["baseline"], "steer", NO_SPEC}
        if gone := [name for name in names if name in dropped]:
            print(f"draftdial: {load.label}: left out from here on: {', '.join(gone)}", file=sys.stderr)
        return [name for name in names if name not in dropped]

    def _out(self, runs: Sequence[Run], share: float) -> set[str]:
        return out_of_reach(runs, share)

    def _warm_up(self, names: Sequence[str]) -> None:
        lengths = lengths_of(self.work.options["lengths"])
        [load] = closed_loads([WARM_UP], 2 * WARM_UP, per_slot=2, lengths=lengths)
        seed = self.work.seeds[0]
        requests = self.work.requests(load, seed)
        for server in {self._server(name) for name in names}:
            result = self._send(server, requests, seed)
            if len(result.errors) == requests.num_requests:
                raise UserError(f"{server.url}: cannot be driven: {next(iter(result.errors.values()))}")

    def _idle_request(self) -> dict[str, float]:
        """What a request for one token takes the client that finds the steered server idle; the median."""
        one = Lengths(
            TokenLaw(IDLE_PROMPT_TOKENS, 0, IDLE_PROMPT_TOKENS, IDLE_PROMPT_TOKENS), TokenLaw(1, 0, 1, 1)
        )
        [load] = closed_loads([1], IDLE_REQUESTS, per_slot=1, lengths=one)
        seed = self.work.seeds[0]
        requests = self.work.requests(load, seed)
        result = self._send(self.steered.server, requests, seed)
        return {
            "prompt_tokens": float(requests.prompt_tokens.mean()),
            "e2e_s": float(np.median(result.finish_s - result.arrival_s)),
        }

    def _measure(self, name: str, load: Load, requests: RequestList, seed: int) -> dict[str, Any]:
        server, arm = self._server(name), self.arms.get(name)
        if arm is not None:
            self.steered.set(arm)
        if self._has_cache[server]:
            flush_cache(server)  # the same prompts come again
        before = self.steered.status_of(arm) if arm is not None else {}
        result = self._send(server, requests, seed)
        after = self.steered.status() if arm is not None else {}
        check_off_mode(before, after)
        if result.errors:
            flush_cache(server)  # as soon as it is idle: what the client gave up may be running
        for i, error in list(result.errors.items())[:SHOWN_ERRORS]:
            print(f"draftdial: {name}, {load.label}: request {i}: {error}", file=sys.stderr)
        run = {"arm": name, "workload": load.workload, "mode": load.mode, "load": load.value}
        run |= figures(result, requests.warmup, self.limits.ttft_s, self.limits.tpot_s)
        return run | policy_figures(before, after)

    def _send(self, server: Server, requests: RequestList, seed: int) -> LoadResult:
        self._count += 1
        bodies = self.work.asking.bodies(requests, seed, f"bench-{os.getpid()}-{self._count}")

        async def send() -> LoadResult:
            client = StreamClient(server.url, self._api_key, self.limits.timeout_s)
            try:
                return await run_load(client, requests, bodies)
            finally:
                await client.close()

        return asyncio.run(send())

    def _server(self, name: str) -> Server:
        return self._other if name == NO_SPEC and self._other is not None else self.steered.server


def check_off_mode(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """ServerRefused if the server's k = 0 became another between two statuses."""
    if after.get("kv_only_fallback") != before.get("kv_only_fallback"):
        raise ServerRefused(f"its off mode kv-only fell back to warm: {after['kv_only_fallback']}")
