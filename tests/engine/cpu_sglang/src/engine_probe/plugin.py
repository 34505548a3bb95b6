"""Hooks that only look on, and one that injects faults; inert unless ENGINE_PROBE names a folder.

Each rank writes there `rounds-RANK.txt`, a line `batch_size k` for every decode round. `register` adds what
is slow at large batches: where draftdial steers, `signals-RANK.jsonl`, what a policy saw beside a recount of
the scheduler; `kv-lengths-RANK.txt`, a line for every round that speculation gets KV for, the type in which
SGLang's own function is told how much; and `RID.npz`, the draft's keys and values of every finished request
named `kv-...`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = "ENGINE_PROBE"

_CONTROLLER = "sglang.srt.speculative.adaptive_runtime_state.AdaptiveController"
_MODULE = "sglang.srt.managers.scheduler"
_SCHEDULER = f"{_MODULE}.Scheduler"
_RELEASE = "sglang.srt.mem_cache.common.release_kv_cache"
_ALLOCATION = "sglang.srt.mem_cache.allocation.alloc_for_spec_decode"
"""Where it is defined: hooks go on in the order of their names, so this one is inside draftdial's."""
_DECISION = "draftdial.engine_patch.dial.Dial.get_steps_for_batch"


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`: faults, rounds, signals and draft KV."""
    register_faults()
    folder = _folder()
    if folder is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from engine_probe.probe import Probe

    probe = Probe(folder)
    HookRegistry.register(f"{_CONTROLLER}.__init__", probe.controller_made, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.run_event_loop", probe.scheduler_ready, HookType.BEFORE)
    HookRegistry.register(_RELEASE, probe.releasing, HookType.BEFORE)
    HookRegistry.register(_ALLOCATION, probe.allocating, HookType.BEFORE)
    HookRegistry.register(_DECISION, probe.signals_read, HookType.AFTER)


def register_faults() -> None:
    """The entry point where speed matters: faults and rounds alone."""
    folder = _folder()
    if folder is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from engine_probe import faults
    from engine_probe.rounds import Rounds

    rounds = Rounds(folder)
    HookRegistry.register(f"{_CONTROLLER}.activate_step_by_batch", rounds.decided, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.run_event_loop", rounds.scheduler_ready, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.set_internal_state", faults.control, HookType.BEFORE)


def _folder() -> Path | None:
    """Where to write; None where nothing is asked for, or in a process without a scheduler."""
    named = os.environ.get(FOLDER)
    return Path(named) if named and _MODULE in sys.modules else None
