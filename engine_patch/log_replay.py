"""Feeds a recorded log to a policy, call by call as the server did: the same history must give the same k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from draftdial.controller.errors import UserError
from draftdial.controller.policy import Policy
from draftdial.controller.policy_file import PolicyFile, load_policy, read
from draftdial.controller.signals import IntArray, RoundOutcome, RoundSignals
from draftdial.engine_patch.log_format import RESTARTS
from draftdial.engine_patch.log_reader import Control, RecordedLog, Records

Step = int | RoundOutcome | Control
"""A decision, as its index in `RecordedLog.rounds`; or an outcome; or a control event."""


@dataclass(frozen=True, eq=False)
class Replay:
    """Every decision that can be replayed, each array of shape `(num_decisions,)`."""

    round_id: IntArray
    logged_k: IntArray
    """What the policy said in the server."""
    offline_k: IntArray
    """What it says here."""


def replay(log: RecordedLog, policy: Policy | None = None) -> Replay:
    """What `policy`, or whichever policy the server had at the time, says at every recorded decision.

    A policy begins with an empty memory at every start and deploy, so decisions that precede all of those
    that the log still holds are left out, and so are rounds whose policy had failed and was not asked.

    Raises:
        UserError: the log goes back to no start or deploy, or lacks the policy's file.
    """
    now: Policy | None = None
    decided = []
    for step in steps(log):
        if isinstance(step, Control):
            if step.kind in RESTARTS:
                now = load_policy(policy_of(log, step)) if policy is None else policy
                now.reset(1)
        elif now is None:
            continue
        elif isinstance(step, RoundOutcome):
            now.observe(step)
        elif log.rounds["policy_k"][step] >= 0:
            said = int(now.decide(signals_of(log.rounds[step]))[0])
            # A server that cannot run a tier takes the next deeper one it can.
            runs = min((k for k in log.tiers if k >= said), default=said)
            decided.append((log.rounds["round_id"][step], log.rounds["policy_k"][step], runs))
    if not decided:
        raise UserError(f"{log.source}: goes back to no start or deploy of a policy, so none can be replayed")
    return Replay(*np.array(decided, np.int64).T)


def steps(log: RecordedLog) -> Iterator[Step]:
    """Decisions, outcomes and control events in the order of the server's calls."""
    orders = [log.rounds["order"], log.outcomes["order"], np.array([c.order for c in log.controls], np.int64)]
    kinds = np.repeat(np.arange(3), [len(order) for order in orders])
    places = np.concatenate([np.arange(len(order)) for order in orders])
    for at in np.argsort(np.concatenate(orders), kind="stable").tolist():
        kind, place = kinds[at], int(places[at])
        if kind == 0:
            yield place
        elif kind == 1:
            yield outcome_of(log.outcomes[place])
        else:
            yield log.controls[place]


def policy_of(log: RecordedLog, restart: Control) -> PolicyFile:
    """The file of the policy that began at this start or deploy; UserError if the log lacks it."""
    sha256 = restart.data.get("policy_sha256", "none")
    if sha256 not in log.policies:
        raise UserError(f"{log.source}: holds no policy file {sha256[:12]}, with which the server began")
    return read(log.policies[sha256])


def signals_of(record: np.void) -> RoundSignals:
    """What the policy saw before a recorded round."""
    signals = RoundSignals.zeros(1)
    for field in fields(RoundSignals):
        getattr(signals, field.name)[0] = record[field.name]
    return signals


def outcome_of(record: np.void) -> RoundOutcome:
    """What it observed."""
    return RoundOutcome(
        np.array([record["round_id"]], np.int64),
        np.array([record["k"]], np.int64),
        np.array([record["accept_counts"]], np.int64),
    )


def record_of(records: Records, round_id: int) -> np.void | None:
    """The record of a round, or None."""
    found = np.flatnonzero(records["round_id"] == round_id)
    return records[found[0]] if len(found) else None
