"""The decision log: what is written is read back, in order, within bounds, and replays to the same k."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pytest

from draftdial.controller.errors import UserError
from draftdial.controller.files import sha256_of
from draftdial.controller.policy_file import PolicyFile, load_policy
from draftdial.controller.signals import RoundOutcome, RoundSignals
from draftdial.engine_patch import decision_log
from draftdial.engine_patch.decision_log import CAPACITY, MIN_BYTES, DecisionLog, obstacle
from draftdial.engine_patch.log_format import CONTROL, FRAME, REQUEST_KINDS, record_types
from draftdial.engine_patch.log_reader import read_log
from draftdial.engine_patch.log_replay import replay, steps
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine

HEADER = {"tiers": [0, 1, 3], "policy_id": "abc"}


def signals_at(round_id: int) -> RoundSignals:
    """A different number in every field."""
    signals = RoundSignals.zeros(1)
    for number, field in enumerate(fields(RoundSignals)):
        getattr(signals, field.name)[0] = round_id + 10 * number
    signals.kv_used_fraction[0] = 1 / (3 + round_id)
    return signals


def write_rounds(log: DecisionLog, first: int, count: int) -> None:
    for round_id in range(first, first + count):
        log.round(signals_at(round_id), 3, 1, 1)
        log.outcome(RoundOutcome.from_num_accepted(round_id, 3, [3, 0, 1], 3))
        log.accepts(round_id, 3, [7, 8, 9], [1, 5, 70_000], [3, 0, 1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "decisions"


@pytest.fixture
def make_engine(make_profile: Any, make_bank: Any, make_requests: Any) -> Callable[..., SimulatedEngine]:
    def make(lag: int = 2, num_requests: int = 40) -> SimulatedEngine:
        rng = np.random.default_rng(3)
        bank = make_bank({"a": [rng.integers(0, 5, 64).tolist() for _ in range(num_requests)]})
        requests = make_requests(
            [int(n) for n in rng.integers(5, 60, num_requests)],
            arrival_s=np.sort(rng.uniform(0, 3.0, num_requests)).tolist(),
        )
        return SimulatedEngine([requests], bank, make_profile(), ServerOptions(lag=lag))

    return make


def test_everything_written_is_read_back_in_the_order_of_the_calls(path: Path) -> None:
    log = DecisionLog.open(path, MIN_BYTES, HEADER)
    log.control("start", {"policy": b"some policy", "mode": "steer"})
    write_rounds(log, 5, 2)
    log.control("mode", {"mode": "off"})
    log.request("arrived", 8, 12.5, 100, 0)
    log.request("aborted", 8, 13.5, 100, 42)
    log.round(signals_at(9), -1, 0, 2)
    log.close()

    read = read_log(path)
    assert read.header["policy_id"] == "abc" and read.tiers == (0, 1, 3) and read.is_whole
    assert read.rounds["round_id"].tolist() == [5, 6, 9]
    for field in fields(RoundSignals):
        written = [getattr(signals_at(round_id), field.name)[0] for round_id in (5, 6, 9)]
        assert read.rounds[field.name].tolist() == written, field.name
    assert read.rounds[["policy_k", "acted_k", "mode"]].tolist() == [(3, 1, 1), (3, 1, 1), (-1, 0, 2)]
    assert (np.diff(read.rounds["time_s"]) >= 0).all() and read.rounds["time_s"][0] > 1.7e9
    assert read.outcomes[["round_id", "k"]].tolist() == [(5, 3), (6, 3)]
    assert read.outcomes["accept_counts"].tolist() == 2 * [[1, 1, 0, 1]]
    assert read.accepts.tolist() == [
        row for r in (5, 6) for row in [(r, 3, 7, 1, 3), (r, 3, 8, 5, 0), (r, 3, 9, 70_000, 1)]
    ]
    kinds = [REQUEST_KINDS[code] for code in read.requests["kind"]]
    assert kinds == ["arrived", "aborted"]
    assert read.requests[["time_s", "request_id", "prompt_tokens", "output_tokens"]].tolist() == [
        (12.5, 8, 100, 0),
        (13.5, 8, 100, 42),
    ]
    start, mode = read.controls
    assert start.data == {"mode": "steer", "policy_sha256": sha256_of(b"some policy")}
    assert mode.kind == "mode" and mode.data == {"mode": "off"}
    assert read.policies == {sha256_of(b"some policy"): b"some policy"}
    order = [type(step).__name__ for step in steps(read)]
    assert order == ["Control", "int", "RoundOutcome", "int", "RoundOutcome", "Control", "int"]


@pytest.mark.parametrize("lag", [1, 2])
def test_a_recorded_policy_says_the_same_offline_at_every_round(
    lag: int,
    path: Path,
    make_engine: Callable[..., SimulatedEngine],
    make_policy_file: Callable[..., PolicyFile],
    record_server: Callable[..., DecisionLog],
) -> None:
    first, second = make_policy_file(seed=2), make_policy_file(seed=5)
    # What ran is another matter than what was said: every 5th round k = 1 runs.
    record_server(
        path,
        make_engine(lag),
        first,
        deploys={100: second, 160: first},
        ran=lambda round_id, k: k if round_id % 5 else 1,
    )
    log = read_log(path)
    found = replay(log)
    assert len(found.round_id) == len(log.rounds) > 150
    assert found.logged_k.tolist() == log.rounds["policy_k"].tolist() == found.offline_k.tolist()
    assert len(set(found.logged_k.tolist())) == 3, "a policy that never changes proves little"
    assert (replay(log, load_policy(second)).offline_k != found.logged_k).any()


def test_a_history_with_an_outcome_missing_is_noticed(
    path: Path,
    make_engine: Callable[..., SimulatedEngine],
    make_policy_file: Callable[..., PolicyFile],
    record_server: Callable[..., DecisionLog],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = DecisionLog.outcome

    def forgetful(self: DecisionLog, outcome: RoundOutcome) -> None:
        if not 20 <= outcome.round_id[0] < 60:
            write(self, outcome)

    monkeypatch.setattr(DecisionLog, "outcome", forgetful)
    record_server(path, make_engine(), make_policy_file(seed=5))
    found = replay(read_log(path))
    assert (found.logged_k[:22] == found.offline_k[:22]).all()
    assert (found.logged_k != found.offline_k).any()


def test_a_policy_that_failed_is_not_replayed_until_the_next_deploy(
    path: Path, make_policy_file: Callable[..., PolicyFile]
) -> None:
    log = DecisionLog.open(path, MIN_BYTES, HEADER)
    file = make_policy_file(3)
    log.round(signals_at(0), 1, 1, 0)  # before any start: nobody knows what the policy remembered
    log.control("start", {"policy": file.data})
    log.round(signals_at(1), 3, 3, 0)
    log.control("fallback", {"reason": "decide: boom"})
    log.round(signals_at(2), -1, 0, 0)
    log.control("deploy", {"policy": file.data})
    log.round(signals_at(3), 3, 3, 0)
    log.close()
    found = replay(read_log(path))
    assert found.round_id.tolist() == [1, 3] and found.offline_k.tolist() == [3, 3]


def test_a_tier_that_cannot_run_here_replays_as_the_next_deeper_one(
    path: Path, make_policy_file: Callable[..., PolicyFile]
) -> None:
    log = DecisionLog.open(path, MIN_BYTES, {"tiers": [1, 3]})
    log.control("start", {"policy": make_policy_file(0).data})
    log.round(signals_at(0), 1, 1, 0)
    log.close()
    assert replay(read_log(path)).offline_k.tolist() == [1]


def test_size_is_bounded_and_the_newest_half_survives(
    path: Path, make_policy_file: Callable[..., PolicyFile]
) -> None:
    file = make_policy_file(3)
    log = DecisionLog.open(path, MIN_BYTES, HEADER)
    log.control("start", {"policy": file.data})
    sizes = []
    for first in range(0, 60_000, 500):
        write_rounds(log, first, 500)
        log.flush_if_due()
        sizes.append(sum(each.stat().st_size for each in path.parent.iterdir()))
    log.close()
    assert max(sizes) <= MIN_BYTES and log.error == "" and log.num_lost == 0
    assert sorted(each.name for each in path.parent.iterdir()) == ["decisions", "decisions.1"]

    read = read_log(path)
    ids = read.rounds["round_id"]
    assert not read.is_whole and ids[-1] == 59_999 and (np.diff(ids) == 1).all()
    assert len(ids) > 59_999 - ids[0] > 10_000, "both files are read"
    assert read.policies == {sha256_of(file.data): file.data}, "each file holds the policy of its time"
    assert (read.outcomes["round_id"] == ids).all() and len(read.accepts) == 3 * len(ids)
    with pytest.raises(UserError, match="goes back to no start or deploy"):
        replay(read)


def test_more_than_the_memory_holds_is_written_at_once(path: Path) -> None:
    log = DecisionLog.open(path, 8 << 20, HEADER)
    write_rounds(log, 0, CAPACITY[b"rond"] + 10)
    ids = np.arange(1000)
    for _ in range(CAPACITY[b"acpt"] // 1000 + 2):
        log.accepts(1, 3, ids, ids + 1, ids % 4)
    log.close()
    read = read_log(path)
    assert read.rounds["round_id"].tolist() == list(range(CAPACITY[b"rond"] + 10))
    big = read.accepts[3 * len(read.rounds) :]
    assert len(big) == 1000 * (CAPACITY[b"acpt"] // 1000 + 2)
    assert (big["request_id"] == np.resize(ids, len(big))).all() and (big["k"] == 3).all()
    assert (big["accepted"] == np.resize(ids % 4, len(big))).all()


def test_every_torn_end_is_read_up_to_the_last_whole_frame(path: Path) -> None:
    log = DecisionLog.open(path, MIN_BYTES, HEADER)
    write_rounds(log, 0, 4)
    log.flush()
    whole = path.stat().st_size
    write_rounds(log, 4, 3)
    log.close()
    data = path.read_bytes()
    for length in range(whole, len(data)):
        path.write_bytes(data[:length])
        read = read_log(path)
        assert len(read.rounds) in (4, 7) and len(read.outcomes) in (4, 7), length
        assert len(read.accepts) in (12, 21), length
    path.write_bytes(data)
    assert len(read_log(path).rounds) == 7


KILLED = """
import os, signal, sys
from draftdial.controller.signals import RoundSignals
from draftdial.engine_patch.decision_log import MIN_BYTES, DecisionLog

