"""Everything that is measured for a profile, in random order: drift must not pass for batch."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from draftdial.controller.cell_timings import (
    WARM_UP_ROUNDS,
    accepted_share,
    prefill_knots,
    row_of,
    switch_ms,
    timings,
)
from draftdial.controller.errors import UserError
from draftdial.controller.files import atomic_write
from draftdial.controller.measured_server import CellFailed, MeasuredServer
from draftdial.engine_patch.measurement_plan import Phase

SCHEMA = "draftdial.measurements/2"
PREFILL_TOKENS = (64, 256, 512, 1024, 2048, 4096, 8192)
PREFILL_BATCH = 8
"""Requests that decode meanwhile: a prefill on an idle server takes the host's time, not the GPU's."""
BACKGROUND_ROUNDS = 50_000
SWITCHES = 48
LEAST_ROOM = 96
"""Tokens beside the answer that a request needs for two contexts worth telling apart."""
SHARE_MARGIN = 1.3
"""Answers are this much longer than the acceptance seen so far makes them."""


@dataclass(frozen=True)
class Grid:
    """What was asked for; the same grid continues a sweep that was interrupted."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    """Prompt tokens of each request; a batch that has no room for two of them gets smaller ones."""
    rounds: int
    """Measured rounds of each k in each repeat."""
    repeats: int
    """Times that each k is run on the same requests."""
    held_out: int
    """Cells between those of the grid, to see how well the profile predicts them."""
    seed: int


@dataclass(frozen=True)
class Task:
    """One thing to measure, on the server with speculation or the one without."""

    kind: str
    """`cell`, `held-out`, `switch` or `prefill`."""
    side: str
    """`speculative` or `nospec`."""
    batch: int = 0
    context: int = 0

    @property
    def id(self) -> str:
        return f"{self.side} {self.kind} batch {self.batch} context {self.context}"


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

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        results: dict[str, dict[str, Any]] = self.document["results"]
        return results

    def add(self, task: Task, result: dict[str, Any]) -> None:
        """Keep the result of `task`."""
        self.results[task.id] = asdict(task) | result
        atomic_write(self.path, json.dumps(self.document, indent=1) + "\n")

    def of(self, kind: str, side: str) -> list[dict[str, Any]]:
        """Results of one kind that did not fail."""
        return [
            result
            for result in self.results.values()
            if (result["kind"], result["side"]) == (kind, side) and "failed" not in result
        ]


class Sweep:
    """Measures one server."""

    def __init__(self, server: MeasuredServer, grid: Grid, side: str) -> None:
        self.server = server
        self.grid = grid
        self.side = side
        self._rng = random.Random(grid.seed)
        self._accepted_share = 1.0
        """Of drafts, at most: how long answers must be for a cell's rounds."""
        self._kinds = self._all_kinds()

    def tasks(self) -> list[Task]:
        """All that is to be measured: the smallest cell first, which says how long answers get."""
        cells = [
            Task("cell", self.side, batch, context)
            for batch in self.grid.batches
            for context in self.contexts(batch)
        ]
        between = [Task("held-out", self.side, *place) for place in self._between(cells)]
        others = [Task("prefill", self.side)]
        if self.side == "speculative":
            others.append(Task("switch", self.side, min(self.grid.batches), min(self.grid.contexts)))
        first, *rest = sorted(cells, key=lambda task: (task.batch, task.context))
        rest += between + others
        self._rng.shuffle(rest)
        return [first, *rest]

    def contexts(self, batch: int) -> list[int]:
        """Prompt tokens that a batch of this size has room for; none if not even short ones."""
        room = self.server.room(batch) - self._answer_tokens(self._cell_phases(), 0.0)
        fitting = [context for context in self.grid.contexts if context <= room]
        if len(fitting) < 2 and room >= LEAST_ROOM:
            return [room // 4, room]
        return fitting if len(fitting) >= 2 else []

    def run(self, task: Task) -> dict[str, Any]:
        """Measure `task`, once more if it fails; what was found, or `failed` and why."""
        for is_last in (False, True):
            try:
                return self._run(task)
            except CellFailed as failure:
                self._accepted_share = 1.0
                if is_last:
                    return {"failed": str(failure)}
            finally:
                self.server.flush()
        raise AssertionError("unreachable")

    def _run(self, task: Task) -> dict[str, Any]:
        if task.kind == "prefill":
            return self._prefill()
        if task.kind == "switch":
            return self._switch(task)
        found = self._cell(task, self._kinds)
        bound = [kind for kind in self._kinds if found[row_of(kind)]["host_bound"]]
        if bound:
            again = self._cell(task, bound)
            for row, timing in again.items():
                if timing["period_ms"] < found[row]["period_ms"]:
                    found[row] = timing
        return {"rows": found}

    def _cell(self, task: Task, kinds: Sequence[Phase]) -> dict[str, Any]:
        phases = self._cell_phases(kinds)
        report = self.server.run(phases, task.batch, task.context, self._new_tokens(task, phases))
        seen = accepted_share(phases, report["rounds"])
        self._accepted_share = min(1.0, SHARE_MARGIN * seen + 0.05)
        return timings(phases, report["rounds"], self.server.is_gpu)

    def _switch(self, task: Task) -> dict[str, Any]:
        low, high = (
            [kind for kind in self._kinds if kind.k][:2]
            if self._num_draft_kinds > 1
            else (self._kinds[0], self._kinds[-1])
        )
        steady = [low, high]
        turns = [Phase(kind.k, 1) for _ in range(SWITCHES // 2) for kind in steady]
        phases = [*steady, *turns, *reversed(steady)]
        report = self.server.run(phases, task.batch, task.context, self._new_tokens(task, phases))
        return {"switch_ms": switch_ms(phases, report["rounds"])}

    def _prefill(self) -> dict[str, Any]:
        chunk = self.server.arguments.get("chunked_prefill_size") or -1
        most = chunk if chunk > 0 else max(PREFILL_TOKENS)
        batch = min(PREFILL_BATCH, max(1, self.server.facts["max_running"] - 2))
        context = min(self.grid.contexts)
        room = self.server.room(batch + 1)
        sizes = [size for size in PREFILL_TOKENS if size <= min(most, room // 2)]
        k = min((kind.k for kind in self._kinds if kind.k), default=None)
        phase = Phase(0 if k is None and self.side == "speculative" else k, BACKGROUND_ROUNDS)
        orders = [self._rng.sample(sizes, len(sizes)) for _ in range(2 * self.grid.repeats + 1)]

        def ask() -> None:
            for size in (size for order in orders for size in order):
                self.server.ask(self.server.prompt(size), 1)

        report = self.server.run(
            [phase], batch, context, room - context - max(sizes, default=0) // batch, ask
        )
        return {"knots": prefill_knots(report["prefills"], sizes)}

    @property
    def _num_draft_kinds(self) -> int:
        return sum(1 for kind in self._kinds if kind.k)

    def _all_kinds(self) -> list[Phase]:
        rounds = WARM_UP_ROUNDS + self.grid.rounds
        if self.side == "nospec":
            return [Phase(None, rounds)]
        return [
            Phase(0, rounds),
            Phase(0, rounds, "skip"),
            *([Phase(0, rounds, "kv-only")] if self.server.has_kv_only else []),
            *(Phase(k, rounds) for k in self.server.tiers if k),
        ]

    def _cell_phases(self, kinds: Sequence[Phase] = ()) -> list[Phase]:
        """Every kind once a repeat: in a random order, then in its reverse, and so on.

        Contexts grow meanwhile; forth and back, every kind has the same one on average.
        """
        chosen = list(kinds or self._kinds)
        phases: list[Phase] = []
        while len(phases) < self.grid.repeats * len(chosen):
            order = self._rng.sample(chosen, len(chosen))
            phases += order + order[::-1]
        return phases[: self.grid.repeats * len(chosen)]

    def _new_tokens(self, task: Task, phases: Sequence[Phase]) -> int:
        most = self.server.room(task.batch) - task.context
        return max(1, min(most, self._answer_tokens(phases, self._accepted_share)))

    @staticmethod
    def _answer_tokens(phases: Sequence[Phase], accepted_share: float) -> int:
        """Tokens a request gets in these phases, and a few for the rounds before they begin."""
        drafted = sum(phase.num_rounds * (phase.k or 0) for phase in phases)
        return int(sum(phase.num_rounds for phase in phases) + accepted_share * drafted) + 64

    def _between(self, cells: Sequence[Task]) -> Iterator[tuple[int, int]]:
        """Places in the middle of the grid, spread over it: other batches and other contexts."""
        by_batch: dict[int, list[int]] = {}
        for cell in cells:
            by_batch.setdefault(cell.batch, []).append(cell.context)
        batches = sorted(by_batch)
        places = []
        for left, right in pairwise(batches):
            most = min(max(by_batch[left]), max(by_batch[right]))
            least = max(min(by_batch[left]), min(by_batch[right]))
            if most > least:
                places.append(((left + right + 1) // 2, (least + most) // 2))
        places = places or [(batches[-1], sum(by_batch[batches[-1]]) // len(by_batch[batches[-1]]))]
        count = min(self.grid.held_out, len(places))
        yield from (places[(2 * i + 1) * len(places) // (2 * count)] for i in range(count))
