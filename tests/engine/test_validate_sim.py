"""`draftdial validate-sim` on a real server: that both sides serve the same, not that their times agree."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import policies
import pytest
from cpu_server import draft_arguments, target_arguments
from live_trainer import trainer, without_progress
from steered_server import SteeredServer

from draftdial.controller.acceptance_file import write_requests

MEANS = {"good": 2.5, "poor": 0.6}
PROFILED = [
    "--batches",
    "1,2,4",
    "--contexts",
    "24,120",
    "--rounds",
    "12",
    "--repeats",
    "1",
    "--held-out",
    "0",
]
LENGTHS = "arrival_s,input_tokens,output_tokens\n0,20,60\n0.1,40,80\n0.2,9,100\n0.3,30,50\n"


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteeredServer]:
    """Replays two domains; its folder holds the files, lengths, and a profile that was measured on it."""
    folder = tmp_path_factory.mktemp("validated")
    rng = np.random.default_rng(5)
    replayed: list[str] = []
    for name, mean in MEANS.items():
        write_requests(folder / f"{name}.jsonl", [rng.poisson(mean, 300).astype(np.uint8) for _ in range(12)])
        replayed += ["--replay-acceptance", str(folder / f"{name}.jsonl")]
    (folder / "lengths.csv").write_text(LENGTHS)
    policy = policies.saved(policies.learned(seed=0), folder / "policy.safetensors")
    arguments = [*target_arguments(models), *draft_arguments(models)]
    environment = {"DRAFTDIAL_BENCHMARK": "1", "DRAFTDIAL_LIVE": str(folder / "live.sock")}
    serve = [str(policy), *replayed]
    with SteeredServer(arguments, folder, serve=serve, environment=environment) as started:
        done = started.command("profile", started.url, "--out", str(folder / "measured.json"), *PROFILED)
        assert done.returncode == 0, done
        yield started


def arguments_of(server: SteeredServer, *files: str) -> list[str]:
    folder = server.folder
    words = ["-m", "draftdial.controller.cli", "validate-sim", server.url]
    words += ["--profile", str(folder / "measured.json"), "--lengths", f"trace:{folder / 'lengths.csv'}"]
    for name in files:
        words += ["--acceptance", str(folder / f"{name}.jsonl")]
    return [*words, "--closed", "1,3", "--requests", "24", "--out", "out"]


def test_both_sides_serve_the_same_requests_with_the_same_acceptance(
    server: SteeredServer, tmp_path: Path
) -> None:
    before = server.status()
    policy = ["--policy", str(server.folder / "policy.safetensors")]
    done = trainer(*arguments_of(server, "good", "poor"), *policy, folder=tmp_path)
    assert done.returncode == 0, done
    document = json.loads((tmp_path / "out" / "validate.json").read_text())
    cells = document["cells"]
    arms = ["off", *(f"fixed-{k}" for k in policies.TIERS[1:]), "policy:policy"]
    assert [(cell["arm"], cell["load"]) for cell in cells] == [(arm, load) for arm in arms for load in (1, 3)]
    for cell in cells:
        for name, error in cell["error"].items():
            assert cell["server"][name] > 0 and cell["simulated"][name] > 0 and math.isfinite(error), cell
        if cell["arm"] in ("fixed-1", "fixed-2", "fixed-3"):
            # The server counts the drafts of all rounds, the simulator those of the counted requests.
            served, simulated = (cell[side]["wasted_draft_share"] for side in ("server", "simulated"))
            assert served == pytest.approx(simulated, abs=0.06), cell
    by_k = [cell["server"]["wasted_draft_share"] for cell in cells if cell["arm"] in arms[1:4]]
    assert by_k[0] < by_k[2] < by_k[4], "what the files say: deeper drafts are wasted more often"
    assert [row["load"] for row in document["best_fixed_k"]] == [1, 3]
    assert {row["server"] for row in document["best_fixed_k"]} <= set(policies.TIERS)
    found = document["summary"]
    assert found["num_cells"] == 10 and found["same_best_k_share"] in (0.0, 0.5, 1.0)
    errors = [abs(cell["error"]["output_tok_s"]) for cell in cells]
    assert found["throughput_error_mean"] == pytest.approx(np.mean(errors))
    assert "mean absolute error over 10 cells: throughput" in done.stdout
    assert len(list(csv.reader((tmp_path / "out" / "validate.csv").open()))) == 11
    runs = json.loads((tmp_path / "out" / "bench.json").read_text())["runs"]
    assert len(runs) == 10 and {run["failed"] for run in runs} == {0}
    after = server.status()
    assert [after[name] for name in ("mode", "forced_k", "policy_sha256")] == [
        before[name] for name in ("mode", "forced_k", "policy_sha256")
    ]


def test_a_bench_that_was_served_is_compared_without_its_server(
    server: SteeredServer, tmp_path: Path
) -> None:
    folder = server.folder
    bench = ["bench", server.url, "--arms", "off", "fixed-3", "sglang-adaptive"]
    bench += [f"policy:{folder / 'policy.safetensors'}", "steer", "--closed", "3", "--per-slot", "6"]
    bench += ["--requests", "18", "--lengths", f"trace:{folder / 'lengths.csv'}", "--domains", "poor,good"]
    bench += ["--domain-span", "4:6", "--repeats", "1", "--out", str(tmp_path / "bench")]
    done = server.command(*bench)
    assert done.returncode == 0, done
    words = ["-m", "draftdial.controller.cli", "validate-sim", str(tmp_path / "bench" / "bench.json")]
    words += ["--profile", str(folder / "measured.json"), "--policy", str(folder / "policy.safetensors")]
    for name in MEANS:
        words += ["--acceptance", str(folder / f"{name}.jsonl")]
    done = trainer(*words, "--out", "out", folder=tmp_path)
    assert done.returncode == 0 and "left out" not in done.stderr, done
    cells = json.loads((tmp_path / "out" / "validate.json").read_text())["cells"]
    assert [(cell["acceptance"], cell["arm"], cell["load"]) for cell in cells] == [
        ("poor,good 4:6", arm, 3) for arm in ("off", "fixed-3", "sglang-adaptive", "policy:policy", "steer")
    ]
    served, simulated = (cells[1][side]["wasted_draft_share"] for side in ("server", "simulated"))
    assert served == pytest.approx(simulated, abs=0.06), "the same acceptance on both sides"


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (["good"], "--acceptance: found good, of sha256 [0-9a-f]{12}, allowed: what http"),
        ([], "--acceptance: none given"),
    ],
)
def test_other_arrays_than_the_servers_are_refused(
    server: SteeredServer, tmp_path: Path, files: list[str], complaint: str
) -> None:
    done = trainer(*arguments_of(server, *files), folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert re.search(complaint, done.stderr), done
    assert list(tmp_path.iterdir()) == []


def test_a_server_with_its_own_acceptance_is_refused(
    server: SteeredServer, steered: SteeredServer, tmp_path: Path
) -> None:
    words = [steered.url if word == server.url else word for word in arguments_of(server, "good", "poor")]
    done = trainer(*words, folder=tmp_path)
    assert done.returncode == 2 and "replays no recorded acceptance" in done.stderr, done


def test_training_on_it_takes_the_domains_it_replays_and_no_others(
    server: SteeredServer, tmp_path: Path
) -> None:
    folder = server.folder
    words = ["-m", "draftdial.controller.cli", "train", "engine=live", f"engine.url={server.url}"]
    words += [f"profile={folder / 'measured.json'}", f"scenario.lengths=trace:{folder / 'lengths.csv'}"]
    words += ["scenario.high=3", "scenario.rounds=32", "ppo.total_rounds=32", "ppo.num_evaluations=1"]
    words += ["ppo.rounds_per_update=32", "ppo.batch_size=32", "ppo.num_validation_episodes=1"]
    (tmp_path / "other.jsonl").write_bytes((folder / "good.jsonl").read_bytes())
    files = (folder / "good.jsonl", tmp_path / "other.jsonl")
    refused = trainer(*words, *replayed(*files), folder=tmp_path)
    assert refused.returncode == 2, refused
    assert "acceptance: domains: found good, other, allowed: good, poor, which http" in refused.stderr
    done = trainer(*words, *replayed(folder / "poor.jsonl", folder / "good.jsonl"), folder=tmp_path)
    assert (done.returncode, without_progress(done.stderr)) == (0, ""), done
    assert server.status()["acceptance_replay"].count("named no array") == 0


def replayed(*files: Path) -> list[str]:
    """Overrides of `draftdial train`."""
    return ["acceptance.kind=replayed", f"acceptance.domains=[{','.join(map(str, files))}]"]
