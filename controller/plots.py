"""The PNG plots of a comparison, drawn from the document `compare.json`."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from draftdial.controller.comparison_schema import BEST_REFERENCE
from draftdial.controller.signals import FloatArray, IntArray

Row = dict[str, Any]
"""One cell of `compare.json`: a policy under one load."""


@dataclass(frozen=True)
class Trace:
    """One traced run, for the plot of k over time. Arrays are (num_rounds,)."""

    title: str
    time_s: FloatArray
    """Start of each round, ascending."""
    k: IntArray
    num_running: IntArray


def cost(row: Row) -> float:
    metrics = row["metrics"]
    return float(metrics["e2e_mean_s"] if row["mode"] == "open" else 1 / metrics["output_tok_s"])


def grouped(rows: Sequence[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
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
    for (profile, mode, off_mode), group in grouped(rows, "profile", "mode", "off_mode").items():
        workloads = {
            name: cells
            for (name,), cells in grouped(group, "workload").items()
            if len({row["load"] for row in cells}) > 1
        }
        if not workloads:
            continue
        labels = _LOAD_LABELS if all("e2e_mean_s" in row["metrics"] for row in group) else _LOAD_LABELS[1:]
        figure = Figure(figsize=(4.2 * len(workloads) + 2, 3 * len(labels)), layout="constrained")
        panels = figure.subplots(len(labels), len(workloads), squeeze=False, sharex="col")
        for column, (workload, cells) in zip(panels.T, workloads.items(), strict=True):
            no_spec = {row["load"]: cost(row) for row in cells if row["policy"] == "no-spec"}
            if labels is _LOAD_LABELS:
                _draw_over_load(column[0], cells, lambda row: row["metrics"]["e2e_mean_s"], styles)
            _draw_over_load(column[-2], cells, lambda row: row["metrics"]["output_tok_s"], styles)
            compared = [
                row | {"speed_up": no_spec[row["load"]] / cost(row)}
                for row in cells
                if row["load"] in no_spec
            ]
            _draw_over_load(column[-1], compared, lambda row: row["speed_up"], styles)
            column[0].set_title(workload)
            column[-1].set_xlabel("utilisation" if mode == "open" else "concurrency (requests)")
        for axes, label in zip(panels[:, 0], labels, strict=True):
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
    for (policy,), points in grouped(rows, "policy").items():
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
    cells = grouped(document["cells"], *names)
    telling = [i for i in (0, 4) if len({key[i] for key in cells}) > 1]
    labels: list[str] = []
    ratios: dict[str, list[tuple[float, int]]] = {}
    for key, rows in cells.items():
        costs = {row["policy"]: cost(row) for row in rows if row["policy"] != BEST_REFERENCE}
        if "informed" not in costs:
            continue
        for policy, of_policy in costs.items():
            ratios.setdefault(policy, []).append((of_policy / costs["informed"], len(labels)))
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
