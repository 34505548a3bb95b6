"""Replay gives back recorded arrays, measures survival on the other half, and refuses bad lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draftdial.controller.errors import UserError
from draftdial.envs.acceptance import MAX_K, walk_statistics
from draftdial.envs.replayed_acceptance import ReplayedAcceptance

RECORDED = Path(__file__).parents[2] / "shared" / "traces" / "acceptance"


def write_requests(path: Path, requests: list[list[int]]) -> Path:
    """A file whose arrays `acc` are given, prefill token included."""
    lines = [
        json.dumps({"id": str(index), "prompt_len": 10, "gen_len": len(acc), "acc": acc})
        for index, acc in enumerate(requests)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_arrays_come_back_without_the_prefill_token(tmp_path: Path) -> None:
    first, second = [9, 3, 1] + [2] * 31, [9] + [1, 20, 300] * 12
    short = [9] + [1] * 31
    other = [[4] * 40, [5] * 50]
    source = ReplayedAcceptance(
        {
            "a": write_requests(tmp_path / "one.jsonl", [first, short, second]),
            "b": write_requests(tmp_path / "two.jsonl", other),
        }
    )
    bank = source.bank(0)
    assert source.domains == bank.domain_names == ("a", "b")
    assert bank.domain_count.tolist() == [2, 2]  # the request of 31 positions is left out
    assert bank.array_length.tolist() == [33, 36, 39, 49]
    assert bank.accepted[:33].tolist() == [2, 0] + [1] * 31
    assert bank.accepted[33:69].tolist() == [0, 19, 255] * 12
    assert np.array_equal(source.bank(7).accepted, bank.accepted)


def test_paths_alone_are_named_by_their_stems(tmp_path: Path) -> None:
    path = write_requests(tmp_path / "poems.jsonl", [[1] * 40, [1] * 40])
    assert ReplayedAcceptance([path]).domains == ("poems",)
    with pytest.raises(UserError, match="each domain once"):
        ReplayedAcceptance([path, path])


def test_survival_is_measured_on_the_other_half(tmp_path: Path) -> None:
    even, odd = [1] + [1] * 60, [1] + [3, 2, 1] * 20
    bank = ReplayedAcceptance([write_requests(tmp_path / "x.jsonl", [even, odd, even, odd])]).bank(0)
    # Even requests (never a draft accepted) are told of the odd ones, and the other way round.
    row_even, row_odd = (bank.survival[bank.latent[bank.array_start[array]]] for array in (0, 1))
    assert row_odd.tolist() == [1] + [0] * MAX_K
    # An odd request yields 3 tokens a round with k >= 2, and 1.5 with k = 1 (rounds at 0, 2, 3, 5, ..).
    assert row_even.tolist() == [1, 0.5, 1.5] + [0] * 5


def test_survival_adds_up_to_the_tokens_per_round_of_each_walk(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    requests = [[1, *rng.geometric(0.35, 400).tolist()] for _ in range(40)]
    halves = [requests[0::2], requests[1::2]]
    bank = ReplayedAcceptance([write_requests(tmp_path / "x.jsonl", requests)]).bank(0)
    for half in range(2):
        other = ReplayedAcceptance([write_requests(tmp_path / "half.jsonl", halves[1 - half])]).bank(0)
        tokens = [walk_statistics(other, 0, k).accept_length for k in range(1, MAX_K + 1)]
        assert np.cumsum(bank.survival[half])[1:] == pytest.approx(tokens)


GOOD = {"id": "a", "prompt_len": 3, "gen_len": 4, "acc": [1, 2, 3]}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "column 2: not JSON"),
        ("", "column 1: not JSON"),
        ("[1, 2]", "expected a JSON object"),
        (json.dumps({**GOOD, "id": None}), "field id: expected a string or an integer, found nothing"),
        (json.dumps({**GOOD, "prompt_len": -1}), "field prompt_len: expected an integer >= 0, found -1"),
        (json.dumps({**GOOD, "gen_len": "4"}), 'field gen_len: expected an integer >= 0, found "4"'),
        (json.dumps({**GOOD, "acc": 5}), "field acc: expected a list of integers >= 1, not empty, found 5"),
        (json.dumps({**GOOD, "acc": []}), "field acc: expected a list .* found \\[\\]"),
        (json.dumps({**GOOD, "acc": [1, 0]}), "field acc\\[1\\]: expected an integer >= 1, found 0"),
        (json.dumps({**GOOD, "acc": [1, 2, 2.5]}), "field acc\\[2\\]: expected an integer >= 1, found 2.5"),
        (json.dumps({**GOOD, "acc": [True]}), "field acc\\[0\\]: expected an integer >= 1, found true"),
        ('{"id": "a"}', "field prompt_len: expected an integer >= 0, found nothing"),
    ],
)
def test_malformed_line_is_named_with_file_line_and_field(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(UserError, match=f"bad.jsonl line 2.*{complaint}") as caught:
        ReplayedAcceptance([path])
    assert "\n" not in str(caught.value)


def test_file_without_two_usable_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 of 2 requests have 32 positions or more"):
        ReplayedAcceptance([write_requests(tmp_path / "x.jsonl", [[1] * 40, [1] * 10])])
    with pytest.raises(UserError, match=r"missing\.jsonl: cannot read it"):
        ReplayedAcceptance([tmp_path / "missing.jsonl"])
    with pytest.raises(UserError, match="needs one file per domain"):
        ReplayedAcceptance([])


@pytest.mark.parametrize(
    (
        "name",
        "requests",
        "accept_lengths",
        "conditionals",
        "percentiles",
        "autocorrelation",
        "predictability",
    ),
    [
        (
            "eagle3_llama31_8b_gsm8k",
            300,
            [1.706, 2.148, 2.411, 2.693, 2.795],
            [0.674, 0.645, 0.633, 0.653, 0.621, 0.649, 0.650],
            [2.13, 2.40, 2.81],
            [0.06, -0.01, -0.02],
            0.010,
        ),
        (
            "eagle3_llama31_8b_instructcoder",
            490,
            [1.686, 2.105, 2.362, 2.643, 2.781],
            [0.600, 0.627, 0.685, 0.741, 0.764, 0.800, 0.783],
            [2.19, 2.78, 3.37],
            [0.22, 0.14, 0.13],
            0.275,
        ),
    ],
)
def test_recorded_files_give_the_documented_statistics(
    name: str,
    requests: int,
    accept_lengths: list[float],
    conditionals: list[float],
    percentiles: list[float],
    autocorrelation: list[float],
    predictability: float,
) -> None:
    path = RECORDED / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there: the recorded arrays have no licence and are not shipped")
    bank = ReplayedAcceptance([path]).bank(0)
    assert bank.domain_count.tolist() == [requests]
    walks = {k: walk_statistics(bank, 0, k) for k in (1, 2, 3, 5, 7)}
    assert [walk.accept_length for walk in walks.values()] == pytest.approx(accept_lengths, abs=0.0006)
    assert walks[7].conditional == pytest.approx(conditionals, abs=0.0006)
    assert np.percentile(walks[3].request_accept_length, [5, 50, 95]) == pytest.approx(percentiles, abs=0.006)
    assert walks[3].autocorrelation[[0, 4, 19]] == pytest.approx(autocorrelation, abs=0.006)
    assert walks[5].predictability == pytest.approx(predictability, abs=0.002)
