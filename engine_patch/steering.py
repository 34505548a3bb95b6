"""The hooks that put a dial into SGLang's decode loop and tell it what happens there.

All take `*args, **kwargs` beyond what they use: SGLang's signatures differ by release. None lets an
exception of draftdial's own out, since that would end the server; errors are functions of what all ranks
share, so all ranks fail alike.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from draftdial.controller.errors import UserError
from draftdial.engine_patch import (
    acceptance_replay,
    compat,
    dial,
    kv_only,
    lockstep,
    plugin,
    rank_agreement,
    round_timer,
)
from draftdial.engine_patch.decision_log import DecisionLog
from draftdial.engine_patch.dial import Dial
from draftdial.engine_patch.launch_checks import disaggregated
from draftdial.engine_patch.metrics import Metrics
from draftdial.engine_patch.rank_agreement import Vote
from draftdial.engine_patch.round_outcomes import (
    ROUND_ATTRIBUTE,
    FinishedRound,
    write_accepts,
    write_arrival,
    write_end,
)
from draftdial.engine_patch.scheduler_signals import SchedulerSignals, is_probe
from draftdial.engine_patch.server_tiers import Refused
from draftdial.engine_patch.settings import Settings

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""The first rank ends the server for all, with one line; one that has a reason of its own waits this long."""

_controller: Any = None


class AllBatches:
    """SGLang's own rule, with CUDA graphs for every tier and batch as on ranks that have a dial.

    Capturing is collective: a rank without a dial must capture as many as the others, until all have voted.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def cuda_graph_bs_for_step(self, *args: Any, **kwargs: Any) -> list[int] | None:
        return None


def after_controller_init(result: Any, controller: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER `AdaptiveController.__init__`: tiers are known and not yet built."""
    global _controller
    settings = _settings()
    try:
        _check_hooks(settings)
        new = Dial(
            controller.params,
            controller.worker,
            without_zero=compat.uses_rejection_sampling(controller.worker),
        )
        new.activate(new.load(settings.policy))
        new.set_mode(settings.mode)
        new.force_k(settings.force_k)
    except Exception as error:
        _give_up(settings, _reason(error), getattr(controller.worker, "tp_rank", 0) == 0)
        controller.params = AllBatches(controller.params)
        return
    _controller = controller
    controller.params = new
    dial.install(new)


