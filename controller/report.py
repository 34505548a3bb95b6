"""A comparison as console tables, CSV and PNG plots, all drawn from the document `compare.json`."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from draftdial.controller.comparison import BEST_REFERENCE, METRICS, to_json
from draftdial.controller.files import atomic_write
from draftdial.controller.signals import FloatArray, IntArray

LEAST_GAP = 1.03
"""Headroom below which there is no gap worth a share: the share of almost nothing is noise."""

_MARKS = {"better": "+", "not-worse": "=", "worse": "-", "undecided": "?"}
_MARK_STYLES = {"+": "green", "-": "red", "?": "yellow"}
_LEGEND = """\
Ratios are cost of the policy ÷ cost of the rival, below 1 is better; "fixed-k" is the strongest of them.
+ better   = not worse by more than the margin   - worse by more than the margin   ? undecided
simultaneous 95 % bounds; margin 1 % (threshold, greedy), 2 % (others), 3 % (open loop, utilisation > 0.85)
headroom: cost of threshold ÷ cost of informed; gap: share of it closed, shown where it is at least 3 %"""

Row = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """One traced run, for the plot of k over time. Arrays are (num_rounds,)."""

    title: str
    time_s: FloatArray
    """Start of each round, ascending."""
    k: IntArray
    num_running: IntArray


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


def _cost(row: Row) -> float:
    metrics = row["metrics"]
    return float(metrics["e2e_mean_s"] if row["mode"] == "open" else 1 / metrics["output_tok_s"])


def _cell_tables(document: dict[str, Any]) -> list[_Table]:
    """One table per profile, mode and off mode, one row per cell and policy under test."""
    groups = _grouped([row for row in document["cells"] if row["vs"]], "profile", "mode", "off_mode")
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


def _grouped(rows: Sequence[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def load_plots(document: dict[str, Any]) -> dict[str, bytes]:
    """PNG by file name: latency, throughput and speed-up over load, a file per profile, mode and off mode.

    A workload that was run at one load only has no curve and is left out.
    """
    rows = [row for row in document["cells"] if row["load"] is not None and row["policy"] != BEST_REFERENCE]
    styles = _styles(document)
    plots = {}
    for (profile, mode, off_mode), group in _grouped(rows, "profile", "mode", "off_mode").items():
        workloads = {
            name: cells
            for (name,), cells in _grouped(group, "workload").items()
            if len({row["load"] for row in cells}) > 1
        }
        if not workloads:
            continue
        figure = Figure(figsize=(4.2 * len(workloads) + 2, 9), layout="constrained")
        panels = figure.subplots(3, len(workloads), squeeze=False, sharex="col")
        for column, (workload, cells) in zip(panels.T, workloads.items(), strict=True):
            no_spec = {row["load"]: _cost(row) for row in cells if row["policy"] == "no-spec"}
            _draw_over_load(column[0], cells, lambda row: row["metrics"]["e2e_mean_s"], styles)
            _draw_over_load(column[1], cells, lambda row: row["metrics"]["output_tok_s"], styles)
            compared = [
                row | {"speed_up": no_spec[row["load"]] / _cost(row)}
                for row in cells
                if row["load"] in no_spec
            ]
            _draw_over_load(column[2], compared, lambda row: row["speed_up"], styles)
            column[0].set_title(workload)
            column[2].set_xlabel("utilisation" if mode == "open" else "concurrency (requests)")
        for axes, label in zip(panels[:, 0], _LOAD_LABELS, strict=True):
            axes.set_ylabel(label)
        figure.suptitle(f"{profile}, {mode} loop, off-{off_mode}")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False)
        name = re.sub(r"[^\w.-]+", "-", f"load_{profile}_{mode}_{off_mode}")
        plots[f"{name}.png"] = _png(figure)
    return plots


_LOAD_LABELS = ("mean end-to-end latency (s)", "output (tokens/s)", "speed-up over no-spec")


def _draw_over_load(
    axes: Axes, rows: Sequence[Row], value: Callable[[Row], float], styles: dict[str, dict[str, Any]]
) -> None:
    for (policy,), points in _grouped(rows, "policy").items():
        ordered = sorted(points, key=lambda row: float(row["load"]))
        axes.plot([row["load"] for row in ordered], list(map(value, ordered)), label=policy, **styles[policy])
    values = list(map(value, rows))
    if rows and rows[0]["mode"] == "closed":
        loads = sorted({row["load"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
    if rows and max(values) > 4 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)


def ratio_plot(document: dict[str, Any]) -> bytes | None:
    """PNG of every policy's cost relative to `informed` in every cell; None without `informed`."""
    names = ("profile", "workload", "load", "mode", "off_mode")
    cells = _grouped(document["cells"], *names)
    telling = [i for i in (0, 4) if len({key[i] for key in cells}) > 1]
    labels: list[str] = []
    ratios: dict[str, list[tuple[float, int]]] = {}
    for key, rows in cells.items():
        costs = {row["policy"]: _cost(row) for row in rows if row["policy"] != BEST_REFERENCE}
        if "informed" not in costs:
            continue
        for policy, cost in costs.items():
            ratios.setdefault(policy, []).append((cost / costs["informed"], len(labels)))
        _, workload, load, mode, _ = key
        parts = [f"{mode}:", workload, "" if load is None else f"{load:g}", *(key[i] for i in telling)]
        labels.append(" ".join(filter(None, parts)))
    if not labels:
        return None
    styles = _styles(document)
    figure = Figure(figsize=(9, 1.6 + 0.3 * len(labels)), layout="constrained")
    axes = figure.subplots()
    for policy, points in ratios.items():
        ratio, height = np.transpose(points)
        style = styles[policy] | {"linestyle": "none", "clip_on": False}
        axes.plot(np.minimum(ratio, _LARGEST_RATIO), height, label=policy, **style)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(right=min(_LARGEST_RATIO, axes.get_xlim()[1]))
    axes.set_xlabel(f"cost ÷ cost of informed (anything above {_LARGEST_RATIO} is drawn at the edge)")
    axes.grid(alpha=0.25)
    axes.set_title("ratio to informed, below 1 is better")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return _png(figure)


