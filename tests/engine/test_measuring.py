"""`draftdial profile` and `draftdial bench` against real servers: that they work, not what the times are."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError

import policies
import pytest
from cpu_server import CPU_ENVIRONMENT, draft_arguments, target_arguments
from steered_server import SteeredServer
from traffic import Reference, Request, Sending, random_requests, tokens_of

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.measured_server import flush_cache
from draftdial.controller.profile_sweep import PREFILLS
from draftdial.engine_patch.client import Server

INTERRUPTED = "draftdial: interrupted; putting the server back\n"
SMALL = ["--batches", "1,3", "--contexts", "24,80", "--rounds", "6", "--repeats", "2", "--held-out", "1"]


def without_progress(stderr: str) -> str:
    """What a bench said besides how far it is, which a host as busy as this one may ask for."""
    return re.sub(r"^draftdial bench: (runs|turns): .*\n", "", stderr, flags=re.MULTILINE)


def only_warnings(stderr: str) -> bool:
    """A host as busy as this one may tell repeats apart, and takes long enough to hear how far it is."""
    told = r"draftdial profile: \w+: (\d+ of \d+ measured|the server starts, its log is )"
    expected = re.compile(told + "|.* the two fastest repeats are more than 5% apart in ")
    return all(expected.match(line) for line in stderr.splitlines())


def test_a_running_server_is_profiled_and_goes_on_as_before(
    steered: SteeredServer, reference: Reference, tmp_path: Path
) -> None:
    out = tmp_path / "tiny.json"
    begun = len(steered.rounds())
    done = steered.command("profile", steered.url, "--out", str(out), *SMALL)
    assert done.returncode == 0 and only_warnings(done.stderr), done
    profile = CostProfile.load(out)
    assert profile.tiers == (0, 1, 2, 3) and profile.max_running == 16 and profile.kv_pool_tokens == 16384
    assert profile.captured_batches.tolist() == [1, 3]
    document = json.loads(out.read_text())
    assert "Held-out cells (5 timings" in document["description"] and document["engine"] == "SGLang"
    measured = json.loads((tmp_path / "tiny.measurements.json").read_text())["results"]
    repeats = [repeat for result in measured.values() for repeat in result["repeats"]]
    assert not [repeat for repeat in repeats if "failed" in repeat] and len(repeats) >= 2 * len(measured)
    cells = [result for result in measured.values() if result["kind"] == "cell"]
    assert len(cells) == 4
    for context, repeat in ((cell["context"], repeat) for cell in cells for repeat in cell["repeats"]):
        assert {row: timing["rounds"] for row, timing in repeat["rows"].items()} == dict.fromkeys(
            ("off-warm", "off-skip", "k=1", "k=2", "k=3"), 6
        )
        assert all(timing["context"] >= context for timing in repeat["rows"].values())
    # What was counted did run: 14 rounds of every tier, of 0 twice, in both repeats of the cells at batch 3.
    ran = [k for batch, k in steered.rounds()[begun:] if batch == 3]
    assert min(ran.count(k) for k in (1, 2, 3)) >= 2 * 2 * 14 and ran.count(0) >= 2 * 2 * 28
    assert "draftdial_timing" not in steered.internal_state()
    requests = reference.choose(random_requests(seed=71), 8)
    assert tokens_of(Sending(steered, requests).answers()) == reference.tokens(requests)


def test_a_profile_is_continued_where_it_stopped(steered: SteeredServer, tmp_path: Path) -> None:
    out, kept = tmp_path / "tiny.json", tmp_path / "tiny.measurements.json"
    arguments = ("profile", steered.url, "--out", str(out), *SMALL[:-4], "--repeats", "1", "--held-out", "0")
    assert steered.command(*arguments).returncode == 0
    whole = json.loads(kept.read_text())
    missing = next(name for name in whole["results"] if "cell batch 3" in name)
    del whole["results"][missing]
    kept.write_text(json.dumps(whole))
    begun = len(steered.rounds())
    assert steered.command(*arguments).returncode == 0
    assert {batch for batch, _ in steered.rounds()[begun:]} <= {1, 2, 3}
    again = json.loads(kept.read_text())["results"]
    assert again.keys() == whole["results"].keys() | {missing}
    assert all(again[name] == result for name, result in whole["results"].items())


def test_a_profile_that_is_interrupted_says_so_and_goes_on(steered: SteeredServer, tmp_path: Path) -> None:
    out, kept = tmp_path / "tiny.json", tmp_path / "tiny.measurements.json"
    arguments = ("profile", steered.url, "--out", str(out), *SMALL)
    profile = subprocess.Popen(
        [sys.executable, "-m", "draftdial.controller.cli", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not kept.exists():
            assert profile.poll() is None
            time.sleep(0.02)
        profile.send_signal(signal.SIGINT)
        _, error = profile.communicate(timeout=600)
    finally:
        profile.kill()
    said = f"draftdial profile: interrupted; {kept} keeps what was measured, and the same command goes on"
    *before, last = error.splitlines()
    assert (profile.returncode, last) == (130, f"{said}; putting the server back")
    assert only_warnings("\n".join(before)), error
    assert "draftdial_timing" not in steered.internal_state()
    begun = json.loads(kept.read_text())["results"]
    done = steered.command(*arguments)
    assert done.returncode == 0 and only_warnings(done.stderr), done
    results = json.loads(kept.read_text())["results"]
    assert begun and all(results[name]["repeats"][0] == begun[name]["repeats"][0] for name in begun)


def test_a_kv_only_server_s_prefills_are_measured_with_and_without_the_draft(
    models: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tiny.json"
    policy = policies.saved(policies.learned(seed=0), tmp_path / "policy.safetensors")
    arguments = [*target_arguments(models), *draft_arguments(models)]
    grid = [*SMALL[:-6], "--rounds", "4", "--repeats", "1", "--held-out", "0"]
    with SteeredServer(arguments, tmp_path, serve=[str(policy), "--off-mode", "kv-only"]) as server:
        before = server.status()
        done = server.command("profile", server.url, "--out", str(out), *grid)
        assert done.returncode == 0 and only_warnings(done.stderr), done
        after = server.status()
    assert (after["kv_only_fallback"], after["errors"]) == ("", 0)
    measured = json.loads((tmp_path / "tiny.measurements.json").read_text())["results"]
    [repeat] = measured["speculative kv-only prefill batch 0 context 0"]["repeats"]
    # On a busy host the batch in the background may end first: then some prefills are behind no round.
    counts = {timing["tokens"]: timing["count"] for timing in repeat["rows"].values()}
    assert len(counts) >= 2 and max(counts.values()) <= PREFILLS
    assert after["kv_only_prefills"] - before["kv_only_prefills"] >= PREFILLS * len(counts) - PREFILLS // 2
    prefill = json.loads(out.read_text())["prefill"]
    assert [tokens for tokens, _ in prefill["kv-only"]] == [*counts] and prefill["speculative"]


def test_servers_are_started_with_and_without_speculation(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "own.json"
    policy = policies.saved(policies.learned(seed=0), tmp_path / "policy.safetensors")
    arguments = [*target_arguments(models), *draft_arguments(models)]
    command = [sys.executable, "-m", "draftdial.controller.cli", "profile", "--out", str(out)]
    done = subprocess.run(
        [*command, *SMALL, "--policy", str(policy), "--off-mode", "kv-only", "--", *arguments],
        env=os.environ | CPU_ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and only_warnings(done.stderr), done
    rows = {row["row"]: row["cells"] for row in json.loads(out.read_text())["rows"]}
    assert not any(cell.get("inferred") for row in ("nospec", "off-kv-only") for cell in rows[row])
    assert {"nospec cell batch 3 context 80", "nospec prefill batch 0 context 0"} <= set(
        json.loads((tmp_path / "own.measurements.json").read_text())["results"]
    )


def test_a_server_that_cannot_be_kv_only_is_not_measured_as_one(models: Path, tmp_path: Path) -> None:
    arguments = [*target_arguments(models), *draft_arguments(models), "--speculative-draft-window-size", "64"]
    command = [sys.executable, "-m", "draftdial.controller.cli", "profile", "--off-mode", "kv-only"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "own.json"), "--", *arguments],
        env=os.environ | CPU_ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    said = (
        "draftdial: --off-mode kv-only: not on this server, where k = 0 is warm: --speculative-draft-window"
    )
    assert (done.returncode, done.stdout) == (2, ""), done
    [starting, refused] = done.stderr.splitlines()
    assert only_warnings(starting) and refused.startswith(said)
    assert [path.name for path in tmp_path.iterdir()] == ["own.speculative.log"]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,20,12\n0.1,40,8\n0.2,9,16\n0.3,30,10\n")
    return path


def setting_of(server: SteeredServer) -> list[object]:
    """What a benchmark is to put back."""
    status = server.status()
    return [status[name] for name in ("mode", "forced_k", "policy_sha256")]


def test_arms_are_compared_and_the_server_is_put_back(
    steered: SteeredServer, reference: Reference, lengths: Path, tmp_path: Path
) -> None:
    before = setting_of(steered)
    done = steered.command(
        *("bench", steered.url, "--arms", "steer", "off", "sglang-adaptive", "fixed-3"),
        *("--no-spec", reference.server.url, "--closed", "1,4", "--rates", "20", "--trace", str(lengths)),
        *("--requests", "4", "--repeats", "1", "--lengths", f"trace:{lengths}", "--out", str(tmp_path / "b")),
    )
    assert done.returncode == 0, done
    document = json.loads((tmp_path / "b" / "bench.json").read_text())
    assert len(document["runs"]) == 4 * 5 and {run["failed"] for run in document["runs"]} == {0}
    by_arm = {run["arm"]: run for run in document["runs"] if run["load"] == 4.0}
    assert by_arm["off"]["rounds_at_k"].keys() == {"0", "1", "2", "3"}
    assert by_arm["off"]["rounds_at_k"]["0"] == by_arm["off"]["rounds"] > 0
    assert by_arm["fixed-3"]["rounds_at_k"]["3"] == by_arm["fixed-3"]["rounds"] > 0
    assert "rounds" not in by_arm["no-spec"] and by_arm["no-spec"]["output_tok_s"] > 0
    assert len(list(csv.reader((tmp_path / "b" / "bench.csv").open()))) == 21
    assert setting_of(steered) == before


def test_arms_switch_back_and_forth_under_one_load(
    steered: SteeredServer, reference: Reference, lengths: Path, tmp_path: Path
) -> None:
    # Turns outlast a moment in which the machine stands still, and few requests end in one.
    lengths.write_text("arrival_s,input_tokens,output_tokens\n0,20,60\n0.1,40,40\n0.2,9,80\n0.3,30,50\n")
    before, began_s, turn_s = setting_of(steered), time.monotonic(), 1.5
    done = steered.command(
        *("bench", steered.url, "--arms", "steer", "off", "fixed-3", "--no-spec", reference.server.url),
        *("--closed", "1,4", "--switchback", str(turn_s), "--repeats", "1", "--requests", "8"),
        *("--lengths", f"trace:{lengths}", "--out", str(tmp_path / "b")),
    )
    assert done.returncode == 0, done
    document = json.loads((tmp_path / "b" / "bench.json").read_text())
    turns = document["runs"]
    assert len(turns) == 2 * 4 and {turn["failed"] for turn in turns} == {0}
    assert document["options"]["switchback"] == turn_s
    assert sum(turn["window_s"] for turn in turns) < time.monotonic() - began_s
    for turn in turns:
        # Counted from result to result, and between two requests there is none.
        assert turn["output_tok_s"] > 0 and turn["window_s"] > 0.6 * turn_s
        ran = {k for k, rounds in turn.get("rounds_at_k", {}).items() if rounds}
        assert turn["arm"] not in ("off", "fixed-3") or ran == {turn["arm"].replace("off", "0")[-1]}
    # At one request in flight and k = 0, every round makes a token, and every prefill.
    [turn] = [turn for turn in turns if turn["arm"] == "off" and turn["load"] == 1.0]
    assert turn["output_tok_s"] * turn["window_s"] == pytest.approx(turn["rounds"] + turn["requests"], abs=4)
    served = [turn for turn in turns if turn["arm"] != "no-spec"]
    at_client, in_server = (sum(turn[name] for turn in served) for name in ("client_tok_s", "output_tok_s"))
    assert in_server / 2 < at_client < 2 * in_server  # turns begin and end apart for the two
    assert setting_of(steered) == before
    for server in (steered, reference.server):  # neither is left paused, nor with what was given up
        assert tokens_of(Sending(server, [Request((5, 6, 7), 8)]).answers())
        flush_cache(Server(server.url))


def test_a_server_counts_the_output_tokens_that_clients_get(
    steered: SteeredServer, reference: Reference
) -> None:
    before = steered.status()["output_tokens"]
    steered.set(draftdial_force_k=3)
    requests = reference.choose(random_requests(seed=72), 8)
    tokens = tokens_of(Sending(steered, requests).answers())
    steered.set(draftdial_force_k=-1)
    assert steered.status()["output_tokens"] - before == sum(map(len, tokens))


def test_a_pause_is_the_time_of_no_round(steered: SteeredServer) -> None:
    def decoding_s() -> float:
        return sum(seconds for name, seconds in steered.status().items() if name.startswith("seconds_at_k."))

    before_s, began_s, pause_s = decoding_s(), time.monotonic(), 3.0
    # Long enough for a pause that comes late, and ended when it has decoded on.
    sending = Sending(steered, [Request((5, 6, 7), 3000)], name="paused")
    steered.await_rounds(20)
    steered.post("/pause_generation", {"mode": "in_place"})
    decoding_s()  # SGLang does not wait until it pauses; what answers this does
    begun = len(steered.rounds())
    time.sleep(pause_s)
    assert len(steered.rounds()) == begun and not sending.done()
    steered.post("/continue_generation", {})
    steered.await_rounds(20)
    steered.post("/abort_request", {"rid": "paused-0"})
    sending.answers()
    passed_s = time.monotonic() - began_s
    assert 0 < decoding_s() - before_s < passed_s - 0.9 * pause_s


def test_requests_that_fail_fail_the_benchmark(steered: SteeredServer, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    # The third one has a token id that does not fit 64 bits: every release refuses it at the door.
    lines = [{"id": str(i), "category": "x", "ids": [2**63 if i == 2 else 5] * 9} for i in range(8)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = steered.command(
        *("bench", steered.url, "--arms", "steer", "--closed", "2", "--requests", "16", "--repeats", "1"),
        *("--prompts", str(prompts), "--out", str(tmp_path / "b")),
    )
    assert done.returncode == 1 and "2 requests were lost or failed" in done.stderr, done
    assert "HTTP 4" in done.stderr, done
    [run] = json.loads((tmp_path / "b" / "bench.json").read_text())["runs"]
    assert run["failed"] == 2
    assert steered.status()["forced_k"] == -1


def test_a_benchmark_of_too_long_requests_does_not_begin(steered: SteeredServer, tmp_path: Path) -> None:
    """The bound read from `/server_info` is the server's own: what reaches it is answered, more is not."""

    def asked(prompt_tokens: int, output_tokens: int) -> tuple[int, str]:
        lengths = tmp_path / "lengths.csv"
        rows = [f"{second},{prompt_tokens},{output_tokens}\n" for second in range(2)]
        lengths.write_text("".join(["arrival_s,input_tokens,output_tokens\n", *rows]))
        done = steered.command(
            *("bench", steered.url, "--arms", "steer", "--closed", "1", "--requests", "1", "--per-slot", "1"),
            *("--lengths", f"trace:{lengths}", "--repeats", "1", "--out", str(tmp_path / "b")),
        )
        return done.returncode, done.stderr

    longest = Server(steered.url).longest_request()
    assert longest == 4096 - (max(policies.TIERS) + 1)
    code, error = asked(longest - 4, 5)
    assert code == 2 and f"allowed: {longest} in all" in error and not (tmp_path / "b").exists()
    code, error = asked(longest - 4, 4)
    assert code == 0, error
    with pytest.raises(HTTPError, match="400"):
        Sending(steered, [Request((5,) * (longest - 4), 5)]).answers()


