"""The document of a benchmark, its table, CSV and plots."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftdial.controller.errors import UserError
from draftdial.controller.files import atomic_write
from draftdial.controller.signals import FloatArray

SCHEMA = "draftdial.bench/1"
ADJUSTED = "adjusted_tok_s"
"""Throughput of a turn, see `bench_adjust`."""
BY_K = ("rounds_at_k", "host_ms_at_k")
"""Of a run, what is told for each k: rounds, and for how long the host did not wait for the GPU in one."""
_COLUMNS = (
    ("output tok/s", "output_tok_s", 1.0, ".0f"),
    ("adjusted", ADJUSTED, 1.0, ".0f"),
    ("TTFT ms", "ttft_mean_s", 1e3, ".0f"),
    ("p99", "ttft_p99_s", 1e3, ".0f"),
    ("TPOT ms", "tpot_mean_s", 1e3, ".2f"),
    ("p99", "tpot_p99_s", 1e3, ".2f"),
    ("E2E s", "e2e_mean_s", 1.0, ".3f"),
    ("p99", "e2e_p99_s", 1.0, ".3f"),
    ("SLO", "slo_attainment", 1.0, ".1%"),
)

Run = dict[str, Any]
"""One arm under one load, once: `arm`, `workload`, `mode`, `load`, `repeat`, `seed` and its figures."""


def read_document(path: Path, complaint: str = "no bench.json") -> dict[str, Any]:
    """What `draftdial bench` wrote.

    Raises:
        UserError: the file cannot be read, or holds something else; `complaint` says that of it.
    """
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        document = None
    found = document if isinstance(document, dict) else {}
    if found.get("schema") == SCHEMA:
        return found
    if isinstance(benches := found.get("benches"), dict):
        raise UserError(
            f"{path}: found {len(benches)} benchmarks in one file, allowed: one: "
            f"write each of its `benches` into a bench.json of its own ({', '.join(benches)})"
        )
    raise UserError(f"{path}: {complaint} (schema {SCHEMA})")


def cells(runs: Sequence[Run], baseline: str) -> list[dict[str, Any]]:
    """Every arm under every load: mean figures over the repeats, and its cost relative to `baseline`.

    Cost is mean E2E in open loop and 1 / output tok/s in closed loop (of turns, as `bench_adjust` has it), so
    a ratio below 1 is better. Repeats are paired: the same requests, or turns of one cycle; one that only one
    of the two ran is in the means alone. The interval is Student's t on the logs, 95 %, of that pair alone,
    and needs two repeats. Runs with failed requests are void and in none of it.
    """
    grouped: dict[tuple[str, float | None], dict[str, list[Run]]] = {}
    for run in runs:
        grouped.setdefault((run["workload"], run["load"]), {}).setdefault(run["arm"], []).append(run)
    found = []
    for arms in grouped.values():
        for of_arm in arms.values():
            whole = [run for run in of_arm if not run["failed"]]
            first = of_arm[0]
            cell = {key: first[key] for key in ("arm", "workload", "mode", "load")}
            cell |= {"repeats": len(whole), "failed": sum(run["failed"] for run in of_arm)}
            if whole:
                cell["metrics"] = _means(whole)
            cell["vs_baseline"] = _versus(whole, arms.get(baseline, []))
            found.append(cell)
    return found


def table(document: dict[str, Any]) -> str:
    """Aligned text, a block for each load, arms as they were named."""
    lines: list[str] = []
    baseline = document["baseline"]
    in_order = sorted(document["cells"], key=lambda cell: document["arms"].index(cell["arm"]))
    for workload, load in dict.fromkeys((cell["workload"], cell["load"]) for cell in document["cells"]):
        rows = [cell for cell in in_order if (cell["workload"], cell["load"]) == (workload, load)]
        columns = [
            column for column in _COLUMNS if any(column[1] in cell.get("metrics", ()) for cell in rows)
        ]
        header = ["arm", *(name for name, *_ in columns), f"cost / {baseline}", "95 % interval", "failed"]
        texts = [header, *(_row(cell, columns) for cell in rows)]
        if len({cell["repeats"] for cell in rows}) > 1:
            for text, found in zip(texts, ["repeats", *(str(cell["repeats"]) for cell in rows)], strict=True):
                text.append(found)
        lines += [_titled(workload, rows[0]["mode"], load), *_aligned(texts), ""]
    return "\n".join(lines)


def write_report(document: dict[str, Any], folder: Path) -> list[Path]:
    """`bench.csv` with a line a run and, where matplotlib is installed, plots over load."""
    contents: dict[str, bytes | str] = {"bench.csv": _csv(document["runs"])}
    if importlib.util.find_spec("matplotlib"):
        from draftdial.controller.plots import load_plots

        contents |= load_plots(_as_comparison(document))
    for name, content in contents.items():
        atomic_write(folder / name, content)
    return [folder / name for name in contents]


def _means(runs: Sequence[Run]) -> dict[str, float]:
    names = set.intersection(*({name for name in run if isinstance(run[name], float)} for run in runs))
    names -= {"load"}
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0] if name in names}


def _cost(run: Run) -> float:
    return float(run["e2e_mean_s"] if run["mode"] == "open" else 1 / throughput(run))


def throughput(run: Run) -> float:
    """Output tokens a second; of a turn, adjusted."""
    return float(run[ADJUSTED if ADJUSTED in run else "output_tok_s"])


def paired_logs(runs: Sequence[Run], others: Sequence[Run]) -> FloatArray:
    """Log of the ratio of costs, for each repeat that both ran without a failed request."""
    costs = {run["repeat"]: _cost(run) for run in others if not run["failed"]}
    return np.array([math.log(_cost(run) / costs[run["repeat"]]) for run in runs if run["repeat"] in costs])


def _versus(runs: Sequence[Run], baseline: Sequence[Run]) -> dict[str, float | None] | None:
    """Ratio of costs and its interval; None where no repeat has both."""
    logs = paired_logs(runs, baseline)
    if not len(logs):
        return None
    low = high = None
    if len(logs) > 1:
        from draftdial.controller.statistics import combined_interval

        _, low, high = combined_interval([logs])
    return {
        "ratio": math.exp(logs.mean()),
        "low": None if low is None else math.exp(low),
        "high": None if high is None else math.exp(high),
    }


def _titled(workload: str, mode: str, load: float | None) -> str:
    value = "" if load is None else f", C = {load:g}" if mode == "closed" else f", {load:g} requests/s"
    return f"{workload} ({mode} loop){value}" if workload != mode else f"{mode} loop{value}"


def _row(cell: dict[str, Any], columns: Sequence[tuple[str, str, float, str]]) -> list[str]:
    metrics, versus = cell.get("metrics"), cell["vs_baseline"]
    figures = [format(factor * metrics[key], form) if metrics else "-" for _, key, factor, form in columns]
    ratio = f"{versus['ratio']:.3f}" if versus else "-"
    known = versus and versus["low"] is not None
    interval = f"{versus['low']:.3f} to {versus['high']:.3f}" if known else "-"
    return [cell["arm"], *figures, ratio, interval, str(cell["failed"])]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]


def _csv(runs: Sequence[Run]) -> str:
    flat = [
        {name: value for name, value in run.items() if not isinstance(value, dict | list)}
        | {f"{name}{k}": value for name in BY_K for k, value in run.get(name, {}).items()}
        for run in runs
    ]
    names = list(dict.fromkeys(name for run in flat for name in run))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _as_comparison(document: dict[str, Any]) -> dict[str, Any]:
    """The cells as `compare.json` has them, which the plots read."""
    rows = [
        {
            "profile": document["title"],
            "policy": cell["arm"],
            "off_mode": document["off_mode"],
            **{key: cell[key] for key in ("workload", "mode", "load", "metrics")},
        }
        for cell in document["cells"]
        if "metrics" in cell
    ]
    drawn = dict.fromkeys(row["policy"] for row in rows)
    tested = [arm for arm in drawn if arm == "steer" or arm.startswith("policy:")]
    return {"cells": rows, "summary": dict.fromkeys(tested)}
