"""How far a simulation is from a server: errors by cell, the best k on both, and a summary."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

SCHEMA = "draftdial.validation/1"
FIGURES = ("output_tok_s", "e2e_mean_s", "ttft_mean_s", "tpot_mean_s")
"""By the formulas of docs/metrics.md on both sides."""
WASTED = "wasted_draft_share"
"""Depends on no time: where it differs, acceptance does. On the server it counts all rounds of a run."""

Cell = dict[str, Any]
"""`arm`, `workload`, `load`; figures of `server` and `simulated`; `error`: simulated over server, less 1"""

_SHOWN = (("tok/s", "output_tok_s", 1.0, ".1f"), ("E2E s", "e2e_mean_s", 1.0, ".3f"))


def cell_of(
    arm: str,
    workload: str,
    load: float | None,
    served: dict[str, float],
    simulated: dict[str, float],
) -> Cell:
    """One way to choose k under one load; `load` is the concurrency, None for recorded arrivals."""
    error = {name: simulated[name] / served[name] - 1.0 for name in FIGURES if name in served}
    return {
        "arm": arm,
        "workload": workload,
        "load": load,
        "server": served,
        "simulated": simulated,
        "error": error,
    }


def best_fixed_k(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """For each concurrency the fixed k of the highest throughput on both sides.

    `loss` is the share of the server's best throughput that the simulator's choice would give away there:
    where it is next to nothing, another best k means two tiers that tie.
    """
    found = []
    for load in dict.fromkeys(cell["load"] for cell in cells if cell["load"] is not None):
        fixed = {
            int(cell["arm"].removeprefix("fixed-")): cell
            for cell in cells
            if cell["load"] == load and cell["arm"].startswith("fixed-")
        }
        served, simulated = (
            {k: cell[side]["output_tok_s"] for k, cell in fixed.items()} for side in ("server", "simulated")
        )
        best, guess = (max(rates, key=lambda k: rates[k]) for rates in (served, simulated))
        loss = 1.0 - served[guess] / served[best]
        found.append({"load": load, "server": best, "simulated": guess, "same": best == guess, "loss": loss})
    return found


def summary(document: dict[str, Any]) -> dict[str, float | int | None]:
    """Means over the cells, which weigh alike."""
    cells, best = document["cells"], document["best_fixed_k"]
    throughput, latency = (
        [abs(cell["error"][name]) for cell in cells] for name in ("output_tok_s", "e2e_mean_s")
    )
    return {
        "num_cells": len(cells),
        "throughput_error_mean": float(np.mean(throughput)),
        "throughput_error_max": float(np.max(throughput)),
        "e2e_error_mean": float(np.mean(latency)),
        "e2e_error_max": float(np.max(latency)),
        "same_best_k_share": float(np.mean([row["same"] for row in best])) if best else None,
        "best_k_loss_max": float(max(row["loss"] for row in best)) if best else None,
    }


def table(document: dict[str, Any]) -> str:
    """Aligned text: a line a cell, then what they come to."""
    header = ["cell"]
    for name, *_ in _SHOWN:
        header += [f"{name} server", "simulated", "error"]
    rows = [header, *map(_row, document["cells"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    lines.append("")
    for best in document["best_fixed_k"]:
        lines.append(
            f"C = {best['load']:g}: best fixed k: server {best['server']}, simulated {best['simulated']}"
            + ("" if best["same"] else f", which loses {best['loss']:.1%} on the server")
        )
    found = document["summary"]
    lines.append(
        f"mean absolute error over {found['num_cells']} cells: "
        f"throughput {found['throughput_error_mean']:.1%} (most {found['throughput_error_max']:.1%}), "
        f"E2E {found['e2e_error_mean']:.1%} (most {found['e2e_error_max']:.1%})"
    )
    if found["same_best_k_share"] is not None:
        lines.append(f"same best fixed k: {found['same_best_k_share']:.0%} of the loads")
    return "\n".join(lines)


def as_csv(cells: Sequence[Cell]) -> str:
    """A line a cell."""
    rows = []
    for cell in cells:
        row = {name: cell[name] for name in ("arm", "workload", "load")}
        for side in ("server", "simulated", "error"):
            row |= {f"{side}_{name}": value for name, value in cell[side].items()}
        rows.append(row)
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(cell: Cell) -> list[str]:
    load = f", C = {cell['load']:g}" if cell["load"] is not None else f", {cell['workload']}"
    row = [f"{cell['arm']}{load}"]
    for _, name, factor, form in _SHOWN:
        row += [format(factor * cell[side][name], form) for side in ("server", "simulated")]
        row.append(f"{cell['error'][name]:+.1%}")
    return row
