"""The simulator against published speed-ups of EAGLE-3 at k = 3 (arXiv 2601.11580, H100, Llama-3.1-8B).

`pytest tests/test_published_speedups.py -s` prints the table.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.rules import FixedK
from draftdial.envs.closed_loop import num_requests_for, stationary
from draftdial.envs.evaluate import evaluate
from draftdial.envs.replayed_acceptance import ReplayedAcceptance
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine

RECORDED = Path(__file__).resolve().parents[2] / "shared" / "traces" / "acceptance"
BATCHES = (1, 16, 64, 128)
PUBLISHED = {"gsm8k": (1.75, 1.70, 1.49, 1.22), "instructcoder": (2.02, 1.92, 1.57, 1.31)}


@pytest.mark.parametrize("domain", PUBLISHED)
def test_replayed_acceptance_gives_the_published_speedups(domain: str) -> None:
    path = RECORDED / f"eagle3_llama31_8b_{domain}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there: recorded acceptance is read in place, never shipped")
    profile = CostProfile.load("h100-llama3-8b")
    bank = ReplayedAcceptance([path]).bank(0)
    lists = [
        stationary(batch, num_requests_for(600, batch, 250, 2.5)).requests(seed)
        for batch in BATCHES
        for seed in range(4)
    ]
    speculating = SimulatedEngine(lists, bank, profile)
    plain = SimulatedEngine(lists, bank, profile, ServerOptions(off_mode="nospec"))
    fast = evaluate(FixedK(profile.tiers, 3), speculating).output_tok_s
    slow = evaluate(FixedK((0,), 0), plain).output_tok_s
    speedup = (fast / slow).reshape(len(BATCHES), -1).mean(axis=1)
    error = speedup / PUBLISHED[domain] - 1
    for batch, simulated, published, off_by in zip(BATCHES, speedup, PUBLISHED[domain], error, strict=True):
        print(f"{domain:>14} {batch:>4} {published:.2f} {simulated:.2f} {100 * off_by:+.1f} %")
    assert np.abs(error).max() < 0.15
    assert np.abs(error).mean() < 0.10
    assert (np.diff(speedup) < 0.03).all(), "the speed-up must fall with the batch"
