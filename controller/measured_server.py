"""A server while it is measured: the batch it decodes, and what its timer says."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any

from draftdial.controller.errors import UserError
from draftdial.controller.interrupts import deferred
from draftdial.engine_patch.client import Server, ServerRefused
from draftdial.engine_patch.measurement_plan import MEASURE_KEY, MeasurementPlan, Phase

POLL_S = 0.5
"""Between two looks at the timer: each costs the server a round or so, out of hundreds."""
STALLED_S = 60.0
"""Without a round that counts for so long, a cell is given up."""
ABORT_S = 20.0
FLUSH_S = 20.0
FIRST_ID, LAST_ID = 3, 999
"""Prompts are random token ids that every vocabulary has."""

Report = dict[str, Any]
"""What `RoundTimer.report` gives."""


class CellFailed(Exception):
    """A cell could not be measured; the message says why."""


class MeasuredServer:
    """Nothing but the measurement may ask this server while it is measured."""

    def __init__(self, server: Server, patient: Server, seed: int) -> None:
        """`patient` is the same server, asked with a timeout that outlasts any batch."""
        self.server = server
        self._patient = patient
        self._rng = random.Random(seed)
        self._number = random.SystemRandom().randrange(1, 10**9)
        self.status = self._only_status()
        self.arguments: dict[str, Any] = server.states()[0]
        """SGLang's own, as far as `/server_info` shows them."""
        self.facts = self._begin(MeasurementPlan(self._next(), 1, ()))
        self._end()

    @property
    def facts_that_last(self) -> dict[str, Any]:
        """What tells this server from another one, now and after a restart."""
        changing = ("plan", "phase", "done", "error", "rounds", "prefills")
        return {name: value for name, value in self.facts.items() if name not in changing} | {
            "tiers": list(self.tiers),
            "model": self.arguments.get("model_path"),
            **({"off_mode": "kv-only"} if self.has_kv_only else {}),
        }

    @property
    def has_kv_only(self) -> bool:
        """Can k = 0 keep the draft's KV here without running the draft?"""
        return self.status.get("off_mode") == "kv-only" and not self.status.get("kv_only_fallback")

    def num_kv_only_prefills(self) -> int:
        """Prefills that left out the draft, since it was started."""
        return int(self._only_status()["kv_only_prefills"])

    def check_kv_only(self) -> None:
        """ServerRefused if k = 0 was kept without the draft when this began, and no longer is."""
        reason = self._only_status().get("kv_only_fallback")
        if self.has_kv_only and reason:
            raise ServerRefused(
                f"its off mode kv-only fell back to warm meanwhile, so its times are void: {reason}"
            )

    @property
    def tiers(self) -> tuple[int, ...]:
        """Values of k that may run; none on a server without speculation."""
        text = str(self.status.get("tiers", ""))
        return tuple(int(k) for k in text.split(",") if k)

    def room(self, batch: int) -> int:
        """Tokens that each of `batch` requests can have, prompt and answer."""
        reserved = 2 * (max(self.tiers, default=0) + 1) + 8
        per_request = self.facts["kv_pool_tokens"] // batch - reserved
        return int(min(per_request, self.facts["context_length"] - reserved))

    def run(
        self,
        phases: Sequence[Phase],
        batch: int,
        context: int,
        new_tokens: int,
        during: Callable[[], None] | None = None,
    ) -> Report:
        """Decode `batch` requests of `context` prompt tokens through `phases`, or while `during` runs.

        Raises:
            CellFailed: the requests ended first, or other requests came in between.
        """
        self._begin(MeasurementPlan(self._next(), batch, tuple(phases)))
        rids = [f"draftdial-{self._number}-{i}" for i in range(batch)]
        prompts = [self.prompt(context) for _ in rids]
        with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
            with deferred():
                answer = pool.submit(self._generate, prompts, new_tokens, rids)
                stack.callback(self._abort, rids, answer)
            if during is None:
                return self._await(answer, phases)
            self._await_rounds(answer)
            during()
            return self.report()

    def ask(self, prompt: list[int], new_tokens: int) -> None:
        """Have one request answered."""
        self._generate([prompt], new_tokens, None)

    def prompt(self, tokens: int) -> list[int]:
        """So many random token ids."""
        return [self._rng.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]

    def report(self) -> Report:
        """What the timer says."""
        report: Report | None = self.server.states()[0].get("draftdial_timing")
        if report is None or report["plan"] != self._number:
            raise UserError(f"{self.server.url}: somebody else measures this server, or it was restarted")
        if report["error"]:
            raise UserError(f"{self.server.url}: its timer failed: {report['error']}")
        return report

    def flush(self) -> None:
        """Forget cached prefixes: after k = 0 with skipping, the draft's part of them is wrong."""
        flush_cache(self.server)

    def close(self) -> None:
        """Let the policy decide again."""
        try:
            self._end()
        finally:
            self.flush()

    def _only_status(self) -> dict[str, Any]:
        replicas = self.server.replicas()
        if len(replicas) > 1:
            raise UserError(f"{self.server.url}: has {len(replicas)} data-parallel replicas, allowed: one")
        return replicas[0]

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _begin(self, plan: MeasurementPlan) -> Report:
        if not all(self.server.change(plan.key(), 1)):
            reason = self._only_status().get("last_control") or "is draftdial there as old as this one?"
            raise ServerRefused(f"it does not measure: {reason}")
        return self.report()

    def _end(self) -> None:
        self.server.change(MEASURE_KEY, 0)

    def _generate(self, prompts: list[list[int]], new_tokens: int, rids: list[str] | None) -> None:
        parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": prompts, "sampling_params": parameters}
        self._patient.post("/generate", body | ({"rid": rids} if rids else {}))

    def _await(self, answer: Future[None], phases: Sequence[Phase]) -> Report:
        seen, since = -1, time.monotonic()
        while True:
            is_over = answer.done()
            report = self.report()
            if report["done"]:
                return report
            if is_over:
                ended = f": {answer.exception()}" if answer.exception() else ""
                raise CellFailed(f"its requests ended in phase {report['phase'] + 1} of {len(phases)}{ended}")
            if len(report["rounds"]) != seen:
                seen, since = len(report["rounds"]), time.monotonic()
            elif time.monotonic() - since > STALLED_S:
                raise CellFailed("its batch was never alone and complete: is the server used by others?")
            time.sleep(POLL_S)

    def _await_rounds(self, answer: Future[None]) -> None:
        """Wait until the batch decodes."""
        since = time.monotonic()
        while not self.report()["rounds"]:
            if answer.done() or time.monotonic() - since > STALLED_S:
                raise CellFailed("its batch was never alone and complete")
            time.sleep(POLL_S / 5)

    def _abort(self, rids: Sequence[str], answer: Future[None]) -> None:
        """End these requests, those that are still on their way to the server too."""
        deadline = time.monotonic() + ABORT_S  # Ctrl-C must end a server that hangs
        with deferred():
            while not answer.done() and time.monotonic() < deadline:
                self._abort_each(rids)
                wait([answer], POLL_S)
            if answer.done() and answer.exception():  # of one of them: the others may run on
                self._abort_each(rids)

    def _abort_each(self, rids: Sequence[str]) -> None:
        for rid in rids:
            self.server.post("/abort_request", {"rid": rid})


def flush_cache(server: Server) -> None:
    """Make a server forget all cached prefixes, as soon as it is idle.

    Raises:
        UserError: it never was.
    """
    deadline = time.monotonic() + FLUSH_S
    wait_s = 0.01
    while True:
        try:
            server.post("/flush_cache", {})
            return
        except UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.2)
