"""The profiles that ship say what their sources say."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cost_profile import OFF_MODE_OF_ROW, CostProfile, OffMode, shipped_profiles
from draftdial.controller.profile_build import ProfileBuilder
from draftdial.controller.profile_measurements import Measurements

REFERENCE = Path(__file__).parents[2] / "shared" / "reference"
NOISE = 0.02
"""Cells are as measured: a round of one k more may come out so much cheaper."""
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
        for off_mode in profile.off_modes:
            times = profile.round_s(batches, np.full(len(batches), context), off_mode)
            assert (times[:, 1:] > (1 - NOISE) * times[:, :-1]).all()
            assert (times[:, -1] > 1.1 * times[:, 0]).all(), "the largest k against off"


@pytest.mark.parametrize("name", NAMES)
def test_a_prefill_costs_more_the_longer_it_is_and_with_the_draft(name: str) -> None:
    profile = CostProfile.load(name)
    tokens = np.geomspace(16, profile.chunked_prefill_tokens, 40).astype(int)
    plain_s, both_s = profile.prefill_s(tokens, "nospec"), profile.prefill_s(tokens, "warm")
    assert (np.diff(plain_s) >= 0).all() and (np.diff(both_s) >= 0).all()
    assert (both_s >= (1 - NOISE) * plain_s).all()


def h200_builder() -> ProfileBuilder:
    """Of the measurements that the shipped profile was made of."""
    path = Path(__file__).parents[1] / "docs" / "results" / "h200-llama3-8b.measurements.json"
    profile = CostProfile.load("h200-llama3-8b")
    server = {"chunked_prefill_size": profile.chunked_prefill_tokens}
    measurements = Measurements(path, json.loads(path.read_text()))
    return ProfileBuilder(measurements, profile.name, profile.tiers, server, "a test", {})


def test_h200_is_what_profile_makes_of_its_measurements() -> None:
    document, made = CostProfile.load("h200-llama3-8b").document, h200_builder().document()
    assert made.keys() == document.keys()
    for field in made.keys() - {"description", "model", "draft", "hardware", "date", "provenance"}:
        assert document[field] == made[field], field
    assert document["description"].endswith(made["description"].removeprefix("Measured by "))


def test_h200_predicts_the_cells_left_out() -> None:
    errors = h200_builder().errors(CostProfile.load("h200-llama3-8b"))
    assert len(errors) > 20
    assert np.mean(np.abs(errors)) < 0.04


def test_h200_repeats_what_another_day_measured() -> None:
    profile = CostProfile.load("h200-llama3-8b")
    errors = []
    for then in reference("h200_llama3_8b_rounds.json")["surface"]:
        if then["host_bound"] or then["bs"] not in profile.captured_batches:
            continue
        row = reference_row(then)
        off_mode = OFF_MODE_OF_ROW.get(row, "warm")
        column = 0 if row in OFF_MODE_OF_ROW else profile.tiers.index(then["steps"])
        now_s = profile.round_s(np.array([then["bs"]]), np.array([then["ctx_mid"]]), off_mode)[0, column]
        errors.append(1e3 * float(now_s) / then["round_ms"] - 1)
    assert len(errors) > 150
    assert np.mean(np.abs(errors)) < 0.03 and np.max(np.abs(errors)) < 0.12


def reference_row(measured: dict[str, Any]) -> str:
    if measured["engine"] == "nospec":
        return "nospec"
    off = "off-skip" if measured["skip_draft_extend"] else "off-warm"
    return f"k={measured['steps']}" if measured["steps"] else off


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
