"""Faults that a test injects into a scheduler through SGLang's own control channel."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from draftdial.controller import policy_weights
from draftdial.engine_patch.kv_only_projection import DraftKv
from draftdial.engine_patch.lockstep import Lockstep
from draftdial.engine_patch.round_outcomes import FinishedRound

if TYPE_CHECKING:
    from draftdial.engine_patch.dial import Dial

FAULT_KEY = "probe_fault"
"""Control key: the policy's next decision raises (1), is no built tier (2), or is no number (3)."""

GOLDEN_KEY = "probe_golden"
"""Control key: the rank on which the golden vectors of any policy fail from now on, -1 for none."""

DIVERGE_KEY = "probe_diverge"
"""Control key: the rank whose hash of decisions changes now, as if it had decided otherwise once."""

KV_ONLY_KEY = "probe_kv_only"
"""Control key: the projection of off mode `kv-only` writes nothing from now on (1), raises (2), works (0)."""

LATE_KEY = "probe_late"
"""Control key: an environment in lockstep hears of each round one round later (1), or no more (0)."""

GAP_KEY = "probe_gap"
"""Control key: so many rounds at k = 0 from the sixteenth from now on; the forced k before and after."""
GAP_AFTER = 15

_KEYS = (FAULT_KEY, GOLDEN_KEY, DIVERGE_KEY, KV_ONLY_KEY, LATE_KEY, GAP_KEY)


def control(scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    """BEFORE `Scheduler.set_internal_state`: take the keys above out of the request and do what they say."""
    faults = {key: request.server_args.pop(key, None) for key in _KEYS}
    if all(value is None for value in faults.values()):
        return
    from draftdial.engine_patch import dial

    current = dial.current()
    assert current is not None
    rank = torch.distributed.get_rank(scheduler.tp_cpu_group)
    if faults[FAULT_KEY] is not None:
        current.policy.decide = _FAULTS[int(faults[FAULT_KEY])]  # type: ignore[method-assign]
    if faults[GOLDEN_KEY] is not None:
        is_here = faults[GOLDEN_KEY] == rank
        policy_weights.replay_features = _wrong_features if is_here else _replay_features
    if faults[DIVERGE_KEY] == rank:
        current.decision_hash ^= 1
    if faults[LATE_KEY] is not None:
        Lockstep.finished = _late([]) if faults[LATE_KEY] else _finished  # type: ignore[method-assign]
    if faults[GAP_KEY] is not None:
        _leave_gap(current, faults[GAP_KEY])
    if faults[KV_ONLY_KEY] is not None:
        DraftKv.write = (_write, lambda *_args: None, _raise)[faults[KV_ONLY_KEY]]  # type: ignore[method-assign]


_replay_features = policy_weights.replay_features
_write = DraftKv.write
_finished = Lockstep.finished


def _late(held: list[FinishedRound]) -> Callable[[Lockstep, FinishedRound], None]:
    """What overlap scheduling does on a GPU: the next round is decided before this one's outcome is known."""

    def finished(followed: Lockstep, newest: FinishedRound) -> None:
        if held:
            _finished(followed, held.pop())
        held.append(newest)

    return finished


def _leave_gap(dial: Dial, num_rounds: int) -> None:
    """By the round: changes from outside come as late as the machine lets them, maybe behind the request."""
    forced = dial.forced_k
    left = iter([*repeat(forced, GAP_AFTER), *repeat(0, num_rounds)])

    def steps(batch_size: int) -> int:
        try:
            dial.forced_k = next(left)
        except StopIteration:
            dial.forced_k = forced
            del dial.get_steps_for_batch  # back to the class's
        return type(dial).get_steps_for_batch(dial, batch_size)

    dial.get_steps_for_batch = steps  # type: ignore[method-assign]


def _wrong_features(features: Any) -> Any:
    """What a rank with a faulty library might compute."""
    return _replay_features(features) * np.float32(1.001)


def _raise(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError("injected by a test")


_FAULTS: dict[int, Any] = {
    1: _raise,
    2: lambda *_args, **_kwargs: np.array([99]),
    3: lambda *_args, **_kwargs: np.array([np.nan]),
}
