"""How far a simulation is from a server: errors by cell, the best k on both, and a summary."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SCHEMA = "draftdial.validation/1"
FIGURES = ("output_tok_s", "e2e_mean_s", "ttft_mean_s", "tpot_mean_s")
"""By the formulas of docs/metrics.md on both sides."""
WASTED = "wasted_draft_share"
"""Depends on no time: where it differs, acceptance does. On the server it counts all rounds of a run."""

WORST = 5
"""Cells of the largest error that a summary names."""

Cell = dict[str, Any]
"""`acceptance`, `workload`, `load`, `arm`; `repeats`; figures of `server` and `simulated`; `error`: simulated
over server, less 1; `rates`: the server's throughput by repeat; `on_its_host` and `error_on_its_host`, of the
throughput, where the bench knows how busy the host was"""

_SHOWN = (("tok/s", "output_tok_s", 1.0, ".1f"), ("E2E s", "e2e_mean_s", 1.0, ".3f"))


def cell_of(
    arm: str,
    workload: str,
    load: float | None,
    served: Mapping[str, float],
    simulated: Mapping[str, float],
    *,
    acceptance: str = "",
    rates: Mapping[str, float] | None = None,
    repeats: int = 1,
    on_its_host: Mapping[str, float] | None = None,
) -> Cell:
    """One way to choose k under one load.

    `load` is the concurrency, None where it is not one number; `acceptance` tells kinds of it apart. `rates`
    has the same keys in cells whose repeats are pairs. `on_its_host` is simulated with rounds no shorter than
    the server's host was busy in them, where that is known.
    """
    error = {name: simulated[name] / served[name] - 1.0 for name in FIGURES if name in served}
    return {
        "acceptance": acceptance,
        "workload": workload,
        "load": load,
        "arm": arm,
        "repeats": repeats,
        "server": dict(served),
        "simulated": dict(simulated),
        "error": error,
        "rates": dict(rates or {}),
    } | (
        {
            "on_its_host": dict(on_its_host),
            "error_on_its_host": on_its_host["output_tok_s"] / served["output_tok_s"] - 1.0,
        }
        if on_its_host
        else {}
    )


def best_fixed_k(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """For each acceptance and concurrency the fixed k of the highest throughput on both sides.

    `off` stands for k = 0 where that was not forced. `loss` is the share of the server's best throughput that
    the simulator's choice would give away there. `tie`: choices differ, and the 95 % interval of their ratio
    on the server, over repeats that both ran, holds 1; None where there are no two such repeats.
    `on_its_host`: the best one in simulation on a host as busy as each run met; None where that is not known.
    """
    places: dict[tuple[str, float], dict[int, Cell]] = {}
    for cell in sorted(cells, key=lambda cell: bool(cell["arm"] != "off")):
        if cell["load"] is not None and (cell["arm"] == "off" or cell["arm"].startswith("fixed-")):
            k = 0 if cell["arm"] == "off" else int(cell["arm"].removeprefix("fixed-"))
            places.setdefault((cell["acceptance"], cell["load"]), {})[k] = cell
    found = []
    for acceptance, load in dict.fromkeys((cell["acceptance"], cell["load"]) for cell in cells):
        fixed = places.get((acceptance, load), {})
        if len(fixed) < 2:
            continue
        served, simulated = (
            {k: cell[side]["output_tok_s"] for k, cell in sorted(fixed.items())}
            for side in ("server", "simulated")
        )
        best, guess = (max(rates, key=lambda k: rates[k]) for rates in (served, simulated))
        hosted = {
            k: cell["on_its_host"]["output_tok_s"] for k, cell in fixed.items() if "on_its_host" in cell
        }
        found.append(
            {
                "acceptance": acceptance,
                "load": load,
                "server": best,
                "simulated": guess,
                "on_its_host": max(hosted, key=lambda k: hosted[k]) if len(hosted) == len(fixed) else None,
                "same": best == guess,
                "tie": best != guess and _is_tie(fixed[best]["rates"], fixed[guess]["rates"]),
                "loss": 1.0 - served[guess] / served[best],
            }
        )
    return found


def _is_tie(rates: Mapping[str, float], others: Mapping[str, float]) -> bool | None:
    shared = rates.keys() & others.keys()
    if len(shared) < 2:
        return None
    from draftdial.controller.statistics import combined_interval

    _, low, high = combined_interval([np.array([np.log(rates[key] / others[key]) for key in sorted(shared)])])
    return low <= 0 <= high


def summary(cells: Sequence[Cell], best: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the cells, which weigh alike; `best` is what `best_fixed_k` found in them."""
    throughput, latency = (
        [abs(cell["error"][name]) for cell in cells if name in cell["error"]]
        for name in ("output_tok_s", "e2e_mean_s")
    )
    of_fixed = [
        error
        for cell, error in zip(cells, throughput, strict=True)
        if cell["arm"] == "off" or cell["arm"].startswith("fixed-")
    ]
    on_its_host = [abs(cell["error_on_its_host"]) for cell in cells if "error_on_its_host" in cell]
    worst = sorted(zip(throughput, range(len(cells)), strict=True), reverse=True)[:WORST]
    named = ("acceptance", "workload", "load", "arm")
    return {
        "num_cells": len(cells),
        "throughput_error_mean": float(np.mean(throughput)),
        "throughput_error_mean_fixed_k": float(np.mean(of_fixed)) if of_fixed else None,
        "throughput_error_max": float(np.max(throughput)),
        "throughput_error_mean_on_its_host": (
            float(np.mean(on_its_host)) if len(on_its_host) == len(cells) else None
        ),
        "e2e_error_mean": float(np.mean(latency)) if latency else None,
        "e2e_error_max": float(np.max(latency)) if latency else None,
        "worst_cells": [
            {name: cells[i][name] for name in named} | {"throughput_error": cells[i]["error"]["output_tok_s"]}
            for _, i in worst
        ],
        "same_best_k_share": float(np.mean([row["same"] for row in best])) if best else None,
        "same_or_tied_best_k_share": (
            float(np.mean([bool(row["same"] or row["tie"]) for row in best])) if best else None
        ),
        "same_best_k_share_on_its_host": (
            float(np.mean([row["server"] == row["on_its_host"] for row in best]))
            if best and all(row["on_its_host"] is not None for row in best)
            else None
        ),
        "best_k_loss_mean": float(np.mean([row["loss"] for row in best])) if best else None,
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
            f"{_named(best)}: best fixed k: server {best['server']}, simulated {best['simulated']}"
            + ("" if best["same"] else f", which loses {best['loss']:.1%} on the server")
            + (", a tie within its noise" if best["tie"] else "")
        )
    found = document["summary"]
    lines.append(
        f"mean absolute error over {found['num_cells']} cells: "
        f"throughput {found['throughput_error_mean']:.1%} (most {found['throughput_error_max']:.1%})"
        + (
            ""
            if found["e2e_error_mean"] is None
            else f", E2E {found['e2e_error_mean']:.1%} (most {found['e2e_error_max']:.1%})"
        )
    )
    if found["throughput_error_mean_fixed_k"] is not None:
        lines.append(f"of fixed k alone: throughput {found['throughput_error_mean_fixed_k']:.1%}")
    if found["throughput_error_mean_on_its_host"] is not None:
        share = found["same_best_k_share_on_its_host"]
        lines.append(
            f"on a host as busy as each run met: throughput {found['throughput_error_mean_on_its_host']:.1%}"
            + ("" if share is None else f", same best fixed k: {share:.0%}")
        )
    worst = (
        f"{cell['arm']}, {_named(cell)} {cell['throughput_error']:+.1%}" for cell in found["worst_cells"]
    )
    lines.append(f"throughput is furthest off in: {'; '.join(worst)}")
    if found["same_best_k_share"] is not None:
        lines.append(
            f"same best fixed k: {found['same_best_k_share']:.0%} of the loads, "
            f"with ties {found['same_or_tied_best_k_share']:.0%}; the simulator's choice loses "
            f"{found['best_k_loss_mean']:.1%} on average (most {found['best_k_loss_max']:.1%})"
        )
    return "\n".join(lines)


def as_csv(cells: Sequence[Cell]) -> str:
    """A line a cell."""
    rows = []
    for cell in cells:
        row = {name: cell[name] for name in ("acceptance", "workload", "load", "arm", "repeats")}
        for side in ("server", "simulated", "error", "on_its_host"):
            row |= {f"{side}_{name}": value for name, value in cell.get(side, {}).items()}
        rows.append(row)
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(cell: Cell) -> list[str]:
    row = [f"{cell['arm']}, {_named(cell)}"]
    for _, name, factor, form in _SHOWN:
        if name in cell["error"]:
            row += [format(factor * cell[side][name], form) for side in ("server", "simulated")]
            row.append(f"{cell['error'][name]:+.1%}")
        else:
            row += ["-"] * 3
    return row


def _named(place: Mapping[str, Any]) -> str:
    """A load, and the acceptance it met where that has a name."""
    load = f"C = {place['load']:g}" if place["load"] is not None else str(place["workload"])
    return f"{place['acceptance']}, {load}" if place["acceptance"] else load
