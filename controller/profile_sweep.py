"""Everything that is measured for a profile, in random order: drift must not pass for batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from draftdial.controller.cell_timings import (
    PREFIX_HIT_TOKENS,
    WARM_UP_ROUNDS,
    Timing,
    accepted_share,
    prefill_timings,
    switch_timings,
    timings,
)
from draftdial.controller.measured_server import CellFailed, MeasuredServer
from draftdial.controller.profile_measurements import KV_ONLY_PREFILL_TASK, Grid, Measurements, Repeat, Task
from draftdial.engine_patch.kv_only_prefill import PROOF_TOKENS
from draftdial.engine_patch.measurement_plan import Phase

PREFILL_TOKENS = (64, 256, 512, 1024, 2048, 4096, 8192)
PREFILL_BATCH = 8
"""Requests that decode meanwhile: a prefill on an idle server takes the host's time, not the GPU's."""
PREFILLS = 5
"""Of each size in a repeat."""
BACKGROUND_ROUNDS = 50_000
SWITCHES = 48
LEAST_ROOM = 96
"""Tokens beside the answer that a request needs for two contexts worth telling apart."""
SHARE_MARGIN = 1.3
"""Answers are this much longer than the acceptance seen so far makes them."""


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

    def passes(self, measurements: Measurements) -> Iterator[list[Task]]:
        """What is left of each pass over everything, then of a last one over what is unsettled or the host's.

        Repeats are a pass apart, so that one slow spell of the host does not take both. A list is made when
        it is asked for: what those before it found must be in `measurements` by then.
        """
        for done in range(self.grid.repeats):
            yield [task for task in self.tasks() if len(measurements.result(task).repeats) <= done]
        results = map(measurements.result, self.tasks())
        yield [
            result.task
            for result in results
            if len(result.repeats) == self.grid.repeats
            and (not result.is_settled or measurements.host_set(result))
        ]

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
            if self.server.has_kv_only:
                others.append(Task(KV_ONLY_PREFILL_TASK, self.side))
            others.append(Task("switch", self.side, min(self.grid.batches), min(self.grid.contexts)))
        first, *rest = sorted(cells, key=lambda task: (task.batch, task.context))
        rest += between + others
        self._rng.shuffle(rest)
        return [first, *rest]

    def contexts(self, batch: int) -> list[int]:
        """Prompt tokens that a batch of this size has room for; none if not even short ones."""
        room = self.server.room(batch) - self._answer_tokens(self._kinds, 0.0)
        fitting = [context for context in self.grid.contexts if context <= room]
        if len(fitting) < 2 and room >= LEAST_ROOM:
            return [room // 4, room]
        return fitting if len(fitting) >= 2 else []

    def run(self, task: Task) -> Repeat:
        """Measure `task` once: its rows, or `failed` and why."""
        try:
            return {"rows": self._run(task)}
        except CellFailed as failure:
            self._accepted_share = 1.0
            return {"failed": str(failure)}
        finally:
            self.server.flush()

    def _run(self, task: Task) -> dict[str, Timing]:
        if task.kind == "prefill":
            k = min((kind.k for kind in self._kinds if kind.k), default=None)
            k = 0 if k is None and self.side == "speculative" else k
            return self._prefill(Phase(k, BACKGROUND_ROUNDS))
        if task.kind == KV_ONLY_PREFILL_TASK:
            return self._prefill(Phase(0, BACKGROUND_ROUNDS, "kv-only"))
        if task.kind == "switch":
            return self._switch(task)
        phases = self._cell_phases(task.batch)
        report = self.server.run(phases, task.batch, task.context, self._new_tokens(task, phases))
        seen = accepted_share(phases, report["rounds"])
        self._accepted_share = min(1.0, SHARE_MARGIN * seen + 0.05)
        return timings(phases, report["rounds"])

    def _switch(self, task: Task) -> dict[str, Timing]:
        low, high = (
            [kind for kind in self._kinds if kind.k][:2]
            if self._num_draft_kinds > 1
            else (self._kinds[0], self._kinds[-1])
        )
        steady = [low, high]
        turns = [Phase(kind.k, 1) for _ in range(SWITCHES // 2) for kind in steady]
        phases = [*steady, *turns, *reversed(steady)]
        report = self.server.run(phases, task.batch, task.context, self._new_tokens(task, phases))
        return switch_timings(phases, report["rounds"])

    def _prefill(self, background: Phase) -> dict[str, Timing]:
        """Prompts of every size, read while a batch decodes as in `background`."""
        chunk = self.server.arguments.get("chunked_prefill_size") or -1
        most = chunk if chunk > 0 else max(PREFILL_TOKENS)
        batch = min(PREFILL_BATCH, max(1, self.server.facts["max_running"] - 2))
        context = min(self.grid.contexts)
        room = self.server.room(batch + 1)
        sizes = [size for size in PREFILL_TOKENS if size <= min(most, room // 2)]
        order = [size for _ in range(PREFILLS) for size in self._rng.sample(sizes, len(sizes))]
        ask = self._ask_without_draft if background.off_mode == "kv-only" else self._ask
        new_tokens = room - context - max(sizes, default=0) // batch
        report = self.server.run([background], batch, context, new_tokens, lambda: ask(order))
        return prefill_timings(report["prefills"], sizes)

    def _ask(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            self.server.ask(self.server.prompt(size), 1)

    def _ask_without_draft(self, sizes: Sequence[int]) -> None:
        """The same, where prefills are to leave out the draft.

        Raises:
            CellFailed: so many ran it that the median of a size may be of those.
        """
        # A server's first such prefill still runs the draft, to prove the projection: this one, of no size.
        self._ask([PROOF_TOKENS + PREFIX_HIT_TOKENS])
        before = self.server.num_kv_only_prefills()
        self._ask(sizes)
        num_drafted = before + len(sizes) - self.server.num_kv_only_prefills()
        if num_drafted > PREFILLS // 2:
            raise CellFailed(f"{num_drafted} of {len(sizes)} prefills ran the draft")

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

    def _cell_phases(self, batch: int) -> list[Phase]:
        """Every kind once, in an order that is random, but one for all cells and repeats of a batch.

        Contexts grow meanwhile: so those of a row are as far apart as the grid's and the same in each repeat.
        """
        return random.Random(f"{self.grid.seed} {batch}").sample(self._kinds, len(self._kinds))

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
