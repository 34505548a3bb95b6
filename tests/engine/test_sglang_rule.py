"""SGLang's own adaptive rule and ours give the same steps on the same feedback."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftdial.controller.sglang_rule import DEFAULT_CONFIG, SglangRule, tuning_grid
from draftdial.controller.signals import RoundOutcome, RoundSignals

TIERS = (0, 1, 2, 3, 5, 7)
NUM_ROUNDS = 1_000
CONFIGS = {
    "default": DEFAULT_CONFIG,
    "last of the tuning grid": tuning_grid()[-1],
    "every field": {
        "ema_alpha": 0.35,
        "update_interval": 3,
        "warmup_batches": 4,
        "up_hysteresis": 0.2,
        "down_hysteresis": -0.3,
        "1": {"candidate_steps": [1, 2, 3, 5, 7]},
        "4": {"candidate_steps": [0, 2, 3], "ema_alpha": 0.1},
        "9": {"candidate_steps": [0, 1], "update_interval": 7},
    },
}


class Worker:
    """All that SGLang's controller asks of a worker: it switches between tiers that are already built."""

    def __init__(self, steps: int) -> None:
        self.speculative_num_steps = steps

    def apply_runtime_state(self, state: int) -> None:
        self.speculative_num_steps = state


def sglangs_own(config: Path, initial: int) -> Any:
    """The real controller over the real rule, with every tier built."""
    from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    worker = Worker(initial)
    if "policy" in inspect.signature(AdaptiveController.__init__).parameters:  # from 0.5.20 on
        controller = AdaptiveController(worker, AdaptiveSpeculativeParams(initial, cfg_path=str(config)))
    else:
        controller = AdaptiveController(worker, config_path=str(config))
    controller._states = {k: k for k in TIERS}
    return controller


@pytest.mark.parametrize("acceptance", [0.05, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lag", [1, 2])
def test_the_same_steps_on_random_feedback(tmp_path: Path, name: str, acceptance: float, lag: int) -> None:
    config = tmp_path / "adaptive.json"
    config.write_text(json.dumps(CONFIGS[name]))
    candidates = sorted(
        {k for key, slot in CONFIGS[name].items() if key.isdigit() for k in slot["candidate_steps"]}
    )
    theirs = sglangs_own(config, candidates[len(candidates) // 2])
    ours = SglangRule(TIERS, CONFIGS[name])
    ours.reset(1)
    rng = np.random.default_rng(0)
    signals = RoundSignals.zeros(1)
    in_flight: list[list[int]] = []
    used = []
    batch_size = 1
    for round_id in range(NUM_ROUNDS):
        if rng.random() < 0.02:
            batch_size = int(rng.choice([1, 3, 5, 8, 20, 40, 80]))
        theirs.activate_step_by_batch(batch_size)
        signals.num_running[0] = batch_size
        k = int(ours.decide(signals)[0])
        assert k == theirs.worker.speculative_num_steps, round_id
        used.append(k)
        runs = rng.random((batch_size, k)) < acceptance * rng.choice([0.6, 1.0])
        in_flight.append(np.cumprod(runs, axis=1).sum(axis=1).tolist())
        if len(in_flight) == lag:
            accepted = in_flight.pop(0)
            theirs.on_verify_complete(accepted, len(accepted))
            ours.observe(RoundOutcome.from_num_accepted(round_id, k, accepted, TIERS[-1]))
    assert len(set(used)) > 1
