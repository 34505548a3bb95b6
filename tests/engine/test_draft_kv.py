"""k = 0 keeps the draft's KV: after off and on again it drafts as if it had never been off.

Half of the draft's heads attend to earlier tokens, so that stale entries show. With SGLang's switch that
leaves them stale, the same checks must see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import policies
import pytest
from cpu_server import adaptive_arguments, target_arguments
from numpy.typing import NDArray
from steered_server import SteeredServer
from traffic import Answer, Request, Sending, random_requests

PROMPT, OUTPUT, GAP = 12, 1500, 250


@dataclass
class Walk:
    """One request: the draft's KV by position, and the drafts accepted in the rounds that began there."""

    answer: Answer
    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    accepted: dict[int, tuple[int, int]]
    """k and accepted drafts by output position."""


def walk(server: SteeredServer, request: Request, name: str, *, has_gap: bool) -> Walk:
    """`request` at k = 3, with k = 0 in the middle if `has_gap`."""
    server.flush()
    assert server.set(draftdial_force_k=3)
    assert not has_gap or server.set(probe_gap=GAP)
    [answer] = Sending(server, [request], name=f"kv-{name}").answers()
    kv = np.load(server.folder / f"kv-{name}-0.npz")
    log = server.recorded()
    request_id = log.requests["request_id"][log.requests["prompt_tokens"] == PROMPT].max()
    mine = log.accepts[log.accepts["request_id"] == request_id]
    accepted = {int(row["position"]): (int(row["k"]), int(row["accepted"])) for row in mine}
    return Walk(answer, kv["keys"], kv["values"], accepted)


@pytest.fixture(params=["warm", "skip"])
def walks(request: pytest.FixtureRequest, models: Path, tmp_path: Path) -> tuple[str, Walk, Walk]:
    """Without a gap and with one, on a server whose k = 0 keeps the draft's KV and on one whose does not."""
    config = tmp_path / "adaptive.json"
    config.write_text('{"1": {"candidate_steps": [0, 1, 2, 3]}}')
    policy = policies.saved(policies.rule("fixed", request.param, k=3), tmp_path / "policy.safetensors")
    environment = {
        "DRAFTDIAL_POLICY": str(policy),
        "DRAFTDIAL_LOG": str(tmp_path / "decisions.log"),
        "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND": "1" if request.param == "skip" else "0",
    }
    arguments = [*target_arguments(models), *adaptive_arguments(models, config, 3, "context-draft")]
    prompts = random_requests(seed=61, prompt_tokens=(PROMPT, PROMPT))
    task, other = (Request(next(prompts).prompt, OUTPUT) for _ in range(2))
    with SteeredServer(arguments, tmp_path, environment=environment) as server:
        # Slots are handed out in the same order again: what is not written keeps another request's KV.
        walk(server, other, "other", has_gap=False)
        gap = walk(server, task, "gap", has_gap=True)
        plain = walk(server, task, "plain", has_gap=False)
    return request.param, plain, gap


def test_off_and_on_again_leaves_no_trace_unless_told_to(walks: tuple[str, Walk, Walk]) -> None:
    kind, plain, gap = walks
    assert plain.answer.tokens == gap.answer.tokens
    off = [position for position, (k, _) in gap.accepted.items() if k == 0]
    back_on = max(off) + 1
    assert len(off) == GAP
    both = [p for p in gap.accepted.keys() & plain.accepted.keys() if p > back_on + 3]
    assert len(both) >= 100
    same_drafts = np.mean([gap.accepted[p] == plain.accepted[p] for p in both])
    kept = PROMPT + OUTPUT - 1 - max(policies.TIERS)  # how far a last round overshoots depends on the walk
    differ = np.abs(gap.keys[:kept] - plain.keys[:kept]).max(axis=(1, 2)) > 1e-3
    differ |= np.abs(gap.values[:kept] - plain.values[:kept]).max(axis=(1, 2)) > 1e-3
    stale = np.flatnonzero(differ)
    if kind == "warm":
        assert len(stale) == 0
        assert same_drafts == 1.0
    else:  # the control: both checks see the gap
        assert len(stale) >= 150
        assert same_drafts < 0.95
