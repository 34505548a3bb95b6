"""Ranks of one server decide alike, whatever their libraries do differently."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import two_ranks

ROUNDS = 50_000


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are chosen by their x86 names")
def test_ranks_with_other_kernels_threads_and_hash_seeds_decide_alike(tmp_path: Path) -> None:
    policy = two_ranks.made_up_policy(tmp_path / "policy.safetensors")
    first, second = two_ranks.compare(policy, ROUNDS, tmp_path)
    assert first["single_sums"] != second["single_sums"]  # else they do not work differently
    assert two_ranks.agree([first, second]), (first, second)
    assert first["switches"] > ROUNDS / 100
    assert min(first["rounds_at_k"].values()) > 0


@pytest.mark.parametrize("differs", ["decisions", "logits"])
def test_ranks_agree_in_decisions_and_logits_or_not_at_all(differs: str) -> None:
    rank = {"decisions": "a", "logits": "b", "single_sums": "c"}
    assert two_ranks.agree([rank, rank | {"single_sums": "d"}])
    assert not two_ranks.agree([rank, rank | {differs: "e"}])