def before_run_event_loop(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE `Scheduler.run_event_loop`: the scheduler is complete, tiers are built, nothing has run.

    Ranks steer together or not at all: one that could not read its file must not decide otherwise.
    """
    settings, bound, is_first = _settings(), dial.current(), compat.is_first_rank(scheduler)
    reason, starting = dial.inactive_reason(), ""
    try:
        if bound is None:
            _check_hooks(settings)
            reason = reason or compat.adaptive_refusal(scheduler.server_args)
        else:
            starting = f"{bound.policy_id} {bound.off_mode}"
            _bind(bound, scheduler, settings, is_first)
    except Exception as error:
        reason = reason or _reason(error)
    reason = rank_agreement.refusal(rank_agreement.gather(scheduler, Vote(reason, starting, "")))
    if not reason and settings.replay:
        try:
            acceptance_replay.start(settings, scheduler, is_first)
        except UserError as error:
            reason = str(error)
    if not reason and settings.live is not None and bound is not None:
        try:
            lockstep.start(settings.live, scheduler, bound.tiers)
        except UserError as error:
            reason = str(error)
    if not reason:
        if bound is not None and bound.off_mode == "kv-only" and 0 in bound.tiers:
            bound.kv_only = kv_only.start(scheduler)
        return
    if bound is not None:
        bound.signals = None
        _controller.params = bound.inner
    _give_up(settings, reason, is_first)


def after_activate_step(result: Any, controller: Any, batch_size: int, *args: Any, **kwargs: Any) -> None:
    """AFTER `AdaptiveController.activate_step_by_batch`, where SGLang's rank consensus checker is on.

    Its exception does go out: the checker is there to end a server whose ranks differ.
    """
    from sglang.srt.utils.rank_consensus_checker import assert_same

    bound = dial.current()
    decisions = 0 if bound is None else bound.decision_hash
    k = controller.worker.speculative_num_steps
    assert_same("draftdial: a batch of %d runs at k = %d, decisions %x", batch_size, k, decisions)


def around_run_batch(
    run_batch: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `Scheduler.run_batch`: the result takes along which round it belongs to."""
    timer = round_timer.current()
    if timer is not None:
        run_batch = partial(timer.run, run_batch)
    followed = lockstep.current()
    if followed is not None:
        run_batch = partial(followed.run, run_batch)
    bound = dial.current()
    if bound is None or bound.signals is None:
        return run_batch(scheduler, batch, *args, **kwargs)
    try:
        bound.signals.launching(batch)
    except Exception as error:
        bound.fail("launching", error)
    result = run_batch(scheduler, batch, *args, **kwargs)
    try:
        round_id = bound.launched()
        if round_id is not None:
            setattr(result, ROUND_ATTRIBUTE, round_id)
    except Exception as error:
        bound.fail("launched", error)
    return result


def after_resolve_spec_v2_tokens(
    returned: Any, processor: Any, result: Any, batch: Any, *args: Any, **kwargs: Any
) -> None:
    """AFTER `_resolve_spec_v2_tokens`: acceptance is on the host, output tokens are not yet appended."""
    bound = dial.current()
    if bound is None or bound.signals is None:
        return
    try:
        finished = FinishedRound.read(result, batch, has_probes=bound.signals.has_probes)
        if finished is not None:
            bound.observe(finished.round_id, finished.k, finished.accepted)
            if (followed := lockstep.current()) is not None:
                followed.finished(finished)
            bound.telemetry.write(write_accepts, finished)
    except Exception as error:
        bound.fail("outcome", error)


def around_process_batch_result(
    process: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `Scheduler.process_batch_result`: before, the host may have to wait for the GPU; after, it is
    known who has finished."""
    bound = dial.current()
    if bound is None or bound.signals is None:
        return process(scheduler, batch, result, *args, **kwargs)
    copied = getattr(result, "copy_done", None) if bound.clock.sees_waits else None
    if copied is not None:  # it is the first that SGLang does
        began = time.perf_counter()
        copied.synchronize()
        bound.clock.waited(time.perf_counter() - began)
    returned = process(scheduler, batch, result, *args, **kwargs)
    bound.clock.processed()
    try:
        for req in bound.signals.processed(batch):
            bound.telemetry.write(write_end, req)
    except Exception as error:
        bound.fail("result", error)
    bound.settled()
    return returned


def after_add_request_to_queue(
    returned: Any, scheduler: Any, req: Any, is_retracted: bool = False, *args: Any, **kwargs: Any
) -> None:
    """AFTER `Scheduler._add_request_to_queue`."""
    bound = dial.current()
    if bound is None or bound.signals is None:
        return
    try:
        if bound.signals.queued(req, is_retracted) and not is_probe(req):
            bound.telemetry.write(write_arrival, req)
    except Exception as error:
        bound.fail("queue", error)


def after_pause_generation(returned: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER `Scheduler.pause_generation`."""
    bound = dial.current()
    if bound is not None:
        bound.clock.paused()


def _settings() -> Settings:
    settings = Settings.from_environment()
    assert settings is not None, "hooks are registered only where there are settings"
    return settings


def _bind(bound: Dial, scheduler: Any, settings: Settings, is_first_rank: bool) -> None:
    """Check that the dial is live and give it what it decides by; UserError if it is not."""
    disaggregation = disaggregated(scheduler.disaggregation_mode.value)
    if disaggregation is not None:
        raise UserError(disaggregation)
    worker = scheduler.model_worker
    if worker.adaptive_controller is not _controller or _controller.params is not bound:
        raise UserError("something else has taken the place of the policy in the adaptive controller")
    missing = [k for k in bound.built if k not in _controller._states]
    if missing:
        raise UserError(f"SGLang has not built the tiers {missing}")
    signals = SchedulerSignals(scheduler, has_warm_up=not scheduler.server_args.skip_server_warmup)
    log = _open_log(settings, bound, scheduler) if is_first_rank else None
    bound.clock.sees_waits = compat.waits_for_results_alone(scheduler)
    bound.bind(signals, log, Metrics.create(scheduler, bound) if is_first_rank else None)


def _check_hooks(settings: Settings) -> None:
    """UserError unless all is hooked: half of it would steer blindly, or never begin to."""
    dead = plugin.dead_targets(settings)
    if dead:
        raise UserError(f"this SGLang has no {' and no '.join(dead)}, which must be hooked")


def _open_log(settings: Settings, bound: Dial, scheduler: Any) -> DecisionLog | None:
    if settings.log is None:
        return None
    replica = compat.replica(scheduler)
    path = Path(f"{settings.log}.replica{replica}") if replica else settings.log
    header = {
        "sglang": compat.release(),
        "policy_id": bound.policy_id,
        "policy_name": bound.policy_name,
        "tiers": list(bound.tiers),
        "profile": bound.file.card["cost_profile"]["document"].get("name"),
        "lag": 2 if getattr(scheduler, "enable_overlap", False) else 1,
        "max_running": int(scheduler.max_running_requests),
    }
    if settings.replay:
        header["acceptance_replay"] = [domain for domain, _ in settings.replay]
    return DecisionLog.open(path, settings.log_bytes, header)


def _reason(error: Exception) -> str:
    """What a start failed for: the line meant for the user, or an exception's kind and text."""
    is_plain = isinstance(error, UserError | Refused)
    return str(error) if is_plain else f"{type(error).__name__}: {error}"


def _give_up(settings: Settings, reason: str, is_first_rank: bool) -> None:
    """This server will not be steered: end it, or serve with SGLang's own rule."""
    reason = " ".join(reason.split())
    if not settings.strict:
        dial.install(None, reason)
        logger.warning("draftdial: not steering: %s", reason)
        return
    if not is_first_rank:
        time.sleep(GRACE_S)
    print(f"draftdial: {reason}", file=sys.stderr, flush=True)
    # SGLang's own way to end a server from a scheduler; an exception would print forty lines first.
    os.kill(os.getppid(), signal.SIGQUIT)
    os._exit(2)
