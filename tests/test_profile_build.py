"""From measured rounds to a checked profile: means, the grid, the document and its held-out error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cell_timings import (
    WARM_UP_ROUNDS,
    accepted_share,
    prefill_timings,
    switch_timings,
    timings,
)
from draftdial.controller.cli import main
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.launched_server import without_speculation
from draftdial.controller.measured_server import CellFailed
from draftdial.controller.profile_build import SIDES, ProfileBuilder
from draftdial.controller.profile_measurements import Grid, Measurements, Task
from draftdial.controller.profile_server import _thinned
from draftdial.controller.profile_sweep import PREFILLS, Sweep
from draftdial.controller.profile_warnings import warnings_of
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
    [timing] = timings([Phase(3, 18)], phase).values()
    assert timing["period_ms"] == pytest.approx(10 + 1 / 9)
    assert timing["rounds"] == 10 and timing["context"] == 64.0


def test_rounds_that_write_for_others_count() -> None:
    times = [[0, WARM_UP_ROUNDS + i, 14.0 if i % 4 == 3 else 13.0, 1.0, 0.0, 60.0] for i in range(20)]
    [timing] = timings([Phase(0, 28, "kv-only")], times).values()
    assert timing["period_ms"] == 13.25


def test_every_kind_has_a_timing_and_a_context_of_its_own() -> None:
    early = [[0, WARM_UP_ROUNDS + i, 10.0, 1.0, 0.0, 100.0] for i in range(20)]
    late = [[1, WARM_UP_ROUNDS + i, 14.0, 1.0, 0.0, 200.0] for i in range(20)]
    found = timings([Phase(0, 28), Phase(0, 28, "skip")], early + late)
    assert {row: (timing["period_ms"], timing["context"]) for row, timing in found.items()} == {
        "off-warm": (10.0, 100.0),
        "off-skip": (14.0, 200.0),
    }


def test_turns_are_compared_with_both_tiers() -> None:
    phases = [Phase(1, 17), Phase(3, 17), *[Phase(k, 1) for _ in range(4) for k in (1, 3)]]
    steady = [[p, WARM_UP_ROUNDS, ms, 0, 0, 0] for p, ms in ((0, 6.0), (1, 10.0))]
    turns = [[2 + i, 0, ms, 0, 0, 0] for i, ms in enumerate([6.5, 10.5] * 4)]
    found = switch_timings(phases, steady + turns)
    assert (found["steady"], found["in turn"]) == ({"period_ms": 8.0}, {"period_ms": 8.5})


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
    [knot] = prefill_timings(seen, (64, 256)).values()
    assert (knot["tokens"], knot["period_ms"], knot["count"]) == (64, 6.0, 2)


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
        self.arguments = {
            "chunked_prefill_size": 2048,
            "model_path": "M",
            "speculative_draft_model_path": "D",
        }
        self.asked: list[tuple[int, int, int]] = []
        self.prefilled: list[int] = []
        self.num_drafted = 0
        """Prefills of each task that run the draft behind rounds that leave it out, besides the first."""
        self._num_asked = 0
        self.number = 0
        """Of the pass."""
        self.slowness: Callable[[int, int, str], float] = lambda number, batch, row: 1.0
        self.idle_ms: Callable[[int, int, str], float] = lambda number, batch, row: 0.0
        self._failures = failures

    def room(self, batch: int) -> int:
        return min(6000, 12_000 // batch)

    def prompt(self, tokens: int) -> list[int]:
        return [3] * tokens

    def ask(self, prompt: list[int], new_tokens: int) -> None:
        self.prefilled.append(len(prompt))
        self._num_asked += 1

    def num_kv_only_prefills(self) -> int:
        return self._num_asked - (self.num_drafted if len(self.prefilled) > 1 else 0)

    def flush(self) -> None:
        pass

    def run(
        self, phases: list[Phase], batch: int, context: int, new_tokens: int, during: Any = None
    ) -> dict[str, Any]:
        self.asked.append((batch, context, new_tokens))
        if self._failures:
            self._failures -= 1
            raise CellFailed("interrupted")
        self.prefilled = []
        if during is not None:
            during()
        found: list[list[float]] = []
        for index, phase in enumerate(phases):
            row = f"off-{phase.off_mode}" if phase.k == 0 else f"k={phase.k}"
            row = "nospec" if phase.k is None else row
            for place in range(min(phase.num_rounds, 50)):
                grown = context + len(found)
                time = round_ms(row, batch, grown) * self.slowness(self.number, batch, row)
                idle_ms = self.idle_ms(self.number, batch, row)
                found.append([index, place, time + idle_ms, 1.0, idle_ms, grown])
        slowness = self.slowness(self.number, batch, "prefill")
        share = 0.9 if phases[0].off_mode == "kv-only" else 1.0
        prefills = [[n, 1, (3.0 + 0.02 * n) * slowness * share, 2.0, 0.0, 1] for n in self.prefilled]
        return {"rounds": found, "prefills": prefills}


def swept(tmp_path: Path, *worlds: World) -> Measurements:
    measurements = Measurements.open(tmp_path / "m.json", GRID, FACTS)
    for world in worlds:
        sweep = Sweep(world, GRID, world.side)  # type: ignore[arg-type]
        for world.number, tasks in enumerate(sweep.passes(measurements)):
            for task in tasks:
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
    assert 1e3 * profile.prefill_s(300, "kv-only") == pytest.approx(9.0)
    assert 1e3 * profile.prefill_s(300, "kv-only", leaves_draft_out=True) == pytest.approx(8.1)
    [entry] = [entry for entry in profile.document["provenance"] if entry["covers"] == ["prefill"]]
    assert "left the draft out" in entry["measured"] and entry["inferred"] == "Nothing."


def test_both_kinds_of_prefill_are_measured_at_the_same_sizes_where_there_are_two(tmp_path: Path) -> None:
    measurements = swept(tmp_path, World(has_kv_only=True))
    [drafted] = measurements.of("prefill", "speculative")
    [without] = measurements.of("kv-only prefill", "speculative")
    assert [*without.rows] == [*drafted.rows] == [f"{n} tokens" for n in (64, 256, 512)]
    assert {timing["count"] for timing in without.rows.values()} == {PREFILLS}
    assert built(measurements).document()["prefill"].keys() == {"nospec", "speculative", "kv-only"}
    (tmp_path / "m.json").unlink()
    measurements = swept(tmp_path, World())
    assert measurements.of("kv-only prefill", "speculative") == []
    assert built(measurements).document()["prefill"].keys() == {"nospec", "speculative"}


@pytest.mark.parametrize("num_drafted", [2, 3])
def test_prefills_that_ran_the_draft_do_not_pass_for_such_that_left_it_out(
    tmp_path: Path, num_drafted: int
) -> None:
    world = World(has_kv_only=True)
    world.num_drafted = num_drafted
    document = built(swept(tmp_path, world)).document()
    is_void = num_drafted > PREFILLS // 2
    assert ("kv-only" in document["prefill"]) == (not is_void)
    [entry] = [entry for entry in document["provenance"] if entry["covers"] == ["prefill"]]
    assert ("as if they ran it" in entry["inferred"]) == is_void
    failures = document["provenance"][0]["inferred"]
    assert failures.endswith("Cells that failed: 3 of 15 prefills ran the draft.") == is_void


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
    assert len(held_out) == 2 and {cell.task.batch for cell in held_out} == {3, 6}
    errors = builder.errors(CostProfile.from_document(document, "the test"))
    # A batch of 3 is padded to 4, which costs 0.5 ms more than this world's 3 requests take.
    assert max(map(abs, errors)) < 0.15 and np.mean(errors) > 0.01
    assert f"mean error of {np.mean(np.abs(errors)):.1%}" in document["description"]


def test_a_host_that_is_slow_for_a_pass_leaves_no_trace(tmp_path: Path) -> None:
    quiet = built(swept(tmp_path, World())).document()
    (tmp_path / "m.json").unlink()
    world = World()
    world.slowness = lambda number, batch, row: 1.3 if number == 0 else 1.0
    measurements = swept(tmp_path, world)
    assert built(measurements).document() == quiet
    assert {len(result.repeats) for result in measurements.results()} == {3}
    assert warnings_of(measurements) == []


def test_the_last_pass_is_over_what_differs_and_what_still_does_is_told(tmp_path: Path) -> None:
    slowness = {(4, "k=1"): (1.2, 1.0, 1.02), (8, "k=3"): (1.0, 1.2, 1.1), (1, "off-skip"): (1.04, 1.0, 1.0)}
    world = World()
    world.slowness = lambda number, batch, row: slowness.get((batch, row), (1.0, 1.0, 1.0))[number]
    measurements = swept(tmp_path, world)
    assert {result.task.batch for result in measurements.results() if len(result.repeats) > 2} == {4, 8}
    assert len(world.asked) == 2 * 10 + 4
    [line] = warnings_of(measurements)
    assert line == (
        "speculative: the two fastest repeats are more than 5% apart in 2 of 37 timings, all in "
        f"{tmp_path / 'm.json'}; worst cell batch 8 context 100, k=3: 17.15 and 18.86 ms"
    )
    document = built(measurements).document()
    by_row = {row["row"]: row["cells"] for row in document["rows"]}
    assert ["note" in cell for cell in by_row["k=3"]] == [False, True, False, True]
    assert ["note" in cell for cell in by_row["k=1"]] == [False, True, False, False]
    assert "Still apart, kept and noted: k=3 at batch 8." in document["provenance"][0]["inferred"]


def test_what_the_host_sets_is_measured_again_and_told_and_no_error_of_the_profile(tmp_path: Path) -> None:
    idle_ms = {(1, "k=1"): (0.3, 0.3, 0.0), (8, "k=3"): (0.8, 0.8, 0.8), (3, "k=1"): (0.9, 0.9, 0.9)}
    world = World()
    world.idle_ms = lambda number, batch, row: idle_ms.get((batch, row), (0.0, 0.0, 0.0))[number]
    measurements = swept(tmp_path, world)
    again = {(r.task.kind, r.task.batch) for r in measurements.results() if len(r.repeats) > 2}
    assert again == {("cell", 1), ("cell", 8), ("held-out", 3)}
    [line] = warnings_of(measurements)
    assert line == (
        f"speculative: the host set 3 of 37 timings, all in {tmp_path / 'm.json'}; worst held-out batch 3 "
        "context 250, k=1: the GPU stood idle before it for 0.90 of 11.23 ms"
    )
    builder = built(measurements)
    document = builder.document()
    noted = {
        (row["row"], cell["batch"])
        for row in document["rows"]
        for cell in row["cells"]
        if "the host set it" in cell.get("note", "")
    }
    assert noted == {("k=3", 8)}
    assert "Set by the host, kept and noted: k=3 at batch 8." in document["provenance"][0]["inferred"]
    assert document["description"].endswith(" 1 more, which the host set, are left out.")
    assert len(builder.errors(CostProfile.from_document(document, "it"))) == 2 * 4 - 1


def test_each_side_has_a_line_of_its_own_for_each_cause(tmp_path: Path) -> None:
    worlds = [World(side) for side in SIDES]
    for world in worlds:
        world.slowness = lambda number, batch, row: (1.0, 1.1, 1.1)[number] if batch == 8 else 1.0
        world.idle_ms = lambda number, batch, row: float(batch == 4)
    lines = warnings_of(swept(tmp_path, *worlds))
    assert [line.split(" timings, ")[0] for line in lines] == [
        "speculative: the two fastest repeats are more than 5% apart in 11 of 37",
        "nospec: the two fastest repeats are more than 5% apart in 5 of 11",
        "speculative: the host set 8 of 37",
        "nospec: the host set 2 of 11",
    ]


def test_without_a_gpu_all_times_are_the_hosts(tmp_path: Path) -> None:
    world = World()
    world.idle_ms = lambda number, batch, row: 1.0
    measurements = swept(tmp_path, world)
    measurements.document["facts"] = FACTS | {"clock": "host"}
    assert not any(measurements.host_set(result) for result in measurements.results())


def test_a_sweep_goes_on_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    whole = swept(tmp_path, World())
    (tmp_path / "m.json").unlink()
    measurements, sweep = (
        Measurements.open(tmp_path / "m.json", GRID, FACTS),
        Sweep(World(), GRID, "speculative"),
    )  # type: ignore[arg-type]
    first, second, _ = sweep.passes(measurements)
    for task in [*first, *second[:3]]:
        measurements.add(task, sweep.run(task))
    world = World()
    again = swept(tmp_path, world)
    assert len(world.asked) == 10 - 3 and {len(result.repeats) for result in again.results()} == {2}
    assert built(again).document() == built(whole).document()


def test_a_cell_that_fails_is_measured_once_more_in_the_end(tmp_path: Path) -> None:
    measurements = swept(tmp_path, World(failures=2))
    results = measurements.results()
    assert [len(result.repeats) for result in results] == [3, 3, *[2] * (len(results) - 2)]
    assert results[0].repeats[0] == {"failed": "interrupted"} and results[0].rows and not results[0].failure


def test_what_always_fails_is_left_out_and_told(tmp_path: Path) -> None:
    measurements = swept(tmp_path, World())
    result = next(result for result in measurements.of("cell", "speculative") if result.task.batch == 4)
    result.repeats[:] = [{"failed": "ended"}]
    document = built(measurements).document()
    assert document["provenance"][0]["inferred"].endswith("Cells that failed: ended.")
    by_row = {row["row"]: row["cells"] for row in document["rows"]}
    assert by_row["k=3"][2]["inferred"]  # one context is left, which makes no line


def test_a_server_without_a_prefill_of_a_timed_size_has_the_other_ones(tmp_path: Path) -> None:
    plain = World("nospec")
    plain.arguments["chunked_prefill_size"] = 32
    document = built(swept(tmp_path, World(), plain)).document()
    assert document["provenance"][0]["inferred"].endswith("Cells that failed: none.")
    assert document["prefill"]["nospec"] == document["prefill"]["speculative"] != []


def test_answers_are_as_long_as_acceptance_makes_them(tmp_path: Path) -> None:
    world = World()
    sweep = Sweep(world, GRID, "speculative")  # type: ignore[arg-type]
    for _ in range(2):
        sweep.run(Task("cell", "speculative", 1, 100))
    worst, learned = (asked[2] for asked in world.asked)
    rounds = 8 + WARM_UP_ROUNDS
    assert worst == 64 + rounds * (1 + 1 + 2 + 4) and 64 + rounds * 4 < learned < worst


def test_a_batch_with_little_room_gets_shorter_contexts() -> None:
    world = World()
    sweep = Sweep(world, GRID, "speculative")  # type: ignore[arg-type]
    assert sweep.contexts(8) == [100, 400]
    world.room = lambda batch: 500  # type: ignore[method-assign]
    room = 500 - 64 - 4 * (8 + WARM_UP_ROUNDS)
    assert sweep.contexts(8) == [room // 4, room]
    world.room = lambda batch: 200  # type: ignore[method-assign]
    assert sweep.contexts(8) == []


def test_a_row_has_its_own_contexts_as_far_apart_as_the_grids(tmp_path: Path) -> None:
    measurements = swept(tmp_path, World())
    cells = {(cell.task.batch, cell.task.context): cell for cell in measurements.of("cell", "speculative")}
    for batch in GRID.batches:
        near, far = (cells[batch, context] for context in GRID.contexts)
        grown = [timing["context"] - 100 for timing in near.rows.values()]
        assert len(set(grown)) == 4 and min(grown) > 0
        assert grown == [far.rows[row]["context"] - 400 for row in near.rows]
        assert [*near.rows] == [*far.repeats[1]["rows"]]
    assert len({tuple(cell.rows) for cell in cells.values()}) > 1
    document = built(measurements).document()
    by_row = {row["row"]: {cell["batch"]: cell for cell in row["cells"]} for row in document["rows"]}
    assert by_row["k=3"][4]["context_tokens"] == [
        round(cells[4, context].rows["k=3"]["context"]) for context in GRID.contexts
    ]


def test_measurements_are_continued_and_those_of_another_grid_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    task, repeat = Task("switch", "speculative", 1, 100), {"rows": {"steady": {"period_ms": 1.0}}}
    for _ in range(2):
        Measurements.open(path, GRID, FACTS).add(task, repeat)
    [result] = Measurements.open(path, GRID, FACTS).results()
    assert (result.task, result.repeats) == (task, [repeat, repeat])
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
        (["http://127.0.0.1:1", "--out", "p.json", "--off-mode", "kv-only"], "--off-mode: not with a URL"),
        (["--out", "p.json", "--off-mode", "skip", "--", "--model-path", "m"], "choose from 'kv-only'"),
        (["http://127.0.0.1:1", "--out", "p.json"], "cannot reach the server"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
