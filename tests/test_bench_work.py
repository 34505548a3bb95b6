"""What a benchmark sends: drawn from its options, before and after they have been through JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_client import FakeSglang, serve  # noqa: F401

from draftdial.controller.bench_arms import Arm, SteeredArms
from draftdial.controller.bench_work import DEFAULTS, Work, fingerprint
from draftdial.controller.cli import main
from draftdial.controller.errors import UserError
from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch.client import Server, ServerRefused
from draftdial.engine_patch.control_keys import FORCE_K_KEY, MODE_KEY, policy_key
from draftdial.engine_patch.dial import Dial
from draftdial.envs.domains import DomainSwitches
from draftdial.envs.workload import make_workload

TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{i},{9 + i},{20 + i}\n" for i in range(60))


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Every kind of load, with two domains that take turns."""
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return {
        "closed": (1, 16),
        "per_slot": 3,
        "rates": (2.0,),
        "swing": (1, 8),
        "trace": path,
        "requests": 40,
        "lengths": f"trace:{path}",
        "domains": ("chat", "code"),
        "domain_span": (5, 9),
        "seed": 3,
        "repeats": 2,
    }


def test_a_closed_loop_sends_so_many_for_each_slot() -> None:
    def sizes(**options: Any) -> list[int]:
        loads = Work.of({"closed": (1, 16), "requests": 40} | options).loads
        return [load.source.requests(0).num_requests for load in loads]

    assert sizes() == [40, 128] and sizes(per_slot=3) == [40, 48] and sizes(per_slot=1, requests=4) == [4, 16]


def test_domains_take_turns_under_every_load(options: dict[str, Any]) -> None:
    work = Work.of(options)
    assert [load.workload for load in work.loads] == [
        "closed",
        "closed",
        "poisson",
        "swing 1:8",
        "trace-trace",
    ]
    assert list(work.seeds) == [3, 4]
    for load in work.loads:
        domain = work.requests(load, 3).domain
        changes = np.flatnonzero(np.diff(domain)) + 1
        spans = np.diff([0, *changes])  # with the last, which the end of the list may cut, left out
        assert len(changes) >= 3 and spans.min() >= 5 and spans.max() <= 9, load.label
    drawn = Work.of(options | {"domain_span": None})
    domain = drawn.requests(drawn.loads[0], 3).domain
    assert np.diff([0, *np.flatnonzero(np.diff(domain))]).min() < 5


def test_the_same_list_comes_from_the_simulators_workload(options: dict[str, Any]) -> None:
    work = Work.of(options)
    same = make_workload(
        "stationary",
        concurrency=16,
        num_requests=48,
        domains=DomainSwitches((0, 1), 5, 9),
        lengths=options["lengths"],
    )
    assert fingerprint(work.requests(work.loads[1], 4)) == fingerprint(same.requests(4))
    assert fingerprint(same.requests(4)) != fingerprint(same.requests(3))


def test_options_that_went_through_json_draw_the_same(options: dict[str, Any]) -> None:
    work = Work.of(options)
    again = Work.of(json.loads(json.dumps(work.options)))
    assert work.options.keys() == DEFAULTS.keys() and again.options == work.options
    for load, other in zip(work.loads, again.loads, strict=True):
        for seed in work.seeds:
            requests = work.requests(load, seed)
            assert fingerprint(requests) == fingerprint(again.requests(other, seed))
            first, second = (each.asking.bodies(requests, seed, "run")(7) for each in (work, again))
            assert first == second


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rates", "2", "--per-slot", "4"], "--per-slot: no --closed"),
        (["--closed", "4,4"], "closed C = 4: found twice, allowed: each load once"),
        (["--closed", "1", "--per-slot", "0"], "found 0"),
        (["--closed", "1", "--domain-span", "5:9"], "--domain-span: found none to change between"),
        (["--closed", "1", "--domains", "a", "--domain-span", "5:9"], "--domain-span: found a to change"),
        (["--closed", "1", "--domains", "a,b", "--domain-span", "9:5"], "LOW not above HIGH"),
        (["--swing", "8"], "--swing: found 8, allowed: LOW:HIGH"),
        (["--swing", "0:8"], "--swing: found 0, allowed: a whole number from 1"),
    ],
)
def test_options_that_fit_no_load_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "http://127.0.0.1:1", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


