"""From measured rounds to a checked profile: means, the grid, the document and its held-out error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cell_timings import (
    WARM_UP_ROUNDS,
    accepted_share,
    prefill_knots,
    switch_ms,
    timings,
)
from draftdial.controller.cli import main
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.launched_server import without_speculation
from draftdial.controller.measured_server import CellFailed
from draftdial.controller.profile_build import ProfileBuilder
from draftdial.controller.profile_server import _thinned
from draftdial.controller.profile_sweep import Grid, Measurements, Sweep, Task
from draftdial.engine_patch.measurement_plan import Phase

GRID = Grid(batches=(1, 4, 8), contexts=(100, 400), rounds=8, repeats=2, held_out=2, seed=3)
FACTS = {
    "device": "H900",
    "clock": "cuda",
    "captured_batches": [1, 2, 4, 8],
    "max_running": 10,
    "kv_pool_tokens": 100_000,
    "context_length": 8_000,
    "engine_version": "0.5.17",
    "speculates": 1,
    "tiers": [0, 1, 3],
    "model": "M",
}


def rows(period_ms: float, launch_ms: float = 1.0, idle_ms: float = 0.0, phase: int = 0) -> list[list[float]]:
    """A phase's rounds: wild while it warms up, then alternating 1 ms around the period."""
    wild = [[phase, place, 99.0, 9.0, 9.0, 50.0] for place in range(WARM_UP_ROUNDS)]
    steady = [
        [phase, WARM_UP_ROUNDS + i, period_ms + (-1) ** i, launch_ms, idle_ms, 60.0 + i] for i in range(9)
    ]
    return wild + steady


def test_a_timing_is_the_mean_without_warm_up_and_hiccups() -> None:
    phase = [*rows(10.0), [0, 99, 250.0, 1.0, 0.0, 64.0]]
    [timing] = timings([Phase(3, 18)], phase, is_gpu=True).values()
    assert timing["period_ms"] == pytest.approx(10 + 1 / 9)
    assert timing["rounds"] == 10 and timing["context"] == 64.0 and not timing["host_bound"]


def test_rounds_that_write_for_others_count() -> None:
    times = [[0, WARM_UP_ROUNDS + i, 14.0 if i % 4 == 3 else 13.0, 1.0, 0.0, 60.0] for i in range(20)]
    [timing] = timings([Phase(0, 28, "kv-only")], times, is_gpu=True).values()
    assert timing["period_ms"] == 13.25


def test_phases_are_averaged_each_at_its_own_context() -> None:
    """Rounds that are lost to one phase must not shift the mean towards the contexts of another."""
    early = [[0, WARM_UP_ROUNDS + i, 10.0, 1.0, 0.0, 100.0] for i in range(20)]
    late = [[1, WARM_UP_ROUNDS + i, 14.0, 1.0, 0.0, 200.0] for i in range(5)]
    [timing] = timings([Phase(1, 28), Phase(1, 28)], early + late, is_gpu=True).values()
    assert (timing["period_ms"], timing["context"]) == (12.0, 150.0)


@pytest.mark.parametrize(("launch_ms", "idle_ms"), [(9.9, 0.0), (1.0, 0.6)])
def test_a_round_that_the_host_sets_is_told_on_a_gpu_alone(launch_ms: float, idle_ms: float) -> None:
    measured = rows(10.0, launch_ms, idle_ms)
    assert timings([Phase(3, 17)], measured, is_gpu=True)["k=3"]["host_bound"]
    assert not timings([Phase(3, 17)], measured, is_gpu=False)["k=3"]["host_bound"]


def test_repeats_of_a_kind_are_one_timing() -> None:
    phases = [Phase(0, 17), Phase(0, 17, "skip"), Phase(0, 17)]
    found = timings(phases, rows(5.0) + rows(4.0, phase=1) + rows(7.0, phase=2), is_gpu=False)
    assert set(found) == {"off-warm", "off-skip"} and found["off-warm"]["rounds"] == 18


def test_a_switch_costs_what_turns_take_beyond_both_tiers() -> None:
    phases = [Phase(1, 17), Phase(3, 17), *[Phase(k, 1) for _ in range(4) for k in (1, 3)]]
    steady = [[p, WARM_UP_ROUNDS, ms, 0, 0, 0] for p, ms in ((0, 6.0), (1, 10.0))]
    turns = [[2 + i, 0, ms, 0, 0, 0] for i, ms in enumerate([6.5, 10.5] * 4)]
    assert switch_ms(phases, steady + turns) == pytest.approx(0.5)


def test_acceptance_shows_in_how_the_context_grows() -> None:
    grown = [[0, i, 1.0, 0, 0, 50 + 2.5 * i] for i in range(9)] + [
        [1, i, 1.0, 0, 0, 80 + i] for i in range(9)
    ]
    assert accepted_share([Phase(3, 9), Phase(0, 9)], grown) == pytest.approx(0.5)
    assert accepted_share([Phase(0, 9)], []) == 0.0


