"""compare.json from known series: exact ratios, margins, references, strict JSON, refused documents."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftdial.controller.comparison import (
    CellData,
    PolicySeries,
    build,
    margin_of,
    seeds_needed,
    to_json,
)
from draftdial.controller.comparison_schema import validate
from draftdial.controller.errors import UserError

TIERS = (0, 1, 3)
SEEDS = 16


def series(
    e2e_s: float, tok_s: float, noise: float = 0.0, num_seeds: int = SEEDS, **other: Any
) -> PolicySeries:
    """Series around the given means; `noise` is the spread of the log of this policy's own figures."""
    own = np.exp(noise * np.random.default_rng(int(e2e_s * 1e6)).standard_normal(num_seeds))
    world = np.exp(0.3 * np.random.default_rng(1).standard_normal(num_seeds))
    columns: dict[str, Any] = {
        "e2e_mean_s": e2e_s * own * world,
        "e2e_p99_s": 3 * e2e_s * own * world,
        "ttft_p99_s": np.full(num_seeds, 0.2),
        "tpot_mean_s": np.full(num_seeds, 0.01),
        "output_tok_s": tok_s / own * world,
        "slo_attainment": np.full(num_seeds, 0.9),
        "switches_per_1k_rounds": np.full(num_seeds, 5.0),
        "wasted_draft_share": np.full(num_seeds, 0.25),
        "rounds": np.full(num_seeds, 5000),
        "n_requests": np.full(num_seeds, 200),
        "tier_time_share": np.tile([0.5, 0.25, 0.25], (num_seeds, 1)),
    }
    return PolicySeries(**(columns | other))


def policies(num_seeds: int = SEEDS) -> dict[str, PolicySeries]:
    """Costs relative to `informed` = 1: learned 1.05, threshold 1.2, off 1.5, greedy worse by 1 %."""
    cost = {
        "learned": 1.05, "threshold": 1.2, "informed": 1.0, "greedy": 1.06, "off": 1.5,
        "no-spec": 1.4, "fixed-1": 1.25, "fixed-3": 1.3, "bandit": 1.05,
    }  # fmt: skip
    return {name: series(c, 1000 / c, num_seeds=num_seeds) for name, c in cost.items()}


def cell(mode: str = "closed", load: float | None = 16, **changes: Any) -> CellData:
    values: dict[str, Any] = {
        "profile": "h200", "workload": "steady", "load": load, "mode": mode, "off_mode": "warm",
        "tiers": TIERS, "policies": policies(),
    }  # fmt: skip
    return CellData(**(values | changes))


def document(cells: list[CellData], learned: tuple[str, ...] = ("learned",)) -> dict[str, Any]:
    return build(
        cells,
        learned,
        versions={"draftdial": "0.1.0", "seed": np.int64(3)},
        hashes={"profile": "ab"},
        tuned_rules={"threshold": {"k": 3, "batch": 48}},
        seed_ranges={"report": [1000, 1016]},
    )


def row(found: dict[str, Any], policy: str = "learned", index: int = 0) -> dict[str, Any]:
    rows = [entry for entry in found["cells"] if entry["policy"] == policy]
    return dict(rows[index])


def test_document_has_the_fields_of_its_schema_and_survives_json() -> None:
    found = document([cell(), cell("open", 0.5)])
    assert set(found) == {
        "schema", "versions", "hashes", "tuned_rules", "seed_ranges", "cells", "summary",
    }  # fmt: skip
    assert len(found["cells"]) == 2 * (len(policies()) + 1)
    text = to_json(found)
    assert validate(json.loads(text)) == found
    assert "NaN" not in text


def test_noise_shared_by_the_policies_cancels_to_exact_ratios() -> None:
    """Worlds differ by 30 % between seeds; paired ratios between policies do not differ at all."""
    for mode, name in (("closed", "output_tok_s_ratio"), ("open", "e2e_mean_ratio")):
        versus = row(document([cell(mode, 0.5)]))["vs"]["threshold"]
        assert versus[name]["value"] == pytest.approx(1.05 / 1.2, rel=1e-9)
        assert versus[name]["simultaneous_upper"] == pytest.approx(1.05 / 1.2, rel=1e-6)
        assert versus["verdict"] == "better"


def test_below_one_is_better_in_both_ratios() -> None:
    versus = row(document([cell()]))["vs"]
    for name in ("e2e_mean_ratio", "output_tok_s_ratio"):
        assert versus["off"][name]["value"] < 1 < versus["informed"][name]["value"]


