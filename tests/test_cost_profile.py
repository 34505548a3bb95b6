"""Cost profiles: what is refused, and every rule of the lookup worked out by hand on a tiny profile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile, OffMode, shipped_profiles
from draftdial.controller.errors import UserError

Document = dict[str, Any]
OFF_MODES: tuple[OffMode, ...] = ("nospec", "warm", "skip")


def cell(batch: int, contexts: list[float], times: list[float]) -> Document:
    return {"batch": batch, "context_tokens": contexts, "round_ms": times}


def tiny_document() -> Document:
    """Two captured batches, tiers 0 and 2; off-skip at batch 4 has a bend at 300 tokens."""
    covered = ["nospec", "off-warm", "off-skip", "k=2", "captured_batches", "eager", "prefill", "switch_ms"]
    covered += ["max_running", "kv_pool_tokens", "chunked_prefill_tokens"]
    return {
        "schema": "draftdial.profile/1",
        "name": "tiny",
        "description": "made up for tests",
        "hardware": "none",
        "model": "none",
        "draft": "none",
        "engine": "none",
        "engine_version": "0",
        "date": "2026-01-31",
        "units": {"time": "ms", "context": "tokens"},
        "provenance": [{"covers": covered, "source": "tests", "measured": "nothing", "inferred": "all"}],
        "tiers": [
            {"k": 0, "label": "off", "draft_tokens": 1},
            {"k": 2, "label": "chain2", "draft_tokens": 3},
        ],
        "captured_batches": [1, 4],
        "max_running": 8,
        "kv_pool_tokens": 10_000,
        "chunked_prefill_tokens": 512,
        "switch_ms": 0.5,
        "eager": {"factor_per_batch": 0.5, "extra_ms": 3.0},
        "prefill": {"nospec": [[100, 5.0], [300, 9.0]], "speculative": [[100, 6.0], [300, 12.0]]},
        "rows": [
            {"row": "nospec", "cells": [cell(1, [100, 200], [4.0, 4.0]), cell(4, [100, 200], [5.0, 6.0])]},
            {"row": "off-warm", "cells": [cell(1, [100, 200], [4.5, 4.6]), cell(4, [100, 200], [6.0, 7.0])]},
            {
                "row": "off-skip",
                "cells": [cell(1, [100, 200], [4.1, 4.2]), cell(4, [100, 300, 400], [5.0, 7.0, 10.0])],
            },
            {"row": "k=2", "cells": [cell(1, [100, 200], [6.0, 6.5]), cell(4, [100, 200], [8.0, 9.0])]},
        ],
    }


def tiny(**changes: Any) -> CostProfile:
    return CostProfile.from_document(tiny_document() | changes, "tiny")


def round_ms(profile: CostProfile, num_running: int, context: float, off_mode: OffMode) -> list[float]:
    row = profile.round_s(np.array([num_running]), np.array([context]), off_mode)
    values: list[float] = (1e3 * row[0]).tolist()
    return values


def delete(*path: str | int) -> Callable[[Document], None]:
    def edit(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        del document[path[-1]]

    return edit


def put(value: Any, *path: str | int) -> Callable[[Document], None]:
    def edit(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return edit


CELL = ("rows", 3, "cells", 1)
BROKEN: list[tuple[Callable[[Document], None], str]] = [
    *((delete(key), f"{key}: missing") for key in tiny_document()),
    (put(1, "colour"), "unknown field colour"),
    (put("draftdial.profile/2", "schema"), "schema: found"),
    (put("", "model"), "model: found"),
    (put(3, "hardware"), "hardware: found"),
    (put("Tiny Profile", "name"), "name: found"),
    (put("31.1.2026", "date"), "date: found"),
    (put({"time": "s", "context": "tokens"}, "units"), "units: found"),
    (put([], "provenance"), "provenance: found"),
    (delete("provenance", 0, "inferred"), "provenance[0].inferred: missing"),
    (put("  ", "provenance", 0, "source"), "provenance[0].source: found"),
    (put("k=7", "provenance", 0, "covers", 0), "provenance[0].covers: found"),
    (delete("provenance", 0, "covers", 0), "an entry that covers nospec too"),
    (delete("tiers", 1), "tiers: found"),
    (put(1, "tiers", 0, "k"), "tiers[0].k: found 1"),
    (put(False, "tiers", 0, "k"), "tiers[0].k: found false"),
    (put(0, "tiers", 1, "k"), "tiers[1].k: found 0"),
    (put(2, "tiers", 1, "draft_tokens"), "tiers[1].draft_tokens: found 2, allowed: 3 or more"),
    (delete("tiers", 1, "label"), "tiers[1].label: missing"),
    (put([4, 1], "captured_batches"), "captured_batches: found"),
    (put([1, 2.5], "captured_batches"), "captured_batches[1]: found 2.5"),
    (put(0, "max_running"), "max_running: found 0"),
    (put(10**6, "max_running"), "max_running: found 1000000"),
    (put(True, "kv_pool_tokens"), "kv_pool_tokens: found true"),
    (put(512.5, "chunked_prefill_tokens"), "chunked_prefill_tokens: found 512.5"),
    (put(-0.1, "switch_ms"), "switch_ms: found -0.1"),
    (put(float("nan"), "eager", "extra_ms"), "eager.extra_ms: found NaN"),
    (delete("eager", "factor_per_batch"), "eager.factor_per_batch: missing"),
    (delete("prefill", "speculative"), "prefill.speculative: missing"),
    (put([[100, 5.0]], "prefill", "nospec"), "prefill.nospec: found"),
    (put([[100, 5.0], [100, 6.0]], "prefill", "nospec"), "prefill.nospec[][0]: found"),
    (put([[100, 5.0], [200, 4.0]], "prefill", "nospec"), "prefill.nospec[1][1]: found 4.0"),
    (put([100, 5.0, 1], "prefill", "nospec", 0), "prefill.nospec[0]: found"),
    (delete("rows", 2), "rows[].row: found"),
    (put("k=3", "rows", 3, "row"), "exactly nospec, off-warm, off-skip, k=2"),
    (put("fast", "rows", 3), "rows[].row: found"),
    (delete(*CELL), "rows[3] (k=2).cells: found"),
    (put(8, *CELL, "batch"), "rows[3] (k=2).cells[1].batch: found 8"),
    (put([200, 100], *CELL, "context_tokens"), "rows[3] (k=2).cells[1].context_tokens: found"),
    (put([100], *CELL, "context_tokens"), "rows[3] (k=2).cells[1].context_tokens: found"),
    (put([8.0], *CELL, "round_ms"), "rows[3] (k=2).cells[1].round_ms: found"),
    (put([8.0, 9.0, 9.5], *CELL, "round_ms"), "allowed: 2 numbers"),
    (put(0, *CELL, "round_ms", 1), "rows[3] (k=2).cells[1].round_ms[1]: found 0"),
    (put(float("inf"), *CELL, "round_ms", 1), "rows[3] (k=2).cells[1].round_ms[1]: found Infinity"),
    (put("9 ms", *CELL, "round_ms", 1), "rows[3] (k=2).cells[1].round_ms[1]: found"),
    (put("yes", *CELL, "inferred"), "rows[3] (k=2).cells[1].inferred: found"),
    (put(1, *CELL, "comment"), "unknown field comment"),
]


@pytest.mark.parametrize(("edit", "complaint"), BROKEN, ids=[complaint for _, complaint in BROKEN])
def test_a_broken_profile_is_refused_by_field(edit: Callable[[Document], None], complaint: str) -> None:
    document = tiny_document()
    edit(document)
    with pytest.raises(UserError) as refusal:
        CostProfile.from_json(json.dumps(document), "server.json")
    message = str(refusal.value)
    assert message.startswith("server.json: ")
    assert complaint in message
    assert "\n" not in message


def test_text_that_is_not_json_names_the_line() -> None:
    with pytest.raises(UserError, match=r"server\.json: line 2, column 1: not JSON"):
        CostProfile.from_json('{"schema":\n', "server.json")


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(UserError) as refusal:
        CostProfile.load("h300")
    assert all(name in str(refusal.value) for name in shipped_profiles())


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.json: cannot read"):
        CostProfile.load(tmp_path / "missing.json")


def test_a_profile_loads_from_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(tiny_document()))
    assert CostProfile.load(str(path)).name == "tiny"


@pytest.mark.parametrize("through_json", [False, True])
def test_round_trip_is_exact(through_json: bool) -> None:
    profile = tiny().scaled("other", [[1.1, 0.9]] * 4, 1.3)
    document = profile.to_document()
    again = CostProfile.from_document(
        json.loads(json.dumps(document)) if through_json else document, "a policy file"
    )
    assert again.to_document() == document
    np.testing.assert_array_equal(again.knot_round_s, profile.knot_round_s)
    for off_mode in OFF_MODES:
        np.testing.assert_array_equal(again.round_table(off_mode), profile.round_table(off_mode))
        np.testing.assert_array_equal(again.prefill_knots(off_mode), profile.prefill_knots(off_mode))


def test_a_profile_keeps_its_own_copy_of_the_document() -> None:
    document = tiny_document()
    profile = CostProfile.from_document(document, "tiny")
    document["name"] = "changed"
    profile.to_document()["name"] = "changed too"
    assert profile.document["name"] == "tiny"


def test_arrays_are_read_only() -> None:
    profile = tiny()
    for array in (profile.knot_round_s, profile.round_table("warm"), profile.bucket_of_batch):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


@pytest.mark.parametrize(
    ("num_running", "context", "off_mode", "expected_ms"),
    [
        pytest.param(4, 100, "nospec", [5.0, 8.0], id="a measured cell as measured"),
        pytest.param(4, 150, "nospec", [5.5, 8.5], id="between two contexts"),
        pytest.param(4, 300, "nospec", [7.0, 10.0], id="beyond the last context"),
        pytest.param(4, 50, "nospec", [4.5, 7.5], id="before the first context"),
        pytest.param(4, 350, "skip", [8.5, 10.5], id="the second piece of a bent cell"),
        pytest.param(4, 600, "skip", [16.0, 13.0], id="the second piece goes on"),
        pytest.param(1, 700, "skip", [4.7, 9.0], id="a cell with fewer knots goes straight on"),
        pytest.param(3, 200, "nospec", [5.5, 8.5], id="padding reads no KV: 200 x 3/4 = 150"),
        pytest.param(2, 200, "warm", [6.0, 8.0], id="padding reads no KV: 200 x 2/4 = 100"),
        pytest.param(2, 700, "skip", [8.5, 10.5], id="padding moves the bend: 700 x 2/4 = 350"),
        pytest.param(6, 100, "nospec", [5.0 * 1.25 + 3, 8.0 * 1.25 + 3], id="eager: 1 + (6/4 - 1) / 2"),
        pytest.param(8, 200, "skip", [6.0 * 1.5 + 3, 9.0 * 1.5 + 3], id="eager: 1 + (8/4 - 1) / 2"),
        pytest.param(30, 200, "skip", [6.0 * 1.5 + 3, 9.0 * 1.5 + 3], id="more than max_running"),
        pytest.param(0, 0, "nospec", [4.0, 5.5], id="nobody: one row of padding"),
    ],
)
def test_round_time_by_hand(
    num_running: int, context: float, off_mode: OffMode, expected_ms: list[float]
) -> None:
    assert round_ms(tiny(), num_running, context, off_mode) == pytest.approx(expected_ms, rel=1e-12)


def test_extrapolation_stops_at_a_fifth_of_the_first_knot() -> None:
    document = tiny_document()
    document["rows"][3]["cells"][1] = cell(4, [100, 200], [2.0, 9.0])
    assert round_ms(CostProfile.from_document(document, "steep"), 4, 0, "warm")[1] == pytest.approx(0.4)


@pytest.mark.parametrize("off_mode", OFF_MODES)
def test_many_servers_cost_what_each_costs_alone(off_mode: OffMode) -> None:
    profile = tiny()
    rng = np.random.default_rng(0)
    num_running, context = rng.integers(0, 12, 200), rng.integers(0, 3000, 200)
    together = profile.round_s(num_running, context, off_mode)
    alone = [profile.round_s(num_running[i : i + 1], context[i : i + 1], off_mode)[0] for i in range(200)]
    np.testing.assert_array_equal(together, alone)


def test_the_table_for_kernels_follows_its_documented_formula() -> None:
    profile = tiny()
    table = profile.round_table("skip")
    num_hinges = (table.shape[1] - 3) // 2
    for n in range(profile.max_running + 1):
        for context in (0.0, 120.0, 390.0, 5000.0):
            hinges = sum(
                table[n, 3 + 2 * h] * np.maximum(context - table[n, 2 + 2 * h], 0.0)
                for h in range(num_hinges)
            )
            by_formula = np.maximum(table[n, -1], table[n, 0] + table[n, 1] * context + hinges)
            priced = profile.round_s(np.array([n]), np.array([context]), "skip")[0]
            np.testing.assert_allclose(by_formula, priced, rtol=1e-14)


def test_prefill_by_hand() -> None:
    profile = tiny()
    tokens = [0, 1, 100, 200, 300, 400]
    nospec = 1e3 * profile.prefill_s(tokens, "nospec")
    assert nospec.tolist() == pytest.approx([0, 5, 5, 7, 9, 11])
    speculative = 1e3 * profile.prefill_s(tokens, "skip")
    assert speculative.tolist() == pytest.approx([0, 6, 6, 9, 12, 15])


def with_kv_only(document: Document) -> Document:
    """`document` with the row off-kv-only, as off-skip."""
    document["rows"].insert(3, document["rows"][2] | {"row": "off-kv-only"})
    document["provenance"][0]["covers"].append("off-kv-only")
    return document


def test_a_prefill_that_leaves_the_draft_out_by_hand() -> None:
    document = with_kv_only(tiny_document())
    tokens = [0, 1, 200, 400]
    without = CostProfile.from_document(document, "tiny")
    document["prefill"]["kv-only"] = [[100, 5.5], [300, 10.5]]
    profile = CostProfile.from_document(document, "tiny")
    for off_mode in ("warm", "skip", "kv-only"):
        for each in (profile, without):
            assert 1e3 * each.prefill_s(tokens, off_mode) == pytest.approx([0, 6, 9, 15])  # type: ignore[arg-type]
    found = 1e3 * profile.prefill_s(tokens, "kv-only", leaves_draft_out=True)
    assert found == pytest.approx([0, 5.5, 8, 13])
    assert 1e3 * without.prefill_s(tokens, "kv-only", leaves_draft_out=True) == pytest.approx([0, 6, 9, 15])
    assert 1e3 * profile.prefill_s(tokens, "warm", leaves_draft_out=True) == pytest.approx([0, 6, 9, 15])
    assert 1e3 * profile.prefill_s(tokens, "nospec", leaves_draft_out=True) == pytest.approx([0, 5, 7, 11])
    twice = CostProfile.from_document(profile.scaled("twice", 1.0, 2.0).to_document(), "twice")
    assert 1e3 * twice.prefill_s(tokens, "kv-only", leaves_draft_out=True) == pytest.approx([0, 11, 16, 26])


def test_such_a_prefill_is_checked_and_needs_its_row() -> None:
    document = tiny_document()
    document["prefill"]["kv-only"] = [[100, 5.5], [300, 10.5]]
    with pytest.raises(
        UserError, match=r"prefill: found .unknown field kv-only., allowed: nospec, speculative"
    ):
        CostProfile.from_document(document, "tiny")
    with_kv_only(document)["prefill"]["kv-only"][1][1] = 5.0
    with pytest.raises(UserError, match=r"prefill.kv-only\[1\]\[1\]: found 5.0, allowed: 5.5 or more"):
        CostProfile.from_document(document, "tiny")


def test_scalars_are_in_seconds_and_tiers_keep_their_widths() -> None:
    profile = tiny()
    assert profile.switch_s == pytest.approx(0.5e-3)
    assert profile.eager_extra_s == pytest.approx(3e-3)
    assert (profile.tiers, profile.labels, profile.draft_tokens) == ((0, 2), ("off", "chain2"), (1, 3))
    assert profile.rows == ("nospec", "off-warm", "off-skip", "k=2")
    assert profile.bucket_of_batch.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]


def test_scaling_multiplies_each_cell_and_leaves_the_original() -> None:
    profile = tiny()
    factors = np.array([[1.0, 2.0], [1.0, 1.0], [1.0, 1.0], [3.0, 0.5]])
    other = profile.scaled("other", factors, 2.0)
    assert other.name == "other"
    np.testing.assert_allclose(other.knot_round_s, profile.knot_round_s * factors[:, :, None], rtol=1e-12)
    assert round_ms(other, 4, 150, "nospec") == pytest.approx([11.0, 4.25])
    np.testing.assert_allclose(other.prefill_s([200], "warm"), 2 * profile.prefill_s([200], "warm"))
    assert profile.document == tiny_document()


def test_no_round_is_shorter_than_the_host_is_busy() -> None:
    profile = tiny()
    slower = profile.no_faster_than({0: 10.5, 2: 1.0}, "skip")
    check_floors(profile, slower, "skip", [10.5, 1.0])
    check_floors(profile, slower, "warm", [0.0, 1.0])
    assert profile.document == tiny_document()
    same = profile.no_faster_than({0: 1e-3, 2: 1e-3}, "skip")
    assert same.document["rows"] == profile.document["rows"], "it is never so short"


@pytest.mark.parametrize("name", ["h200-llama3-8b", "qwen3-235b-a22b"])
@pytest.mark.parametrize("busy_ms", [3.0, 6.2, 7.2, 30.0, 1e4])
def test_a_busy_hosts_rounds_are_exact_between_knots_and_beyond(name: str, busy_ms: float) -> None:
    profile = CostProfile.load(name)
    least_ms = [0.5 * busy_ms, *[busy_ms] * (len(profile.tiers) - 1)]
    slower = profile.no_faster_than(dict(zip(profile.tiers, least_ms, strict=True)), "warm")
    check_floors(profile, slower, "warm", least_ms)
    again = slower.no_faster_than(dict(zip(profile.tiers, least_ms, strict=True)), "warm")
    assert again.document["rows"] == slower.document["rows"]


def check_floors(profile: CostProfile, slower: CostProfile, off_mode: OffMode, least_ms: list[float]) -> None:
    """Wherever the GPU is done sooner, a round of `slower` takes `least_ms` of its tier, else what it did."""
    running, context = np.meshgrid(
        np.arange(1, profile.captured_batches[-1] + 1),
        [0, 1, 50, 99, 100, 150, 700, 1250, 3250, 12_000, 200_000],
    )
    expected = np.maximum(
        profile.round_s(running.ravel(), context.ravel(), off_mode), 1e-3 * np.array(least_ms)
    )
    found = slower.round_s(running.ravel(), context.ravel(), off_mode)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_scaling_by_nonsense_is_refused(factor: float) -> None:
    with pytest.raises(UserError, match="round_ms"):
        tiny().scaled("other", factor, 1.0)


def test_max_running_below_the_captured_batches_is_fine() -> None:
    profile = tiny(max_running=2)
    assert profile.round_table("warm").shape[0] == 3


def test_loading_a_shipped_profile_needs_numpy_alone() -> None:
    program = (
        "import sys; from draftdial.controller.cost_profile import CostProfile; "
        "CostProfile.load('h200-llama3-8b'); "
        "heavy = {'torch', 'gymnasium', 'numba', 'scipy', 'draftdial.envs'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["h200-llama3-8b", "qwen3-235b-a22b"])
def test_one_number_costs_the_same_bits_as_in_an_array(name: str) -> None:
    profile = CostProfile.load(name)
    running = np.array([0, 1, 2, 7, 8, 100, 256, profile.max_running, 5000])
    context = np.array([0, 1, 333, 8000, 0, 2500, 640, 10, 1200])
    together = profile.round_s(running, context, "warm")
    alone = [profile.round_s(n, c, "warm") for n, c in zip(running.tolist(), context.tolist(), strict=True)]
    np.testing.assert_array_equal(alone, together)
