"""`draftdial tune`: rivals at their best, tuned for each workload on seeds of their own."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.files import atomic_write, sha256_of
from draftdial.controller.greedy import GoodputGreedy
from draftdial.controller.policy_card import canonical
from draftdial.controller.progress_lines import ProgressLines
from draftdial.controller.sglang_rule import DEFAULT_CONFIG, tuning_grid
from draftdial.controller.signals import FloatArray
from draftdial.envs.contenders import Card, Server
from draftdial.envs.evaluate import Metrics
from draftdial.envs.simulated_engine import ServerOptions
from draftdial.envs.suite import Acceptance, Cell, Suite, make_cells, workload_sha256
from draftdial.envs.trials import Batch, Trial, Workers, make_batches, trials_of

SCHEMA = "draftdial.tune/1"
HALF_LIVES_SAMPLES = (50.0, 150.0, 500.0, 1500.0)
MAX_PROBE_INTERVALS = (64, 128, 512)

Tuned = dict[str, dict[str, dict[str, Any]]]
"""By workload and rule: `card`, and `ratio`, its cost over that of the untuned rule (a threshold: of off)."""


def threshold_grid(profile: CostProfile) -> list[Card]:
    """Never speculate, or any k up to any captured batch, or always."""
    cards: list[Card] = [{"kind": "threshold", "k": profile.tiers[0], "batch": 0}]
    batches = [*profile.captured_batches.tolist(), profile.max_running]
    cards += [{"kind": "threshold", "k": k, "batch": b} for k, b in product(profile.tiers[1:], batches)]
    return cards


def sglang_grid() -> list[Card]:
    """SGLang's rule as it comes, and with the configs worth trying."""
    return [{"kind": "sglang-adaptive", "config": config} for config in (DEFAULT_CONFIG, *tuning_grid())]


def greedy_grid(profile: CostProfile) -> list[Card]:
    """Goodput-greedy as it comes, and with other memories and longest pauses between probes."""
    default = GoodputGreedy(profile.tiers, profile).card()
    grid = product(HALF_LIVES_SAMPLES, MAX_PROBE_INTERVALS)
    cards = [{**default, "half_life_samples": life, "max_probe_interval": pause} for life, pause in grid]
    return [default, *cards]


def tune(cells: Sequence[Cell], num_seeds: int, server: Server, workers: Workers, bar: Bar) -> Tuned:
    """The best card of every rule for each workload: least geometric mean cost over its cells and seeds.

    Cost is mean E2E in open loop, inverse throughput in closed loop. Every grid begins with the untuned rule,
    which stays unless another is better.
    """
    batches = make_batches((cell, cell.seeds("tuning", num_seeds)) for cell in cells)
    thresholds = threshold_grid(server.profile)
    fixed: list[Card] = [{"kind": "fixed", "k": k} for k in server.profile.tiers]
    grids = {
        "threshold": thresholds,
        "sglang-adaptive-tuned": sglang_grid(),
        "greedy": greedy_grid(server.profile),
    }
    work = []
    for batch in batches:
        constant = batch.cells[0].is_constant
        for rule, grid in grids.items():
            # At a constant load every threshold is one of these.
            cards = fixed if rule == "threshold" and constant else grid
            work += [(rule, *item) for item in _trials(f"tune {rule}", cards, batch)]
    bar.expect(len(work))
    results = workers.run([trial for _, _, trial in work], server, bar.advance)

    costs: dict[str, dict[Cell, FloatArray]] = {rule: {} for rule in grids}
    for (rule, first, trial), variants in zip(work, results, strict=True):
        for cell, metrics in ((c, m) for v in variants for c, m in zip(trial.batch.cells, v, strict=True)):
            known = costs[rule].get(cell, np.empty(0))
            costs[rule][cell] = np.append(known, log_cost(cell, metrics).mean())
        assert first + len(variants) == len(costs[rule][trial.batch.cells[0]]), "variants come in order"
    for cell in cells:
        if cell.is_constant:
            costs["threshold"][cell] = _at_constant_load(thresholds, server.profile, cell, costs)
    return {
        workload: {rule: _best(grid, workload, costs[rule]) for rule, grid in grids.items()}
        for workload in dict.fromkeys(cell.workload for cell in cells)
    }


def log_cost(cell: Cell, metrics: Metrics) -> FloatArray:
    """(num_seeds,) log of the headline metric as a cost: mean E2E, or inverse throughput."""
    return np.log(metrics.e2e_mean_s) if cell.mode == "open" else -np.log(metrics.output_tok_s)


def _trials(label: str, cards: Sequence[Card], batch: Batch) -> Iterator[tuple[int, Trial]]:
    return trials_of(label, {cell.workload: cards for cell in batch.cells}, batch)