log, signals = DecisionLog.open(sys.argv[1], MIN_BYTES, {"tiers": [0, 1, 3]}), RoundSignals.zeros(1)
for signals.round_id[0] in range(150):
    log.round(signals, 3, 3, 0)
    if signals.round_id[0] == 99:
        log.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_server_loses_what_was_not_flushed_and_no_more(path: Path) -> None:
    server = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert server.returncode == -signal.SIGKILL
    assert read_log(path).rounds["round_id"].tolist() == list(range(100))


def test_an_idle_server_has_written_everything(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "FLUSH_INTERVAL_S", 1e9)  # never because time has passed
    log = DecisionLog.open(path, MIN_BYTES, HEADER)
    for request in (1, 2):
        log.request("arrived", request, 1.0, 10, 0)
    write_rounds(log, 0, 5)
    log.request("finished", 1, 2.0, 10, 5)
    log.flush_if_due()
    assert len(read_log(path).rounds) == 0, "one more request runs, so more rounds will follow"
    log.request("aborted", 2, 2.0, 10, 5)
    log.flush_if_due()
    read = read_log(path)
    assert len(read.rounds) == len(read.outcomes) == 5 and len(read.requests) == 4


def test_a_new_server_moves_the_old_log_aside_and_does_not_read_it_as_its_own(path: Path) -> None:
    for first in (0, 50):
        log = DecisionLog.open(path, MIN_BYTES, HEADER)
        write_rounds(log, first, 3)
        log.close()
    assert read_log(path).rounds["round_id"].tolist() == [50, 51, 52]
    assert read_log(path.with_name("decisions.1")).rounds["round_id"].tolist() == [0, 1, 2]


