"""Runs policies on many cells and seeds at once, in worker processes.

A trial is one contender on one batch of cells. It is made anew from its description wherever it runs, on
one thread, so its result depends neither on the number of workers nor on the order of the trials.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from multiprocessing import get_context
from typing import Any

import numpy as np

from draftdial.controller.policy import Policy
from draftdial.controller.signals import FloatArray, IntArray, RoundOutcome, RoundSignals
from draftdial.envs.acceptance import AcceptanceBank
from draftdial.envs.contenders import Card, Contender, Rules, Server
from draftdial.envs.evaluate import Metrics, evaluate, run
from draftdial.envs.simulated_engine import SimulatedEngine
from draftdial.envs.suite import LOW_CONCURRENCY, Cell, build_world
from draftdial.envs.workload import RequestList

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

MAX_BYTES = 600_000_000
"""Memory of one trial, about; larger batches are cut."""
MAX_ROWS = 600
"""Rows of one trial of many variants: enough to make steps cheap, few enough to share the work out."""
BYTES_PER_REQUEST = 170
BYTES_PER_POSITION = 3
TYPICAL_POSITIONS = 512 * 512
"""Of one domain's acceptance."""


@dataclass(frozen=True)
class Batch:
    """Cells and seeds that run side by side; a row is one (cell, seed), ordered by cell."""

    key: tuple[tuple[str, float | None, int, int, int], ...]
    cells: tuple[Cell, ...] = field(compare=False)
    seeds: tuple[tuple[int, ...], ...] = field(compare=False)

    @classmethod
    def of(cls, parts: Sequence[tuple[Cell, tuple[int, ...]]]) -> Batch:
        """The batch of these cells with their seeds."""
        key = tuple((c.workload, c.load, c.num_requests, seeds[0], len(seeds)) for c, seeds in parts)
        return cls(key, tuple(cell for cell, _ in parts), tuple(seeds for _, seeds in parts))

    @property
    def row_cells(self) -> list[Cell]:
        """The cell of every row."""
        return [cell for cell, seeds in zip(self.cells, self.seeds, strict=True) for _ in seeds]

    @property
    def num_bytes(self) -> int:
        """Memory of the requests, about."""
        return len(self.row_cells) * max(cell.num_requests for cell in self.cells) * BYTES_PER_REQUEST

    def rows_of(self, place: int, variant: int) -> slice:
        """Rows of the cell at `place`, for one of several variants run one after another."""
        counts = [len(seeds) for seeds in self.seeds]
        first = variant * sum(counts) + sum(counts[:place])
        return slice(first, first + counts[place])


def make_batches(parts: Iterable[tuple[Cell, tuple[int, ...]]]) -> list[Batch]:
    """Batches of cells that take about equally many rounds, so that few finished rows wait for others.

    Cells whose load varies come first, then light closed loops, then heavy ones; no batch holds two of these.
    """
    groups: dict[int, list[tuple[Cell, tuple[int, ...]]]] = {}
    for cell, seeds in parts:
        kind = 0 if cell.load is None or not cell.is_constant else 1 if cell.load <= LOW_CONCURRENCY else 2
        groups.setdefault(kind, []).append((cell, seeds))
    batches = []
    for _, group in sorted(groups.items()):
        group.sort(key=lambda part: part[0].num_requests)
        members: list[tuple[Cell, tuple[int, ...]]] = []
        for part in group:
            if members and _num_bytes([*members, part]) > MAX_BYTES:
                batches.append(Batch.of(members))
                members = []
            members.append(part)
        batches.append(Batch.of(members))
    return batches


def _num_bytes(parts: Sequence[tuple[Cell, tuple[int, ...]]]) -> int:
    num_domains = sum(len(seeds) * len(cell.domains) for cell, seeds in parts)
    return Batch.of(parts).num_bytes + num_domains * TYPICAL_POSITIONS * BYTES_PER_POSITION


@dataclass(frozen=True)
class Trial:
    """One contender on one batch; `label` is for the progress bar."""

    label: str
    contender: Contender
    batch: Batch