def test_equal_policies_have_ratio_exactly_one_and_are_not_worse() -> None:
    versus = row(document([cell()]))["vs"]["bandit"]
    assert versus["output_tok_s_ratio"] == {"value": 1.0, "ci95": [1.0, 1.0], "simultaneous_upper": 1.0}
    assert versus["slo_diff"] == {"value": 0.0, "ci95": [0.0, 0.0], "simultaneous_upper": 0.0}
    assert versus["verdict"] == "not-worse"


def test_verdicts_follow_the_margin_of_the_rival() -> None:
    table = policies() | {"learned": series(1.015 * 1.2, 1000 / (1.015 * 1.2))}
    table["off"] = table["threshold"]
    versus = row(document([cell(policies=table)]))["vs"]
    assert versus["off"]["verdict"] == "not-worse"  # 1.5 % worse, margin 2 %
    assert versus["threshold"]["verdict"] == "worse"  # margin 1 %


def test_noisy_pair_is_undecided() -> None:
    table = policies() | {"learned": series(1.2, 1000 / 1.2, noise=0.05)}
    assert row(document([cell(policies=table)]))["vs"]["threshold"]["verdict"] == "undecided"


@pytest.mark.parametrize(
    ("rival", "mode", "load", "margin"),
    [
        ("threshold", "closed", 64, 0.01),
        ("greedy", "open", 0.85, 0.01),
        ("greedy", "open", 0.9, 0.03),
        ("off", "closed", 256, 0.02),
        ("fixed-3", "open", 0.5, 0.02),
        ("fixed-3", "open", 0.86, 0.03),
        ("threshold", "open", None, 0.01),
        ("sglang-adaptive", "closed", 4, 0.02),
    ],
)
def test_margins(rival: str, mode: str, load: float | None, margin: float) -> None:
    assert margin_of(rival, mode, load) == margin


def test_headroom_is_threshold_over_informed_in_both_modes() -> None:
    found = document([cell(), cell("open", 0.5)])
    assert [entry["headroom"] for entry in found["cells"]] == pytest.approx([1.2] * len(found["cells"]))
    without = {name: s for name, s in policies().items() if name != "informed"}
    assert row(document([cell(policies=without)]))["headroom"] is None


def test_best_reference_is_the_best_candidate_in_hindsight() -> None:
    found = document([cell()])
    assert row(found, "best_reference")["metrics"] == row(found, "informed")["metrics"]
    hindsight = {"threshold-k1-b8": series(0.9, 1000 / 0.9)}
    found = document([cell(hindsight=hindsight)])
    ratio = row(found)["vs"]["best_reference"]["output_tok_s_ratio"]["value"]
    assert ratio == pytest.approx(1.05 / 0.9)
    assert "threshold-k1-b8" not in row(found)["vs"]


def test_best_reference_leaves_out_policies_that_are_no_reference() -> None:
    table = policies() | {"clairvoyant": series(0.5, 2000.0), "no-spec": series(0.6, 1900.0)}
    found = document([cell(policies=table)])
    assert row(found, "best_reference")["metrics"] == row(found, "informed")["metrics"]


def test_undefined_metrics_become_null() -> None:
    nothing = np.full(SEEDS, np.nan)
    table = policies()
    table["off"] = series(1.5, 1000 / 1.5, wasted_draft_share=nothing, slo_attainment=nothing)
    found = document([cell(policies=table)])
    assert row(found, "off")["metrics"]["wasted_draft_share"] is None
    unknown = {"value": None, "ci95": [None, None], "simultaneous_upper": None}
    assert row(found)["vs"]["off"]["slo_diff"] == unknown
    assert row(found)["vs"]["off"]["verdict"] == "better"


def test_slo_difference_counts_lost_attainment() -> None:
    table = policies() | {"learned": series(1.05, 1000 / 1.05, slo_attainment=np.full(SEEDS, 0.86))}
    assert row(document([cell(policies=table)]))["vs"]["off"]["slo_diff"]["value"] == pytest.approx(0.04)


def test_single_seed_gives_values_and_no_bounds() -> None:
    versus = row(document([cell(policies=policies(num_seeds=1))]))["vs"]["threshold"]
    assert versus["output_tok_s_ratio"]["value"] == pytest.approx(1.05 / 1.2)
    assert versus["output_tok_s_ratio"]["simultaneous_upper"] is None
    assert versus["verdict"] == "undecided"


def test_totals_and_time_shares() -> None:
    entry = row(document([cell()]))
    assert (entry["n_seeds"], entry["rounds"], entry["n_requests"]) == (16, 80_000, 3200)
    assert entry["metrics"]["time_share_at_k"] == {"0": 0.5, "1": 0.25, "3": 0.25}


