"""A real server in lockstep: episodes, late answers, outcomes that come late, and training on it."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import policies
import pytest
from cpu_server import ANSWER_S, draft_arguments, target_arguments
from live_trainer import started, trainer, without_progress
from steered_server import SteeredServer
from traffic import Request, Sending

from draftdial.controller.bench_loads import Asking, closed_loads
from draftdial.controller.errors import UserError
from draftdial.controller.policy_file import load_policy, read
from draftdial.engine_patch import lockstep
from draftdial.engine_patch.warm_restart import WarmRestart
from draftdial.envs.lengths import as_lengths
from draftdial.envs.live_engine import LiveEngine
from draftdial.envs.live_server import LiveServer
from draftdial.envs.workload import RequestList

HERE = Path(__file__).parent
LENGTHS = "arrival_s,input_tokens,output_tokens\n0,20,60\n0.1,40,80\n0.2,9,100\n0.3,30,50\n"
TRAIN = [
    *("engine=live", "scenario.high=4", "scenario.rounds=32", "ppo.total_rounds=128"),
    *("ppo.rounds_per_update=32", "ppo.batch_size=32", "ppo.num_validation_episodes=1"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the socket, the tiny profile and lengths."""
    folder = tmp_path_factory.mktemp("live")
    (folder / "tiny.json").write_text(json.dumps(policies.PROFILE.document))
    (folder / "lengths.csv").write_text(LENGTHS)
    return folder


@pytest.fixture(scope="module")
def server(models: Path, folder: Path) -> Iterator[SteeredServer]:
    policy = policies.saved(policies.learned(seed=0), folder / "policy.safetensors")
    with SteeredServer(
        [*target_arguments(models), *draft_arguments(models)],
        folder,
        serve=[str(policy)],
        environment={"DRAFTDIAL_LIVE": str(folder / "live.sock")},
    ) as started_server:
        yield started_server


def engine_of(server: SteeredServer, num_requests: int = 1000) -> LiveEngine:
    """Episodes of a closed loop; the seed is the concurrency."""
    lengths = as_lengths(f"trace:{server.folder / 'lengths.csv'}")

    def draw(seed: int) -> RequestList:
        [load] = closed_loads([seed], num_requests, lengths=lengths, domains=(0,))
        return load.source.requests(seed)

    return LiveEngine(LiveServer(server.url), draw, Asking())


@pytest.fixture
def engine(server: SteeredServer) -> Iterator[LiveEngine]:
    made = engine_of(server)
    yield made
    made.close()


def play(engine: LiveEngine, num_rounds: int, seed: int = 0) -> tuple[dict[int, int], dict[int, int]]:
    """Rounds at random k: what was asked for and, as outcomes say, what ran, by round."""
    rng = np.random.default_rng(seed)
    asked, ran = dict[int, int](), dict[int, int]()
    for _ in range(num_rounds):
        round_id, num_running = int(engine.signals().round_id[0]), int(engine.signals().num_running[0])
        k = int(rng.choice(engine.tiers))
        asked[round_id] = k
        for outcome in engine.run_round(np.array([k])):
            ran[int(outcome.round_id[0])] = int(outcome.k[0])
            counts = outcome.accept_counts[0]
            assert counts[outcome.k[0] + 1 :].sum() == 0 and 0 <= counts.sum() <= max(num_running, 4)
        assert engine.step.num_missed == 0
        if engine.is_served:
            break
    return asked, ran


def test_an_episode_runs_what_was_asked(server: SteeredServer, engine: LiveEngine) -> None:
    for concurrency in (3, 1):
        engine.reset(concurrency)
        begun = len(server.rounds())  # the round that is asked for has not been decided
        asked, ran = play(engine, 120, concurrency)
        assert len(asked) == 120 and len(ran) >= 118
        assert ran == {round_id: asked[round_id] for round_id in ran}
        written = server.rounds()[begun:]
        assert [k for _, k in written] == list(asked.values())
        assert {batch for batch, _ in written} <= set(range(1, concurrency + 1))
        assert Counter(batch for batch, _ in written)[concurrency] > 60
    assert engine.step.waited_s > 0


