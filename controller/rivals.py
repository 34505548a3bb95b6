"""Every rival of a policy, and what all of them did: the table of a comparison before statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from draftdial.controller.comparison import CellData, PolicySeries
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.sglang_rule import DEFAULT_CONFIG
from draftdial.controller.tune import Bar, Tuned, threshold_grid
from draftdial.envs.contenders import Card, Contender, NoSpeculation, Reference, Rules, Server
from draftdial.envs.evaluate import Metrics
from draftdial.envs.suite import Cell
from draftdial.envs.trials import Batch, Trial, Workers, make_batches, trials_of

Played = dict[Cell, dict[str, list[Metrics]]]
"""By cell and name, a chunk of seeds at a time."""


def rivals(profile: CostProfile, tuned: Tuned) -> dict[str, Contender]:
    """Every rival by its name in the table."""

    def everywhere(card: Card) -> Contender:
        return Rules({workload: (card,) for workload in tuned})

    def at_its_best(rule: str) -> Contender:
        return Rules({workload: (rules[rule]["card"],) for workload, rules in tuned.items()})

    return {
        "no-spec": NoSpeculation(),
        "off": everywhere({"kind": "fixed", "k": profile.tiers[0]}),
        **{f"fixed-{k}": everywhere({"kind": "fixed", "k": k}) for k in profile.tiers[1:]},
        "threshold": at_its_best("threshold"),
        "sglang-adaptive": everywhere({"kind": "sglang-adaptive", "config": DEFAULT_CONFIG}),
        "sglang-adaptive-tuned": at_its_best("sglang-adaptive-tuned"),
        "greedy": at_its_best("greedy"),
        "bandit": everywhere({"kind": "bandit"}),
        "informed": Reference("informed"),
        "clairvoyant": Reference("clairvoyant"),
    }


def rival_names(profile: CostProfile) -> tuple[str, ...]:
    """Names that `--against` takes."""
    return tuple(rivals(profile, {}))


class Scores:
    """What every contender did in every cell, growing seed by seed."""

    def __init__(self, cells: Sequence[Cell], server: Server) -> None:
        self.cells = cells
        self._server = server
        self._chunks: Played = {cell: {} for cell in cells}
        self._hindsight: Played = {cell: {} for cell in cells}

    def play(
        self,
        seeds: Mapping[Cell, tuple[int, ...]],
        field: Mapping[str, Contender],
        hindsight: bool,
        workers: Workers,
        bar: Bar,
    ) -> None:
        """Run every contender of `field`, and with `hindsight` every threshold, on more seeds of cells."""
        work: list[tuple[Sequence[str], Played, Trial]] = []
        for batch in make_batches(seeds.items()):
            work += [([n], self._chunks, Trial(n, contender, batch)) for n, contender in field.items()]
            # At a constant load every threshold is a fixed k or off, and those are in the table.
            if hindsight and not batch.cells[0].is_constant:
                work += self._thresholds(batch)
        bar.expect(len(work))
        results = workers.run([trial for _, _, trial in work], self._server, bar.advance)
        for (names, into, trial), variants in zip(work, results, strict=True):
            for name, by_cell in zip(names, variants, strict=True):
                for cell, metrics in zip(trial.batch.cells, by_cell, strict=True):
                    into[cell].setdefault(name, []).append(metrics)
        if hindsight:
            for cell in filter(lambda cell: cell.is_constant, seeds):
                self._hindsight[cell] = {"never": self._chunks[cell]["off"]}

    def data(self) -> list[CellData]:
        """The cells with all their seeds so far."""
        profile, off_mode = self._server.profile, self._server.options.off_mode
        return [
            CellData(
                profile.name, cell.workload, cell.load, cell.mode, off_mode, profile.tiers,
                {name: _series(chunks) for name, chunks in self._chunks[cell].items()},
                {name: _series(chunks) for name, chunks in self._hindsight[cell].items()},
            )
            for cell in self.cells
        ]  # fmt: skip

    def _thresholds(self, batch: Batch) -> list[tuple[Sequence[str], Played, Trial]]:
        cards = threshold_grid(self._server.profile)
        names = [f"{card['k']}@{card['batch']}" for card in cards]
        trials = trials_of("hindsight", {cell.workload: cards for cell in batch.cells}, batch)
        return [
            (names[first : first + trial.contender.num_variants], self._hindsight, trial)
            for first, trial in trials
        ]


def _series(chunks: Sequence[Metrics]) -> PolicySeries:
    """One series of the metrics of several runs, each with other seeds."""
    joined = {f.name: np.concatenate([getattr(chunk, f.name) for chunk in chunks]) for f in fields(Metrics)}
    joined["n_requests"] = joined["num_requests"].astype(np.int64)
    joined["rounds"] = joined["rounds"].astype(np.int64)
    return PolicySeries(**{f.name: joined[f.name] for f in fields(PolicySeries)})
