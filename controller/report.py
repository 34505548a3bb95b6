"""A comparison as console tables, CSV and PNG plots, all drawn from the document `compare.json`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from draftdial.controller.comparison import to_json
from draftdial.controller.comparison_schema import BEST_REFERENCE, METRICS
from draftdial.controller.files import atomic_write
from draftdial.controller.plots import Row, Trace, grouped, load_plots, ratio_plot, trace_plot

LEAST_GAP = 1.03
"""Headroom below which there is no gap worth a share: the share of almost nothing is noise."""

_MARKS = {"better": "+", "not-worse": "=", "worse": "-", "undecided": "?"}
_MARK_STYLES = {"+": "green", "-": "red", "?": "yellow"}
_LEGEND = """\
Ratios are cost of the policy ÷ cost of the rival, below 1 is better; "fixed-k" is the strongest of them.
+ better   = not worse by more than the margin   - worse by more than the margin   ? undecided
simultaneous 95 % bounds; margin 1 % (threshold, greedy), 2 % (others), 3 % (open loop, utilisation > 0.85)
headroom: cost of threshold ÷ cost of informed; gap: share of it closed, shown where it is at least 3 %"""


@dataclass(frozen=True)
class _Table:
    title: str
    header: list[str]
    rows: list[list[str]]


def write_report(document: dict[str, Any], folder: Path, trace: Trace | None = None) -> list[Path]:
    """Write `compare.json`, `compare.csv` and the plots into `folder`; returns their paths."""
    contents: dict[str, str | bytes] = {"compare.json": to_json(document), "compare.csv": csv_text(document)}
    contents |= load_plots(document)
    ratios = ratio_plot(document)
    if ratios is not None:
        contents["ratio_to_informed.png"] = ratios
    if trace is not None:
        contents["k_over_time.png"] = trace_plot(trace)
    for name, content in contents.items():
        atomic_write(folder / name, content)
    return [folder / name for name in contents]


def print_report(document: dict[str, Any], stream: TextIO) -> None:
    """Tables of cells and summary: rich on a terminal, plain aligned text anywhere else."""
    tables = [*_cell_tables(document), _summary_table(document)]
    text = "\n\n".join([*map(_plain, tables), _LEGEND]) + "\n"
    if not stream.isatty():
        stream.write(text)
        return
    console = Console(file=stream)
    # On a narrow terminal whole lines that wrap are easier to read than numbers broken within a column.
    console.width = max(console.width, *map(len, text.splitlines()))
    for table in tables:
        console.print(_rich(table))
    console.print(Text(_LEGEND, style="dim"))


def gap_share(row: Row) -> float | None:
    """Share of the gap from threshold to informed that the policy closes, in logs; None below 3 %."""
    if row["headroom"] is None or row["headroom"] < LEAST_GAP or "threshold" not in row["vs"]:
        return None
    return -math.log(_estimate(row, "threshold")["value"]) / math.log(row["headroom"])


def csv_text(document: dict[str, Any]) -> str:
    """One line per cell and policy; `vs_RIVAL_*` are the headline ratio, empty where there is none."""
    rows: list[Row] = document["cells"]
    tiers = sorted({int(k) for row in rows for k in row["metrics"]["time_share_at_k"]})
    rivals = list(dict.fromkeys(rival for row in rows for rival in row["vs"]))
    plain = "profile workload load mode off_mode policy n_seeds n_requests rounds headroom".split()
    names = [*plain, *METRICS, *(f"time_share_k{k}" for k in tiers)]
    names += [f"vs_{rival}_{column}" for rival in rivals for column in ("ratio", "upper", "verdict")]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        line = {name: row[name] for name in plain} | {name: row["metrics"][name] for name in METRICS}
        line |= {f"time_share_k{k}": share for k, share in row["metrics"]["time_share_at_k"].items()}
        for rival, versus in row["vs"].items():
            line[f"vs_{rival}_ratio"] = _estimate(row, rival)["value"]
            line[f"vs_{rival}_upper"] = _estimate(row, rival)["simultaneous_upper"]
            line[f"vs_{rival}_verdict"] = versus["verdict"]
        writer.writerow(line)
    return text.getvalue()


def _estimate(row: Row, rival: str) -> Row:
    """The headline ratio of `row` to `rival`."""
    name = "e2e_mean_ratio" if row["mode"] == "open" else "output_tok_s_ratio"
    return dict(row["vs"][rival][name])


def _cell_tables(document: dict[str, Any]) -> list[_Table]:
    """One table per profile, mode and off mode, one row per cell and policy under test."""
    groups = grouped([row for row in document["cells"] if row["vs"]], "profile", "mode", "off_mode")
    several = len(document["summary"]) > 1
    tables = []
    for (profile, mode, off_mode), rows in groups.items():
        unit = "E2E s" if mode == "open" else "tok/s"
        header = ["workload", "load", *(["policy"] if several else []), unit, *_COLUMNS]
        table = _Table(f"{profile}, {mode} loop, off-{off_mode}", header, [])
        for row in rows:
            headline = row["metrics"]["e2e_mean_s" if mode == "open" else "output_tok_s"]
            cells = [row["workload"], _number(row["load"], "g"), *([row["policy"]] if several else [])]
            cells.append(_number(headline, ".3f" if mode == "open" else ".0f"))
            table.rows.append(cells + [column(row) for column in _COLUMNS.values()])
        tables.append(table)
    return tables


def _versus(rival: str) -> Callable[[Row], str]:
    def column(row: Row) -> str:
        if rival not in row["vs"]:
            return "-"
        return f"{_estimate(row, rival)['value']:.3f}{_MARKS[row['vs'][rival]['verdict']]}"

    return column


def _versus_fixed(row: Row) -> str:
    """The fixed k that the policy does worst against."""
    fixed = [rival for rival in row["vs"] if rival.startswith("fixed-")]
    if not fixed:
        return "-"
    return _versus(max(fixed, key=lambda rival: float(_estimate(row, rival)["value"])))(row)


def _gap(row: Row) -> str:
    share = gap_share(row)
    return "-" if share is None else f"{share:.0%}"


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "threshold": _versus("threshold"),
    "greedy": _versus("greedy"),
    "off": _versus("off"),
    "fixed-k": _versus_fixed,
    "sglang": _versus("sglang-adaptive"),
    "sgl-tuned": _versus("sglang-adaptive-tuned"),
    "best_ref": _versus(BEST_REFERENCE),
    "no-spec": _versus("no-spec"),
    "headroom": lambda row: _number(row["headroom"], ".3f"),
    "gap": _gap,
}


def _summary_table(document: dict[str, Any]) -> _Table:
    header = ["policy", "mode", "rival", "ratio", "95 % interval", "worst cell", "its bound", "+/=/-/? cells"]
    table = _Table("all cells, geometric mean", header, [])
    for policy, modes in document["summary"].items():
        for mode, rivals in modes.items():
            rows = [row for row in document["cells"] if (row["policy"], row["mode"]) == (policy, mode)]
            for rival, entry in rivals.items():
                verdicts = [row["vs"][rival]["verdict"] for row in rows if rival in row["vs"]]
                worst = entry["worst_cell"]
                numbers = [entry["ratio"], *entry["ci95"], worst["ratio"], worst["upper"]]
                ratio, low, high, worst_ratio, bound = (_number(value, ".3f") for value in numbers)
                counts = "/".join(str(verdicts.count(verdict)) for verdict in _MARKS)
                table.rows.append(
                    [policy, mode, rival, ratio, f"{low} to {high}", worst_ratio, bound, counts]
                )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _plain(table: _Table) -> str:
    lines = [table.header, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.header))]
    padded = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    for line, cells in zip(padded, lines, strict=True):
        line[0] = cells[0].ljust(widths[0])
    return "\n".join([table.title, *("  ".join(line).rstrip() for line in padded)])


def _rich(table: _Table) -> RichTable:
    rich = RichTable(title=table.title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for i, name in enumerate(table.header):
        rich.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in table.rows:
        rich.add_row(
            *(Text(cell, style=_MARK_STYLES.get(cell[-1:], "") if cell != "-" else "") for cell in row)
        )
    return rich
