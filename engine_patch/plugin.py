"""Entry point of SGLang's plugin group `sglang.srt.plugins`: which of its functions are hooked, by what."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from typing import TYPE_CHECKING

from draftdial.controller.errors import UserError
from draftdial.engine_patch.settings import Settings

if TYPE_CHECKING:
    from draftdial.engine_patch.compat import Hook

logger = logging.getLogger(__name__)

SCHEDULER = "sglang.srt.managers.scheduler"
PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor"
CONTROLLER = "sglang.srt.speculative.adaptive_runtime_state.AdaptiveController"


def register() -> None:
    """Called by SGLang once in each of its processes. Without settings it does nothing at all.

    The launching process checks the settings and the policy file, so that a mistake in them ends the
    command before anything is loaded; processes with a scheduler get the hooks.
    """
    try:
        settings = Settings.from_environment()
    except UserError as error:
        _complain(error)
        raise SystemExit(2) from None
    if settings is None:
        return
    if multiprocessing.parent_process() is None:
        if settings.strict and not settings.inactive:
            _check_policy(settings)
    elif SCHEDULER in sys.modules:
        _register_hooks(settings)


def hooks() -> list[Hook]:
    """Every function of SGLang that is hooked on all releases, and by what."""
    from draftdial.engine_patch import control, steering
    from draftdial.engine_patch.compat import Hook

    return [
        Hook(f"{CONTROLLER}.__init__", "after", steering.after_controller_init),
        Hook(f"{SCHEDULER}.Scheduler.run_event_loop", "before", steering.before_run_event_loop),
        Hook(f"{SCHEDULER}.Scheduler.run_batch", "around", steering.around_run_batch),
        Hook(f"{SCHEDULER}.Scheduler._add_request_to_queue", "after", steering.after_add_request_to_queue),
        Hook(f"{SCHEDULER}.Scheduler.process_batch_result", "around", steering.around_process_batch_result),
        Hook(
            f"{PROCESSOR}.SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
            "after",
            steering.after_resolve_spec_v2_tokens,
        ),
        Hook(f"{SCHEDULER}.Scheduler.set_internal_state", "around", control.around_set_internal_state),
        Hook(f"{SCHEDULER}.Scheduler.get_internal_state", "after", control.after_get_internal_state),
    ]


def steering_hooks(settings: Settings) -> list[Hook]:
    """What a server that is steered needs on this release."""
    from draftdial.engine_patch import acceptance_replay, compat, steering
    from draftdial.engine_patch.compat import Hook

    wanted = hooks() + compat.hooks(compat.release())
    if compat.has_consensus_checker():
        wanted.append(Hook(f"{CONTROLLER}.activate_step_by_batch", "after", steering.after_activate_step))
    if settings.replay:
        wanted += acceptance_replay.hooks()
    return wanted


def clock_hooks() -> list[Hook]:
    """What measured times alone need."""
    from draftdial.engine_patch import steering
    from draftdial.engine_patch.compat import Hook

    return [Hook(f"{SCHEDULER}.Scheduler.pause_generation", "after", steering.after_pause_generation)]


def dead_targets(settings: Settings) -> list[str]:
    """Those of `steering_hooks` that are not in place: SGLang only logs a target that it does not find."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    live = getattr(HookRegistry, "_patched", None)
    if live is None:
        logger.warning("draftdial: this SGLang does not say which hooks are live: not checked")
        return []
    return [hook.target for hook in steering_hooks(settings) if hook.target not in live]


def _register_hooks(settings: Settings) -> None:
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from draftdial.engine_patch import compat, dial, kv_lengths, kv_only, one_token_verify, round_timer
    from draftdial.engine_patch.compat import Hook

    if settings.inactive:
        dial.install(None, settings.inactive)
        wanted = [hook for hook in hooks() if hook.target.endswith("_internal_state")]
        wanted.append(Hook(f"{SCHEDULER}.Scheduler.run_batch", "around", round_timer.around_run_batch))
    else:
        wanted = steering_hooks(settings)
        # None of these does steering depend on: without them a round is as SGLang has it.
        wanted += clock_hooks() + kv_lengths.hooks(compat.release())
        if settings.kv_only:
            wanted += kv_only.hooks()
        if torch.cuda.is_available():
            wanted += one_token_verify.hooks(compat.release())
        compat.quieten()
    for target, kind, hook in wanted:
        HookRegistry.register(target, hook, HookType(kind))


def _check_policy(settings: Settings) -> None:
    from draftdial.controller.policy_file import load_policy

    try:
        load_policy(settings.policy)
    except UserError as error:
        _complain(error)
        raise SystemExit(2) from None


def _complain(error: UserError) -> None:
    print(f"draftdial: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
