"""A run of swinging load and changing policies in which tensor-parallel ranks must never disagree or hang."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from policy_changes import PolicyChanges
from swinging_load import SwingingLoad, status_of

LOOK_EVERY_S, REPORT_EVERY_S = 2.0, 10.0
LEFT_OUT = ("kv_only_rounds", "kv_only_prefills", "kv_only_restarts")
"""What a server with off mode `kv-only` has left out of the draft's work, by the names in its status."""


class Stuck(AssertionError):
    """The server answers no more, or decodes no more although it has requests."""


class RankSoak:
    """One run against one server; `failures` says what was not as it must be."""

    def __init__(
        self,
        load: SwingingLoad,
        changes: PolicyChanges,
        *,
        num_ranks: int,
        levels: Sequence[int],
        level_s: float,
        change_every_s: float,
        hang_s: float,
        is_kv_only: bool,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            load: The requests.
            changes: What is done to the policy meanwhile.
            num_ranks: Ranks that must compare their decisions.
            levels: Requests in flight, in turn and from the start again, none of them 0.
            level_s: Seconds at each.
            change_every_s: Mean time between two changes.
            hang_s: So long without a round, or without an answer of `/server_info`, is a hang.
            is_kv_only: Must k = 0 leave the draft out?
            report: Called every ten seconds, when `summary` has news.
        """
        self.load, self.changes = load, changes
        self.is_kv_only, self.report = is_kv_only, report
        self.num_ranks = num_ranks
        self.levels, self.level_s, self.change_every_s = levels, level_s, change_every_s
        self.hang_s = hang_s
        self.num_comparisons = self.num_disagreements = 0
        self.elapsed_s = 0.0
        self.failures: list[str] = []
        self.status: dict[str, Any] = {}
        self._first_decisions = 0
        self._is_over = threading.Event()

    def run(self, num_rounds: int, limit_s: float = float("inf")) -> None:
        """Until so many rounds have run and all has happened once, or so long, or something failed."""
        began = moved = shown = time.monotonic()
        self.status = status_of(self.load.url, self.hang_s)
        self._first_decisions = self.status["decisions"]
        changer = threading.Thread(target=self._change, daemon=True)
        changer.start()
        try:
            while not self._is_over.is_set():
                now = time.monotonic()
                self.load.set_level(self.levels[int((now - began) / self.level_s) % len(self.levels)])
                self._is_over.wait(min(LOOK_EVERY_S, self.level_s))
                before = self.status["decisions"]
                self._look()
                now = time.monotonic()
                self.elapsed_s = now - began
                if self.status["decisions"] > before:
                    moved = now
                elif now - moved > self.hang_s:
                    raise Stuck(f"no round in {self.hang_s:.0f} s")
                if now - shown > REPORT_EVERY_S:
                    shown = now
                    print(f"{self.num_rounds} rounds in {self.elapsed_s:.0f} s", file=sys.stderr, flush=True)
                    self.report()
                if (self.num_rounds >= num_rounds and self._has_seen_all()) or now - began > limit_s:
                    break
            self._is_over.set()
            changer.join(self.hang_s)
            if changer.is_alive() or not self.load.drain(self.hang_s):
                raise Stuck(f"requests were not answered within {self.hang_s:.0f} s")
            if not self.failures:
                self.changes.settle()
            self._look()
        except (Stuck, OSError, AssertionError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")
        finally:
            self._is_over.set()
            self.load.set_level(0)
        self.elapsed_s = time.monotonic() - began
        self._judge()

    @property
    def num_rounds(self) -> int:
        """Decode rounds so far."""
        rounds: int = self.status["decisions"] - self._first_decisions
        return rounds

    def summary(self) -> dict[str, Any]:
        """What has come of it so far."""
        status = self.status
        return {
            "rounds": self.num_rounds,
            "seconds": round(self.elapsed_s, 1),
            "ranks": status.get("ranks", 0),
            "comparisons": self.num_comparisons,
            "disagreements": self.num_disagreements,
            "switches": status["switches"],
            "rounds_at_k": {
                name.rpartition(".")[2]: count
                for name, count in status.items()
                if name.startswith("rounds_at_k.")
            },
            **(self._left_out() if self.is_kv_only else {}),
            "answers": self.load.num_answers,
            "wrong": self.load.num_wrong,
            "aborts": self.load.num_aborts,
            "changes": self.changes.made,
            "errors": status["errors"],
            "failures": self.failures,
        }

    def compare_records(self, folder: Path) -> dict[str, Any]:
        """Are the ranks' own records of their rounds alike, which `engine_probe` wrote to `folder`?

        Returns:
            How many rounds each rank recorded, and how many switches of k the first one did.
        """
        records = [(folder / f"rounds-{rank}.txt").read_text().splitlines() for rank in range(self.num_ranks)]
        if any(record != records[0] for record in records):
            self.failures.append("the ranks' own records of their rounds differ")
        if len(records[0]) < self.num_rounds:
            self.failures.append(f"the ranks recorded {len(records[0])} rounds of {self.num_rounds}")
        ks = [line.split()[1] for line in records[0]]
        return {
            "recorded_rounds": [len(record) for record in records],
            "recorded_switches": sum(before != after for before, after in pairwise(ks)),
        }

    def _left_out(self) -> dict[str, int]:
        return {name: self.status[name] for name in LEFT_OUT}

    def _has_seen_all(self) -> bool:
        return min(self.changes.made.values()) > 0 and self.load.num_aborts > 0

    def _look(self) -> None:
        """Asking for the status makes the ranks compare what they have decided."""
        self.status = status_of(self.load.url, self.hang_s)
        self.num_comparisons += 1
        self.num_disagreements += self.status.get("ranks_agree") != 1

    def _change(self) -> None:
        rng = random.Random(1)
        try:
            while not self._is_over.wait(2 * self.change_every_s * rng.random()):
                self.changes.make(rng)
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            self._is_over.set()

    def _judge(self) -> None:
        status, load = self.status, self.load
        judged = {
            "ranks disagree": self.num_disagreements > 0,
            f"not {self.num_ranks} ranks": status.get("ranks") != self.num_ranks,
            "answers are wrong": load.num_wrong > 0,
            f"requests failed: {load.errors[:3]}": bool(load.errors),
            f"{status['errors']} errors, {self.changes.num_faults} injected: {status['last_error']}": (
                status["errors"] != self.changes.num_faults
            ),
        }
        if self.is_kv_only:
            runs_draft = bool(status["kv_only_fallback"]) or 0 in self._left_out().values()
            judged[f"k = 0 ran the draft: {self._left_out()} {status['kv_only_fallback']}"] = runs_draft
        self.failures += [failure for failure, holds in judged.items() if holds]