def test_a_list_is_served_to_its_end_and_every_token_is_told(server: SteeredServer) -> None:
    engine = engine_of(server, num_requests=8)
    try:
        engine.reset(2)
        assert engine.requests is not None
        got = np.ones(engine.requests.num_requests, np.int64)  # the token of the prefill
        while not engine.is_served:
            engine.run_round(np.array([2]))
            for _, places, accepted in engine.step.finished:
                got[places] += np.array(accepted, np.int64) + 1
    finally:
        engine.close()
    # The outcome of the very last round has nobody to be told to.
    wanted = engine.requests.output_tokens
    assert np.all(got <= wanted + 2) and np.count_nonzero(got >= wanted) >= len(wanted) - 2
    assert server.status()["live_is_followed"] == 0


def test_no_request_no_round(server: SteeredServer) -> None:
    lengths = as_lengths(f"trace:{server.folder / 'lengths.csv'}")
    [load] = closed_loads([1], 2, lengths=lengths, domains=(0,))
    requests = load.source.requests(0)
    requests.mode, requests.arrival_s = "open", np.arange(requests.num_requests) * 2.0
    since_s = 0.0

    def draw(seed: int) -> RequestList:
        nonlocal since_s
        since_s = time.monotonic()  # right before they are sent: the first question comes when it does
        return requests

    engine = LiveEngine(LiveServer(server.url), draw, Asking())
    try:
        engine.reset(0)
        begun = len(server.rounds())
        while not engine.is_served:
            engine.run_round(np.array([3]))
        assert time.monotonic() - since_s >= requests.arrival_s[-1], "the last request had not come yet"
        assert len(server.rounds()) - begun >= requests.num_requests * 50 // 4 - 1
    finally:
        engine.close()
    server.get("/health")


def test_a_late_answer_falls_back_and_the_server_serves_on(server: SteeredServer, engine: LiveEngine) -> None:
    before = server.status()["live_timeouts"]
    engine.reset(2)
    play(engine, 20)  # the question of the next round is out, and goes unanswered
    since = time.monotonic()
    while server.status()["live_timeouts"] == before:
        assert time.monotonic() - since < ANSWER_S
    begun = len(server.rounds())
    server.get("/health")
    while len(server.rounds()) < begun + 50:
        assert time.monotonic() - since < ANSWER_S, "it goes on at its own k"
    engine.run_round(np.array([1]))
    assert engine.step.num_missed >= 50
    asked, ran = play(engine, 20)
    assert ran == {round_id: asked[round_id] for round_id in ran} and len(ran) >= 18
    status = server.status()
    assert (status["errors"], status["fallback"]) == (0, "")


def test_outcomes_that_come_a_round_later_hold_nothing_up(server: SteeredServer, engine: LiveEngine) -> None:
    """As under overlap scheduling: an environment that waited for them would run into the time limit."""
    assert server.set(probe_late=1)
    try:
        before = server.status()["live_timeouts"]
        engine.reset(3)
        first = int(engine.signals().round_id[0])
        for n in range(60):
            outcomes = engine.run_round(np.array([1 + n % 3]))
            assert [int(outcome.round_id[0]) for outcome in outcomes] == ([first + n - 1] if n else [])
            assert all(int(outcome.k[0]) == 1 + (n - 1) % 3 for outcome in outcomes)
            assert [round_id for round_id, _ in engine.step.times_s] == [first + n]
        assert engine.step.num_missed == 0
    finally:
        engine.close()
        assert server.set(probe_late=0)
    assert server.status()["live_timeouts"] == before


def test_one_environment_at_a_time_and_none_that_stays(server: SteeredServer, engine: LiveEngine) -> None:
    engine.reset(1)
    second = engine_of(server)
    with pytest.raises(UserError, match="another environment decides there, allowed: one"):
        second.reset(1)
    engine.close()
    [answer] = Sending(server, [Request((5, 6, 7), 20)]).answers()
    assert len(answer.tokens) == 20
    second.reset(1)
    asked, ran = play(second, 10)
    assert ran == {round_id: asked[round_id] for round_id in ran}
    second.close()
    second.close()


def test_requests_of_others_are_noticed(server: SteeredServer, engine: LiveEngine) -> None:
    engine.reset(1)
    sending = Sending(server, [Request((5, 6, 7), 40)], name="stranger")
    with pytest.raises(UserError, match="somebody else's request stranger-0 runs there"):
        play(engine, 400)
    engine.close()
    assert len(sending.answers()[0].tokens) == 40


