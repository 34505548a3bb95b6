"""Tables say what the document says, CSV reads back, plots are PNG files of the right number."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from draftdial.controller.comparison import CellData, PolicySeries, build
from draftdial.controller.comparison_schema import validate
from draftdial.controller.plots import Trace, load_plots, ratio_plot, trace_plot
from draftdial.controller.report import csv_text, gap_share, print_report, write_report

SEEDS = 8
COSTS = {
    "learned": 1.02, "no-spec": 1.3, "off": 1.4, "fixed-1": 1.1, "fixed-3": 1.2, "threshold": 1.1,
    "sglang-adaptive": 1.25, "greedy": 1.02, "informed": 1.0,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def series(cost: float) -> PolicySeries:
    steady = np.ones(SEEDS)
    return PolicySeries(
        e2e_mean_s=2.0 * cost * steady,
        e2e_p99_s=6.0 * cost * steady,
        ttft_p99_s=0.2 * steady,
        tpot_mean_s=0.01 * steady,
        output_tok_s=1000 / cost * steady,
        slo_attainment=np.nan * steady,
        switches_per_1k_rounds=10 * steady,
        wasted_draft_share=0.3 * steady,
        rounds=np.full(SEEDS, 5000),
        n_requests=np.full(SEEDS, 100),
        tier_time_share=np.tile([0.25, 0.75], (SEEDS, 1)),
    )


def cell(load: float | None, mode: str, workload: str, **costs: float) -> CellData:
    policies = {name: series(cost) for name, cost in (COSTS | costs).items()}
    return CellData("h200", workload, load, mode, "warm", (0, 3), policies)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    cells = [
        cell(1, "closed", "steady"),
        cell(64, "closed", "steady", learned=1.2, threshold=1.02),
        cell(None, "closed", "drift"),
        cell(0.5, "open", "poisson"),
        cell(0.9, "open", "poisson", learned=1.12),
    ]
    return build(cells, ["learned"], versions={}, hashes={}, tuned_rules={}, seed_ranges={})


def row(document: dict[str, Any], index: int) -> dict[str, Any]:
    rows = [entry for entry in document["cells"] if entry["policy"] == "learned"]
    return dict(rows[index])


def printed(document: dict[str, Any], stream: io.StringIO) -> str:
    print_report(document, stream)
    return stream.getvalue()


def fields_of(text: str, title: str, first: str, second: str) -> dict[str, str]:
    """The line of the named table that starts with these two words, by column name."""
    lines = iter(text.splitlines())
    next(line for line in lines if line.strip() == title)
    names = [name.strip() for name in next(lines).split("  ") if name.strip()]
    for line in lines:
        words = [word.strip() for word in line.split("  ") if word.strip()]
        if words[:2] == [first, second]:
            return dict(zip(names, words, strict=True))
    raise AssertionError(f"no line {first} {second} in {title}")


def test_cell_table_gives_headline_ratios_and_verdicts(document: dict[str, Any]) -> None:
    text = printed(document, io.StringIO())
    closed = fields_of(text, "h200, closed loop, off-warm", "steady", "64")
    assert closed["tok/s"] == f"{1000 / 1.2:.0f}"
    assert closed["threshold"] == f"{1.2 / 1.02:.3f}-"
    assert closed["fixed-k"] == f"{1.2 / 1.1:.3f}-"
    assert closed["no-spec"] == f"{1.2 / 1.3:.3f}+"
    assert closed["sgl-tuned"] == "-"
    open_loop = fields_of(text, "h200, open loop, off-warm", "poisson", "0.9")
    assert open_loop["E2E s"] == f"{2 * 1.12:.3f}"
    assert open_loop["threshold"] == f"{1.12 / 1.1:.3f}="  # 1.8 % worse, margin 3 % at this load
    assert fields_of(text, "h200, closed loop, off-warm", "drift", "-")["greedy"] == "1.000="


def test_gap_share_is_printed_only_where_there_is_a_gap(document: dict[str, Any]) -> None:
    share = gap_share(row(document, 0))
    assert share == pytest.approx(np.log(1.1 / 1.02) / np.log(1.1))
    assert gap_share(row(document, 1)) is None  # headroom 1.02
    text = printed(document, io.StringIO())
    closed = "h200, closed loop, off-warm"
    assert fields_of(text, closed, "steady", "1")["gap"] == f"{share:.0%}"
    assert fields_of(text, closed, "steady", "64")["gap"] == "-"


def test_summary_counts_verdicts_and_names_the_worst_cell(document: dict[str, Any]) -> None:
    text = printed(document, io.StringIO())
    line = next(line for line in text.splitlines() if line.split()[:3] == ["learned", "closed", "threshold"])
    ratio = (1.02 / 1.1 * 1.2 / 1.02 * 1.02 / 1.1) ** (1 / 3)
    assert f"{ratio:.3f}" in line
    assert f"{1.2 / 1.02:.3f}" in line
    assert line.endswith("2/0/1/0")


def test_piped_text_is_plain_and_terminal_text_is_coloured(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in printed(document, io.StringIO())
    terminal = printed(document, Terminal())
    assert re.search(rf"\x1b\[32m *{1.2 / 1.3:.3f}\+", terminal)
    assert re.search(rf"\x1b\[31m *{1.2 / 1.02:.3f}-", terminal)


def test_several_policies_under_test_get_a_column() -> None:
    both = cell(4, "closed", "steady", **{"learned:b": 1.05})
    built = build([both], ["learned", "learned:b"], versions={}, hashes={}, tuned_rules={}, seed_ranges={})
    text = printed(built, io.StringIO())
    rows = [line.split() for line in text.splitlines() if line.startswith("steady")]
    assert [words[2] for words in rows] == ["learned", "learned:b"]


def test_csv_reads_back_to_the_document(document: dict[str, Any]) -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(document))))
    assert len(lines) == len(document["cells"])
    for line, entry in zip(lines, document["cells"], strict=True):
        assert line["policy"] == entry["policy"]
        assert float(line["output_tok_s"]) == entry["metrics"]["output_tok_s"]
        assert float(line["time_share_k3"]) == 0.75
        assert line["slo_attainment"] == ""
    tested = lines[0]
    versus = document["cells"][0]["vs"]["threshold"]
    assert float(tested["vs_threshold_ratio"]) == versus["output_tok_s_ratio"]["value"]
    assert tested["vs_threshold_verdict"] == versus["verdict"]
    assert lines[1]["vs_threshold_ratio"] == ""


def test_report_writes_json_csv_and_plots(document: dict[str, Any], tmp_path: Path) -> None:
    time_s = np.linspace(0.0, 0.5, 50)
    trace = Trace("steady", time_s, np.where(time_s < 0.2, 3, 0), np.full(50, 8))
    paths = write_report(document, tmp_path / "out", trace)
    assert [path.name for path in paths] == [
        "compare.json",
        "compare.csv",
        "load_h200_closed_warm.png",
        "load_h200_open_warm.png",
        "ratio_to_informed.png",
        "k_over_time.png",
    ]
    assert validate(json.loads(paths[0].read_text())) == document
    for path in paths[2:]:
        image = matplotlib.image.imread(path)
        assert image.std() > 0.02, f"{path.name} is blank"


def test_load_plot_needs_two_loads(document: dict[str, Any]) -> None:
    single = document | {"cells": [e for e in document["cells"] if e["load"] in (1, None)]}
    assert load_plots(single) == {}


def test_ratio_plot_needs_informed(document: dict[str, Any]) -> None:
    without = document | {"cells": [e for e in document["cells"] if e["policy"] != "informed"]}
    assert ratio_plot(without) is None


def test_plots_are_the_same_for_the_same_input(document: dict[str, Any]) -> None:
    assert load_plots(document) == load_plots(document)


@pytest.mark.parametrize("num_rounds", [3, 5000])
def test_trace_of_any_length_is_drawn(num_rounds: int) -> None:
    rng = np.random.default_rng(0)
    time_s = np.cumsum(rng.uniform(0.01, 0.05, num_rounds)).astype(np.float64)
    trace = Trace("run", time_s, rng.choice([0, 1, 3], num_rounds), np.ones(num_rounds, int))
    assert trace_plot(trace).startswith(b"\x89PNG")