@pytest.fixture
def fake(
    serve: Callable[..., FakeSglang],  # noqa: F811
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
) -> FakeSglang:
    return serve(make_dial(make_policy_file(1)))


def test_a_server_is_asked_for_nothing_that_is_so_already(fake: FakeSglang, tmp_path: Path) -> None:
    [dial] = fake.replicas
    assert dial is not None
    path = tmp_path / "own.safetensors"
    path.write_bytes(dial.file.data)
    off, third, own = (Arm.parse(text) for text in ("off", "fixed-3", f"policy:{path}"))
    steered = SteeredArms(Server(fake.url), [off, third, own], None)

    def asked(arm: Arm) -> list[str]:
        before = len(fake.posts)
        steered.set(arm)
        assert steered.status_of(arm)["mode"] == arm.mode
        return [key for post in fake.posts[before:] for key in post]

    assert asked(third) == [MODE_KEY, FORCE_K_KEY]  # the first time, to end a measurement left behind
    assert asked(third) == [] and asked(off) == [MODE_KEY, FORCE_K_KEY]
    assert asked(own) == [MODE_KEY, policy_key(dial.file.data)]
    assert asked(own) == [policy_key(dial.file.data)], "every run of a policy begins with an empty memory"
    assert asked(third) == [FORCE_K_KEY] and dial.counters.deploys == 2


def test_a_server_that_somebody_else_steers_is_refused(fake: FakeSglang) -> None:
    [dial] = fake.replicas
    assert dial is not None
    arm = Arm.parse("fixed-3")
    steered = SteeredArms(Server(fake.url), [arm], None)
    steered.set(arm)
    dial.force_k(1)
    with pytest.raises(ServerRefused, match="somebody else steers it: forced_k is 1 and was set to 3"):
        steered.status_of(arm)
    steered.restore()
    assert (dial.mode, dial.forced_k) == ("steer", None)


def test_a_policy_that_fails_stops_its_own_arm_alone(fake: FakeSglang) -> None:
    [dial] = fake.replicas
    assert dial is not None
    third, steer = Arm.parse("fixed-3"), Arm.parse("steer")
    steered = SteeredArms(Server(fake.url), [third, steer], None)
    dial.fail("decide", RuntimeError("broken"))
    steered.set(third)
    assert steered.status_of(third)["forced_k"] == 3
    steered.set(steer)
    with pytest.raises(ServerRefused, match="its policy has failed: decide"):
        steered.status_of(steer)


def test_policies_are_named_by_what_tells_their_files_apart(
    tmp_path: Path, make_policy_file: Callable[..., PolicyFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = ["old/policy.safetensors", "runs/0/policy.safetensors", "more/0/policy.safetensors"]
    paths += ["mine.safetensors", "policy.safetensors"]
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_policy_file(1).data)

    def names(*texts: str) -> list[str]:
        return [arm.name for arm in Arm.parse_all(texts)]

    files = [f"policy:{path}" for path in paths]
    apart = ["policy:old/policy", "policy:runs/0/policy", "policy:more/0/policy"]
    assert names(*files[:3], "off", files[3]) == [*apart, "off", "policy:mine"]
    assert names("steer", files[0]) == ["steer", "policy:policy"]
    assert names(files[0], files[4])[1] == f"policy:{tmp_path.name}/policy"
    with pytest.raises(
        UserError, match=r"found policy:mine\.safetensors policy:\./mine\.safetensors, allowed"
    ):
        names(files[3], "policy:./mine.safetensors")
    with pytest.raises(UserError, match="arms: found off off, allowed: each once"):
        names("off", "off")


def test_a_prompts_file_that_is_gone_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read it as text"):
        Work.of({"closed": (1,), "prompts": tmp_path / "none.jsonl"})