def test_two_servers_do_not_share_a_log(path: Path) -> None:
    first = DecisionLog.open(path, MIN_BYTES, HEADER)
    write_rounds(first, 0, 3)
    with pytest.raises(UserError, match="another server writes it: name another file"):
        DecisionLog.open(path, MIN_BYTES, HEADER)
    for begin in range(3, 40_003, 500):
        write_rounds(first, begin, 500)
        first.flush_if_due()
    assert path.with_name("decisions.1").exists(), "the file is another one by now"
    assert obstacle(path) == "another server writes it: name another file"
    first.close()
    assert first.error == "" and read_log(path).rounds["round_id"][-1] == 40_002
    assert obstacle(path) is None
    DecisionLog.open(path, MIN_BYTES, HEADER).close()


def test_a_log_that_was_deleted_and_begun_by_another_server_is_left_to_it(path: Path) -> None:
    first = DecisionLog.open(path, MIN_BYTES, HEADER)
    path.unlink()
    second = DecisionLog.open(path, MIN_BYTES, HEADER)
    write_rounds(second, 7, 1)
    second.flush()
    for begin in range(0, 20_000, 500):
        write_rounds(first, begin, 500)
        first.flush_if_due()
    assert first.error == f"{path}: another server writes it: name another file"
    assert read_log(path).rounds["round_id"].tolist() == [7]
    first.close()
    second.close()


def test_a_change_to_an_idle_server_is_written_at_once(path: Path) -> None:
    log = DecisionLog.open(path, MIN_BYTES, HEADER)
    log.control("mode", {"mode": "off"})
    assert [control.kind for control in read_log(path).controls] == ["mode"]
    log.close()


