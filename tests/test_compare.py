"""The whole comparison on tiny cells: pairing, seeds, schema, and that nothing depends on who runs what."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftdial.controller.compare import Contest, compare, contest_of
from draftdial.controller.compare_command import add_parser
from draftdial.controller.comparison_schema import validate
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.plots import Trace
from draftdial.controller.policy_export import rule_file
from draftdial.controller.policy_file import read, write
from draftdial.controller.rivals import rival_names
from draftdial.controller.rule_cards import rule_from_card
from draftdial.controller.rules import Threshold
from draftdial.controller.tune import progress_bar
from draftdial.envs.contenders import Exported, Server
from draftdial.envs.simulated_engine import ServerOptions
from draftdial.envs.suite import Acceptance, Extent, Suite, make_cells
from draftdial.envs.trials import Trial, Workers, make_batches, run_trial

Document = dict[str, Any]
TINY = Extent(seeds=2, low_rounds=60, high_rounds=5, switch_requests=10, open_requests=60, drift_share=0.01)
SUITE = replace(Suite.load("demo"), max_seeds=3, report=replace(TINY, seeds=3), tune=TINY)
PROFILE = CostProfile.load("seeds-pcie")
"""Two tiers, hence few rivals."""


def export(folder: Path, name: str, profile: CostProfile = PROFILE, **card: Any) -> Path:
    rule = rule_from_card(card, profile.tiers, profile, "warm")
    path = folder / f"{name}.safetensors"
    write(path, rule_file(rule, profile, "warm", name=name, fallback=Threshold(profile.tiers, 0, 0)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies")
    export(folder, "always", kind="fixed", k=PROFILE.tiers[1])
    export(folder, "greedy", kind="greedy")
    return folder


def contest(folder: Path, *names: str, **others: Any) -> Contest:
    files = {f"learned:{name}": read(folder / f"{name}.safetensors") for name in names}
    if len(names) == 1:
        files = {"learned": files.popitem()[1]}
    server = Server(PROFILE, ServerOptions(mid_flight=True))
    return Contest(files, server, ("drift5", "poisson"), Acceptance(), others.pop("suite", SUITE), **others)


def play(what: Contest, folder: Path, jobs: int = 1) -> tuple[Document, Trace]:
    with Workers(jobs) as workers, progress_bar("compare") as bar:
        return compare(what, workers, bar, folder / "tuned_rules.json")


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Document, Trace]:
    """Both policies against all rivals, in two processes. The tuned rules lie in `folder` afterwards."""
    return play(contest(folder, "always", "greedy"), folder, jobs=2)


def row_of(document: Document, policy: str, workload: str, load: float | None = None) -> Document:
    rows = [
        r for r in document["cells"] if (r["policy"], r["workload"], r["load"]) == (policy, workload, load)
    ]
    assert len(rows) == 1
    return dict(rows[0])


def test_every_cell_has_every_contender_and_the_document_is_whole(whole: tuple[Document, Trace]) -> None:
    document = validate(json.loads(json.dumps(whole[0], allow_nan=False)))
    names = {"learned:always", "learned:greedy", "best_reference", *rival_names(PROFILE)}
    for workload, load in (("drift5", None), *(("poisson", load) for load in (0.5, 0.8, 0.9))):
        rows = [r for r in document["cells"] if (r["workload"], r["load"]) == (workload, load)]
        assert {row["policy"] for row in rows} == names
        assert all(row["n_seeds"] == 3 and row["off_mode"] == "warm" for row in rows)
    assert row_of(document, "no-spec", "drift5")["metrics"]["time_share_at_k"] == {"0": 1.0}
    assert row_of(document, "off", "drift5")["metrics"]["wasted_draft_share"] is None
    assert set(document["tuned_rules"]) == {"drift5", "poisson"}
    assert set(document["hashes"]["policies"]) == {"learned:always", "learned:greedy"}
    assert document["versions"]["suite"] == "demo"


def test_a_policy_that_is_a_rival_equals_it_exactly(whole: tuple[Document, Trace]) -> None:
    name = f"fixed-{PROFILE.tiers[1]}"
    for workload, load in (("drift5", None), ("poisson", 0.9)):
        policy, rival = (row_of(whole[0], n, workload, load) for n in ("learned:always", name))
        assert policy["metrics"] == rival["metrics"] and policy["rounds"] == rival["rounds"]
        versus = policy["vs"][name]
        assert versus["verdict"] == "not-worse"
        for ratio in ("e2e_mean_ratio", "output_tok_s_ratio"):
            assert versus[ratio] == {"value": 1.0, "ci95": [1.0, 1.0], "simultaneous_upper": 1.0}


def test_no_reference_beats_the_best_reference(whole: tuple[Document, Trace]) -> None:
    for row in whole[0]["cells"]:
        if row["policy"].startswith("learned"):
            headline = "e2e_mean_ratio" if row["mode"] == "open" else "output_tok_s_ratio"
            against = {rival: versus[headline]["value"] for rival, versus in row["vs"].items()}
            members = ("informed", "greedy", "threshold", f"fixed-{PROFILE.tiers[1]}")
            assert against["best_reference"] >= max(against[member] for member in members) - 1e-12


def test_reporting_and_tuning_use_the_seeds_that_are_written_down(whole: tuple[Document, Trace]) -> None:
    ranges = whole[0]["seed_ranges"]
    assert set(ranges["reporting"]) == {"drift5", "poisson 0.5", "poisson 0.8", "poisson 0.9"}
    assert all(last - first == 2 and first >= 3_000_000 for first, last in ranges["reporting"].values())
    assert all(last - first == 1 and last < 2_000_000 for first, last in ranges["tuning"].values())


def test_the_trace_shows_drift5_from_its_start(whole: tuple[Document, Trace]) -> None:
    trace = whole[1]
    assert trace.title == "learned:always on seeds-pcie, drift5"
    assert np.all(np.diff(trace.time_s) > 0) and set(trace.k.tolist()) == {PROFILE.tiers[1]}
    assert len(trace.time_s) == len(trace.k) == len(trace.num_running) and trace.num_running.max() > 8


def test_the_number_of_workers_changes_nothing(
    folder: Path, tmp_path: Path, whole: tuple[Document, Trace]
) -> None:
    document, trace = play(contest(folder, "always", "greedy"), tmp_path, jobs=1)
    assert document == whole[0]
    assert all(np.array_equal(value, vars(whole[1])[name]) for name, value in vars(trace).items())


def test_only_the_rivals_asked_for_run_and_seeds_are_added_where_verdicts_are_open(
    folder: Path, whole: tuple[Document, Trace]
) -> None:
    suite = replace(SUITE, max_seeds=11)
    document, _ = play(contest(folder, "greedy", suite=suite, against=("off", "clairvoyant")), folder)
    assert {row["policy"] for row in document["cells"]} == {"learned", "off", "clairvoyant"}
    counts = {row["n_seeds"] for row in document["cells"]}
    assert max(counts) in (8, 11), "by eights, up to the most allowed"
    for name, (first, last) in document["seed_ranges"]["reporting"].items():
        workload, _, load = name.partition(" ")
        row = row_of(document, "off", workload, float(load) if load else None)
        assert last - first + 1 == row["n_seeds"]


def test_a_cell_is_the_same_in_any_batch(folder: Path) -> None:
    server = contest(folder, "greedy").server
    cells = make_cells(["drift5", "poisson"], PROFILE, "warm", Acceptance(), TINY)
    policy = Exported((folder / "greedy.safetensors").read_bytes())
    (together,) = make_batches((cell, cell.seeds("reporting", 3)) for cell in cells)
    (whole,) = run_trial(Trial("", policy, together), server)
    for cell, metrics in zip(together.cells, whole, strict=True):
        (last,) = make_batches([(cell, cell.seeds("reporting", 1, skipped=2))])
        ((alone,),) = run_trial(Trial("", policy, last), server)
        for name, value in vars(metrics).items():  # not to the last bit: means are taken over padded rows
            assert value[-1:] == pytest.approx(vars(alone)[name], rel=1e-12, nan_ok=True), name


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["compare", *words])


def test_the_command_writes_its_files_and_prints_tables_or_json(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    whole: tuple[Document, Trace],
) -> None:
    monkeypatch.setattr(Suite, "load", lambda _: SUITE)
    words = [str(folder / "greedy.safetensors"), "--out", str(folder), "--jobs", "1", "--against", "off"]
    words += ["--workload", "drift5", "poisson"]
    args = arguments(*words)
    assert args.run(args) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("short run") and str(folder / "compare.json") in printed
    names = {path.name for path in folder.iterdir()}
    assert {"compare.json", "compare.csv", "tuned_rules.json", "k_over_time.png"} <= names

    args = arguments(*words, "--json")
    assert args.run(args) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((folder / "compare.json").read_text())


def test_one_file_is_learned_and_several_go_by_their_stems(folder: Path, tmp_path: Path) -> None:
    paths = [str(folder / "always.safetensors"), str(folder / "greedy.safetensors")]
    assert list(contest_of(arguments(paths[0])).policies) == ["learned"]
    both = contest_of(arguments(*paths))
    assert list(both.policies) == ["learned:always", "learned:greedy"]
    assert (both.server.profile.name, both.server.options.off_mode) == ("seeds-pcie", "warm")
    alike = contest_of(arguments(paths[0], str(export(tmp_path, "always", kind="greedy"))))
    assert list(alike.policies) == [f"learned:{folder.name}/always", f"learned:{tmp_path.name}/always"]


def test_a_rule_reckons_with_the_server_it_is_compared_on(folder: Path, tmp_path: Path) -> None:
    h200 = CostProfile.load("h200-llama3-8b")
    export(tmp_path, "elsewhere", h200, kind="greedy")
    args = arguments(
        str(tmp_path / "elsewhere.safetensors"), "--profile", "h100-llama3-8b", "--off-mode", "skip"
    )
    server = contest_of(args).server
    assert (server.profile.name, server.options.off_mode) == ("h100-llama3-8b", "skip")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["gone.safetensors"], "gone.safetensors: cannot read the policy file"),
        (["{folder}/other.safetensors", "--profile", "seeds-pcie"], "allowed: [0, 5], those of seeds-pcie"),
        (["{folder}/greedy.safetensors", "--profile", "gone.json"], "gone.json: cannot read the profile"),
        (["{folder}/greedy.safetensors", "--off-mode", "kv-only"], "found no row for off mode kv-only"),
        (["{folder}/greedy.safetensors", "--against", "of"], "--against: found of, allowed: no-spec, off"),
        (["{folder}/greedy.safetensors", "--seeds", "1"], "--seeds, --max-seeds: found 1, 6, allowed: 2 to"),
        (["{folder}/greedy.safetensors", "--acceptance", "gone.jsonl"], "gone.jsonl"),
        (["{folder}/greedy.safetensors", "--workload", "drift6"], "workload: found drift6; allowed: chat"),
        (["{folder}/greedy.safetensors", "--workload", "trace:gone.csv"], "gone.csv: cannot be read"),
        (["{folder}/greedy.safetensors", "{folder}/greedy.safetensors"], "allowed: each once"),
        (["{folder}/greedy.safetensors", "{folder}/other.safetensors"], "--profile: found none"),
    ],
)
def test_bad_input_is_one_line(words: list[str], complaint: str, folder: Path) -> None:
    export(folder, "other", CostProfile.load("h200-llama3-8b"), kind="greedy")
    with pytest.raises(UserError) as error:
        contest_of(arguments(*(word.format(folder=folder) for word in words)))
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_a_folder_that_cannot_be_is_found_before_anything_runs(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    args = arguments(str(folder / "greedy.safetensors"), "--out", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"--out: found .*file, allowed: a folder"):
        args.run(args)
