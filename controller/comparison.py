"""What a comparison found: series per cell and policy in, the document `compare.json` out.

docs/metrics.md gives every metric by formula. Everything under `vs` and `summary` is a cost: smaller is
better, and `simultaneous_upper` is the worst case that the seeds leave open.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from draftdial.controller.comparison_schema import BEST_REFERENCE, METRICS, SCHEMA, validate
from draftdial.controller.signals import FloatArray, IntArray
from draftdial.controller.statistics import (
    Bounds,
    combined_interval,
    log_ratio,
    needed_seeds,
    simultaneous_bounds,
    verdict_of,
)

Headline = Literal["e2e", "tok_s"]


@dataclass(frozen=True)
class PolicySeries:
    """What one policy did in one cell, seed by seed. Arrays are (num_seeds,) unless said otherwise."""

    e2e_mean_s: FloatArray
    e2e_p99_s: FloatArray
    ttft_p99_s: FloatArray
    tpot_mean_s: FloatArray
    output_tok_s: FloatArray
    slo_attainment: FloatArray
    """Share of requests within the limits; nan where no limits were set."""
    switches_per_1k_rounds: FloatArray
    wasted_draft_share: FloatArray
    """nan where nothing was drafted."""
    rounds: IntArray
    n_requests: IntArray
    tier_time_share: FloatArray
    """(num_seeds, num_tiers) share of decode time at each tier of the cell, or at the first of them where
    the server has no more (`no-spec`)."""

    def cost(self, headline: Headline) -> FloatArray:
        """(num_seeds,) the headline metric as a cost."""
        return self.e2e_mean_s if headline == "e2e" else 1 / self.output_tok_s


@dataclass(frozen=True)
class CellData:
    """One cell: the same requests, arrivals and acceptance for every policy, seed by seed."""

    profile: str
    workload: str
    load: float | None
    """Closed loop: concurrency. Open loop: utilisation. None where the workload has no single load."""
    mode: Literal["open", "closed"]
    off_mode: str
    tiers: tuple[int, ...]
    policies: Mapping[str, PolicySeries]
    hindsight: Mapping[str, PolicySeries] = field(default_factory=dict)
    """More thresholds, candidates for `best_reference` only."""

    @property
    def headline(self) -> Headline:
        return "e2e" if self.mode == "open" else "tok_s"

    @property
    def num_seeds(self) -> int:
        return len(next(iter(self.policies.values())).rounds)

    def check(self) -> None:
        """ValueError naming policy and field unless shapes agree and the headline metrics are above 0."""
        for name, series in {**self.policies, **self.hindsight}.items():
            for item in fields(PolicySeries):
                array = getattr(series, item.name)
                shape: tuple[int, ...] = (self.num_seeds,)
                if item.name == "tier_time_share":
                    shape += (min(array.shape[-1], len(self.tiers)),)
                where = f"{self.workload} at load {self.load}, policy {name}: {item.name}"
                if np.shape(array) != shape:
                    raise ValueError(f"{where} has shape {np.shape(array)}, not {shape}")
                if item.name in ("e2e_mean_s", "output_tok_s") and not np.all(
                    np.isfinite(array) & (array > 0)
                ):
                    raise ValueError(f"{where} is not finite and above 0 for every seed")

    def best_reference(self) -> PolicySeries | None:
        """In hindsight the best of informed, greedy, every fixed k and every threshold, by mean log cost."""
        candidates = [s for name, s in self.policies.items() if _is_reference(name)]
        candidates += self.hindsight.values()
        if not candidates:
            return None
        return min(candidates, key=lambda s: float(np.log(s.cost(self.headline)).mean()))


def margin_of(rival: str, mode: str, load: float | None) -> float:
    """How much worse than `rival` still counts as not worse, as a share of the headline metric."""
    if mode == "open" and load is not None and load > 0.85:
        return 0.03
    return 0.01 if rival in ("threshold", "greedy") else 0.02


def seeds_needed(cells: Sequence[CellData], learned: Sequence[str], bootstrap_seed: int = 0) -> list[int]:
    """Seeds each cell should have for verdicts against off, every fixed k, threshold and greedy.

    The number follows from how far the bounds reach, not from the verdict, so adding seeds until it is met
    favours no verdict.
    """
    table = _Table(cells, learned, bootstrap_seed)
    needed = []
    for cell, pairs, bounds in zip(cells, table.pairs, table.headline, strict=True):
        margins = np.array([margin_of(rival, cell.mode, cell.load) for _, rival in pairs])
        judged = np.array([_is_judged(rival) for _, rival in pairs], bool)
        needed.append(int(needed_seeds(bounds, margins)[judged].max(initial=cell.num_seeds)))
    return needed


def build(
    cells: Sequence[CellData],
    learned: Sequence[str],
    *,
    versions: Mapping[str, Any],
    hashes: Mapping[str, Any],
    tuned_rules: Mapping[str, Any],
    seed_ranges: Mapping[str, Any],
    bootstrap_seed: int = 0,
) -> dict[str, Any]:
    """The document `compare.json`; `learned` are the policies under test, present in every cell."""
    table = _Table(cells, learned, bootstrap_seed)
    document = {
        "schema": SCHEMA,
        "versions": versions,
        "hashes": hashes,
        "tuned_rules": tuned_rules,
        "seed_ranges": seed_ranges,
        "cells": table.rows(bootstrap_seed),
        "summary": {policy: table.summary(policy) for policy in learned},
    }
    return validate(_plain(document))


def to_json(document: Mapping[str, Any]) -> str:
    """The document as strict JSON: no NaN, no infinity."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