_LARGEST_RATIO = 1.5


def trace_plot(trace: Trace) -> bytes:
    """PNG of the share of time at each k above the number of running requests, over time.

    Time is cut into at most 400 slices, so a run of many rounds stays readable and a short one shows
    single rounds. The last round's length is not known and is left out.
    """
    starts = np.asarray(trace.time_s, np.float64)
    lengths = np.diff(starts)
    edges = np.linspace(starts[0], starts[-1], min(400, len(lengths)) + 1)
    widths = np.diff(edges)

    def mean_over_slices(values: FloatArray) -> FloatArray:
        total = np.concatenate([[0.0], np.cumsum(values[:-1] * lengths)])
        return np.asarray(np.diff(np.interp(edges, starts, total)) / widths)

    tiers = np.unique(trace.k)
    shares = [mean_over_slices((trace.k == k).astype(np.float64)) for k in tiers]
    running = mean_over_slices(np.asarray(trace.num_running, np.float64))
    figure = Figure(figsize=(10, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    levels = np.cumsum([np.zeros_like(running), *shares], axis=0)
    for k, below, above in zip(tiers, levels[:-1], levels[1:], strict=True):
        top.stairs(above, edges, baseline=below, fill=True, color=_tier_color(int(k)), label=f"k = {k}")
    top.set_ylabel("share of time at k")
    top.set_ylim(0, 1)
    top.set_title(trace.title)
    bottom.stairs(running, edges, color="black", baseline=None)
    bottom.set_ylabel("running requests")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("time (s)")
    bottom.set_xlim(edges[0], edges[-1])
    figure.legend(*top.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return _png(figure)


def _tier_color(k: int) -> Any:
    """Grey for off, then darker with k."""
    return "#d9d9d9" if k == 0 else colormaps["viridis_r"](min(1.0, 0.1 + k / 8))


def _styles(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Line style by policy: policies under test thick, fixed k dotted, references black."""
    styles: dict[str, dict[str, Any]] = {}
    for policy in dict.fromkeys(row["policy"] for row in document["cells"]):
        color, dashes = _STYLES.get(policy, ("#666666", "-"))
        styles[policy] = {
            "color": color,
            "linestyle": dashes,
            "linewidth": 1.2,
            "marker": ".",
            "markersize": 5,
        }
        if dashes == "--":
            styles[policy] |= {"marker": "o", "markersize": 4, "markerfacecolor": "white"}
        if policy.startswith("fixed-"):
            digits = f"${policy.removeprefix('fixed-')}$"
            styles[policy] |= {"color": "#7A6FAC", "linestyle": ":", "marker": digits}
    for i, policy in enumerate(document["summary"]):
        color = _TESTED_COLORS[i % len(_TESTED_COLORS)]
        styles[policy] |= {
            "color": color,
            "linestyle": "-",
            "linewidth": 2.5,
            "marker": "o",
            "markersize": 6,
            "zorder": 5,
        }
    return styles


_TESTED_COLORS = ("#D55E00", "#8B0000", "#F0C808", "#7A0177", "#FF8FA3")
# The Okabe-Ito palette, which colour-blind readers can tell apart.
_STYLES = {
    "no-spec": ("#56B4E9", "-"),
    "off": ("#999999", "-"),
    "threshold": ("#0072B2", "-"),
    "sglang-adaptive": ("#CC79A7", "-"),
    "sglang-adaptive-tuned": ("#CC79A7", "--"),
    "greedy": ("#009E73", "-"),
    "bandit": ("#E69F00", "-"),
    "informed": ("black", "-"),
    "clairvoyant": ("black", "--"),
}


def _png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()
