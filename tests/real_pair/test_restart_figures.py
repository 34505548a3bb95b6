"""The figures of a restart, from walks made up here: no server runs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent))  # the modules here are no package

from restart_figures import MODES, ROUNDS, Walk, figures, repeated_share, t_quantile, table, verdict

REQUESTS = 12
OFF = 30
SETTLED = 5
TOKENS = list(range(400))


def walk(rng: np.random.Generator, *, off: int, good: float) -> Walk:
    """Rounds of up to 3 drafts, each right with probability `good`; `off` of them at 0 after some."""
    runs = np.minimum(rng.geometric(1 - good, SETTLED + 3 * ROUNDS) - 1, 3)
    made = [(3, int(n)) for n in runs]
    return Walk.of(TOKENS, [*made[:SETTLED], *[(0, 0)] * off, *made[SETTLED:]])


def document(kv_only: float, skip: float) -> dict[str, object]:
    """What a run would write where drafts are right with these probabilities after the restart."""
    rng = np.random.default_rng(0)
    good = {"warm": 0.6, "kv-only": kv_only, "skip": skip}
    walks = {mode: [walk(rng, off=OFF, good=good[mode]) for _ in range(REQUESTS)] for mode in MODES}
    walks["never"] = [walk(rng, off=0, good=0.6) for _ in range(REQUESTS)]
    return figures(walks, ["qa"] * REQUESTS) | {"kv_only": {"kv_only_fallback": ""}}


def test_positions_and_the_restart() -> None:
    made = Walk.of(TOKENS, [(3, 2), (3, 0), (0, 0), (0, 0), *[(3, 1)] * ROUNDS])
    assert made.rounds[:5] == [(1, 3, 2), (4, 3, 0), (5, 0, 0), (6, 0, 0), (7, 3, 1)]
    assert made.restart() == 7
    assert made.accepted_from(7) == {7 + 2 * i: 1 for i in range(ROUNDS)}
    with pytest.raises(ValueError, match=f"{ROUNDS - 1} rounds from position 8"):
        made.accepted_from(8)


def test_a_loop_is_seen() -> None:
    assert repeated_share(TOKENS) == 0
    assert repeated_share([1, 2, 3, 4, 5] * 80) == 1


def test_verdicts() -> None:
    assert verdict(document(kv_only=0.6, skip=0.2)) == []
    assert verdict(document(kv_only=0.2, skip=0.2)) == [
        f"{text}: kv-only is worse than never off" for text in ("all", "no loop")
    ]
    assert all("no power" in failure for failure in verdict(document(kv_only=0.6, skip=0.6)))
    assert len(verdict(document(kv_only=0.6, skip=0.6))) == 2


def test_answers_that_differ_are_left_out_and_told() -> None:
    rng = np.random.default_rng(1)
    walks = {mode: [walk(rng, off=OFF, good=0.6) for _ in range(4)] for mode in MODES}
    walks["never"] = [walk(rng, off=0, good=0.6) for _ in range(4)]
    walks["never"][2] = Walk(TOKENS[1:], walks["never"][2].rounds)
    found = figures(walks, ["a", "b", "c", "d"]) | {"kv_only": {"kv_only_fallback": ""}}
    assert [request["domain"] for request in found["walks"]] == ["a", "b", "d"]
    assert "only 3 of 4 answers are the same" in verdict(found)
    assert table(found).count("\n") == 1 + 2 * len(MODES)


def test_the_quantile_is_student_s() -> None:
    for freedom in (8, 15, 31, 100):
        assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-3)
