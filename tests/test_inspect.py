"""`draftdial inspect`: the card in words and the picture of what the policy does."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.features import Features
from draftdial.controller.greedy import GoodputGreedy
from draftdial.controller.inspect_policy import ACCEPTANCES, QUEUES, add_parser, describe, inspection
from draftdial.controller.learned import LearnedPolicy, Network
from draftdial.controller.policy_card import Training
from draftdial.controller.policy_export import learned_file, rule_file
from draftdial.controller.policy_file import write
from draftdial.controller.rules import FixedK, Threshold
from draftdial.controller.steady_state import settled_k

PROFILE = CostProfile.load("h200-llama3-8b")
TIERS = PROFILE.tiers
FALLBACK = Threshold(TIERS, k=3, batch=48)


@pytest.fixture
def threshold_path(tmp_path: Path) -> Path:
    path = tmp_path / "threshold.safetensors"
    write(path, rule_file(FALLBACK, PROFILE, "warm", name="threshold-k3", fallback=FALLBACK))
    return path


def advice_network() -> Network:
    """A silent hidden part: the best advice of the longest memory decides, and k = 0 where all is below 0."""
    num_features, num_deeper = len(Features(PROFILE, "warm").table), len(TIERS) - 1
    direct = np.zeros((len(TIERS), 4 * num_deeper), np.float32)
    direct[1:, 3 * num_deeper :] = 20.0 * np.eye(num_deeper)
    return Network(
        {
            "hidden.0.weight": np.zeros((8, num_features), np.float32),
            "hidden.0.bias": np.zeros(8, np.float32),
            "hidden.1.weight": np.zeros((8, 8), np.float32),
            "hidden.1.bias": np.zeros(8, np.float32),
            "logits.weight": np.concatenate([np.zeros((len(TIERS), 8), np.float32), direct], axis=1),
            "logits.bias": np.zeros(len(TIERS), np.float32),
        }
    )


@pytest.fixture
def learned_path(tmp_path: Path) -> Path:
    path = tmp_path / "learned.safetensors"
    training = Training(
        "ppo:\n  lr: 0.1\n\x1b[2J", "draftdial train", 5, {"profile": "abc"}, {"numpy": "2.0"}
    )
    policy = LearnedPolicy(Features(PROFILE, "warm"), advice_network())
    evaluation = {"ratio": 0.97, "ci95": [0.96, 0.98]}
    write(
        path,
        learned_file(policy, name="mine", fallback=FALLBACK, training=training, evaluation=evaluation),
    )
    return path


def test_picture_of_a_threshold_is_its_definition(threshold_path: Path) -> None:
    found = inspection(threshold_path)
    batches = PROFILE.captured_batches.tolist()
    row = [3 if batch <= 48 else 0 for batch in batches]
    by_acceptance, by_queue = found["k_by_batch_and_acceptance"], found["k_by_batch_and_queue"]
    assert by_acceptance["batches"] == by_queue["batches"] == batches
    assert by_acceptance["k"] == [row] * len(ACCEPTANCES)
    assert by_queue["k"] == [row] * len(QUEUES)


def test_pictures_are_drawn_with_a_digit_per_cell(threshold_path: Path) -> None:
    lines = describe(threshold_path).splitlines()
    drawn = [line for line in lines if " |" in line]
    assert len(drawn) == 2 + len(ACCEPTANCES) + len(QUEUES)
    heading, first = drawn[0], drawn[1]
    assert heading.split() == ["acceptance", "|", *map(str, PROFILE.captured_batches)]
    assert first.split() == [
        "0.95",
        "|",
        *("3" if batch <= 48 else "0" for batch in PROFILE.captured_batches),
    ]
    assert {len(line) for line in drawn} == {len(heading)}


def test_settled_k_of_a_learned_policy_is_the_best_tier_of_the_profile(learned_path: Path) -> None:
    k = np.array(inspection(learned_path)["k_by_batch_and_acceptance"]["k"])
    batches = PROFILE.captured_batches
    round_s = PROFILE.round_s(batches, np.full(len(batches), 1000), "warm")
    for row, acceptance in enumerate(ACCEPTANCES):
        tokens = np.array([sum(acceptance**depth for depth in range(tier + 1)) for tier in TIERS])
        speed = tokens / round_s
        chosen = speed[np.arange(len(batches)), np.searchsorted(TIERS, k[row])]
        # The belief is close to the truth, not equal to it: near ties may go either way.
        assert (chosen >= 0.98 * speed.max(axis=1)).all()
    assert len(np.unique(k)) >= 4


def test_card_of_a_learned_policy_in_words(learned_path: Path) -> None:
    text = describe(learned_path)
    assert "mine (learned), id " in text
    assert "Measured by `draftdial profile` on a running server." in text, "a repriced file says so there"
    assert "k = 0, 1, 2, 3, 5, 7; off mode warm" in text
    assert "k = 3 while at most 48 run, else 0" in text
    assert "72 features, 2 x 8 tanh, 6 logits; the last 20 features" in text
    assert "advice/3/k=7" in text
    assert "TTFT 1.0 s, TPOT 0.02 s" in text
    assert "draftdial train; seed 5" in text
    assert "    lr: 0.1" in text
    assert '"ratio": 0.97' in text
    assert max(map(len, text.splitlines())) <= 110
    # What a file says about itself must not drive the terminal.
    assert "\x1b" not in text


def test_command_prints_text_or_one_json_object(
    threshold_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["inspect", str(threshold_path)])
    assert args.run(args) == 0
    assert capsys.readouterr().out == describe(threshold_path) + "\n"
    args = parser.parse_args(["inspect", str(threshold_path), "--json"])
    assert args.run(args) == 0
    assert json.loads(capsys.readouterr().out) == inspection(threshold_path)
    args = parser.parse_args(["inspect", str(threshold_path.parent / "none")])
    with pytest.raises(UserError, match="none: cannot read the policy file"):
        args.run(args)


def test_settled_k_ignores_probes() -> None:
    rule = GoodputGreedy(TIERS, PROFILE, probe_interval=2, max_probe_interval=2)
    steady = GoodputGreedy(TIERS, PROFILE, probe_interval=0, max_probe_interval=0)
    states = ([1, 32, 256], [0, 0, 0], [0.8, 0.6, 0.2])
    probing, still = (settled_k(policy, PROFILE, *states) for policy in (rule, steady))
    np.testing.assert_array_equal(probing, still)


def test_settled_k_of_a_server_without_tier_0() -> None:
    assert settled_k(FixedK((1, 3), 3), PROFILE, [4], [2], [0.5]).tolist() == [3]