def trials_of(label: str, rules: Mapping[str, Sequence[Card]], batch: Batch) -> Iterator[tuple[int, Trial]]:
    """Trials of many rules on one batch, as many at a time as memory allows, each with its first variant."""
    num_variants = len(next(iter(rules.values())))
    step = max(1, min(MAX_BYTES // batch.num_bytes, MAX_ROWS // len(batch.row_cells)))
    for first in range(0, num_variants, step):
        part = {workload: cards[first : first + step] for workload, cards in rules.items()}
        yield first, Trial(label, Rules(part), batch)


@dataclass(frozen=True)
class Recording:
    """One server's run, round by round. Arrays are (num_rounds,)."""

    time_s: FloatArray
    """When each round began."""
    k: IntArray
    num_running: IntArray


def run_trial(trial: Trial, server: Server) -> list[list[Metrics]]:
    """Metrics by variant and cell of the batch, with one row per seed."""
    engine, policy = _set_up(trial, server)
    metrics = evaluate(policy, engine)
    return [
        [_rows(metrics, trial.batch.rows_of(place, variant)) for place in range(len(trial.batch.cells))]
        for variant in range(trial.contender.num_variants)
    ]


def record_trial(trial: Trial, server: Server) -> Recording:
    """What the policy did on the first row of the batch."""
    engine, policy = _set_up(trial, server)
    recorder = _Recorder(policy, engine)
    run(recorder, engine)
    time_s, k, num_running = np.array(recorder.rounds).T
    return Recording(time_s, k.astype(np.int64), num_running.astype(np.int64))


class Workers:
    """Processes that run trials; a context manager."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    def __enter__(self) -> Workers:
        with _one_thread_each():
            self._pool = ProcessPoolExecutor(self._jobs, get_context("spawn"))
            # Processes start when work arrives, so all of them get some while the limit on threads stands.
            list(self._pool.map(abs, range(self._jobs)))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(
        self, trials: Sequence[Trial], server: Server, progress: Callable[[str], None]
    ) -> list[list[list[Metrics]]]:
        """`run_trial` of every trial, in their order; `progress` hears the label of each that is done."""
        futures = [self._pool.submit(run_trial, trial, server) for trial in trials]
        label_of: dict[Future[Any], str] = {f: t.label for f, t in zip(futures, trials, strict=True)}
        for future in as_completed(futures):
            future.result()
            progress(label_of[future])
        return [future.result() for future in futures]

    def record(self, trial: Trial, server: Server) -> Future[Recording]:
        """`record_trial`, under way."""
        return self._pool.submit(record_trial, trial, server)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started inside use one thread: sums, and so decisions, depend on how many there are."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Recorder:
    """A policy whose first row is written down."""

    def __init__(self, policy: Policy, engine: SimulatedEngine) -> None:
        self.tiers = policy.tiers
        self.rounds: list[tuple[float, int, int]] = []
        self._policy = policy
        self._engine = engine

    def reset(self, num_servers: int) -> None:
        self._policy.reset(num_servers)

    def decide(self, signals: RoundSignals) -> IntArray:
        k = self._policy.decide(signals)
        clock_s = float(self._engine.servers["clock_s"][0])
        self.rounds.append((clock_s, int(k[0]), int(signals.num_running[0])))
        return k

    def observe(self, outcome: RoundOutcome) -> None:
        self._policy.observe(outcome)


@lru_cache(maxsize=1)
def _world(batch: Batch) -> tuple[list[RequestList], AcceptanceBank]:
    # Trials of one batch follow each other, and drawing its world takes about as long as running one.
    return build_world(
        [(cell, seed) for cell, seeds in zip(batch.cells, batch.seeds, strict=True) for seed in seeds]
    )


def _set_up(trial: Trial, server: Server) -> tuple[SimulatedEngine, Policy]:
    lists, bank = _world(trial.batch)
    contender = trial.contender
    options = contender.options(server.options)
    engine = SimulatedEngine(lists * contender.num_variants, bank, server.profile, options)
    return engine, contender.policy(engine, server, trial.batch.row_cells)


def _rows(metrics: Metrics, rows: slice) -> Metrics:
    return Metrics(**{item.name: getattr(metrics, item.name)[rows] for item in fields(metrics)})