def _at_constant_load(
    grid: Sequence[Card], profile: CostProfile, cell: Cell, costs: Mapping[str, Mapping[Cell, FloatArray]]
) -> FloatArray:
    """Costs of thresholds from those of the tiers. All but the last few requests see the same load."""
    assert cell.load is not None
    of_tier = dict(zip(profile.tiers, costs["threshold"][cell], strict=True))
    return np.array([of_tier[card["k"] if cell.load <= card["batch"] else profile.tiers[0]] for card in grid])


def _best(grid: Sequence[Card], workload: str, costs: Mapping[Cell, FloatArray]) -> dict[str, Any]:
    mean = np.mean([cost for cell, cost in costs.items() if cell.workload == workload], axis=0)
    best = int(mean.argmin())
    return {"card": dict(grid[best]), "ratio": float(np.exp(mean[best] - mean[0]))}


def cached_tune(
    path: Path | None,
    server: Server,
    workloads: Sequence[str],
    acceptance: Acceptance,
    suite: Suite,
    workers: Workers,
    bar: Bar,
) -> dict[str, Any]:
    """The document of `draftdial tune`: from `path` if the very same is there, else made and put there.

    The key covers profile, workloads, acceptance, server, suite and all code that takes part.
    """
    identity = {
        "profile": sha256_of(canonical(server.profile.to_document()).encode()),
        "workloads": {name: workload_sha256(name) for name in workloads},
        "acceptance": acceptance.identity(workloads),
        "server": vars(server.options),
        "suite": [suite.name, vars(suite.tune)],
        "code": _code_sha256(),
    }
    key = sha256_of(canonical(identity).encode())
    known = _read_json(path)
    if known.get("schema") == SCHEMA and known.get("key") == key:
        return known
    cells = make_cells(workloads, server.profile, server.options.off_mode, acceptance, suite.tune)
    document = {
        "schema": SCHEMA,
        "key": key,
        "profile": server.profile.name,
        "off_mode": server.options.off_mode,
        "lag": server.options.lag,
        "suite": suite.name,
        "seeds": {f"{c.workload} {c.load}": list(c.seeds("tuning", suite.tune.seeds)) for c in cells},
        "rules": tune(cells, suite.tune.seeds, server, workers, bar),
    }
    if path is not None:
        atomic_write(path, json.dumps(document, indent=1) + "\n")
    return document


def _read_json(path: Path | None) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _code_sha256() -> str:
    """Of every module of the two packages: results of another version are not reused."""
    files = [
        file
        for package in ("draftdial.controller", "draftdial.envs")
        for file in sorted(resources.files(package).iterdir(), key=lambda file: file.name)
        if file.name.endswith(".py")
    ]
    return sha256_of(b"".join(file.read_bytes() for file in files))


class Bar:
    """A progress bar on standard error; in a pipe, lines."""

    def __init__(self, progress: Progress, lines: ProgressLines) -> None:
        self._progress = progress
        self._lines = lines
        self._task = progress.add_task("", total=0)
        self._total = 0
        self._num_done = 0

    def expect(self, num_trials: int) -> None:
        """So many more are to come."""
        self._total += num_trials
        self._progress.update(self._task, total=self._total)

    def advance(self, label: str) -> None:
        """One is done."""
        self._num_done += 1
        self._progress.update(self._task, advance=1, description=label)
        self._lines.now_and_then(lambda: f"{label}: {self._num_done} of at least {self._total} trials")


@contextmanager
def progress_bar(command: str) -> Iterator[Bar]:
    """A `Bar` for the work of the block, which `draftdial command` does."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress, ProgressLines(command))


def run(args: argparse.Namespace) -> int:
    """Tune, print and perhaps write the result; 0, or a `UserError`."""
    suite = Suite.load("full" if args.full else "demo")
    options = ServerOptions(off_mode=args.off_mode or "warm", lag=args.lag, mid_flight=True)
    server = Server(CostProfile.load(args.profile), options)
    acceptance, workloads = Acceptance.parse(args.acceptance), args.workload or suite.workloads
    with Workers(checked_jobs(args.jobs)) as workers, progress_bar("tune") as bar:
        document = cached_tune(args.out, server, workloads, acceptance, suite, workers, bar)
    if args.json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
        return 0
    for workload, rules in document["rules"].items():
        for rule, found in rules.items():
            card = json.dumps({name: value for name, value in found["card"].items() if name != "kind"})
            print(f"{workload:12} {rule:22} cost x {found['ratio']:.3f}  {card}")
    return 0


def checked_jobs(jobs: int) -> int:
    """`jobs`, or a UserError if it is no number of processes."""
    if jobs < 1:
        raise UserError(f"--jobs: found {jobs}, allowed: 1 or more")
    return jobs
