"""`draftdial validate-sim` on benches that were served: by a simulated server, which must be met exactly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated_bench import CONCURRENCIES, MEANS, SimulatedBenches

from draftdial.controller.cli import main
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.host_time import HostTime
from draftdial.controller.policy_file import PolicyFile
from draftdial.controller.validate_sim_acceptance import GivenAcceptance
from draftdial.engine_patch.acceptance_arrays import AcceptanceArrays


@pytest.fixture
def served(
    make_profile: Callable[..., CostProfile], make_policy_file: Callable[..., PolicyFile], tmp_path: Path
) -> SimulatedBenches:
    profile = make_profile()
    (tmp_path / "server.json").write_text(json.dumps(profile.document))
    return SimulatedBenches(tmp_path, profile, make_policy_file(3), make_policy_file())


def command(
    served: SimulatedBenches, *benches: Path | str, files: tuple[str, ...] = tuple(MEANS)
) -> list[str]:
    words = ["validate-sim", *map(str, benches), "--profile", str(served.folder / "server.json")]
    for name in files:
        words += ["--acceptance", str(served.files[name])]
    return [*words, "--out", str(served.folder / "out")]


def document_of(served: SimulatedBenches) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((served.folder / "out" / "validate.json").read_text())
    return document


def test_three_kinds_of_acceptance_give_one_summary_and_a_best_k_each(
    served: SimulatedBenches, capsys: pytest.CaptureFixture[str]
) -> None:
    benches = [
        served.bench("good.json", "good"),
        served.bench("drifting.json", "poor", "good", span=(5, 9)),
        served.bench("poor.json", "poor"),
    ]
    assert main([*command(served, *benches), "--policy", str(served.policy)]) == 0
    document = document_of(served)
    kinds = ["good", "poor,good 5:9", "poor"]
    assert [
        (cell["acceptance"], cell["arm"], cell["load"], cell["repeats"]) for cell in document["cells"]
    ] == [
        (kind, arm, load, 2)
        for kind in kinds
        for arm in served.deciders
        if arm != "steer"
        for load in CONCURRENCIES
    ]
    for cell in document["cells"]:
        assert list(cell["error"].values()) == pytest.approx([0.0] * 4, abs=1e-9), cell
        assert cell["server"].get("wasted_draft_share") == cell["simulated"].get("wasted_draft_share")
    best = document["best_fixed_k"]
    assert [(row["acceptance"], row["load"]) for row in best] == [
        (a, c) for a in kinds for c in CONCURRENCIES
    ]
    assert {row["server"] for row in best if row["acceptance"] == "good"} == {3}
    assert all(row["same"] and row["loss"] == 0.0 for row in best)
    assert document["summary"]["num_cells"] == 30 and document["summary"]["same_best_k_share"] == 1.0
    out, error = capsys.readouterr()
    assert "poor,good 5:9, C = 4: best fixed k" in out and "left out: steer" in error


def test_a_bench_that_was_cut_short_and_void_runs(
    served: SimulatedBenches, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads(served.bench("whole.json", "good").read_text())
    runs = whole["runs"][:7]  # off in both repeats, one repeat of fixed-1, half a repeat more
    runs[1] |= {"failed": 2, "output_tok_s": 1.0}
    cut = served.folder / "cut.json"
    cut.write_text(json.dumps(whole | {"runs": runs}))
    assert main(command(served, cut)) == 0
    document = document_of(served)
    assert [(cell["arm"], cell["load"], cell["repeats"]) for cell in document["cells"]] == [
        ("off", 1.0, 2),
        ("off", 4.0, 1),
        ("fixed-1", 1.0, 2),
        ("fixed-1", 4.0, 1),
    ]
    assert document["summary"]["throughput_error_max"] < 1e-9
    error = capsys.readouterr().err
    assert "1 runs are void and left out" in error and "policy:mine" in error


def test_further_repeats_join_their_cell_and_a_server_that_is_slower_shows(served: SimulatedBenches) -> None:
    first, again = served.bench("first.json", "good"), served.bench("again.json", "good")
    slower = json.loads(again.read_text())
    for run in slower["runs"]:
        run["output_tok_s"] *= 0.5
    again.write_text(json.dumps(slower))
    assert main(command(served, first, again)) == 0
    document = document_of(served)
    assert {cell["repeats"] for cell in document["cells"]} == {4}
    assert document["summary"]["throughput_error_mean"] == pytest.approx(1 / 0.75 - 1)
    assert document["summary"]["throughput_error_mean_fixed_k"] == pytest.approx(1 / 0.75 - 1)
    assert len(document["summary"]["worst_cells"]) == 5


def test_a_busy_host_is_told_from_the_simulators_error(
    served: SimulatedBenches, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(served, served.bench("quick.json", "good"))) == 0
    summary = document_of(served)["summary"]
    assert summary["throughput_error_mean_on_its_host"] is summary["same_best_k_share_on_its_host"] is None
    fastest_ms = 1e3 * float(served.profile.round_s(1, 20, "skip").min())
    prefill_ms = 1e3 * float(served.profile.prefill_s(20, "skip"))
    hosts = [  # another one in each repeat
        HostTime(0.5 * fastest_ms, 3 * fastest_ms, 4 * prefill_ms),
        HostTime(2 * fastest_ms, 2 * fastest_ms, 9 * prefill_ms),
    ]
    served.host_of = lambda arm, repeat: hosts[repeat]
    path = served.bench("bench.json", "good")
    capsys.readouterr()
    assert main(command(served, path)) == 0
    document = document_of(served)
    assert document["summary"]["throughput_error_mean"] > 0.2
    assert document["summary"]["throughput_error_mean_on_its_host"] == pytest.approx(0.0, abs=1e-9)
    assert document["summary"]["same_best_k_share_on_its_host"] == 1.0
    told = "on a host as busy as each run met: throughput 0.0%, same best fixed k: 100%"
    assert told in capsys.readouterr().out


def test_what_a_run_does_not_say_of_its_host_the_others_do(served: SimulatedBenches) -> None:
    fastest_ms = 1e3 * float(served.profile.round_s(1, 20, "skip").min())
    served.host_of = lambda arm, repeat: HostTime(2 * fastest_ms, 3 * fastest_ms, None)
    path = served.bench("bench.json", "good")
    bench = json.loads(path.read_text())
    for run in bench["runs"]:
        if run["arm"] == "off":
            del run["host_ms_at_k"]
    path.write_text(json.dumps(bench))
    assert main(command(served, path)) == 0
    summary = document_of(served)["summary"]
    assert summary["throughput_error_mean_on_its_host"] == pytest.approx(0.0, abs=1e-9)


def test_ratios_on_an_equally_busy_host(served: SimulatedBenches) -> None:
    """`steer` met a host half as busy as `fixed-3` did; in the second bench both met their average."""
    fastest_ms = 1e3 * float(served.profile.round_s(1, 20, "skip").min())
    busy_ms = {"steer": 2 * fastest_ms, "fixed-3": 4 * fastest_ms}

    def ran(*words: str | Path) -> subprocess.CompletedProcess[str]:
        script = Path(__file__).parent / "gpu" / "equal_host.py"
        given = ["--profile", str(served.folder / "server.json"), *map(str, words)]
        given += [word for file in served.files.values() for word in ("--acceptance", str(file))]
        return subprocess.run([sys.executable, str(script), *given], capture_output=True, text=True)

    def ratios(path: Path) -> list[list[str]]:
        done = ran("--policy", served.own, path)
        assert done.returncode == 0, done.stderr
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
        return [[row[1], row[3], row[5]] for row in rows]

    def bench(host_of: Callable[[str, int], HostTime]) -> Path:
        """Of these two arms."""
        served.host_of = host_of
        path = served.bench("bench.json", "good", arms=list(busy_ms))
        document = json.loads(path.read_text())
        document["runs"] = [run for run in document["runs"] if run["arm"] in busy_ms]
        path.write_text(json.dumps(document))
        return path

    unequal = ratios(bench(lambda arm, repeat: HostTime(None, busy_ms.get(arm), None)))
    equal = ratios(bench(lambda arm, repeat: HostTime(None, 3 * fastest_ms, None)))
    assert [row[0] for row in equal] == ["1", "4", "all 2"]
    assert all(measured == corrected for _, measured, corrected in equal)
    assert all(measured != corrected for _, measured, corrected in unequal)
    assert [row[2] for row in unequal] == [row[2] for row in equal]
    without_policy = ran(served.folder / "bench.json")
    assert without_policy.returncode == 1 and without_policy.stderr.count("\n") == 1
    assert "bench.json: steer: not simulated" in without_policy.stderr


def changed(served: SimulatedBenches, **options: Any) -> Path:
    """A bench of other options than those that were served."""
    document = json.loads(served.bench("bench.json", "good").read_text())
    document["options"] |= options
    (served.folder / "bench.json").write_text(json.dumps(document))
    return served.folder / "bench.json"


@pytest.mark.parametrize(
    ("make", "files", "complaint"),
    [
        (lambda served: changed(served, rates=[2.0]), tuple(MEANS), "has open loops"),
        (lambda served: changed(served, domains=[]), tuple(MEANS), "has no --domains"),
        (lambda served: changed(served, stop_at_eos=True), tuple(MEANS), "--stop-at-eos"),
        (
            lambda served: changed(served, prompts="gone.jsonl"),
            tuple(MEANS),
            "drawn again in this folder: prompts gone.jsonl",
        ),
        (lambda served: changed(served, per_slot=7), tuple(MEANS), "found list .*, which was served"),
        (
            lambda served: changed(served),
            ("good", "poor"),
            r"found good, poor, of sha256 [0-9a-f]{12}, allowed: what .* replays: 8 of good",
        ),
        (lambda served: changed(served), ("poor",), "--acceptance: found poor, allowed: good, too"),
        (lambda served: changed(served), (), "--acceptance: none given"),
        (lambda served: served.bench("b.json", "good", options={}), ("good",), "an older draftdial wrote it"),
        (lambda served: served.bench("b.json", "good", runs=[]), ("good",), "0 runs, none of them without"),
        (
            lambda served: served.bench("b.json", "good", runs=[{}]),
            ("good",),
            "not as `draftdial bench` writes",
        ),
        (
            lambda served: served.bench("b.json", "good", server={"status": []}),
            ("good",),
            "not as `draftdial bench` writes|older draftdial",
        ),
        (
            lambda served: served.bench("b.json", "good", arms=["fixed-x"]),
            ("good",),
            "not as `draftdial bench` writes",
        ),
        (
            lambda served: served.bench("b.json", "good", policies=["policy:mine"]),
            ("good",),
            "not as `draftdial bench` writes",
        ),
        (lambda served: served.bench("b.json", "good", schema="x"), ("good",), "neither a decision log nor"),
    ],
)
def test_a_bench_that_cannot_be_simulated_is_one_line(
    served: SimulatedBenches,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[SimulatedBenches], Path],
    files: tuple[str, ...],
    complaint: str,
) -> None:
    assert main(command(served, make(served), files=files)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(complaint, error), error
    assert not (served.folder / "out").exists()


def test_files_of_acceptance_may_come_in_any_order(served: SimulatedBenches) -> None:
    assert main(command(served, served.bench("good.json", "good"), files=tuple(reversed(MEANS)))) == 0
    assert document_of(served)["summary"]["throughput_error_max"] < 1e-9


def test_a_domain_that_the_server_does_not_replay_is_refused(served: SimulatedBenches) -> None:
    acceptance = GivenAcceptance([str(served.files[name]) for name in ("poor", "good")])
    replayed = str(AcceptanceArrays.read([("good", served.files["good"])]))
    acceptance.check(replayed, "a server", ("good",))
    with pytest.raises(UserError, match="found poor, good, of sha256"):
        acceptance.check(replayed, "a server", ("good", "poor"))


def test_more_requests_than_the_profile_has_batches_for_are_warned_of(
    served: SimulatedBenches, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, path = served.bench("bench.json", "good"), served.folder / "server.json"
    assert main(command(served, bench)) == 0
    assert "batches up to" not in capsys.readouterr().err
    smaller = json.loads(path.read_text())
    smaller["captured_batches"] = [1, 2]
    for row in smaller["rows"]:
        row["cells"] = [cell for cell in row["cells"] if cell["batch"] <= 2]
    path.write_text(json.dumps(smaller))
    assert main(command(served, bench)) == 0
    assert "warning: C = 4: profile tiny has batches up to 2; beyond, " in capsys.readouterr().err


def policies(*paths: Path) -> list[str]:
    return [word for path in paths for word in ("--policy", str(path))]


def test_the_servers_own_policy_is_the_arm_steer(
    served: SimulatedBenches, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = served.bench("bench.json", "good")
    assert main([*command(served, bench), *policies(served.own)]) == 0
    cells = document_of(served)["cells"]
    assert {cell["arm"] for cell in cells} == set(served.deciders) - {"policy:mine"}
    for cell in cells:
        assert list(cell["error"].values()) == pytest.approx([0.0] * 4, abs=1e-9), cell
    by_arm = {cell["arm"]: cell["simulated"] for cell in cells if cell["load"] == 4.0}
    assert all(by_arm["steer"] != figures for arm, figures in by_arm.items() if arm != "steer")
    assert "left out: policy:mine\n" in capsys.readouterr().err


def test_a_file_is_told_by_what_is_in_it(
    served: SimulatedBenches, make_policy_file: Callable[..., PolicyFile], capsys: pytest.CaptureFixture[str]
) -> None:
    bench = served.bench("bench.json", "good")
    (served.folder / "other").mkdir()
    renamed = served.policy.rename(served.folder / "other" / served.own.name)
    served.policy.write_bytes(make_policy_file(1).data)
    assert main([*command(served, bench), *policies(served.policy)]) == 2
    error = capsys.readouterr().err
    assert re.search(
        r"--policy: found \S+/mine.safetensors of sha256 \w{12}, allowed: what is an arm of \S+: "
        r"policy:mine of sha256 \w{12}, steer of sha256 \w{12}\n$",
        error,
    ), error
    assert main([*command(served, bench), *policies(renamed, served.own)]) == 0
    assert {cell["arm"] for cell in document_of(served)["cells"]} == set(served.deciders)


def test_the_server_may_have_another_policy_in_another_bench(served: SimulatedBenches) -> None:
    """That of the second had the policy that was deployed to that of the first."""
    first = served.bench("first.json", "good")
    document = json.loads(first.read_text())
    status = document["server"]["status"] | {"policy_sha256": document["policies"]["policy:mine"]}
    mine = [run | {"arm": "steer"} for run in document["runs"] if run["arm"] == "policy:mine"]
    second = served.bench("second.json", "good", server=document["server"] | {"status": status}, runs=mine)
    assert main([*command(served, first, second), *policies(served.own, served.policy)]) == 0
    found = document_of(served)
    repeats = {cell["arm"]: cell["repeats"] for cell in found["cells"]}
    assert repeats == dict.fromkeys(served.deciders, 2) | {"steer": 4}
    assert found["summary"]["throughput_error_max"] == pytest.approx(0.0, abs=1e-9)
    assert main([*command(served, first, second), *policies(served.own)]) == 0
    repeats = {cell["arm"]: cell["repeats"] for cell in document_of(served)["cells"]}
    assert repeats == dict.fromkeys(served.deciders.keys() - {"policy:mine"}, 2)


def test_an_arm_that_was_left_out_of_a_repeat_is_compared_over_the_others(served: SimulatedBenches) -> None:
    bench = served.bench("bench.json", "good")
    document = json.loads(bench.read_text())
    document["options"]["drop"] = 0.25
    document["runs"] = [
        run for run in document["runs"] if (run["arm"], run["load"], run["repeat"]) != ("off", 4.0, 1)
    ]
    bench.write_text(json.dumps(document))
    assert main(command(served, bench)) == 0
    found = document_of(served)
    repeats = {(cell["arm"], cell["load"]): cell["repeats"] for cell in found["cells"]}
    assert repeats.pop(("off", 4.0)) == 1 and set(repeats.values()) == {2}
    assert found["summary"]["throughput_error_max"] < 1e-9
    assert [row["same"] for row in found["best_fixed_k"]] == [True, True]


def test_turns_are_compared_by_their_throughput(served: SimulatedBenches) -> None:
    bench = served.bench("bench.json", "good")
    document = json.loads(bench.read_text())
    document["options"]["switchback"] = 0.5
    named = ("arm", "workload", "mode", "load", "seed", "list", "failed", "output_tok_s")
    document["runs"] = [  # of the first list two turns, which share a simulation
        {name: run[name] for name in named}
        | {"repeat": 2 * run["repeat"] + half, "requests": 3, "window_s": 90 / run["output_tok_s"]}
        for run in document["runs"]
        for half in (0, 1)
        if run["repeat"] == 0
    ]
    bench.write_text(json.dumps(document))
    assert main(command(served, bench)) == 0
    found = document_of(served)
    assert {cell["repeats"] for cell in found["cells"]} == {2}
    errors = {
        load: [abs(cell["error"]["output_tok_s"]) for cell in found["cells"] if cell["load"] == load]
        for load in CONCURRENCIES
    }
    assert max(errors[1]) < 1e-9, "as long a list as was served"
    assert 1e-9 < max(errors[4]) < 0.2, "a longer one, with less of it spent on filling and draining"
    assert found["summary"]["e2e_error_mean"] is None
    document["options"]["switchback"] = None
    bench.write_text(json.dumps(document))
    assert main(command(served, bench)) == 2, "runs have latencies"


def test_a_bench_counts_once(served: SimulatedBenches, capsys: pytest.CaptureFixture[str]) -> None:
    path = served.bench("bench.json", *MEANS)
    assert main(command(served, path, path)) == 2
    assert "validate-sim: file: found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["missing.log"], "missing.log: no such file, and no URL, which is written http://HOST:PORT"),
        (["folder"], "folder: a folder, allowed: a file, such as its bench.json"),
        (["pack.json"], "write each of its `benches` into a bench.json of its own (low, high)"),
        (["text.log"], "text.log: neither a decision log nor a bench.json"),
        (["text.log", "http://127.0.0.1:1"], "allowed: one URL, one log, or one bench.json or more"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1: cannot reach the server"),
    ],
)
def test_what_is_named_must_be_one_of_the_three(
    served: SimulatedBenches,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(served.folder)
    (served.folder / "text.log").write_text("round 1\n")
    (served.folder / "pack.json").write_text('{"what": "two", "benches": {"low": {}, "high": {}}}')
    (served.folder / "folder").mkdir()
    assert main(command(served, *words)) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
