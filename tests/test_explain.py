"""`draftdial explain`: one recorded round in words and in JSON, and the summary of a log."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftdial.controller.belief import AcceptanceBelief
from draftdial.controller.cli import main
from draftdial.controller.errors import UserError
from draftdial.controller.features import HALF_LIVES_SAMPLES
from draftdial.controller.policy_file import PolicyFile
from draftdial.controller.signals import RoundOutcome, RoundSignals
from draftdial.engine_patch.decision_log import MIN_BYTES, DecisionLog
from draftdial.engine_patch.explain import explanation, summary
from draftdial.engine_patch.explain_command import round_lines, summary_lines
from draftdial.engine_patch.log_format import FRAME, record_types
from draftdial.engine_patch.log_reader import read_log


def decide(log: DecisionLog, round_id: int, said: int, ran: int, mode: int = 0, **seen: float) -> None:
    signals = RoundSignals.zeros(1)
    signals.round_id[0] = round_id
    for name, value in {"num_running": 2, "mean_context_tokens": 150, "max_running": 8, **seen}.items():
        getattr(signals, name)[0] = value
    log.round(signals, said, ran, mode)


@pytest.fixture
def path(tmp_path: Path, make_policy_file: Callable[..., PolicyFile]) -> Path:
    """Outcomes lag by two; the policy of round 4 on is another; from round 6 on it has failed."""
    first, second = make_policy_file(1, name="one"), make_policy_file(3, name="three")
    log = DecisionLog.open(tmp_path / "log", MIN_BYTES, {"tiers": [0, 1, 3], "sglang": "0.5.23"})
    log.control("start", {"policy": first.data, "mode": "steer"})
    decide(log, 0, 1, 1)
    decide(log, 1, 1, 1, num_waiting=3, num_waiting_prompt_tokens=900, oldest_wait_rounds=1)
    log.outcome(RoundOutcome.from_num_accepted(0, 1, [1, 0], 3))
    decide(log, 2, 1, 0, mode=2)
    log.outcome(RoundOutcome.from_num_accepted(1, 1, [1, 1], 3))
    decide(log, 3, 1, 3, mode=1)
    log.control("deploy", {"policy": second.data})
    log.outcome(RoundOutcome.from_num_accepted(2, 0, [0, 0], 3))
    decide(log, 4, 3, 3, kv_used_fraction=0.25)
    log.outcome(RoundOutcome.from_num_accepted(3, 3, [3, 1], 3))
    decide(log, 5, 3, 1)
    log.outcome(RoundOutcome.from_num_accepted(4, 3, [0, 2], 3))
    log.control("fallback", {"reason": "decide: boom"})
    decide(log, 6, -1, 1)
    log.request("arrived", 1, 5.0, 10, 0)
    log.request("finished", 1, 6.0, 10, 20)
    log.close()
    return tmp_path / "log"


def words(path: Path, round_id: int) -> str:
    return "\n".join(round_lines(explanation(read_log(path), round_id)))


def test_the_belief_is_the_one_the_server_had_at_that_round(path: Path) -> None:
    facts = explanation(read_log(path), 3)
    belief = AcceptanceBelief(3, HALF_LIVES_SAMPLES)
    for round_id, accepted in ((0, [1, 0]), (1, [1, 1])):
        belief.observe(RoundOutcome.from_num_accepted(round_id, 1, accepted, 3))
    assert facts["belief"]["acceptance"] == belief.mean()[:, 0].tolist()
    assert facts["belief"]["evidence_requests"] == belief.reached[:, 0].tolist()
    assert facts["belief"]["num_outcomes"] == 2 and facts["belief"]["is_whole"]
    # The policy deployed after round 3 began with nothing, and saw the outcomes that came later.
    assert explanation(read_log(path), 4)["belief"]["num_outcomes"] == 1
    assert explanation(read_log(path), 5)["belief"]["num_outcomes"] == 2


def test_predicted_speed_is_tokens_by_the_belief_over_the_profiles_time(
    path: Path, make_profile: Callable[..., Any]
) -> None:
    facts = explanation(read_log(path), 1)
    p = facts["belief"]["acceptance"][2]
    tokens = {0: 1.0, 1: 1 + p[0], 3: 1 + p[0] + p[0] * p[1] + p[0] * p[1] * p[2]}
    round_s = make_profile().round_s(np.array([2]), np.array([150]), "warm")[0]
    assert facts["prediction"]["k"] == [0, 1, 3]
    assert facts["prediction"]["round_s"] == round_s.tolist() == [0.012, 0.014, 0.018]
    speed = [2 * tokens[k] / seconds for k, seconds in zip((0, 1, 3), round_s, strict=True)]
    assert facts["prediction"]["tokens_per_s"][2] == pytest.approx(speed)


def test_a_round_reads_out_what_was_seen_said_and_done(path: Path) -> None:
    text = words(path, 1)
    assert "policy one (" in text and "The server ran 2 requests of at most 8 at 150 tokens" in text
    assert "3 requests waited with 900 prompt tokens, the oldest for 1 round." in text
    assert "The policy chose k = 1. It ran (mode steer)." in text
    assert "It gave 4 tokens to 2 requests (requests x drafts accepted: 2 x 1); 0 drafts were wasted." in text
    assert "That is 2.00 tokens per request" in text
    text = words(path, 4)
    assert "policy three (" in text and "Nothing waited." in text and "25% of the KV pool" in text
    assert "It gave 4 tokens to 2 requests (requests x drafts accepted: 1 x 0, 1 x 2); 4 drafts" in text


@pytest.mark.parametrize(
    ("round_id", "line"),
    [
        (2, "The policy chose k = 1. k = 0 ran instead (the mode is off, or k was forced)."),
        (3, "The policy chose k = 1. k = 3 ran instead (in shadow SGLang's own rule acts)."),
        (5, "The policy chose k = 3. k = 1 ran instead (k was forced)."),
        (6, "The policy had failed (decide: boom): the file's threshold rule decided in its place."),
        (6, "What came of it is not in the log."),
    ],
)
def test_who_acted_when_it_was_not_the_policy(path: Path, round_id: int, line: str) -> None:
    assert line in words(path, round_id)


def test_a_choice_that_is_not_the_fastest_is_set_against_greedys(
    tmp_path: Path, make_policy_file: Callable[..., PolicyFile]
) -> None:
    log = DecisionLog.open(tmp_path / "log", MIN_BYTES, {"tiers": [0, 1, 3]})
    log.control("start", {"policy": make_policy_file(0).data})
    for round_id in range(300):
        decide(log, round_id, 0, 0)
        log.outcome(RoundOutcome.from_num_accepted(round_id, 3, [3, 3], 3))
    log.close()
    text = words(tmp_path / "log", 299)
    # All drafts right: 8 tokens in 18 ms against 2 in 12 ms, 2.67 times as many a second.
    assert "k = 3 by the memory of 8 requests (+16" in text
    assert "No memory speaks for the choice" in text


def test_the_summary_counts(path: Path) -> None:
    facts = summary(read_log(path))
    assert facts["num_rounds"] == 7 and facts["round_ids"] == [0, 6] and facts["num_outcomes"] == 5
    assert facts["modes"] == {"steer": 5, "shadow": 1, "off": 1} and facts["num_switches"] == 3
    assert facts["k"] == {
        "0": {"acted": 1, "policy": 0, "tokens_per_round": 1.0},
        "1": {"acted": 4, "policy": 4, "tokens_per_round": 1.75},
        "3": {"acted": 2, "policy": 2, "tokens_per_round": 2.5},
    }
    assert facts["drafted"] == 16 and facts["accepted"] == 9
    assert facts["requests"] == {"arrived": 1, "finished": 1, "aborted": 0}
    assert [event["kind"] for event in facts["events"]] == ["start", "deploy", "fallback"]
    text = "\n".join(summary_lines(facts))
    assert "sglang 0.5.23" in text and "rounds   7 (0 to 6)" in text
    assert "k = 1    ran in  57.1% of rounds; the policy said so in 57.1%, 1.75 tokens" in text
    assert "16, of which 43.8% were wasted" in text and 'fallback {"reason": "decide: boom"}' in text


def test_a_log_without_its_beginning_says_what_is_missing(
    tmp_path: Path, make_policy_file: Callable[..., PolicyFile]
) -> None:
    path = tmp_path / "log"
    log = DecisionLog.open(path, MIN_BYTES, {"tiers": [0, 1, 3]})
    log.control("start", {"policy": make_policy_file(1).data})
    num_rounds = 60_000
    for round_id in range(num_rounds):
        decide(log, round_id, 1, 1)
        log.outcome(RoundOutcome.from_num_accepted(round_id, 1, [1], 3))
        log.flush_if_due()
    log.close()
    read = read_log(path)
    first = int(read.rounds["round_id"][0])
    assert first > 0
    facts = explanation(read, first + 10)
    assert facts["belief"]["num_outcomes"] == 10 and not facts["belief"]["is_whole"]
    assert "since the log begins; what came before is lost" in "\n".join(round_lines(facts))
    assert "oldest part has been overwritten" in "\n".join(summary_lines(summary(read)))
    with pytest.raises(UserError, match=f"round: found 0, allowed: those it holds, {first} to"):
        explanation(read, 0)


def test_an_empty_log_is_summed_up(tmp_path: Path) -> None:
    DecisionLog.open(tmp_path / "log", MIN_BYTES, {"tiers": [0, 1]}).close()
    read = read_log(tmp_path / "log")
    assert list(summary_lines(summary(read)))[-1] == "rounds   none"
    with pytest.raises(UserError, match="round: found 3, allowed: none, it holds no rounds"):
        explanation(read, 3)


def test_the_command_prints_words_json_or_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(path)]) == 0
    assert capsys.readouterr().out.startswith("log      ")
    assert main(["explain", str(path), "4", "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == explanation(read_log(path), 4) and "NaN" not in printed
    assert main(["explain", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary(read_log(path))
    assert main(["explain", str(path), "99"]) == 2
    error = capsys.readouterr().err
    assert error == f"draftdial: {path}: round: found 99, allowed: those it holds, 0 to 6\n"


def test_a_record_out_of_range_is_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with path.open("ab") as file:
        types = record_types(3)
        record = np.zeros(1, types[b"rond"])
        record["round_id"], record["order"], record["time_s"], record["mode"] = 77, 10**6, 1e300, 9
        payload = record.tobytes()
        file.write(FRAME.pack(b"rond", 1, len(payload), zlib.crc32(payload)) + payload)
    for arguments in ([], ["77"], ["77", "--json"]):
        assert main(["explain", str(path), *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and f"{path}: damaged: a record is out of range" in err
