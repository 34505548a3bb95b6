"""The commands against a live server: what an operator types, and what they see."""

from __future__ import annotations

import json
from pathlib import Path

import policies
from cpu_server import draft_arguments, target_arguments
from steered_server import SteeredServer
from traffic import Load, Reference, Sending, random_requests


def test_status_set_and_deploy_while_requests_run(
    steered: SteeredServer, reference: Reference, tmp_path: Path
) -> None:
    requests = reference.choose(random_requests(seed=41), 24)
    jumping = policies.jumping(seed=8)
    path = policies.saved(jumping, tmp_path / "new.safetensors")
    with Load(steered, requests) as load:
        deploy = steered.command("deploy", str(path), steered.url)
        assert (deploy.returncode, deploy.stderr) == (0, ""), deploy
        assert jumping.policy_id in deploy.stdout
        off = steered.command("set", steered.url, "--mode", "off")
        assert (off.returncode, off.stderr) == (0, ""), off
        assert steered.status()["mode"] == "off"
        on = steered.command("set", steered.url, "--mode", "steer")
        assert (on.returncode, on.stderr) == (0, ""), on
        status = steered.command("status", steered.url, "--json")
        assert (status.returncode, status.stderr) == (0, ""), status
        assert jumping.policy_id in json.dumps(json.loads(status.stdout))
    assert load.tokens() == reference.tokens(requests)


def test_the_server_refuses_what_it_cannot_run(steered: SteeredServer) -> None:
    before = steered.status()
    refused = steered.command("set", steered.url, "--force-k", "7")
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1
    assert steered.status()["forced_k"] == before["forced_k"]


def test_a_server_without_the_plugin_is_recognised(
    reference: Reference, steered: SteeredServer, tmp_path: Path
) -> None:
    path = policies.saved(policies.learned(seed=0), tmp_path / "policy.safetensors")
    log = reference.server.log_text()
    deploy = steered.command("deploy", str(path), reference.server.url)
    assert deploy.returncode in (1, 2)
    assert len(deploy.stderr.splitlines()) == 1
    assert "draftdial_policy" not in reference.server.log_text().removeprefix(log)


def test_metrics_stand_beside_sglangs_own(steered: SteeredServer, reference: Reference) -> None:
    requests = reference.choose(random_requests(seed=42, spread_s=0.0), 8)
    Sending(steered, requests).answers()
    page = steered.get("/metrics").decode()
    assert "sglang:" in page
    lines = [line for line in page.splitlines() if line.startswith("draftdial")]
    decisions = sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("draftdial:decisions_total")
    )
    counted = steered.status()["decisions"]
    assert counted - 40 <= decisions <= counted  # flushed every 40 rounds


def test_server_info_stays_small(steered: SteeredServer) -> None:
    status = steered.status()
    assert len(json.dumps(status)) < 10_000
    assert {type(value) for value in status.values()} <= {int, float, str}


def test_doctor_says_in_one_line_what_sglangs_own_reading_of_a_flag_raises(steered: SteeredServer) -> None:
    done = steered.command("doctor", "--", "--model-path", "m", "--lora-paths", '{"lora_name": "a"}')
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert (
        done.stderr.startswith("draftdial: SGLang refuses these arguments: ") and "lora_path" in done.stderr
    )


def test_doctor_says_why_attention_dp_is_not_steered_and_what_it_wants(
    steered: SteeredServer, models: Path
) -> None:
    arguments = ["--", *target_arguments(models), *draft_arguments(models), "--enable-dp-attention"]
    done = steered.command("doctor", *arguments, "--dp", "2", "--tp", "2")
    [problem] = [line for line in done.stdout.splitlines() if line.startswith("problem ")]
    assert "adaptive" in problem and "across DP ranks" in problem, done
    refused = steered.command("doctor", *arguments, "--dp", "2")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1), refused
    assert "AssertionError at `assert " in refused.stderr and "tp_size % " in refused.stderr
