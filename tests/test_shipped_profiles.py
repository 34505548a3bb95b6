"""The profiles that ship say what their sources say."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile, OffMode, shipped_profiles

REFERENCE = Path(__file__).parents[2] / "shared" / "reference"
OFF_MODES: tuple[OffMode, ...] = ("nospec", "warm", "skip")
NAMES = ("h100-llama3-8b", "h200-llama3-8b", "qwen3-235b-a22b", "seeds-pcie")


@cache
def reference(name: str) -> Any:
    path = REFERENCE / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return json.loads(path.read_text())


def round_s(profile: CostProfile, batch: int, k: int, off_mode: OffMode = "nospec") -> float:
    times = profile.round_s(np.array([batch]), np.array([500]), off_mode)
    return float(times[0, profile.tiers.index(k)])


def test_these_profiles_ship() -> None:
    assert tuple(sorted(shipped_profiles())) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_loads_under_its_file_name(name: str) -> None:
    profile = CostProfile.load(name)
    assert profile.name == name
    assert profile.max_running >= profile.captured_batches[-1]


@pytest.mark.parametrize("name", NAMES)
def test_a_round_costs_more_the_more_it_drafts(name: str) -> None:
    """At every captured batch and every context up to 8,000 tokens that fits the KV pool."""
    profile = CostProfile.load(name)
    for context in (0, 500, 2000, 4000, 8000):
        batches = profile.captured_batches[profile.captured_batches * context <= profile.kv_pool_tokens]
        for off_mode in OFF_MODES:
            times = profile.round_s(batches, np.full(len(batches), context), off_mode)
            assert (np.diff(times, axis=1) > 0).all()


def h200_row(measured: dict[str, Any]) -> str:
    if measured["engine"] == "nospec":
        return "nospec"
    off = "off-skip" if measured["skip_draft_extend"] else "off-warm"
    return f"k={measured['steps']}" if measured["steps"] else off


def h200_cells() -> dict[tuple[str, int], dict[str, Any]]:
    rows = CostProfile.load("h200-llama3-8b").document["rows"]
    return {(row["row"], cell["batch"]): cell for row in rows for cell in row["cells"]}


def test_h200_holds_every_measured_cell_the_host_did_not_spoil() -> None:
    cells = h200_cells()
    for measured in reference("h200_llama3_8b_rounds.json")["surface"]:
        cell = cells[h200_row(measured), measured["bs"]]
        if measured["host_bound"]:
            assert measured["round_ms"] not in cell["round_ms"]
            assert cell["note"]
        else:
            knot = cell["context_tokens"].index(measured["ctx_mid"])
            assert cell["round_ms"][knot] == measured["round_ms"]


def test_h200_takes_the_second_pass_where_the_first_was_host_bound() -> None:
    rounds = reference("h200_llama3_8b_rounds.json")
    spoilt = {
        (h200_row(cell), cell["bs"])
        for cell in rounds["surface"]
        if cell["host_bound"] and cell["ctx_start"] == 400
    }
    again = {(h200_row(cell), cell["bs"]): cell["round_ms"] for cell in rounds["remeasured"]["cells"]}
    assert spoilt == {("off-warm", 24), ("k=7", 24), ("k=1", 48)}
    for where in spoilt:
        assert h200_cells()[where]["round_ms"][0] == again[where]


def test_h200_has_the_long_context_as_a_last_knot() -> None:
    cells = h200_cells()
    long_context = {
        (h200_row(cell), cell["bs"]): cell["round_ms"]
        for cell in reference("h200_llama3_8b_rounds.json")["context_7600"]["cells"]
    }
    for where, cell in cells.items():
        if where in long_context:
            assert cell["context_tokens"][-1] > 7600
            assert cell["round_ms"][-1] == long_context[where]
        else:
            assert cell["context_tokens"][-1] < 7600 or cell["inferred"]


def test_h200_prefill_is_the_best_measured_call() -> None:
    profile = CostProfile.load("h200-llama3-8b")
    rows = reference("h200_llama3_8b_rounds.json")["prefill"]["rows"]
    off_modes: dict[str, OffMode] = {"nospec": "nospec", "spec": "warm"}
    for mode, off_mode in off_modes.items():
        for num_prompts, prompt_tokens in ((1, 2048), (4, 1024), (8, 1024)):
            shape = (mode, num_prompts, prompt_tokens)
            best_ms = next(
                row["best_ms"]
                for row in rows
                if (row["mode"], row["num_prompts"], row["prompt_tokens"]) == shape
            )
            total = num_prompts * prompt_tokens
            assert 1e3 * profile.prefill_s(total, off_mode) == pytest.approx(best_ms)


# Published speed-ups of 3 drafts over none and accept lengths: arXiv 2601.11580 (one H100, vLLM 0.10.1).
H100_SPEEDUPS = [
    (2.411, {1: 1.75, 16: 1.70, 64: 1.49, 128: 1.22}),
    (2.362, {1: 2.02, 16: 1.92, 64: 1.57, 128: 1.31}),
]


def test_h100_comes_within_its_stated_error_of_the_published_speed_ups() -> None:
    profile = CostProfile.load("h100-llama3-8b")
    errors = [
        accept_length * round_s(profile, batch, 0) / round_s(profile, batch, 3) / speedup - 1
        for accept_length, speedups in H100_SPEEDUPS
        for batch, speedup in speedups.items()
    ]
    assert np.mean(np.abs(errors)) < 0.07
    assert np.max(np.abs(errors)) < 0.135


def test_qwen3_keeps_the_published_throughput_over_batch() -> None:
    """Round time x throughput / batch is the accept length, one number for each k."""
    published = [
        row
        for row in reference("latency_tables.json")["rows"]
        if row["source"] == "sglang-pr-22246" and row["model"].startswith("Qwen3-235B")
    ]
    document = CostProfile.load("qwen3-235b-a22b").document
    rows = {row["row"]: {cell["batch"]: cell for cell in row["cells"]} for row in document["rows"]}
    for k in (1, 2, 3, 5):
        accept_lengths = [
            rows[f"k={k}"][row["batch_or_concurrency"]]["round_ms"][0]
            * row["throughput_tok_s"]
            / row["batch_or_concurrency"]
            / 1e3
            for row in published
            if row["steps"] == k
        ]
        assert len(accept_lengths) == 7
        assert accept_lengths == pytest.approx([accept_lengths[0]] * 7, rel=1e-3)
        assert 1.5 < accept_lengths[0] < k + 1


def test_qwen3_agrees_with_the_other_benchmark_at_batch_8() -> None:
    rows = [
        row
        for row in reference("latency_tables.json")["rows"]
        if row["source"] == "specbundle"
        and row["model"] == "Qwen3-235B-A22B-Instruct-2507"
        and row["topk"] in (0, 1)
        and (row["draft"] is None or "SpecForge" in row["draft"])
    ]
    document = CostProfile.load("qwen3-235b-a22b").document
    names = {0: "nospec", 3: "k=3", 5: "k=5"}
    cells = {row["row"]: {cell["batch"]: cell for cell in row["cells"]} for row in document["rows"]}
    for k, name in names.items():
        published_ms = median(row["step_ms_derived"] for row in rows if row["steps"] == k)
        assert cells[name][8]["round_ms"][0] == pytest.approx(published_ms, rel=1e-3)


TREE_ACCEPT_LENGTH = 4.0  # assumed by the profile, not published


@pytest.mark.parametrize(
    ("batch", "off_tok_s", "tree_tok_s", "error"),
    [
        pytest.param(1, 92.6, (77.5, 77.5), 0.001, id="one request"),
        pytest.param(32, 773, (340, 354), 0.001, id="where the plateau starts"),
        pytest.param(256, 773, (340, 354), 0.001, id="where it ends"),
        pytest.param(30, 773, (340, 354), 0.07, id="30 requests, padded to 32"),
        pytest.param(250, 773, (340, 354), 0.03, id="250 requests, padded to 256"),
    ],
)
def test_seeds_pcie_gives_the_published_throughput(
    batch: int, off_tok_s: float, tree_tok_s: tuple[float, float], error: float
) -> None:
    profile = CostProfile.load("seeds-pcie")
    off = batch / round_s(profile, batch, 0)
    tree = TREE_ACCEPT_LENGTH * batch / round_s(profile, batch, 5)
    assert off == pytest.approx(off_tok_s, rel=error)
    assert tree == pytest.approx(sum(tree_tok_s) / 2, rel=error)
    assert off / tree == pytest.approx(2 * off_tok_s / sum(tree_tok_s), rel=0.001)


def test_seeds_pcie_has_no_chain() -> None:
    profile = CostProfile.load("seeds-pcie")
    assert list(zip(profile.labels, profile.draft_tokens, strict=True)) == [("off", 1), ("tree16", 16)]
