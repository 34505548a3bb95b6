"""A short run of `make soak-tp`: two ranks under everything that may change, and an alarm that rings."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak_tp import soak
from traffic import Reference

from draftdial.controller.cost_profile import OffMode

ROUNDS = 2_000


@pytest.mark.parametrize("off_mode", ["warm", "kv-only"])
def test_two_ranks_never_disagree(
    tmp_path: Path, models: Path, reference: Reference, off_mode: OffMode
) -> None:
    summary = soak(tmp_path, models, reference, ROUNDS, off_mode=off_mode)
    assert summary["failures"] == []
    assert summary["rounds"] >= ROUNDS
    assert min(summary["changes"].values()) > 0
    assert summary["recorded_switches"] > ROUNDS / 20
    assert summary["aborts"] > 0
