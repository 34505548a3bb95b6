"""Hooks that only look on, and one that injects faults; inert unless ENGINE_PROBE names a folder.

Each rank writes there `rounds-RANK.txt`, a line `batch_size k` for every decode round; where draftdial
steers, `signals-RANK.jsonl`, what a policy saw beside a recount of the scheduler; and `RID.npz`, the draft's
keys and values of every finished request whose id begins with `kv-`.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "ENGINE_PROBE"

_CONTROLLER = "sglang.srt.speculative.adaptive_runtime_state.AdaptiveController"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RELEASE = "sglang.srt.mem_cache.common.release_kv_cache"
_DECISION = "draftdial.engine_patch.dial.Dial.get_steps_for_batch"


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from engine_probe.probe import Probe

    probe = Probe(Path(folder))
    HookRegistry.register(f"{_CONTROLLER}.__init__", probe.controller_made, HookType.AFTER)
    HookRegistry.register(f"{_CONTROLLER}.activate_step_by_batch", probe.round_decided, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.run_event_loop", probe.scheduler_ready, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.set_internal_state", probe.control, HookType.BEFORE)
    HookRegistry.register(_RELEASE, probe.releasing, HookType.BEFORE)
    HookRegistry.register(_DECISION, probe.signals_read, HookType.AFTER)