class _Table:
    """All pairs (policy under test, rival) of all cells, and the bounds of their headline ratios."""

    def __init__(self, cells: Sequence[CellData], learned: Sequence[str], seed: int) -> None:
        self.cells = cells
        self.series: list[dict[str, PolicySeries]] = []
        self.pairs: list[list[tuple[str, str]]] = []
        for cell in cells:
            cell.check()
            missing = [policy for policy in learned if policy not in cell.policies]
            if missing:
                raise ValueError(f"{cell.workload} at load {cell.load} lacks policy {missing[0]}")
            series = dict(cell.policies)
            best = cell.best_reference()
            if best is not None:
                series[BEST_REFERENCE] = best
            self.series.append(series)
            self.pairs.append([(policy, r) for policy in learned for r in series if r not in learned])
        self.headline = self._bounds([_ratio_of(cell.headline) for cell in cells], seed)

    def rows(self, seed: int) -> list[dict[str, Any]]:
        """One entry of `cells` per cell and policy."""
        other = self._bounds([_ratio_of(_OTHER[cell.headline]) for cell in self.cells], seed)
        slo = self._bounds([_slo_loss] * len(self.cells), seed)
        rows = []
        for i, cell in enumerate(self.cells):
            versus: dict[str, dict[str, Any]] = {policy: {} for policy in self.series[i]}
            for j, (policy, rival) in enumerate(self.pairs[i]):
                bounds = self.headline[i]
                margin = margin_of(rival, cell.mode, cell.load)
                versus[policy][rival] = {
                    _RATIO_NAMES[cell.headline]: _estimate(bounds, j, np.exp),
                    _RATIO_NAMES[_OTHER[cell.headline]]: _estimate(other[i], j, np.exp),
                    "slo_diff": _estimate(slo[i], j, float),
                    "verdict": verdict_of(np.exp(bounds.lower[j]), np.exp(bounds.upper[j]), margin),
                }
            headroom = _headroom(cell)
            for policy, series in self.series[i].items():
                rows.append(_row(cell, policy, series, headroom) | {"vs": versus[policy]})
        return rows

    def summary(self, policy: str) -> dict[str, Any]:
        """Per mode and rival: geometric mean over the cells, its interval, and the worst cell."""
        result: dict[str, Any] = {}
        for mode in ("open", "closed"):
            indices = [i for i, cell in enumerate(self.cells) if cell.mode == mode]
            rivals = dict.fromkeys(rival for i in indices for _, rival in self.pairs[i])
            if rivals:
                result[mode] = {rival: self._summarise(policy, rival, indices) for rival in rivals}
        return result

    def _summarise(self, policy: str, rival: str, indices: Sequence[int]) -> dict[str, Any]:
        pair = (policy, rival)
        indices = [i for i in indices if pair in self.pairs[i]]
        columns = [_ratio_of(self.cells[i].headline)(*(self.series[i][p] for p in pair)) for i in indices]
        mean, low, high = combined_interval(columns)
        at = [(self.headline[i], self.pairs[i].index(pair)) for i in indices]
        worst, j = max(at, key=lambda found: float(found[0].mean[found[1]]))
        return {
            "ratio": np.exp(mean),
            "ci95": [np.exp(low), np.exp(high)],
            "worst_cell": {"ratio": np.exp(worst.mean[j]), "upper": np.exp(worst.upper[j])},
        }

    def _bounds(self, differences: Sequence[_Difference], seed: int) -> list[Bounds]:
        columns = []
        for difference, series, pairs in zip(differences, self.series, self.pairs, strict=True):
            num_seeds = len(next(iter(series.values())).rounds)
            of_cell = [difference(series[policy], series[rival]) for policy, rival in pairs]
            columns.append(np.stack(of_cell, axis=1) if of_cell else np.empty((num_seeds, 0)))
        return simultaneous_bounds(columns, seed)


