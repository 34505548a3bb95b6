"""The control channel: SGLang's `/set_internal_state` and `/server_info`, with keys of draftdial's own.

SGLang broadcasts a request of the first kind to every rank, which applies it between two rounds, all in the
same iteration. So a change that all ranks agree on inside the hook takes effect in the same round everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftdial.controller.errors import UserError
from draftdial.engine_patch import dial as dials
from draftdial.engine_patch import rank_agreement, round_timer
from draftdial.engine_patch.control_keys import (
    FORCE_K_KEY,
    MODE_KEY,
    NO_FORCED_K,
    PREFIX,
    is_policy_key,
    policy_bytes,
)
from draftdial.engine_patch.dial import Dial
from draftdial.engine_patch.measurement_plan import MEASURE_KEY, MeasurementPlan
from draftdial.engine_patch.rank_agreement import Vote
from draftdial.engine_patch.server_tiers import Refused
from draftdial.engine_patch.settings import MODES
from draftdial.engine_patch.status import status_of

logger = logging.getLogger(__name__)

MAX_KEY, MAX_NAME = 100, 200
"""Characters shown of a key, so that a policy's hash is whole, and of a change's name: a request may have any
number of keys."""


@dataclass(frozen=True)
class Change:
    """A change that has been checked on this rank, and not been made."""

    name: str
    apply: Callable[[], None]


def around_set_internal_state(
    original: Callable[..., Any], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `Scheduler.set_internal_state`: make a change of ours, leave the other keys to SGLang.

    A request carries at most one key of ours. Either all of it is done, on every rank, and `updated` is true;
    or none of it, and the status says why.
    """
    own = {key: value for key, value in recv_req.server_args.items() if key.startswith(PREFIX)}
    if not own:
        return original(scheduler, recv_req, *args, **kwargs)
    dial = dials.current()
    change, reason = _checked(dial, own, scheduler)
    vote = Vote(reason, change.name, f"{dial.decision_hash:x}" if dial else "")
    reason = rank_agreement.refusal(rank_agreement.gather(scheduler, vote))
    answer = None
    rest = {key: value for key, value in recv_req.server_args.items() if key not in own}
    if rest and not reason:
        recv_req.server_args = rest
        answer = original(scheduler, recv_req, *args, **kwargs)
        reason = "" if answer.updated else "SGLang refused the other keys of the request"
    if reason:
        logger.warning("draftdial: refused %s: %s", change.name, reason)
    else:
        change.apply()
        logger.warning("draftdial: %s", change.name)
    if dial is not None:
        dial.record_control(change.name, reason)
    return _answer(not reason) if answer is None else answer


def after_get_internal_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER `Scheduler.get_internal_state`: add the status to what `/server_info` shows.

    This request, too, is broadcast to every rank and answered by all in the same iteration, so they compare
    here how they have decided. Whether there is a dial is the same on all of them since the start.
    """
    dial = dials.current()
    status = status_of(dial)
    if dial is not None:
        state = f"policy {dial.policy_id}, mode {dial.mode}, forced k {dial.forced_k}"
        votes = rank_agreement.gather(scheduler, Vote("", state, f"{dial.decision_hash:x}"))
        status |= {"ranks": len(votes), "ranks_agree": int(not rank_agreement.refusal(votes))}
    result.internal_state["draftdial"] = status
    timer = round_timer.current()
    if timer is not None:
        result.internal_state["draftdial_timing"] = timer.report()


def _checked(dial: Dial | None, own: dict[str, Any], scheduler: Any) -> tuple[Change, str]:
    """The change that is asked for and why this rank refuses it, empty if it does not.

    Raises nothing: a rank that left here would keep the others waiting for its vote.
    """
    try:
        if len(own) > 1:
            raise Refused(f"{len(own)} draftdial keys in one request, allowed: one")
        [(key, value)] = own.items()
        if key.startswith(MEASURE_KEY):
            return _measurement(dial, key, scheduler), ""
        if dial is None:
            raise Refused(f"nothing is steered here: {dials.inactive_reason()}")
        return _change(dial, key, value), ""
    except (Refused, UserError) as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    return Change(" and ".join(key[:MAX_KEY] for key in own)[:MAX_NAME], lambda: None), reason


def _change(dial: Dial, key: str, value: Any) -> Change:
    if is_policy_key(key):
        data, sha256 = policy_bytes(key)
        loaded = dial.load(data)
        return Change(f"deploy of {sha256}", lambda: dial.activate(loaded))
    if key == MODE_KEY:
        if value not in range(len(MODES)):
            raise Refused(f"{key}: found {value}, allowed: {', '.join(map(_numbered, MODES))}")
        mode = MODES[int(value)]
        dial.check_mode(mode)
        return Change(f"mode {mode}", _ending_measurement(lambda: dial.set_mode(mode)))
    if key == FORCE_K_KEY:
        if value != int(value):
            raise Refused(f"{key}: found {value}, allowed: a tier, or {NO_FORCED_K} for none")
        k = None if value == NO_FORCED_K else int(value)
        dial.check_force_k(k)
        return Change(f"force_k {'none' if k is None else k}", _ending_measurement(lambda: dial.force_k(k)))
    raise Refused(f"{key[:MAX_KEY]}: no such key, allowed: {MODE_KEY}, {FORCE_K_KEY}, a policy key")


def _ending_measurement(apply: Callable[[], None]) -> Callable[[], None]:
    """`apply` for an operator who says what is to run: nothing goes before that."""

    def applied() -> None:
        round_timer.stop()
        apply()

    return applied


def _measurement(dial: Dial | None, key: str, scheduler: Any) -> Change:
    if key == MEASURE_KEY:
        return Change("end of the measurement", round_timer.stop)
    plan = MeasurementPlan.from_key(key)
    for phase in plan.phases:
        if (phase.k is None) != (dial is None):
            what = "a server that is steered" if dial else f"one that is not: {dials.inactive_reason()}"
            raise Refused(f"measurement: phase {phase} on {what}")
        if dial is not None:
            dial.check_force_k(phase.k)
    return Change(
        f"measurement {plan.number} at batch {plan.batch}", lambda: round_timer.start(plan, scheduler)
    )


def _numbered(mode: str) -> str:
    return f"{MODES.index(mode)} {mode}"


def _answer(updated: bool) -> Any:
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    # Up to 0.5.14 the answer carried the server's arguments, too; its one reader takes `updated`.
    if "server_args" in SetInternalStateReqOutput.__annotations__:
        return SetInternalStateReqOutput(updated=updated, server_args={})
    return SetInternalStateReqOutput(updated=updated)
