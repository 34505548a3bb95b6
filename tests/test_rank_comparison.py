"""What a server says about whether its ranks decide alike, and SGLang's own check of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch import compat, control, rank_agreement, steering
from draftdial.engine_patch import dial as dials
from draftdial.engine_patch.dial import Dial
from draftdial.engine_patch.rank_agreement import Vote
from draftdial.engine_patch.status_command import status_lines


@pytest.fixture
def dial(make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]) -> Iterator[Dial]:
    made = make_dial(make_policy_file(1))
    dials.install(made)
    yield made
    dials.install(None)


def server_info(monkeypatch: pytest.MonkeyPatch, others: Callable[[Vote], list[Vote]]) -> dict[str, Any]:
    """The status that this rank gives when the ranks beside it say what `others` makes of its vote."""
    monkeypatch.setattr(rank_agreement, "gather", lambda scheduler, vote: [vote, *others(vote)])
    result = SimpleNamespace(internal_state={})
    control.after_get_internal_state(result, "scheduler")
    status: dict[str, Any] = result.internal_state["draftdial"]
    return status


@pytest.mark.parametrize(
    ("difference", "agree", "text"),
    [
        ({}, 1, "ranks      2, all decided alike"),
        ({"decisions": "1f"}, 0, "NOT ALIKE"),
        ({"change": "policy 000, mode off, forced k None"}, 0, "NOT ALIKE"),
    ],
)
def test_a_rank_that_differs_shows(
    difference: dict[str, str], agree: int, text: str, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = server_info(monkeypatch, lambda vote: [vote._replace(**difference)])
    assert (status["ranks"], status["ranks_agree"]) == (2, agree)
    assert text in "\n".join(status_lines(status))


def test_one_rank_has_nobody_to_compare_with(dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    status = server_info(monkeypatch, lambda vote: [])
    assert (status["ranks"], status["ranks_agree"]) == (1, 1)
    assert not [line for line in status_lines(status) if line.startswith("ranks")]


def test_an_inactive_server_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(vote: Vote) -> list[Vote]:
        raise AssertionError("ranks that never steer need not meet")

    dials.install(None, "no draft model")
    assert server_info(monkeypatch, unexpected)["mode"] == "inactive"


@pytest.mark.parametrize(
    ("switch", "has"),
    [(None, False), (lambda: False, False), (lambda: True, True)],
    ids=["older", "off", "on"],
)
def test_sglangs_checker_is_used_where_it_is_on(
    switch: Callable[[], bool] | None, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = ModuleType("sglang.srt.environ")
    variables = (
        {} if switch is None else {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": SimpleNamespace(get=switch)}
    )
    environ.envs = SimpleNamespace(**variables)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, environ.__name__, environ)
    assert compat.has_consensus_checker() == has


def test_the_checker_is_told_what_runs(dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    checker = ModuleType("sglang.srt.utils.rank_consensus_checker")
    checker.assert_same = lambda text, *values: told.append(text % values)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, checker.__name__, checker)
    controller = SimpleNamespace(worker=SimpleNamespace(speculative_num_steps=3))
    dial.decision_hash = 255
    steering.after_activate_step(None, controller, 8)
    assert told == ["draftdial: a batch of 8 runs at k = 3, decisions ff"]