_Difference = Callable[[PolicySeries, PolicySeries], FloatArray]
_OTHER: dict[Headline, Headline] = {"e2e": "tok_s", "tok_s": "e2e"}
_RATIO_NAMES = {"e2e": "e2e_mean_ratio", "tok_s": "output_tok_s_ratio"}


def _ratio_of(headline: Headline) -> _Difference:
    return lambda policy, rival: log_ratio(policy.cost(headline), rival.cost(headline))


def _slo_loss(policy: PolicySeries, rival: PolicySeries) -> FloatArray:
    return rival.slo_attainment - policy.slo_attainment


def _is_reference(name: str) -> bool:
    return name in ("informed", "greedy", "threshold") or name.startswith("fixed-")


def _is_judged(rival: str) -> bool:
    return rival in ("off", "threshold", "greedy") or rival.startswith("fixed-")


def _estimate(bounds: Bounds, j: int, scale: Callable[[float], float]) -> dict[str, Any]:
    return {
        "value": scale(bounds.mean[j]),
        "ci95": [scale(bounds.ci_low[j]), scale(bounds.ci_high[j])],
        "simultaneous_upper": scale(bounds.upper[j]),
    }


def _headroom(cell: CellData) -> float:
    """Cost of the threshold over cost of informed, geometric mean over seeds; nan without both."""
    threshold, informed = cell.policies.get("threshold"), cell.policies.get("informed")
    if threshold is None or informed is None:
        return math.nan
    return float(np.exp(_ratio_of(cell.headline)(threshold, informed).mean()))


def _row(cell: CellData, policy: str, series: PolicySeries, headroom: float) -> dict[str, Any]:
    metrics: dict[str, Any] = {name: _mean_where_defined(getattr(series, name)) for name in METRICS}
    shares = series.tier_time_share.mean(axis=0)
    metrics["time_share_at_k"] = {str(k): share for k, share in zip(cell.tiers, shares, strict=False)}
    return {
        "profile": cell.profile,
        "workload": cell.workload,
        "load": cell.load,
        "mode": cell.mode,
        "off_mode": cell.off_mode,
        "policy": policy,
        "n_seeds": cell.num_seeds,
        "n_requests": int(series.n_requests.sum()),
        "rounds": int(series.rounds.sum()),
        "headroom": headroom,
        "metrics": metrics,
    }


def _mean_where_defined(values: FloatArray) -> float:
    defined = values[np.isfinite(values)]
    return float(defined.mean()) if len(defined) else math.nan


def _plain(value: Any) -> Any:
    """Plain Python values that JSON can hold; numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
