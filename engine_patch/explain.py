"""What one recorded round looked like to its server, what was chosen and what came of it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from draftdial.controller.belief import AcceptanceBelief
from draftdial.controller.errors import UserError
from draftdial.controller.features import HALF_LIVES_SAMPLES
from draftdial.controller.signals import RoundSignals
from draftdial.engine_patch.log_format import MODES, REQUEST_KINDS, RESTARTS
from draftdial.engine_patch.log_reader import Control, RecordedLog
from draftdial.engine_patch.log_replay import outcome_of, policy_of, record_of, signals_of


def explanation(log: RecordedLog, round_id: int) -> dict[str, Any]:
    """One round as JSON's own types.

    The belief is computed from the log: it has seen the outcomes that the server had seen at that round,
    since its policy began or since the log does. A learned policy believed the same if the log goes back
    that far; a rule may keep other statistics, or none.

    Raises:
        UserError: the log lacks the round, or the policy of its time.
    """
    record = record_of(log.rounds, round_id)
    if record is None:
        raise UserError(f"{log.source}: round: found {round_id}, allowed: {_span(log)}")
    restart = _restart_before(log, int(record["order"]))
    file = policy_of(log, restart)
    profile, signals = file.profile(), signals_of(record)
    belief = AcceptanceBelief(profile.tiers[-1], HALF_LIVES_SAMPLES)
    seen = (log.outcomes["order"] > restart.order) & (log.outcomes["order"] < record["order"])
    for outcome in log.outcomes[seen]:
        belief.observe(outcome_of(outcome))
    mean = belief.mean()[:, 0]
    # (num_memories, num_tiers): tokens per request of the coming round.
    tokens = np.cumsum(np.cumprod(np.insert(mean, 0, 1.0, axis=1), axis=1), axis=1)[:, list(profile.tiers)]
    round_s = profile.round_s(signals.num_running, signals.mean_context_tokens, file.card["off_mode"])[0]
    fallen = [c for c in log.controls if c.kind == "fallback" and restart.order < c.order < record["order"]]
    return {
        "round_id": round_id,
        "time_s": float(record["time_s"]),
        "policy": {"name": file.card["name"], "id": file.policy_id, "kind": file.card["kind"]},
        "mode": MODES[record["mode"]],
        "fallback": str(fallen[0].data.get("reason", "yes")) if fallen else "",
        "signals": {field.name: record[field.name].item() for field in fields(RoundSignals)},
        "policy_k": int(record["policy_k"]),
        "acted_k": int(record["acted_k"]),
        "belief": {
            "half_lives_requests": list(HALF_LIVES_SAMPLES),
            "acceptance": mean.tolist(),
            "evidence_requests": belief.reached[:, 0].tolist(),
            "num_outcomes": int(seen.sum()),
            "is_whole": log.is_whole or restart.order > int(log.rounds["order"][0]),
        },
        "prediction": {
            "k": list(profile.tiers),
            "round_s": round_s.tolist(),
            "tokens_per_s": (signals.num_running[0] * tokens / round_s).tolist(),
        },
        "outcome": _outcome(log, round_id),
    }


def summary(log: RecordedLog) -> dict[str, Any]:
    """The whole log as JSON's own types."""
    rounds, outcomes = log.rounds, log.outcomes
    depth = np.arange(outcomes["accept_counts"].shape[1])
    num_requests, accepted = outcomes["accept_counts"].sum(axis=1), outcomes["accept_counts"] @ depth
    by_k = {}
    for k in log.tiers:
        of_k = outcomes["k"] == k
        requests = int(num_requests[of_k].sum())
        by_k[str(k)] = {
            "acted": int((rounds["acted_k"] == k).sum()),
            "policy": int((rounds["policy_k"] == k).sum()),
            "tokens_per_round": 1 + int(accepted[of_k].sum()) / requests if requests else None,
        }
    return {
        "header": {name: value for name, value in log.header.items() if name != "records"},
        "is_whole": log.is_whole,
        "num_rounds": len(rounds),
        "round_ids": [int(rounds["round_id"].min()), int(rounds["round_id"].max())] if len(rounds) else None,
        "time_s": [float(rounds["time_s"].min()), float(rounds["time_s"].max())] if len(rounds) else None,
        "k": by_k,
        "modes": {mode: int((rounds["mode"] == code).sum()) for code, mode in enumerate(MODES)},
        "num_switches": int(np.count_nonzero(np.diff(rounds["acted_k"]))),
        "num_outcomes": len(outcomes),
        "drafted": int((outcomes["k"] * num_requests).sum()),
        "accepted": int(accepted.sum()),
        "requests": {
            kind: int((log.requests["kind"] == code).sum()) for code, kind in enumerate(REQUEST_KINDS)
        },
        "num_accept_rows": len(log.accepts),
        "events": [{"time_s": c.time_s, "kind": c.kind, **c.data} for c in log.controls],
    }


def _restart_before(log: RecordedLog, order: int) -> Control:
    """When the policy that decided at `order` began; the log's first policy if it lacks that moment."""
    begun = [c for c in log.controls if c.kind in RESTARTS and c.order < order]
    if begun:
        return begun[-1]
    if not log.policies:
        raise UserError(f"{log.source}: holds no policy file, so nothing can be said of its belief")
    return Control(0, 0.0, "start", {"policy_sha256": next(iter(log.policies))})


def _outcome(log: RecordedLog, round_id: int) -> dict[str, Any] | None:
    """What the round revealed; None if that is not recorded."""
    record = record_of(log.outcomes, round_id)
    if record is None:
        return None
    k = int(record["k"])
    counts = record["accept_counts"][: k + 1].astype(int)
    num_requests = int(counts.sum())
    accepted = int(counts @ np.arange(k + 1))
    return {
        "k": k,
        "accept_counts": counts.tolist(),
        "num_requests": num_requests,
        "num_tokens": num_requests + accepted,
        "num_wasted": k * num_requests - accepted,
    }


def _span(log: RecordedLog) -> str:
    ids = log.rounds["round_id"]
    return f"those it holds, {ids.min()} to {ids.max()}" if len(ids) else "none, it holds no rounds"