def test_prefills_count_behind_a_decode_round_and_at_their_size() -> None:
    seen = [
        [64, 1, 5.0, 4.0, 0, 1],
        [63, 1, 7.0, 4.0, 0, 1],
        [64, 1, 99.0, 4.0, 0, 0],
        [300, 1, 9.0, 4.0, 0, 1],
    ]
    [knot] = prefill_knots(seen, (64, 256))
    assert (knot["tokens"], knot["ms"], knot["count"]) == (64, 6.0, 2)


def round_ms(row: str, batch: int, context: float) -> float:
    """A world in which the profile's lookup is exact at captured batches."""
    base = {"nospec": 4.0, "off-skip": 5.0, "off-kv-only": 5.1, "off-warm": 6.0}.get(row)
    base = base or 6.0 + 2 * int(row[2:])
    return base + 0.5 * batch + 0.001 * batch * context


class World:
    """Stands in for a `MeasuredServer` whose rounds take `round_ms`."""

    def __init__(self, side: str = "speculative", failures: int = 0, has_kv_only: bool = False) -> None:
        self.side = side
        self.has_kv_only = has_kv_only
        self.facts = FACTS
        self.tiers = (0, 1, 3) if side == "speculative" else ()
        self.is_gpu = True
        self.arguments = {
            "chunked_prefill_size": 2048,
            "model_path": "M",
            "speculative_draft_model_path": "D",
        }
        self.asked: list[tuple[int, int, int]] = []
        self.host_bound_attempts = 0
        self._failures = failures

    def room(self, batch: int) -> int:
        return min(6000, 12_000 // batch)

    def prompt(self, tokens: int) -> list[int]:
        return [3] * tokens

    def ask(self, prompt: list[int], new_tokens: int) -> None:
        self.prefilled.append(len(prompt))

    def flush(self) -> None:
        pass

    def run(
        self, phases: list[Phase], batch: int, context: int, new_tokens: int, during: Any = None
    ) -> dict[str, Any]:
        self.asked.append((batch, context, new_tokens))
        if self._failures:
            self._failures -= 1
            raise CellFailed("interrupted")
        self.prefilled: list[int] = []
        if during is not None:
            during()
        found: list[list[float]] = []
        for index, phase in enumerate(phases):
            row = f"off-{phase.off_mode}" if phase.k == 0 else f"k={phase.k}"
            row = "nospec" if phase.k is None else row
            for place in range(min(phase.num_rounds, 50)):
                time = round_ms(row, batch, context + place)
                launch = 99.0 if self.host_bound_attempts and phase.k == 3 else 1.0
                found.append([index, place, time, launch, 0.0, context + place])
        self.host_bound_attempts = max(0, self.host_bound_attempts - 1)
        return {"rounds": found, "prefills": [[n, 1, 3.0 + 0.02 * n, 2.0, 0.0, 1] for n in self.prefilled]}


def swept(tmp_path: Path, world: World, *others: World) -> Measurements:
    measurements = Measurements.open(tmp_path / "m.json", GRID, FACTS)
    for each in (world, *others):
        sweep = Sweep(each, GRID, each.side)  # type: ignore[arg-type]
        for task in sweep.tasks():
            measurements.add(task, sweep.run(task))
    return measurements


OFF_COLUMNS = {"nospec": "nospec", "warm": "off-warm", "skip": "off-skip", "kv-only": "off-kv-only"}


def built(measurements: Measurements) -> ProfileBuilder:
    versions, command = {"draftdial": "0"}, "draftdial profile"
    return ProfileBuilder(measurements, "tiny", (0, 1, 3), World().arguments, command, versions)


def test_the_profile_gives_the_measured_times_back(tmp_path: Path) -> None:
    worlds = World(has_kv_only=True), World("nospec")
    profile = CostProfile.from_document(built(swept(tmp_path, *worlds)).document(), "the test")
    for mode, column in OFF_COLUMNS.items():
        for batch in (1, 4, 8):
            expected = [round_ms(row, batch, 250) for row in (column, "k=1", "k=3")]
            assert 1e3 * profile.round_s(batch, 250, mode) == pytest.approx(expected, rel=1e-3)  # type: ignore[arg-type]
    assert profile.max_running == 10 and profile.chunked_prefill_tokens == 2048
    assert 1e3 * profile.prefill_s(300, "warm") == pytest.approx(9.0)


def test_what_was_not_measured_is_flagged(tmp_path: Path) -> None:
    document = built(swept(tmp_path, World())).document()
    by_row = {row["row"]: row["cells"] for row in document["rows"]}
    assert [cell.get("inferred", False) for cell in by_row["k=3"]] == [False, True, False, False]
    assert by_row["k=3"][1]["round_ms"][0] == pytest.approx(
        round_ms("k=3", 2, by_row["k=3"][1]["context_tokens"][0]), abs=0.05
    )
    assert all(cell["inferred"] for cell in by_row["nospec"])
    assert by_row["nospec"][0]["round_ms"] == by_row["off-skip"][0]["round_ms"]
    [about_nospec] = [entry for entry in document["provenance"] if entry["covers"] == ["nospec"]]
    assert "no measurement" in about_nospec["source"]


def test_held_out_cells_say_how_far_off_the_profile_is(tmp_path: Path) -> None:
    measurements = swept(tmp_path, World())
    builder = built(measurements)
    document = builder.document()
    held_out = measurements.of("held-out", "speculative")
    assert len(held_out) == 2 and {cell["batch"] for cell in held_out} == {3, 6}
    errors = builder.errors(CostProfile.from_document(document, "the test"))
    # A batch of 3 is padded to 4, which costs 0.5 ms more than this world's 3 requests take.
    assert max(map(abs, errors)) < 0.15 and np.mean(errors) > 0.01
    assert f"mean error of {np.mean(np.abs(errors)):.1%}" in document["description"]


def test_host_bound_cells_are_measured_again_and_noted_if_they_stay_so(tmp_path: Path) -> None:
    world = World()
    sweep = Sweep(world, GRID, "speculative")  # type: ignore[arg-type]
    world.host_bound_attempts = 1
    assert sweep.run(Task("cell", "speculative", 4, 100))["rows"]["k=3"]["host_bound"]
    assert len(world.asked) == 2  # once all, once what the host had set
    measurements = swept(tmp_path, World())
    cell = next(cell for cell in measurements.of("cell", "speculative") if cell["batch"] == 8)
    cell["rows"]["k=1"]["host_bound"] = True
    document = built(measurements).document()
    [row] = [row for row in document["rows"] if row["row"] == "k=1"]
    assert ["note" in cell for cell in row["cells"]] == [False, True, False, True]


def test_a_cell_that_fails_is_tried_again_and_then_left_out(tmp_path: Path) -> None:
    task = Task("cell", "speculative", 4, 100)
    assert "rows" in Sweep(World(failures=1), GRID, "speculative").run(task)  # type: ignore[arg-type]
    assert Sweep(World(failures=2), GRID, "speculative").run(task) == {"failed": "interrupted"}  # type: ignore[arg-type]


def test_answers_are_as_long_as_acceptance_makes_them(tmp_path: Path) -> None:
    world = World()
    sweep = Sweep(world, GRID, "speculative")  # type: ignore[arg-type]
    for _ in range(2):
        sweep.run(Task("cell", "speculative", 1, 100))
    worst, learned = (asked[2] for asked in world.asked)
    rounds = 2 * (8 + WARM_UP_ROUNDS)
    assert worst == 64 + rounds * (1 + 1 + 2 + 4) and 64 + rounds * 4 < learned < worst


def test_a_batch_with_little_room_gets_shorter_contexts() -> None:
    world = World()
    sweep = Sweep(world, GRID, "speculative")  # type: ignore[arg-type]
    assert sweep.contexts(8) == [100, 400]
    world.room = lambda batch: 500  # type: ignore[method-assign]
    room = 500 - 64 - 4 * 2 * (8 + WARM_UP_ROUNDS)
    assert sweep.contexts(8) == [room // 4, room]
    world.room = lambda batch: 250  # type: ignore[method-assign]
    assert sweep.contexts(8) == []


def test_every_k_goes_forth_and_back_and_orders_differ() -> None:
    sweep = Sweep(World(), replace(GRID, repeats=3), "speculative")  # type: ignore[arg-type]
    orders = [[str(phase) for phase in sweep._cell_phases()] for _ in range(6)]
    for order in orders:
        assert order[4:8] == order[:4][::-1] and sorted(order[8:]) == sorted(order[:4])
    assert len({tuple(order[:4]) for order in orders}) > 1 and any(o[8:] != o[:4] for o in orders)


def test_measurements_are_continued_and_those_of_another_grid_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    Measurements.open(path, GRID, FACTS).add(Task("switch", "speculative", 1, 100), {"switch_ms": 0.1})
    assert list(Measurements.open(path, GRID, FACTS).results) == ["speculative switch batch 1 context 100"]
    with pytest.raises(UserError, match="another server or with other options"):
        Measurements.open(path, GRID, FACTS | {"device": "CPU"})
    path.write_text("[]")
    with pytest.raises(UserError, match="remove the file"):
        Measurements.open(path, GRID, FACTS)


def test_speculation_is_taken_out_of_arguments() -> None:
    given = "--model-path M --speculative-algorithm EAGLE3 --speculative-eagle-topk=1 --tp 2"
    assert without_speculation([*given.split(), "--speculative-adaptive"]) == [
        "--model-path",
        "M",
        "--tp",
        "2",
    ]


def test_many_captured_batches_are_thinned_by_ratio() -> None:
    captured = [1, 2, 4, 8, *range(12, 257, 4)]
    chosen = _thinned(captured)
    assert len(chosen) <= 16 and chosen[0] == 1 and chosen[-1] == 256 and set(chosen) <= set(captured)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "p.json"], "give the URL of a server"),
        (["http://127.0.0.1:1", "--out", "p.txt"], "ends in .json"),
        (["http://127.0.0.1:1", "--out", "p.json", "--contexts", "100"], "--contexts: found 1"),
        (["http://127.0.0.1:1", "--out", "p.json", "--batches", "0"], "found 0"),
        (["http://127.0.0.1:1", "--out", "p.json"], "cannot reach the server"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