def test_a_benchmark_that_is_interrupted_puts_the_server_back(steered: SteeredServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "draftdial.controller.cli", "bench", steered.url, "--closed", "4"]
    bench = subprocess.Popen(
        [*command, "--arms", "fixed-3", "--requests", "2000", "--repeats", "1", "--out", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        # A parent in the background would hand down that it ignores this signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while steered.status()["forced_k"] != 3:
            assert bench.poll() is None
            time.sleep(0.2)
        bench.send_signal(signal.SIGINT)
        _, error = bench.communicate(timeout=600)
    finally:
        bench.kill()
    assert (bench.returncode, without_progress(error)) == (130, INTERRUPTED)
    assert steered.status()["forced_k"] == -1


def test_turns_that_are_interrupted_leave_no_server_paused(
    steered: SteeredServer, reference: Reference, tmp_path: Path
) -> None:
    before = steered.status()
    command = [sys.executable, "-m", "draftdial.controller.cli", "bench", steered.url, "--closed", "1,2,3,4"]
    command += ["--arms", "fixed-3", "--no-spec", reference.server.url, "--switchback", "60"]
    bench = subprocess.Popen(
        [*command, "--repeats", "1", "--out", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while steered.status()["forced_k"] != 3:  # in its turn: the other server is paused
            assert bench.poll() is None
            time.sleep(0.2)
        bench.send_signal(signal.SIGINT)
        _, error = bench.communicate(timeout=600)
    finally:
        bench.kill()
    assert (bench.returncode, without_progress(error)) == (130, INTERRUPTED)
    assert json.loads((tmp_path / "bench.json").read_text())["cells"] == []
    after = steered.status()
    assert [after[name] for name in ("mode", "forced_k")] == [before[name] for name in ("mode", "forced_k")]
    for server in (steered, reference.server):
        assert tokens_of(Sending(server, [Request((5, 6, 7), 8)]).answers())
        server.flush()