class FullDisk:
    """A file on a disk that has become full."""

    def write(self, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_disk_error_ends_the_log_and_nothing_else(path: Path) -> None:
    log = DecisionLog.open(path, MIN_BYTES, HEADER)
    write_rounds(log, 0, 5)
    log.flush()
    log._file = cast(BinaryIO, FullDisk())
    write_rounds(log, 5, 5)
    log.flush()
    assert log.error == f"{path}: No space left on device" and log.num_lost == 0
    write_rounds(log, 10, 2)
    log.request("arrived", 1, 0.0, 1, 0)
    log.control("mode", {"mode": "off"})
    log.flush_if_due()
    log.close()
    assert log.num_lost == 8
    assert len(read_log(path).rounds) == 5


def test_a_log_that_cannot_be_is_refused_in_one_line_before_anything_is_touched(path: Path) -> None:
    with pytest.raises(UserError, match=r"size bound: found 1000 bytes, allowed: 4194304 or more"):
        DecisionLog.open(path, 1000, HEADER)
    path.parent.mkdir()
    path.write_text("my thesis")
    with pytest.raises(UserError, match="found a file of another kind"):
        DecisionLog.open(path, MIN_BYTES, HEADER)
    assert path.read_text() == "my thesis"
    path.with_name("aside").touch()
    path.with_name("aside.1").write_text("my other thesis")
    with pytest.raises(UserError, match="found a file of another kind"):
        DecisionLog.open(path.with_name("aside"), MIN_BYTES, HEADER)
    os.mkfifo(path.with_name("pipe"))
    for other in (path.parent, path.with_name("pipe"), Path("/dev/null")):
        with pytest.raises(UserError, match="which is no regular file"):
            DecisionLog.open(other, MIN_BYTES, HEADER)
    with pytest.raises(UserError, match="cannot be written: "):
        DecisionLog.open(path / "below", MIN_BYTES, HEADER)


def damage(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_what_is_no_log_and_what_is_damaged_is_one_line(path: Path) -> None:
    log = DecisionLog.open(path, MIN_BYTES, HEADER)
    write_rounds(log, 0, 4)
    log.close()
    data = path.read_bytes()
    begin = data.index(b"\n") + 1
    cases = {
        b"": "line 1: found no draftdial.log/1 header",
        b'{"schema": "draftdial.profile/1"}\n': "line 1: found no draftdial.log/1 header",
        data.replace(b'"tiers": [0, 1, 3]', b'"tiers": [3, 1, 0]'): "misstates tiers, run or part",
        data.replace(b"draftdial.log/1", b"draftdial.log/2"): "found draftdial.log/2 of another version",
        data.replace(b'"kv_used_fraction", "<f8"', b'"kv_used_fraction", "<f4"'): "of another version",
        damage(data, begin): f"damaged at byte {begin}: found no frame, allowed: acpt, ctrl, outc",
        damage(data, begin + FRAME.size + 3): f"damaged at byte {begin}: a rond frame's checksum is wrong",
    }
    for content, complaint in cases.items():
        path.write_bytes(content)
        with pytest.raises(UserError) as error:
            read_log(path)
        assert complaint in str(error.value) and str(path) in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="gone: cannot read the decision log: No such file"):
        read_log(path.with_name("gone"))


@pytest.mark.parametrize(
    ("kind", "num_records", "payload", "complaint"),
    [
        (CONTROL, 1, b"{", "holds no control event"),
        (CONTROL, 1, b"[" * 100_000, "holds no control event"),
        (CONTROL, 1, b'{"order": 1, "time_s": 1.0, "kind": "mode"}', "holds no control event"),
        (CONTROL, 1, b'{"order": 1, "time_s": "x", "kind": "mode", "data": {}}', "holds no control event"),
        (b"rond", 1, b"abc", "a rond frame of 3 bytes says that it holds 1 records"),
    ],
)
def test_wrong_content_behind_a_right_checksum_is_one_line(
    kind: bytes, num_records: int, payload: bytes, complaint: str, path: Path
) -> None:
    DecisionLog.open(path, MIN_BYTES, HEADER).close()
    with path.open("ab") as file:
        file.write(FRAME.pack(kind, num_records, len(payload), zlib.crc32(payload)) + payload)
    with pytest.raises(UserError, match=complaint):
        read_log(path)


def test_a_span_of_more_requests_than_follow_costs_no_memory(path: Path) -> None:
    DecisionLog.open(path, MIN_BYTES, HEADER).close()
    types = record_types(3)
    span = np.array([(5, 3, 2**32 - 1)], types[b"span"]).tobytes()
    rows = np.array([(7, 1, 2), (8, 1, 0)], types[b"acpt"]).tobytes()
    with path.open("ab") as file:
        for kind, count, payload in ((b"acpt", 2, rows), (b"span", 1, span)):
            file.write(FRAME.pack(kind, count, len(payload), zlib.crc32(payload)) + payload)
    assert read_log(path).accepts["round_id"].tolist() == [5, 5]
