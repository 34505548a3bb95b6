"""A decision log as a workload: its requests, their times and lengths, and the acceptance it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.policy_file import PolicyFile
from draftdial.controller.rules import FixedK
from draftdial.engine_patch.decision_log import MIN_BYTES, DecisionLog
from draftdial.engine_patch.log_format import RequestKind
from draftdial.envs.acceptance import AcceptanceBank, walk_statistics
from draftdial.envs.domains import DomainMix
from draftdial.envs.evaluate import run
from draftdial.envs.fitted_acceptance import FittedAcceptance
from draftdial.envs.logged_workload import (
    UNKNOWN,
    LoggedAcceptance,
    LoggedTraffic,
    LoggedWorkload,
    filled,
    hashes_for,
    known_right,
)
from draftdial.envs.replayed_acceptance import bank_of_arrays
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine
from draftdial.envs.suite import Acceptance, Extent, make_cells, notes, workload_sha256
from draftdial.envs.workload import draw_hashes

SHORT = Extent(seeds=2, low_rounds=30, high_rounds=6, switch_requests=10, open_requests=60, drift_share=0.02)
ROWS = [("round_id", "<i8"), ("k", "<i2"), ("request_id", "<u4"), ("position", "<u4"), ("accepted", "<u1")]
U = UNKNOWN


def rows(*accepts: tuple[int, int, int, int]) -> np.ndarray:
    """Of `(k, request, position, accepted)`."""
    return np.array([(number, *accept) for number, accept in enumerate(accepts)], ROWS)


def walk(arrays: Sequence[np.ndarray], k_of_round: Callable[[int], int]) -> np.ndarray:
    """What rounds of these k record of requests with these acceptance arrays."""
    accepts = []
    for request, array in enumerate(arrays):
        place = number = 0
        while place < len(array):
            k = k_of_round(number)
            accepted = min(int(array[place]), k)
            accepts.append((k, request, place + 1, accepted))
            place, number = place + accepted + 1, number + 1
    return rows(*accepts)


def write_log(
    path: Path,
    requests: Sequence[tuple[RequestKind, float, float, int, int]],
    accepts: np.ndarray | None = None,
) -> Path:
    """A log of `(how it ended, arrival, end, prompt tokens, output tokens)`, numbered from 100."""
    log = DecisionLog.open(path, MIN_BYTES, {"tiers": [0, 1, 3]})
    for number, (_, arrival_s, _, prompt_tokens, _) in enumerate(requests, 100):
        log.request("arrived", number, arrival_s, prompt_tokens, 0)
    for number, (kind, _, end_s, prompt_tokens, output_tokens) in enumerate(requests, 100):
        log.request(kind, number, end_s, prompt_tokens, output_tokens)
    for row in () if accepts is None else accepts:
        log.accepts(row["round_id"], row["k"], [row["request_id"]], [row["position"]], [row["accepted"]])
    log.close()
    return path


def test_rounds_show_what_they_tried_and_no_more() -> None:
    accepts = rows(
        (3, 7, 1, 3),  # all right: what comes fourth is not known
        (3, 7, 5, 1),  # one right, then one wrong
        (0, 7, 7, 0),  # nothing tried
        (1, 7, 8, 0),
        (3, 9, 1, 2),  # the draft that was wrong lies past the last token
        (3, 8, 1, 3),  # a request whose end is not in the log
    )
    first, second, third = known_right(accepts, np.array([9, 7, 5]), np.array([3, 11, 4]))
    assert first.tolist() == [1, 1]
    assert second.tolist() == [1, 1, 1, U, 1, 0, U, 0, U, U]
    assert third.tolist() == [U, U, U]


def test_filling_keeps_what_is_known_and_draws_the_rest_at_the_requests_rate() -> None:
    known = np.array([1, 1, 0, 1, 0], np.int8)
    assert filled((known, known))[0].tolist() == [2, 1, 0, 1, 0]
    rng = np.random.default_rng(1)
    often = np.where(rng.random(8000) < 0.5, U, rng.random(8000) < 0.9).astype(np.int8)
    seldom = np.where(rng.random(8000) < 0.5, U, rng.random(8000) < 0.3).astype(np.int8)
    silent = np.full(20, U, np.int8)
    arrays = filled((silent, often, silent, seldom))
    for known, array, rate in ((often, arrays[1], 0.9), (seldom, arrays[3], 0.3)):
        drawn = array[known == U] > 0
        assert drawn.mean() == pytest.approx(rate, abs=0.03)
        assert ((array > 0) == (known == 1))[known != U].all()
    assert arrays[0] is arrays[1] is arrays[2], "a request without a record takes its neighbour's array"


@pytest.mark.parametrize("k_of_round", [lambda n: 1, lambda n: 3, lambda n: 7, lambda n: (0, 1, 3, 7)[n % 4]])
def test_a_replay_with_the_recorded_k_accepts_what_was_recorded(k_of_round: Callable[[int], int]) -> None:
    bank = FittedAcceptance(["chat"]).bank(1)
    starts = zip(bank.array_start[:50], bank.array_length[:50], strict=True)
    arrays = [bank.accepted[start : start + min(length, 200)] for start, length in starts]
    accepts = walk(arrays, k_of_round)
    lengths = np.array([len(array) for array in arrays])
    again = walk(filled(tuple(known_right(accepts, np.arange(50), lengths + 1))), k_of_round)
    # Right up to the last round of a request, which may run past its end.
    ended = accepts["position"] + accepts["accepted"] > lengths[accepts["request_id"]]
    assert (again[["request_id", "position"]] == accepts[["request_id", "position"]]).all()
    assert (again["accepted"] == accepts["accepted"])[~ended].all() and ended.mean() < 0.05


@pytest.mark.parametrize(("recorded_k", "within"), [(2, 0.05), (3, 0.04), (5, 0.035), (7, 0.035)])
@pytest.mark.parametrize("domain", ["maths-gsm8k", "code-edit", "chat", "poor"])
def test_other_k_are_replayed_within_a_few_percent(domain: str, recorded_k: int, within: float) -> None:
    bank = FittedAcceptance([domain]).bank(5)
    starts = zip(bank.array_start[:200], bank.array_length[:200], strict=True)
    arrays = [bank.accepted[start : start + min(length, 300)] for start, length in starts]
    lengths = np.array([len(array) for array in arrays])
    accepts = walk(arrays, lambda _: recorded_k)
    rebuilt = bank_of_arrays({domain: filled(tuple(known_right(accepts, np.arange(200), lengths + 1)))})
    truth = bank_of_arrays({domain: arrays})
    for k in (1, 2, 3, 5, 7):
        length = walk_statistics(rebuilt, 0, k).accept_length
        assert length == pytest.approx(walk_statistics(truth, 0, k).accept_length, rel=within), k


def test_hashes_lead_each_request_to_its_own_array(
    make_profile: Callable[..., CostProfile], make_bank: Callable[..., AcceptanceBank], make_requests: Any
) -> None:
    """Array i accepts i drafts for ever: requests of 4 tokens after the first take 4, 2, 2, 1, ... rounds."""
    arrays = [[min(i, 3)] * 40 for i in range(5)]
    rows_of = np.array([3, 0, 4, 1, 2, 0])
    requests = make_requests([5] * 6, arrival_s=np.arange(6.0).tolist())
    requests.request_hash = hashes_for(rows_of, 5, draw_hashes(9, 6))
    engine = SimulatedEngine([requests], make_bank({"a": arrays}), make_profile(), ServerOptions())
    results = run(FixedK(engine.tiers, 3), engine)
    rounds = np.array([4, 2, 2, 1, 1])[rows_of]
    took_s = results.finish_s[0] - results.first_token_s[0]
    # 6 ms for 3 drafts, 10 ms and 1 ms for the request, a round each. After i drafts come i + 1 tokens.
    assert took_s == pytest.approx(0.017 * rounds)


def test_requests_come_as_they_were_recorded_from_any_place_on(tmp_path: Path) -> None:
    path = write_log(
        tmp_path / "day.log",
        [
            ("finished", 50.0, 51.0, 10, 30),
            ("finished", 52.5, 60.0, 0, 9),
            ("aborted", 51.0, 51.5, 12, 4),
            ("aborted", 51.2, 51.3, 12, 0),  # it never got a token
        ],
    )
    traffic = LoggedTraffic.read(path)
    assert traffic.arrival_s.tolist() == [0.0, 1.0, 2.5]
    assert traffic.prompt_tokens.tolist() == [10, 12, 1] and traffic.output_tokens.tolist() == [30, 4, 9]
    assert traffic.period_s == 3.75 and not traffic.has_acceptance

    workload = LoggedWorkload("log-day", traffic, 3, DomainMix((0, 1), (1.0, 1.0)))
    lists = {
        tuple(workload.requests(seed).output_tokens.tolist()): workload.requests(seed) for seed in range(9)
    }
    assert set(lists) == {(30, 4, 9), (4, 9, 30), (9, 30, 4)}
    assert lists[4, 9, 30].arrival_s.tolist() == pytest.approx([0.0, 1.5, 2.75])
    again = workload.requests(3)
    assert all(
        (getattr(again, n) == getattr(workload.requests(3), n)).all() for n in ("domain", "request_hash")
    )


def test_a_log_brings_its_own_acceptance_unless_the_user_asks_for_another(
    tmp_path: Path, make_profile: Callable[..., CostProfile]
) -> None:
    arrays = [np.full(40, 3), np.zeros(40, int)] * 10
    accepts = walk(arrays, lambda _: 3)
    accepts["request_id"] += 100
    requests: list[tuple[RequestKind, float, float, int, int]] = [
        ("finished", float(number), number + 3.0, 100, 41) for number in range(20)
    ]
    full = write_log(tmp_path / "full.log", requests, accepts)
    silent = write_log(tmp_path / "silent.log", requests)
    (cell,) = make_cells([f"log:{full}"], make_profile(), "warm", Acceptance(), SHORT)
    assert (cell.workload, cell.load, cell.mode, cell.num_requests) == ("log:full", None, "open", 20)
    assert isinstance(cell.acceptance, LoggedAcceptance) and cell.domains.tolist() == [0]
    assert notes([f"log:{full}", "chat"], Acceptance()) == [
        "log:full: acceptance as recorded at 88% of positions, drawn at each request's own rate at the "
        "others; drafts beyond k = 3 were never tried"
    ]
    (cell,) = make_cells([f"log:{silent}"], make_profile(), "warm", Acceptance(), SHORT)
    assert isinstance(cell.acceptance, FittedAcceptance)
    assert "too little" in notes([f"log:{silent}"], Acceptance())[0]
    asked = Acceptance.parse(["fitted"])
    (cell,) = make_cells([f"log:{full}"], make_profile(), "warm", asked, SHORT)
    assert isinstance(cell.acceptance, FittedAcceptance) and notes([f"log:{full}"], asked) == []
    assert asked.identity([f"log:{full}"]) == Acceptance().identity(["chat"]) == "fitted"
    assert Acceptance().identity([f"log:{full}"]) == "fitted; logs their own"
    assert workload_sha256(f"log:{full}") != workload_sha256(f"log:{silent}")


def test_a_recorded_server_replays_as_it_ran(
    tmp_path: Path,
    make_policy_file: Callable[..., PolicyFile],
    make_profile: Callable[..., CostProfile],
    make_requests: Any,
    record_server: Callable[..., DecisionLog],
) -> None:
    """Record k = 3 for ever, replay the log under the same: the same requests end when they did."""
    bank = FittedAcceptance(["chat"]).bank(2)
    rng = np.random.default_rng(4)
    arrival_s = np.sort(rng.uniform(0, 20, 60)).tolist()
    requests = make_requests(rng.integers(2, 80, 60).tolist(), arrival_s=arrival_s)
    engine = SimulatedEngine([requests], bank, make_profile(), ServerOptions())
    record_server(tmp_path / "log", engine, make_policy_file(3))
    (cell,) = make_cells([f"log:{tmp_path / 'log'}"], make_profile(), "warm", Acceptance(), SHORT)
    seed = next(seed for seed in range(2000) if first_row(cell.requests.requests(seed), requests) == 0)
    replayed = SimulatedEngine([cell.requests.requests(seed)], cell.acceptance.bank(seed), make_profile())
    recorded, again = (run(FixedK((0, 1, 3), 3), each) for each in (engine, replayed))
    took_s, took_again_s = (each.finish_s[0] - each.arrival_s[0] for each in (recorded, again))
    ended = ~np.isnan(took_s) & ~np.isnan(took_again_s)
    assert ended.sum() > 50 and took_again_s[ended] == pytest.approx(took_s[ended], abs=1e-6)


def first_row(drawn: Any, requests: Any) -> int | None:
    """Which request the window begins with, if the lengths tell."""
    n = len(drawn.output_tokens)
    return 0 if (drawn.output_tokens == requests.output_tokens[:n]).all() else None


@pytest.mark.parametrize(
    ("requests", "complaint"),
    [
        ([], "holds 0 requests from arrival to end, allowed: two or more"),
        (
            [("finished", 1.0, 2.0, 5, 5), ("finished", 1.0, 2.0, 5, 5)],
            "holds 2 requests from arrival to end",
        ),
    ],
)
def test_a_log_without_traffic_is_one_line(
    requests: list[tuple[RequestKind, float, float, int, int]],
    complaint: str,
    tmp_path: Path,
    make_profile: Callable[..., CostProfile],
) -> None:
    path = write_log(tmp_path / "log", requests)
    with pytest.raises(UserError) as error:
        make_cells([f"log:{path}"], make_profile(), "warm", Acceptance(), SHORT)
    assert complaint in str(error.value) and str(path) in str(error.value)
    with pytest.raises(UserError, match=r"gone\.log: cannot be read"):
        workload_sha256(f"log:{tmp_path / 'gone.log'}")
