"""The cells of a comparison: what is shipped, which seeds they own, how long they are, what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.files import sha256_of
from draftdial.controller.rules import FixedK
from draftdial.envs.closed_loop import drift5
from draftdial.envs.evaluate import evaluate
from draftdial.envs.fitted_acceptance import SHIPPED
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine
from draftdial.envs.suite import (
    SEEDS_PER_CELL,
    Acceptance,
    Cell,
    Extent,
    Suite,
    build_world,
    make_cells,
    workload_names,
    workload_sha256,
)

SHORT = Extent(
    seeds=2, low_rounds=300, high_rounds=60, switch_requests=10, open_requests=60, drift_share=0.02
)
CONCURRENCIES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


@pytest.fixture(scope="module")
def h200() -> CostProfile:
    return CostProfile.load("h200-llama3-8b")


def cells_of(names: Sequence[str], profile: CostProfile, extent: Extent = SHORT, **others: Any) -> list[Cell]:
    return make_cells(names, profile, "warm", others.get("acceptance", Acceptance()), extent)


@pytest.fixture(scope="module")
def all_cells(h200: CostProfile) -> list[Cell]:
    return cells_of(Suite.load("full").workloads, h200)


def recorded(folder: Path, **acceptance: Sequence[int]) -> list[str]:
    """JSONL files by domain, two requests each, that yield the given tokens again and again."""
    for name, tokens in acceptance.items():
        acc = (list(tokens) * 200)[:200]
        line = f'{{"id": 1, "prompt_len": 5, "gen_len": 200, "acc": {acc}}}\n'
        (folder / f"{name}.jsonl").write_text(2 * line)
    return [str(folder / f"{name}.jsonl") for name in acceptance]


def test_the_suites_hold_the_promised_cells(all_cells: list[Cell]) -> None:
    loads: dict[str, list[float | None]] = {}
    for cell in all_cells:
        loads.setdefault(cell.workload, []).append(cell.load)
    assert loads == {
        **dict.fromkeys(("chat", "good", "poor", "switches"), CONCURRENCIES),
        "drift5": [None],
        "poisson": [0.5, 0.8, 0.9],
        "swings": [0.6],
    }
    demo, full = Suite.load("demo"), Suite.load("full")
    assert demo.workloads == full.workloads == tuple(dict.fromkeys(cell.workload for cell in all_cells))
    assert set(demo.workloads) == set(workload_names())
    assert full.report.seeds >= 16 and full.report.low_rounds >= 30_000 and full.report.high_rounds >= 5_000
    assert 0.9 * full.report.open_requests >= 10_000 and full.report.drift_share == 1


def test_drift5_is_what_its_module_says_and_the_hash_is_of_the_file(h200: CostProfile) -> None:
    (cell,) = cells_of(["drift5"], h200, replace(SHORT, drift_share=1.0))
    mine, theirs = cell.requests.requests(7), drift5().requests(7)
    assert all(np.array_equal(getattr(mine, name), value) for name, value in vars(theirs).items())
    file = resources.files("draftdial.conf") / "workload" / "drift5.yaml"
    assert workload_sha256("drift5") == sha256_of(file.read_bytes())


def test_no_two_cells_and_no_two_purposes_share_a_seed(all_cells: list[Cell]) -> None:
    for purpose in ("tuning", "checkpoint", "reporting"):
        seeds = [set(cell.seeds(purpose, SEEDS_PER_CELL)) for cell in all_cells]
        assert all(a.isdisjoint(b) for a, b in combinations(seeds, 2))
    for cell in all_cells:
        tuning, checkpoint, reporting = (
            cell.seeds(purpose, SEEDS_PER_CELL) for purpose in ("tuning", "checkpoint", "reporting")
        )
        assert max(tuning) < min(checkpoint) and max(checkpoint) < min(reporting)
        assert cell.seeds("reporting", 5) + cell.seeds("reporting", 3, skipped=5) == reporting[:8]


def test_seeds_of_a_cell_do_not_depend_on_what_else_is_compared(
    h200: CostProfile, all_cells: list[Cell]
) -> None:
    for alone in cells_of(["swings", "poor"], h200):
        (same,) = [c for c in all_cells if (c.workload, c.load) == (alone.workload, alone.load)]
        assert alone.seeds("reporting", 3) == same.seeds("reporting", 3)


def test_a_cell_lasts_for_the_rounds_it_promises(h200: CostProfile) -> None:
    extent = replace(SHORT, low_rounds=400, high_rounds=150)
    cells = [cell for cell in cells_of(["chat"], h200, extent) if cell.load in (2, 16)]
    for cell, least in zip(cells, (400, 150), strict=True):
        lists, bank = build_world([(cell, seed) for seed in cell.seeds("reporting", 8)])
        most_tokens = h200.tiers[-1] + 1
        best = max(
            (evaluate(FixedK(h200.tiers, k), SimulatedEngine(lists, bank, h200)) for k in h200.tiers),
            key=lambda metrics: float(metrics.output_tok_s.mean()),
        )
        assert least <= best.rounds.mean() <= least * most_tokens


def test_requests_at_the_ends_keep_a_constant_load_up(all_cells: list[Cell]) -> None:
    for cell in all_cells:
        if cell.load is not None and cell.mode == "closed":
            ((requests,), _) = build_world([(cell, 5)])
            assert requests.warmup == 2 * cell.load
            assert requests.num_requests > 4 * cell.load


def test_utilisation_is_the_share_of_a_capacity_that_the_best_fixed_k_sustains(h200: CostProfile) -> None:
    poisson = cells_of(["poisson"], h200, replace(SHORT, open_requests=1500))
    rates = [cell.requests.arrivals.rate_per_s for cell in poisson]  # type: ignore[attr-defined]
    assert rates == pytest.approx([rates[0] / 0.5 * cell.load for cell in poisson if cell.load])

    def e2e_s(share: float) -> float:
        cell = poisson[0]
        overload = replace(cell, requests=cell.requests.at_rate(share * rates[0] / 0.5))  # type: ignore[attr-defined]
        lists, bank = build_world([(overload, seed) for seed in (1, 2, 3)])
        engine = SimulatedEngine(lists, bank, h200)
        return min(float(evaluate(FixedK(h200.tiers, k), engine).e2e_mean_s.mean()) for k in h200.tiers)

    assert e2e_s(1.3) > 4 * e2e_s(0.7)


def test_a_world_in_a_batch_is_the_world_alone(all_cells: list[Cell]) -> None:
    chosen = [all_cells[0], all_cells[28], all_cells[-1]]
    rows = [(cell, seed) for cell in chosen for seed in cell.seeds("tuning", 2)]
    together, bank = build_world(rows)
    for row, requests in zip(rows, together, strict=True):
        ((alone,), own) = build_world([row])
        for name, value in vars(alone).items():
            if name != "domain":
                assert np.array_equal(getattr(requests, name), value), name
        moved = requests.domain - alone.domain
        assert len(set(moved.tolist())) == 1
        for domain in np.unique(alone.domain):
            arrays, mine = bank.arrays_of(domain + moved[0]), own.arrays_of(domain)
            for start, other in zip(bank.array_start[arrays][:3], own.array_start[mine][:3], strict=True):
                same = slice(start, start + 100), slice(other, other + 100)
                assert np.array_equal(bank.accepted[same[0]], own.accepted[same[1]])
                expected = own.survival[own.latent[same[1]]]
                assert np.array_equal(bank.survival[bank.latent[same[0]]], expected)


def test_recorded_domains_stand_for_their_namesakes_and_for_the_others_in_turn(tmp_path: Path) -> None:
    paths = recorded(tmp_path, code=[2], maths=[3])
    replayed = Acceptance.parse(paths)
    _, places = replayed.source(["finance", "maths", "chat", "code", "reasoning"])
    assert places.tolist() == [0, 1, 0, 0, 0]
    source, places = Acceptance.parse([f"poor={paths[1]}"]).source(["poor"])
    assert (source.domains, places.tolist()) == (("poor",), [0])
    assert replayed.hashes is not None
    assert replayed.hashes["code"] == sha256_of(Path(paths[0]).read_bytes())
    fitted, places = Acceptance.parse(["fitted"]).source(["maths", "poor"])
    assert (fitted.domains, places.tolist()) == (("maths", "poor"), [0, 1])


def test_recorded_acceptance_reaches_the_server(tmp_path: Path, h200: CostProfile) -> None:
    replayed = Acceptance.parse(recorded(tmp_path, steady=[2]))
    (cell, *_) = cells_of(["switches"], h200, acceptance=replayed)
    lists, bank = build_world([(cell, seed) for seed in cell.seeds("reporting", 2)])
    assert len(bank.domain_names) == 1, "recorded banks are the same for every seed: one is enough"
    engine = SimulatedEngine(lists, bank, h200, ServerOptions(mid_flight=True))
    assert evaluate(FixedK(h200.tiers, 2), engine).wasted_draft_share == pytest.approx(0.5, abs=0.03)


def test_a_trace_is_a_workload_at_three_utilisations(tmp_path: Path, h200: CostProfile) -> None:
    path = tmp_path / "busy.csv"
    rows = "\n".join(f"{i / 2},{100 + i % 7},{20 + i % 5}" for i in range(100))
    path.write_text(f"arrival_s,input_tokens,output_tokens\n{rows}\n")
    cells = cells_of([f"trace:{path}"], h200)
    assert [(cell.workload, cell.load, cell.mode) for cell in cells] == [
        ("trace:busy", load, "open") for load in (0.5, 0.8, 0.9)
    ]
    ((requests,), _) = build_world([(cells[1], 3)])
    assert requests.num_requests == SHORT.open_requests
    assert set(requests.output_tokens.tolist()) == {20, 21, 22, 23, 24}
    assert workload_sha256(f"trace:{path}") == sha256_of(path.read_bytes())


def test_every_domain_of_the_shipped_workloads_is_fitted(all_cells: list[Cell]) -> None:
    assert {name for cell in all_cells for name in cell.acceptance.domains} <= set(SHIPPED)


@pytest.mark.parametrize(
    ("workloads", "acceptance", "complaint"),
    [
        (["chatt"], ["fitted"], "workload: found chatt; allowed: chat, drift5, good"),
        (["chat", "chat"], ["fitted"], "workload: found chat chat; allowed: each name once"),
        (["trace:a/x.csv", "trace:b/x.csv"], ["fitted"], "found trace:x trace:x; allowed: each name once"),
        (["trace:nowhere.csv"], ["fitted"], "nowhere.csv: cannot be read"),
        (["chat"], ["nowhere.jsonl"], "nowhere.jsonl"),
        (["chat"], ["a=x.jsonl", "a=y.jsonl"], "one file per domain"),
    ],
)
def test_bad_input_is_one_line(
    workloads: list[str], acceptance: list[str], complaint: str, h200: CostProfile
) -> None:
    with pytest.raises(UserError) as error:
        cells_of(workloads, h200, acceptance=Acceptance.parse(acceptance))
    assert complaint in str(error.value) and "\n" not in str(error.value)
