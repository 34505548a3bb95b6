"""Makes the document of a cost profile from measurements, and says how well it predicts cells left out."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftdial.controller.cost_profile import OFF_MODE_OF_ROW, CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.profile_document import KV_ONLY_ROW, OFF_ROWS, SCHEMA, UNITS, row_names
from draftdial.controller.profile_measurements import APART, IDLE_SHARE, Measurements, Result
from draftdial.controller.profile_prefills import measured_prefills, prefill_knots
from draftdial.controller.profile_provenance import Provenance

EAGER_FACTOR = 1.0
MOST_MEAN_ERROR = 0.05
"""Of the held-out timings: a profile that is further off should be measured more finely."""
SIDES = ("speculative", "nospec")

Cells = dict[int, dict[int, float]]
"""Round time in ms by batch and mean context, of one row."""


class ProfileBuilder:
    """One document from one set of measurements.

    Args:
        measurements: Of a finished sweep.
        name: Of the profile.
        tiers: Values of k, from 0.
        server: What `/server_info` shows of the server's arguments.
        command: That measured, for the provenance.
        versions: Of what took part.
    """

    def __init__(
        self,
        measurements: Measurements,
        name: str,
        tiers: Sequence[int],
        server: Mapping[str, Any],
        command: str,
        versions: Mapping[str, str],
    ) -> None:
        self._measured = measurements
        self._name = name
        self._tiers = tuple(tiers)
        self._server = server
        self._command = command
        self._versions = versions
        self._facts: dict[str, Any] = measurements.document["facts"]
        self._has_nospec = bool(measurements.of("cell", "nospec"))
        has_kv_only = any(KV_ONLY_ROW in cell.rows for cell in measurements.of("cell", "speculative"))
        self._rows = row_names(self._tiers, has_kv_only=has_kv_only)
        self._date = datetime.date.today().isoformat()
        cells = [cell for side in SIDES for cell in measurements.of("cell", side)]
        self._apart = {(row, cell.task.batch) for cell in cells for row in cell.apart}
        """Row and batch whose repeats do not agree."""
        self._host_set = {(row, cell.task.batch) for cell in cells for row in measurements.host_set(cell)}
        """Row and batch whose time is the host's."""

    def document(self) -> dict[str, Any]:
        """The checked document.

        Raises:
            UserError: too little was measured for a profile.
        """
        rows = {name: self._cells(name) for name in self._rows}
        if not self._has_nospec:
            rows["nospec"] = rows["off-skip"]
        if any(not cells for cells in rows.values()):
            empty = next(name for name, cells in rows.items() if not cells)
            raise UserError(f"{self._measured.path}: no cell of {empty} was measured at two contexts")
        measured = sorted(rows["off-warm"])
        captured = [int(batch) for batch in self._facts["captured_batches"]] or measured
        prefill = self._prefill()
        document = {
            "schema": SCHEMA,
            "name": self._name,
            "description": "Measured by `draftdial profile` on a running server.",
            "hardware": f"{self._server.get('tp_size') or 1}x {self._facts['device']}",
            "model": str(self._server.get("model_path")),
            "draft": str(self._server.get("speculative_draft_model_path")),
            "engine": "SGLang",
            "engine_version": self._facts["engine_version"],
            "date": self._date,
            "units": UNITS,
            "provenance": self._provenance(measured, captured).entries(),
            "tiers": [
                {"k": k, "label": f"chain{k}" if k else "off", "draft_tokens": k + 1} for k in self._tiers
            ],
            "captured_batches": captured,
            "max_running": self._facts["max_running"],
            "kv_pool_tokens": self._facts["kv_pool_tokens"],
            "chunked_prefill_tokens": self._chunk,
            "switch_ms": self._switch_ms,
            "eager": {"factor_per_batch": EAGER_FACTOR, "extra_ms": self._eager_ms},
            "prefill": prefill,
            "rows": [
                {"row": name, "cells": [self._cell(name, cells, batch) for batch in captured]}
                for name, cells in rows.items()
            ],
        }
        profile = CostProfile.from_document(document, "the measured profile")
        document["description"] += f" {self._error_text(profile)}"
        return CostProfile.from_document(document, "the measured profile").to_document()

    def errors(self, profile: CostProfile) -> list[float]:
        """Relative error of `profile` in every held-out timing that the host did not set."""
        found = []
        for cell in self._held_out:
            host_set = self._measured.host_set(cell)
            for row, timing in cell.rows.items():
                if row not in host_set:
                    mode = OFF_MODE_OF_ROW.get(row, "warm")
                    column = 0 if row in OFF_ROWS else profile.tiers.index(int(row.removeprefix("k=")))
                    predicted = profile.round_s(cell.task.batch, round(timing["context"]), mode)[column]
                    found.append(1e3 * float(predicted) / timing["period_ms"] - 1)
        return found

    def advice(self, document: Mapping[str, Any]) -> str:
        """What to do about the finished `document`, where it predicts too badly; else empty."""
        errors = self.errors(CostProfile.from_document(dict(document), "the measured profile"))
        if not errors or np.abs(errors).mean() <= MOST_MEAN_ERROR:
            return ""
        return (
            f" Above {MOST_MEAN_ERROR:.0%} mean error, measure more batches (--batches): "
            "round times are stairs in the batch."
        )

    @property
    def _held_out(self) -> list[Result]:
        return [cell for side in SIDES for cell in self._measured.of("held-out", side)]

    def _error_text(self, profile: CostProfile) -> str:
        errors = self.errors(profile)
        num_host_set = sum(len(self._measured.host_set(cell)) for cell in self._held_out)
        left_out = f" {num_host_set} more, which the host set, are left out." if num_host_set else ""
        if not errors:
            return f"Held-out cells: none were measured.{left_out}"
        size = np.abs(errors)
        return (
            f"Held-out cells ({len(errors)} timings, at other batches and contexts than the table): "
            f"predicted with a mean error of {size.mean():.1%}, most {size.max():.1%}, on average "
            f"{np.mean(errors):+.1%}.{left_out}"
        )

    def _cells(self, row: str) -> Cells:
        side = "nospec" if row == "nospec" else "speculative"
        cells: Cells = {}
        for result in self._measured.of("cell", side):
            timing = result.rows[row]
            cells.setdefault(result.task.batch, {})[round(timing["context"])] = timing["period_ms"]
        return {batch: times for batch, times in cells.items() if len(times) >= 2}

    def _cell(self, row: str, cells: Cells, batch: int) -> dict[str, Any]:
        """The cell of a captured batch; one that was not measured lies on the line between its neighbours."""
        is_copied = row == "nospec" and not self._has_nospec
        if batch in cells:
            times, note = cells[batch], "off-skip's: no server without speculation" if is_copied else ""
        else:
            times, note = _between(cells, batch)
        cell: dict[str, Any] = {
            "batch": batch,
            "context_tokens": sorted(times),
            "round_ms": [round(times[context], 4) for context in sorted(times)],
        }
        if batch not in cells or is_copied:
            cell["inferred"] = True
        elif (row, batch) in self._host_set:
            note = f"the host set it: the GPU stood idle before it for more than {IDLE_SHARE:.1%} of it"
        elif (row, batch) in self._apart:
            note = f"its two fastest repeats are more than {APART - 1:.0%} apart"
        return cell | ({"note": note} if note else {})

    def _prefill(self) -> dict[str, list[list[float]]]:
        measured = prefill_knots(self._measured)
        if "speculative" not in measured:
            raise UserError(f"{self._measured.path}: fewer than two sizes of prefill were measured")
        return {"nospec": measured["speculative"]} | measured

    @property
    def _chunk(self) -> int:
        chunk = self._server.get("chunked_prefill_size") or -1
        return int(chunk) if chunk > 0 else int(self._facts["kv_pool_tokens"])

    @property
    def _switch_ms(self) -> float:
        found = [
            result.rows["in turn"]["period_ms"] - result.rows["steady"]["period_ms"]
            for result in self._measured.of("switch", "speculative")
        ]
        return round(float(max([0.0, *found])), 3)

    @property
    def _eager_ms(self) -> float:
        """What launching a forward pass without a graph takes the host: the smallest prefill's launch."""
        smallest = next(iter(measured_prefills(self._measured, "speculative")), {"launch_ms": 0.0})
        return round(float(smallest["launch_ms"]), 3)

    def _provenance(self, measured: Sequence[int], captured: Sequence[int]) -> Provenance:
        versions = ", ".join(f"{name} {version}" for name, version in self._versions.items())
        return Provenance(
            source=f"`{self._command}` on {self._date}; {versions}",
            grid=self._measured.document["grid"],
            is_gpu=self._facts["clock"] == "cuda",
            has_graphs=bool(self._facts["captured_batches"]),
            rows=self._rows,
            measured=measured,
            captured=captured,
            apart=self._apart,
            host_set=self._host_set,
            failures=[result.failure for result in self._measured.results() if result.failure],
            has_nospec=self._has_nospec,
            prefills=tuple(prefill_knots(self._measured)),
        )