def test_server_without_tiers_reports_only_the_first() -> None:
    table = policies() | {"no-spec": series(1.4, 700.0, tier_time_share=np.ones((SEEDS, 1)))}
    found = document([cell(policies=table)])
    assert row(found, "no-spec")["metrics"]["time_share_at_k"] == {"0": 1.0}


def test_summary_is_the_geometric_mean_and_names_the_worst_cell() -> None:
    worse = policies() | {"learned": series(1.3, 1000 / 1.3)}
    found = document([cell(), cell(load=64, policies=worse), cell("open", 0.5)])
    entry = found["summary"]["learned"]["closed"]["threshold"]
    assert entry["ratio"] == pytest.approx(np.sqrt(1.05 / 1.2 * 1.3 / 1.2))
    assert entry["worst_cell"]["ratio"] == pytest.approx(1.3 / 1.2)
    assert entry["worst_cell"]["upper"] == pytest.approx(1.3 / 1.2)
    assert found["summary"]["learned"]["open"]["threshold"]["ratio"] == pytest.approx(1.05 / 1.2)


def test_several_policies_under_test_are_no_rivals_of_each_other() -> None:
    table = policies()
    table["learned:b"] = series(1.1, 1000 / 1.1)
    found = document([cell(policies=table)], ("learned", "learned:b"))
    assert set(found["summary"]) == {"learned", "learned:b"}
    assert row(found)["vs"].keys() == row(found, "learned:b")["vs"].keys()
    assert "learned" not in row(found, "learned:b")["vs"]
    assert row(found, "threshold")["vs"] == {}


def test_seeds_needed_counts_only_rivals_with_a_bar() -> None:
    steady = cell()
    noisy_rival = cell(policies=policies() | {"bandit": series(1.05, 1000 / 1.05, noise=0.02)})
    noisy_greedy = cell(policies=policies() | {"greedy": series(1.05, 1000 / 1.05, noise=0.02)})
    first, second, third = seeds_needed([steady, noisy_rival, noisy_greedy], ["learned"])
    assert first == second == SEEDS
    assert third > SEEDS


def test_same_input_gives_the_same_document() -> None:
    table = policies() | {"learned": series(1.05, 1000 / 1.05, noise=0.01)}
    assert document([cell(policies=table)]) == document([cell(policies=table)])


def test_series_that_cannot_be_compared_are_refused_by_name() -> None:
    zero = policies() | {"off": series(1.5, 0.0)}
    with pytest.raises(ValueError, match="policy off: output_tok_s"):
        document([cell(policies=zero)])
    short = policies() | {"greedy": series(1.0, 1.0, num_seeds=4)}
    with pytest.raises(ValueError, match="policy greedy: e2e_mean_s has shape"):
        document([cell(policies=short)])
    with pytest.raises(ValueError, match="lacks policy learned:x"):
        document([cell()], ("learned:x",))


Spoil = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: d.update(schema="draftdial.compare/2"), "compare.json.schema: found draftdial.compare/2"),
        (lambda d: d.pop("hashes"), "no hashes"),
        (lambda d: d["cells"][0].update(mode="half-open"), r"cells\[0\].mode: found half-open"),
        (lambda d: d["cells"][0].update(n_seeds=0), r"cells\[0\].n_seeds: found 0"),
        (lambda d: d["cells"][0].update(extra=1), r"cells\[0\]: found extra"),
        (lambda d: d["cells"][0]["metrics"].update(e2e_p99_s=float("nan")), "e2e_p99_s: found nan"),
        (
            lambda d: d["cells"][0]["vs"]["off"].update(verdict="fine"),
            "vs.off.verdict: found fine; allowed: better or not-worse or worse or undecided",
        ),
        (
            lambda d: d["cells"][0]["vs"]["off"]["slo_diff"].update(ci95=[1]),
            r"vs.off.slo_diff.ci95: found \[1\]",
        ),
        (lambda d: d["summary"]["learned"]["closed"]["off"].pop("worst_cell"), "no worst_cell"),
        (lambda d: d.update(cells={}), "cells: found {}; allowed: a list"),
    ],
)
def test_document_that_is_not_whole_is_refused_in_one_line(spoil: Spoil, message: str) -> None:
    spoiled = copy.deepcopy(document([cell()]))
    spoil(spoiled)
    with pytest.raises(UserError, match=message) as raised:
        validate(spoiled)
    assert "\n" not in str(raised.value)
