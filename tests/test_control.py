"""The control channel: what a request changes, on all ranks or on none."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch import control, rank_agreement
from draftdial.engine_patch import dial as dials
from draftdial.engine_patch.control_keys import FORCE_K_KEY, MODE_KEY, policy_key
from draftdial.engine_patch.dial import Dial
from draftdial.engine_patch.rank_agreement import Vote


@dataclass
class SetInternalStateReqOutput:
    updated: bool


class Scheduler:
    """SGLang's side of the hook: takes `pp_max_micro_batch_size` and nothing else."""

    def __init__(self, group: Any) -> None:
        self.tp_cpu_group = group
        self.seen: list[dict[str, Any]] = []

    def set_internal_state(self, recv_req: Any) -> SetInternalStateReqOutput:
        self.seen.append(recv_req.server_args)
        return SetInternalStateReqOutput(updated=set(recv_req.server_args) <= {"pp_max_micro_batch_size"})

    def ask(self, **server_args: Any) -> bool:
        request = SimpleNamespace(server_args=server_args)
        answer = control.around_set_internal_state(Scheduler.set_internal_state, self, request)
        assert isinstance(answer, SetInternalStateReqOutput)
        return answer.updated


def install_sglang_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one name of SGLang that the hook imports."""
    module = ModuleType("sglang.srt.managers.io_struct")
    module.SetInternalStateReqOutput = SetInternalStateReqOutput  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", module)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def scheduler(group: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    install_sglang_answer(monkeypatch)
    yield Scheduler(group)
    dials.install(None)


@pytest.fixture
def dial(make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]) -> Dial:
    dial = make_dial(make_policy_file(1))
    dials.install(dial)
    return dial


def test_a_request_of_very_many_keys_makes_a_short_line(
    scheduler: Scheduler, dial: Dial, caplog: pytest.LogCaptureFixture
) -> None:
    assert not scheduler.ask(**{f"draftdial_{number}": 1 for number in range(20_000)})
    assert dial.last_control == "20000 draftdial keys in one request, allowed: one"
    assert len(caplog.text) < 500


def test_a_mode_is_set(scheduler: Scheduler, dial: Dial) -> None:
    for code, mode in enumerate(("steer", "shadow", "off")):
        assert scheduler.ask(**{MODE_KEY: code})
        assert dial.mode == mode and dial.last_control == ""
    assert scheduler.seen == []


def test_a_k_is_forced_and_released(scheduler: Scheduler, dial: Dial) -> None:
    assert scheduler.ask(**{FORCE_K_KEY: 3}) and dial.forced_k == 3
    assert scheduler.ask(**{FORCE_K_KEY: -1}) and dial.forced_k is None


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({MODE_KEY: 3}, "draftdial_mode: found 3, allowed: 0 steer, 1 shadow, 2 off"),
        ({MODE_KEY: -1}, "draftdial_mode: found -1"),
        ({FORCE_K_KEY: 2}, "allowed: [0, 1, 3]"),
        ({FORCE_K_KEY: 0.5}, "draftdial_force_k: found 0.5"),
        ({FORCE_K_KEY: float("inf")}, "OverflowError"),
        ({"draftdial_speed": 1}, "draftdial_speed: no such key"),
        ({MODE_KEY: 2, FORCE_K_KEY: 3}, "2 draftdial keys in one request"),
        ({"draftdial_policy:": 1}, "damaged"),
        ({"draftdial_policy:00:AAAA": 1}, "damaged"),
        ({"draftdial_policy:00:%%%%": 1}, "not base64"),
    ],
)
def test_a_refusal_changes_nothing_and_says_why(
    keys: dict[str, Any], why: str, scheduler: Scheduler, dial: Dial
) -> None:
    before = dial.policy
    assert not scheduler.ask(**keys)
    assert why in dial.last_control
    assert (dial.mode, dial.forced_k, dial.policy, dial.counters.deploys) == ("steer", None, before, 0)


def test_the_next_success_clears_the_reason(scheduler: Scheduler, dial: Dial) -> None:
    assert not scheduler.ask(**{FORCE_K_KEY: 2}) and dial.last_control
    assert scheduler.ask(**{FORCE_K_KEY: 3}) and dial.last_control == ""


def test_off_is_refused_where_k_0_would_end_the_server(
    scheduler: Scheduler, make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file(1), without_zero=True)
    dials.install(dial)
    for keys in ({MODE_KEY: 2}, {FORCE_K_KEY: 0}):
        assert not scheduler.ask(**keys)
        assert "rejection sampling" in dial.last_control
    assert dial.mode == "steer" and dial.forced_k is None


def test_a_deploy_swaps_the_policy(
    scheduler: Scheduler, dial: Dial, make_policy_file: Callable[..., PolicyFile]
) -> None:
    file = make_policy_file()
    assert scheduler.ask(**{policy_key(file.data): 1})
    assert dial.policy_id == file.policy_id and dial.counters.deploys == 1


def test_a_deploy_ends_a_fallback(
    scheduler: Scheduler, dial: Dial, make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial.fallback = "it failed"
    assert scheduler.ask(**{policy_key(make_policy_file(3).data): 1})
    assert dial.fallback is None


def test_a_policy_for_other_tiers_is_refused(
    scheduler: Scheduler, dial: Dial, make_policy_file: Callable[..., PolicyFile]
) -> None:
    before = dial.policy_id
    assert not scheduler.ask(**{policy_key(make_policy_file(2, tiers=(0, 2)).data): 1})
    assert "tiers" in dial.last_control and dial.policy_id == before


def test_a_damaged_file_is_refused_by_its_hash_and_by_its_content(
    scheduler: Scheduler,
    dial: Dial,
    make_policy_file: Callable[..., PolicyFile],
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = make_policy_file(3).data
    name, sha256, _ = policy_key(data).split(":")
    cut = base64.b64encode(data[:-30]).decode()
    assert not scheduler.ask(**{f"{name}:{sha256}:{cut}": 1})
    assert "damaged" in dial.last_control and sha256 in caplog.text, "which one is told in full"
    assert not scheduler.ask(**{policy_key(data[:-30]): 1})
    assert "policy file: file length" in dial.last_control
    assert dial.counters.deploys == 0


def test_other_keys_are_sglangs_alone(scheduler: Scheduler, dial: Dial) -> None:
    assert scheduler.ask(pp_max_micro_batch_size=8)
    assert not scheduler.ask(max_loras=8)
    assert scheduler.seen == [{"pp_max_micro_batch_size": 8}, {"max_loras": 8}]
    assert dial.last_control == ""


def test_a_mixed_request_is_done_whole_or_not_at_all(scheduler: Scheduler, dial: Dial) -> None:
    assert scheduler.ask(**{MODE_KEY: 2}, pp_max_micro_batch_size=8)
    assert dial.mode == "off" and scheduler.seen == [{"pp_max_micro_batch_size": 8}]
    assert not scheduler.ask(**{MODE_KEY: 0}, max_loras=8)
    assert dial.mode == "off" and "SGLang refused" in dial.last_control
    assert not scheduler.ask(**{MODE_KEY: 9}, pp_max_micro_batch_size=4)
    assert scheduler.seen[-1] == {"max_loras": 8}


def test_a_server_without_a_dial_answers_false(scheduler: Scheduler) -> None:
    dials.install(None, "adaptive speculation is off")
    assert not scheduler.ask(**{MODE_KEY: 0})
    assert scheduler.seen == []


def test_server_info_gets_the_status(dial: Dial, scheduler: Scheduler) -> None:
    result = SimpleNamespace(internal_state={"tp_size": 1})
    control.after_get_internal_state(result, scheduler)
    assert result.internal_state["tp_size"] == 1
    assert result.internal_state["draftdial"]["policy_id"] == dial.policy_id


READY = Vote("", "mode off", "abc")


@pytest.mark.parametrize(
    ("votes", "why"),
    [
        ([READY], ""),
        ([READY, READY], ""),
        ([READY._replace(reason="no"), READY._replace(reason="no")], "no"),
        ([READY, READY._replace(reason="no")], "rank 1 of 2 refused: no"),
        ([READY, READY._replace(change="mode steer"), READY], "rank 1 and rank 0 disagree about the change"),
        (
            [READY, READY._replace(decisions="1"), READY._replace(decisions="1")],
            "ranks 1, 2 and rank 0 disagree about the decisions so far",
        ),
    ],
)
def test_votes(votes: list[Vote], why: str) -> None:
    assert rank_agreement.refusal(votes) == why


def _broken_load(source: object) -> Any:
    raise MemoryError("no room")


def run_rank(rank: int, folder: Path) -> None:
    """One rank of two: a deploy that both can make, one that fails on rank 1, one after rank 1 diverged."""
    from conftest import StockRule  # this file runs as a script here

    install_sglang_answer(pytest.MonkeyPatch())
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    first, second = ((folder / name).read_bytes() for name in ("first", "second"))
    dial = Dial(StockRule((0, 1, 3), 1), worker=None)
    dial.activate(dial.load(first))
    dials.install(dial)
    scheduler = Scheduler(dist.group.WORLD)
    lines = []

    def deploy(data: bytes) -> None:
        lines.append(f"{scheduler.ask(**{policy_key(data): 1})} {dial.policy_id} {dial.last_control}")

    deploy(second)
    load = dial.load
    if rank == 1:
        dial.load = _broken_load  # type: ignore[method-assign]
    deploy(first)
    dial.load = load  # type: ignore[method-assign]
    dial.decision_hash += rank
    deploy(first)
    (folder / f"rank{rank}").write_text("\n".join(lines))
    dist.destroy_process_group()


def test_two_ranks_swap_together_or_not_at_all(
    tmp_path: Path, make_policy_file: Callable[..., PolicyFile]
) -> None:
    first, second = make_policy_file(1), make_policy_file(3)
    (tmp_path / "first").write_bytes(first.data)
    (tmp_path / "second").write_bytes(second.data)
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)]) for rank in range(2)]
    try:
        assert [rank.wait(300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    answers = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in range(2)]
    assert answers[0] == answers[1]
    assert answers[0] == [
        f"True {second.policy_id} ",
        f"False {second.policy_id} rank 1 of 2 refused: MemoryError: no room",
        f"False {second.policy_id} rank 1 and rank 0 disagree about the decisions so far",
    ]


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
