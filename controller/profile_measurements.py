"""What was measured for a profile: every repeat, in a file that grows, and the fastest of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from draftdial.controller.cell_timings import Timing
from draftdial.controller.errors import UserError
from draftdial.controller.files import atomic_write

SCHEMA = "draftdial.measurements/3"
KV_ONLY_PREFILL_TASK = "kv-only prefill"
"""Kind of task: prefills that leave out the draft, behind rounds that do."""
APART = 1.05
"""The second fastest repeat took more than this many times the fastest: the host held one of them up."""

IDLE_SHARE = 0.005
"""Of a round: where the GPU stood idle before it for longer, the host set its time. Idle times within a round
do not show."""

Repeat = dict[str, Any]
"""`rows`, a timing for each name, or `failed` and why."""


@dataclass(frozen=True)
class Grid:
    """What was asked for; the same grid continues a sweep that was interrupted."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    """Prompt tokens of each request; a batch that has no room for two of them gets smaller ones."""
    rounds: int
    """Measured rounds of each k in each repeat."""
    repeats: int
    """Passes over everything."""
    held_out: int
    """Cells between those of the grid, to see how well the profile predicts them."""
    seed: int


@dataclass(frozen=True)
class Task:
    """One thing to measure, on the server with speculation or the one without."""

    kind: str
    """`cell`, `held-out`, `switch`, `prefill` or `kv-only prefill`."""
    side: str
    """`speculative` or `nospec`."""
    batch: int = 0
    context: int = 0

    @property
    def id(self) -> str:
        return f"{self.side} {self.kind} batch {self.batch} context {self.context}"


@dataclass(frozen=True)
class Result:
    """All repeats of one task."""

    task: Task
    repeats: list[Repeat]

    @property
    def rows(self) -> dict[str, Timing]:
        """The fastest timing of each row: a host that is slow for a while only adds."""
        return {row: fastest for row, (fastest, *_) in self._sorted().items()}

    @property
    def apart(self) -> dict[str, tuple[float, float]]:
        """Times in ms of the two fastest repeats, of each row in which they do not agree."""
        times = {row: [timing["period_ms"] for timing in found[:2]] for row, found in self._sorted().items()}
        return {row: (two[0], two[1]) for row, two in times.items() if two[-1] > APART * two[0]}

    @property
    def failure(self) -> str:
        """Why the last repeat failed, where none found anything; else empty."""
        return "" if self.rows else str(self.repeats[-1].get("failed", ""))

    @property
    def is_settled(self) -> bool:
        """Nothing failed, and repeats agree."""
        return not self.apart and not any("failed" in repeat for repeat in self.repeats)

    def _sorted(self) -> dict[str, list[Timing]]:
        found: dict[str, list[Timing]] = {}
        for repeat in self.repeats:
            for row, timing in repeat.get("rows", {}).items():
                found.setdefault(row, []).append(timing)
        return {row: sorted(each, key=lambda timing: timing["period_ms"]) for row, each in found.items()}


class Measurements:
    """Results by task, in a file that grows as they come in."""

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path = path
        self.document = document

    @classmethod
    def open(cls, path: Path, grid: Grid, facts: dict[str, Any]) -> Self:
        """Those in `path`, or none.

        Raises:
            UserError: they are of another grid or server.
        """
        fresh = {
            "schema": SCHEMA,
            "grid": json.loads(json.dumps(asdict(grid))),
            "facts": facts,
            "results": {},
        }
        if not path.exists():
            return cls(path, fresh)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            same = all(found[key] == fresh[key] for key in ("schema", "grid", "facts"))
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{path}: not measurements that can be continued: remove the file") from None
        if not same:
            raise UserError(
                f"{path}: holds measurements of another server or with other options: "
                "give those again to continue, or remove the file"
            )
        return cls(path, found)

    def add(self, task: Task, repeat: Repeat) -> None:
        """Keep another repeat of `task`."""
        self._entries.setdefault(task.id, asdict(task) | {"repeats": []})["repeats"].append(repeat)
        atomic_write(self.path, json.dumps(self.document, indent=1) + "\n")

    def result(self, task: Task) -> Result:
        """The repeats of `task` so far."""
        return Result(task, self._entries.get(task.id, {}).get("repeats", []))

    def host_set(self, result: Result) -> set[str]:
        """Rows whose time is the host's even in the fastest repeat; none without a GPU, where all are."""
        if self.document["facts"]["clock"] != "cuda" or result.task.kind not in ("cell", "held-out"):
            return set()
        return {
            row for row, found in result.rows.items() if found["idle_ms"] > IDLE_SHARE * found["period_ms"]
        }

    def results(self) -> list[Result]:
        """Everything, failures as well."""
        entries = [dict(entry) for entry in self._entries.values()]
        return [Result(repeats=entry.pop("repeats"), task=Task(**entry)) for entry in entries]

    def of(self, kind: str, side: str) -> list[Result]:
        """Results of one kind that did not fail."""
        return [
            result
            for result in self.results()
            if (result.task.kind, result.task.side) == (kind, side) and result.rows
        ]

    @property
    def _entries(self) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = self.document["results"]
        return entries
