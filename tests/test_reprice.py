"""`draftdial reprice`: the same policy on a host that a benchmark found busy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cli import main
from draftdial.controller.learned import LearnedPolicy
from draftdial.controller.policy_export import rule_file
from draftdial.controller.policy_file import PolicyFile, load_policy, read
from draftdial.controller.rule_cards import rule_from_card
from draftdial.controller.rules import Threshold


def run_of(load: float | None, host_ms: dict[str, float], failed: int = 0) -> dict[str, Any]:
    return {
        "mode": "trace" if load is None else "closed",
        "load": load,
        "failed": failed,
        "host_ms_at_k": host_ms,
        "rounds_at_k": dict.fromkeys(host_ms, 10),
    }


def bench_of(folder: Path, *runs: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "bench.json"
    path.write_text(json.dumps({"schema": "draftdial.bench/1", "runs": runs}))
    return str(path)


def file_at(path: Path, file: PolicyFile) -> str:
    path.write_bytes(file.data)
    return str(path)


def test_rounds_are_priced_by_the_lightest_load(
    make_policy_file: Callable[..., PolicyFile], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, out = make_policy_file(), tmp_path / "new" / "policy.safetensors"
    slow = {"0": 90.0, "1": 50.0, "3": 70.0}
    bench = bench_of(
        tmp_path,
        run_of(64.0, {"1": 900.0}),
        run_of(4.0, slow),
        run_of(4.0, {"3": 30.0}),
        run_of(4.0, {"1": 1.0}, failed=1),
        run_of(1.0, {"0": 900.0}),
        run_of(None, {"1": 900.0}),
    )
    assert main(["reprice", file_at(tmp_path / "old.safetensors", old), bench, "--out", str(out)]) == 0
    new = read(out)
    told = (
        f"{out}: tiny, id {new.policy_id}; a round takes at least 50.00 ms with drafts; at k = 0 90.00 ms\n"
    )
    assert capsys.readouterr().out == told
    before, after = old.profile(), new.profile()
    for context in (10, 5000):
        least_s = np.array([0.09, 0.05, 0.05])
        expected = np.maximum(before.round_s(1, context, "warm"), least_s)
        np.testing.assert_allclose(after.round_s(1, context, "warm"), expected)
    assert (
        "busy in each round: off-warm 90.00 ms, k=1 50.00 ms, k=3 50.00 ms" in after.document["description"]
    )
    for name in ("name", "kind", "tiers", "training", "limits", "fallback", "features"):
        assert new.card[name] == old.card[name]
    assert new.card["evaluation"] == {"repriced": {"off_ms": 90.0, "drafts_ms": 50.0, "prefill_ms": None}}
    mine, theirs = load_policy(old), load_policy(new)
    assert isinstance(mine, LearnedPolicy) and isinstance(theirs, LearnedPolicy)
    for name, weights in mine.network.tensors.items():
        np.testing.assert_array_equal(theirs.network.tensors[name], weights)


def test_a_rule_reckons_with_the_host_too(
    make_policy_file: Callable[..., PolicyFile], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = make_policy_file().profile()
    greedy = rule_from_card({"kind": "greedy"}, profile.tiers, profile, "warm")
    fallback = Threshold(profile.tiers, k=1, batch=2)
    old = rule_file(greedy, profile, "warm", name="greedy", fallback=fallback)
    path, out = file_at(tmp_path / "greedy.safetensors", old), tmp_path / "new.safetensors"
    assert main(["reprice", path, bench_of(tmp_path, run_of(1.0, {"3": 1e4})), "--out", str(out)]) == 0
    assert "10000.00 ms with drafts; at k = 0 as before (the benchmark has none)" in capsys.readouterr().out
    new = read(out)
    assert "busy in each round: k=1 10000.00 ms, k=3 10000.00 ms." in new.profile().document["description"]
    assert new.card["golden"] != old.card["golden"], "what drafts cost decides"
    assert load_policy(new).tiers == profile.tiers


def test_a_bench_that_does_not_know_the_host_is_refused(
    make_policy_file: Callable[..., PolicyFile], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = file_at(tmp_path / "old.safetensors", make_policy_file()), tmp_path / "new.safetensors"
    (tmp_path / "odd.json").write_text("[]")
    (tmp_path / "pack.json").write_text('{"what": "two", "benches": {"low": {}, "high": {}}}')
    for bench, message in (
        (bench_of(tmp_path, run_of(1.0, {"0": 9.0})), "bench.json: host_ms_at_k: found none of a k above 0"),
        (bench_of(tmp_path / "heavy", run_of(64.0, {"1": 9.0})), "found no load lighter than C = 64"),
        (str(tmp_path / "odd.json"), "odd.json: no bench.json"),
        (str(tmp_path / "pack.json"), "pack.json: found 2 benchmarks in one file, allowed: one: write each"),
        (str(tmp_path / "none.json"), "none.json: cannot be read: No such file"),
        (str(tmp_path), f"{tmp_path}: cannot be read: Is a directory"),
    ):
        assert main(["reprice", path, bench, "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
    bench = bench_of(tmp_path, run_of(1.0, {"1": 9.0}))
    assert main(["reprice", path, bench, "--out", str(tmp_path)]) == 2
    assert f"--out: found {tmp_path}, allowed: a file that can be written" in capsys.readouterr().err
    assert not out.exists()


def test_prices_do_not_pile_up(
    make_policy_file: Callable[..., PolicyFile], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once, again = tmp_path / "once.safetensors", tmp_path / "again.safetensors"
    path, bench = (
        file_at(tmp_path / "old.safetensors", make_policy_file()),
        bench_of(tmp_path, run_of(1.0, {"1": 9.0})),
    )
    assert main(["reprice", path, bench, "--out", str(once)]) == 0
    assert main(["reprice", str(once), bench, "--out", str(again)]) == 2
    assert (
        "once.safetensors: found a repriced policy, allowed: the file that it was" in capsys.readouterr().err
    )
    assert not again.exists()


def test_a_bench_of_a_server_with_another_off_mode_is_refused(
    make_policy_file: Callable[..., PolicyFile], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its host is busy for another time in a round at k = 0."""
    path, out = file_at(tmp_path / "old.safetensors", make_policy_file()), tmp_path / "new.safetensors"
    bench = Path(bench_of(tmp_path, run_of(1.0, {"1": 9.0})))
    document = json.loads(bench.read_text())
    for off_mode, status in (("skip", 2), ("warm", 0), ("kv-only", 0)):
        out.unlink(missing_ok=True)
        bench.write_text(json.dumps(document | {"server": {"status": {"off_mode": off_mode}}}))
        assert main(["reprice", path, str(bench), "--out", str(out)]) == status
        assert out.exists() == (status == 0)
    assert "server.status.off_mode: found skip, allowed: warm" in capsys.readouterr().err