def test_a_request_that_the_server_refuses_is_an_error(server: SteeredServer) -> None:
    [load] = closed_loads([1], 2, lengths=as_lengths(f"trace:{server.folder / 'lengths.csv'}"), domains=(0,))
    requests = load.source.requests(0)
    requests.prompt_tokens[:] = 5000
    engine = LiveEngine(LiveServer(server.url), lambda seed: requests, Asking())
    with pytest.raises(UserError, match=r"request live-.* failed: .*longer than"):
        engine.reset(0)
    engine.close()


def test_a_forced_k_is_no_lockstep(server: SteeredServer) -> None:
    assert server.set(draftdial_force_k=2)
    with pytest.raises(UserError, match="found mode steer, forced k 2, allowed: mode steer and no forced k"):
        LiveServer(server.url)
    assert server.set(draftdial_force_k=-1)


def test_a_server_that_is_not_live_says_how_to_make_it_so(steered: SteeredServer) -> None:
    with pytest.raises(UserError, match="not a live server: start it with `DRAFTDIAL_LIVE=/absolute/path"):
        LiveServer(steered.url)


def test_gymnasiums_checker_has_nothing_to_say(server: SteeredServer, folder: Path) -> None:
    script = str(HERE / "check_live_env.py")
    done = trainer(script, server.url, str(folder / "tiny.json"), str(folder / "lengths.csv"), folder=folder)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done


def train_arguments(server: SteeredServer, *overrides: str) -> list[str]:
    folder = server.folder
    where = [f"engine.url={server.url}", f"profile={folder / 'tiny.json'}"]
    where.append(f"scenario.lengths=trace:{folder / 'lengths.csv'}")
    return ["-m", "draftdial.controller.cli", "train", *TRAIN, *where, *overrides]


def test_a_policy_is_trained_and_deployed(server: SteeredServer, tmp_path: Path) -> None:
    begun = server.status()["live_answers"]
    done = trainer(*train_arguments(server, "--json"), folder=tmp_path)
    assert (done.returncode, without_progress(done.stderr)) == (0, ""), done
    run = tmp_path / json.loads(done.stdout)["run_dir"]
    file = read(run / "policy.safetensors")
    assert load_policy(file).tiers == policies.TIERS and server.deploy(file)
    evaluations: dict[str, Any] = json.loads((run / "evaluations.json").read_text())
    assert evaluations["rules"].keys() == {"off", "greedy", "threshold"}
    assert [rounds for rounds, _ in evaluations["evaluations"]] == [0, 64, 128]
    # Three rules and three evaluations of one episode each, and the training.
    assert server.status()["live_answers"] - begun >= 6 * 32 + 128
    again = trainer(
        *train_arguments(server, f"resume={run}", "ppo.total_rounds=192", "--json"), folder=tmp_path
    )
    assert (again.returncode, without_progress(again.stderr)) == (0, ""), again
    record = json.loads((tmp_path / json.loads(again.stdout)["run_dir"] / "evaluations.json").read_text())
    assert record["evaluations"][:3] == evaluations["evaluations"] and record["evaluations"][-1][0] == 192


