"""A policy that fails, and files that are none: the server goes on, by rule, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import policies
import pytest
from cpu_server import CpuServer, ServerDied, adaptive_arguments, draft_arguments, target_arguments
from steered_server import SteeredServer, shares
from traffic import Reference, Sending, random_requests, tokens_of

from draftdial.engine_patch.control_keys import policy_key


@pytest.fixture
def healed(steered: SteeredServer) -> Iterator[SteeredServer]:
    """The shared server, with a sound policy before and after."""
    assert steered.set(draftdial_mode=0)
    assert steered.set(draftdial_force_k=-1)
    assert steered.deploy(policies.rule("fixed", k=3))
    yield steered
    assert steered.deploy(policies.learned(seed=0))


@pytest.mark.parametrize(
    ("fault", "told"), [(1, "injected by a test"), (2, "99"), (3, "NaN")], ids=["raises", "no tier", "nan"]
)
def test_a_failing_policy_is_replaced_by_its_threshold_rule_for_good(
    healed: SteeredServer, reference: Reference, fault: int, told: str
) -> None:
    requests = reference.choose(random_requests(seed=31), 12)
    before, start = healed.status(), len(healed.rounds())
    sending = Sending(healed, requests)
    assert healed.break_policy(fault)
    assert tokens_of(sending.answers()) == reference.tokens(requests)
    status = healed.status()
    assert told in status["fallback"]
    assert status["errors"] == before["errors"] + 1
    rounds = healed.rounds()[start:]
    rule = policies.FALLBACK.card()
    by_rule = [k == (rule["k"] if batch_size <= rule["batch"] else 0) for batch_size, k in rounds]
    first = next(i for i, (_, k) in enumerate(rounds) if k != 3)
    assert all(by_rule[first:])
    assert healed.deploy(policies.rule("fixed", k=1))
    assert healed.status()["fallback"] == ""
    start = len(healed.rounds())
    assert tokens_of(Sending(healed, requests[:2]).answers()) == reference.tokens(requests[:2])
    assert set(shares(healed.rounds()[start:])) == {1}


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_policy_is_refused_and_the_old_one_stays(healed: SteeredServer, damage: str) -> None:
    before = healed.status()
    data = bytearray(policies.learned(seed=1).data)
    if damage == "cut":
        del data[-1000:]
    else:
        data[-100] ^= 0xFF
    assert not healed.set(**{policy_key(bytes(data)): 1})
    after = healed.status()
    assert after["last_control"]
    assert (after["policy_id"], after["deploys"]) == (before["policy_id"], before["deploys"])


def test_strict_ends_with_one_line_where_the_file_is_broken(models: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no policy")
    config = tmp_path / "adaptive.json"
    config.write_text('{"1": {"candidate_steps": [0, 1, 2, 3]}}')
    by_hand = [*target_arguments(models), *adaptive_arguments(models, config, 3)]
    with pytest.raises(ServerDied, match=r"exit 2\n") as died:
        CpuServer(by_hand, tmp_path / "hand.log", environment={"DRAFTDIAL_POLICY": str(broken)})
    assert len([line for line in str(died.value).splitlines() if line.startswith("draftdial: ")]) == 1
    served = [*target_arguments(models), *draft_arguments(models)]
    with pytest.raises(ServerDied, match=r"exit 2\n") as died:
        CpuServer(served, tmp_path / "serve.log", serve=[str(broken)])
    assert "broken.safetensors" in str(died.value)


def test_warn_serves_and_says_why_it_does_not_steer(
    models: Path, tmp_path: Path, reference: Reference
) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no policy")
    arguments = [*target_arguments(models), *draft_arguments(models)]
    requests = reference.choose(random_requests(seed=32, spread_s=0.0), 4)
    with SteeredServer(arguments, tmp_path, serve=[str(broken), "--warn"]) as server:
        assert tokens_of(Sending(server, requests).answers()) == reference.tokens(requests)
        status = server.status()
        assert status["mode"] == "inactive"
        assert "broken.safetensors" in status["reason"]
        assert not server.deploy(policies.learned(seed=0))