def _between(cells: Cells, batch: int) -> tuple[dict[int, float], str]:
    """Times of a batch that was not measured, and how they came about."""
    batches = sorted(cells)
    if len(batches) == 1:
        return cells[batches[0]], f"not measured: as batch {batches[0]}"
    place = int(np.clip(np.searchsorted(batches, batch), 1, len(batches) - 1))
    left, right = batches[place - 1], batches[place]
    contexts = sorted(cells[left] if batch < right else cells[right])
    share = (batch - left) / (right - left)
    times = {
        context: max((1 - share) * _at(cells[left], context) + share * _at(cells[right], context), 1e-3)
        for context in contexts
    }
    return times, f"not measured: on the line through batches {left} and {right}"


def _at(times: Mapping[int, float], context: int) -> float:
    """A cell's time at a context, on its line, which goes straight on beyond its ends."""
    xs = sorted(times)
    place = int(np.clip(np.searchsorted(xs, context), 1, len(xs) - 1))
    low, high = xs[place - 1], xs[place]
    slope: float = (times[high] - times[low]) / (high - low)
    return times[low] + slope * (context - low)


def profile_name(path: Path) -> str:
    """The name a profile in this file must have.

    Raises:
        UserError: the file's own cannot be one.
    """
    name = path.stem.lower().replace("_", "-")
    if path.suffix != ".json" or not all(part.isalnum() and part.isascii() for part in name.split("-")):
        raise UserError(f"--out {path}: allowed: a name of letters, digits and - that ends in .json")
    return name