def test_what_was_learned_in_simulation_goes_on_here(server: SteeredServer, tmp_path: Path) -> None:
    simulated = [
        "experiment=smoke",
        f"profile={server.folder / 'tiny.json'}",
        "ppo.width=16",
        "scenario.high=4",
    ]
    begun = trainer("-m", "draftdial.controller.cli", "train", *simulated, "--json", folder=tmp_path)
    assert begun.returncode == 0, begun
    run = json.loads(begun.stdout)["run_dir"]
    done = trainer(*train_arguments(server, f"resume={run}", "--json"), folder=tmp_path)
    assert (done.returncode, without_progress(done.stderr)) == (0, ""), done
    record = json.loads((tmp_path / json.loads(done.stdout)["run_dir"] / "evaluations.json").read_text())
    assert [rounds for rounds, _ in record["evaluations"]] == [0, 64, 128], (
        "scores of the simulator are left out"
    )
    file = read(tmp_path / json.loads(done.stdout)["policy"])
    assert file.tensors["hidden.0.weight"].shape[0] == 16


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["profile.names=[h200-llama3-8b]"], "tiers: found .*, allowed: .*, of profile h200-llama3-8b"),
        (["engine.off_mode=skip"], "off_mode: found skip, allowed: warm, as http"),
        (["engine.url=http://127.0.0.1:9"], "cannot reach the server"),
        (["engine.command=--model"], "give engine.url of a server, or engine.command to start one"),
        (["scenario=open", "objective=latency"], "objective.name: latency; allowed: throughput"),
    ],
)
def test_what_cannot_be_trained_on_is_one_line(
    server: SteeredServer, tmp_path: Path, overrides: list[str], complaint: str
) -> None:
    done = trainer(*train_arguments(server, *overrides), folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert re.search(complaint, done.stderr), done
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_a_second_trainer_is_refused_and_a_dead_server_ends_the_first(
    server: SteeredServer, tmp_path: Path
) -> None:
    """The last test of this server."""
    long = ["ppo.total_rounds=100000", "ppo.num_evaluations=2000"]
    before = server.status()["live_answers"]
    with started(*train_arguments(server, *long), folder=tmp_path) as first:
        try:
            while not list(tmp_path.glob("runs/*/*/policy.safetensors")):
                assert first.poll() is None, first.communicate()
                time.sleep(0.5)
            other = tmp_path / "other"
            other.mkdir()
            second = trainer(*train_arguments(server), folder=other)
            assert (
                second.returncode == 2 and "another environment decides there, allowed: one" in second.stderr
            )
            assert second.stderr.count("\n") == 1 and list(other.iterdir()) == []
            assert first.poll() is None and server.status()["live_answers"] > before
            server.process.send_signal(signal.SIGKILL)
            server.close()
            _, error = first.communicate(timeout=300)
        finally:
            first.kill()
    assert first.returncode == 2 and without_progress(error).count("\n") == 1, error
    assert re.search("the server is gone, or was restarted|cannot reach the server|request .* failed", error)
    [policy] = tmp_path.glob("runs/*/*/policy.safetensors")
    load_policy(read(policy))


def test_where_k_0_is_kv_only_rounds_that_wait_are_told_and_policies_are_trained(
    models: Path, tmp_path: Path
) -> None:
    profile = policies.tiny_profile(has_kv_only=True)
    (tmp_path / "tiny.json").write_text(json.dumps(profile.document))
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    policy = policies.saved(policies.learned(seed=0), tmp_path / "policy.safetensors")
    with SteeredServer(
        [*target_arguments(models), *draft_arguments(models)],
        tmp_path,
        serve=[str(policy), "--off-mode", "kv-only"],
        environment={"DRAFTDIAL_LIVE": str(tmp_path / "live.sock")},
    ) as server:
        engine = engine_of(server)
        engine.reset(2)
        play(engine, 40)  # its first round at k = 0 runs the draft, to prove the projection
        asked, ran = play(engine, 120, seed=1)
        engine.close()
        restart = WarmRestart()
        begun = min(i for i in ran if ran[i] == asked[i] > 0)  # then no round waits
        expected = {i: restart.decide(k) for i, k in asked.items() if i > begun}
        assert {i: k for i, k in ran.items() if i > begun} == {i: expected[i] for i in ran if i > begun}
        assert restart.num_restarts >= 10

        (tmp_path / "runs").mkdir()
        warm = trainer(*train_arguments(server), folder=tmp_path / "runs")
        assert (warm.returncode, warm.stdout, warm.stderr.count("\n")) == (2, "", 1), warm
        assert "off_mode: found warm, allowed: kv-only, as http" in warm.stderr
        assert list((tmp_path / "runs").iterdir()) == []
        done = trainer(*train_arguments(server, "engine.off_mode=kv-only", "--json"), folder=tmp_path)
        assert (done.returncode, without_progress(done.stderr)) == (0, ""), done
        file = read(tmp_path / json.loads(done.stdout)["policy"])
        assert file.card["off_mode"] == "kv-only" and server.deploy(file)
        status = server.status()
    assert status["kv_only_rounds"] > 0 and status["kv_only_prefills"] > 0
    assert (status["kv_only_fallback"], status["errors"], status["fallback"]) == ("", 0, "")


def test_ranks_that_would_have_to_agree_are_refused(models: Path, folder: Path, tmp_path: Path) -> None:
    policy = policies.saved(policies.learned(seed=0), tmp_path / "policy.safetensors")
    arguments = [*target_arguments(models), *draft_arguments(models), "--tp-size", "2"]
    environment = {"DRAFTDIAL_LIVE": str(tmp_path / "live.sock"), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with pytest.raises(AssertionError, match="draftdial: live: --tp-size: found 2, allowed: 1"):
        SteeredServer(arguments, tmp_path, serve=[str(policy)], environment=environment)


def test_the_wait_leaves_health_checks_time() -> None:
    assert lockstep.WAIT_S <= 5.0, "/health turns to 503 after 20 s without a token"