@pytest.mark.parametrize(
    "runs",
    [
        None,
        ["a run"],
        [{"load": 1.0}],
        [run_of(1.0, {"1": 9.0}) | {"load": [1]}],
        [run_of(1.0, {"1": 9.0}) | {"rounds_at_k": {}}],
        [run_of(1.0, {"k": 9.0})],
        [run_of(1.0, {"1": "9"})],  # type: ignore[dict-item]
        [run_of(1.0, {"1": math.nan})],
        [run_of(1.0, {"1": math.inf})],
        [run_of(1.0, {"1": -9.0})],
        [run_of(1.0, {"1": 10**400})],
        [run_of(1.0, {"1": 9.0}) | {"host_ms_in_prefill": 9.0}],
    ],
)
def test_a_bench_that_is_not_as_it_was_written_is_refused_in_one_line(
    runs: Any, make_policy_file: Callable[..., PolicyFile], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = file_at(tmp_path / "old.safetensors", make_policy_file()), tmp_path / "new.safetensors"
    (tmp_path / "bench.json").write_text(json.dumps({"schema": "draftdial.bench/1", "runs": runs}))
    assert main(["reprice", path, str(tmp_path / "bench.json"), "--out", str(out)]) == 2
    complaint = capsys.readouterr().err
    assert "bench.json: not as `draftdial bench` writes it here" in complaint and complaint.count("\n") == 1
    assert not out.exists()
