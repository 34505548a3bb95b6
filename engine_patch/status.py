"""What a server says about its policy: the `draftdial` part of `/server_info`."""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import asdict, fields
from typing import Any

from draftdial.controller.files import sha256_of
from draftdial.controller.signals import RoundSignals
from draftdial.engine_patch import acceptance_replay, lockstep, one_token_verify, round_timer
from draftdial.engine_patch import dial as dials
from draftdial.engine_patch.control_keys import NO_FORCED_K
from draftdial.engine_patch.dial import Dial
from draftdial.engine_patch.kv_only import KvOnly
from draftdial.engine_patch.prediction import Prediction
from draftdial.engine_patch.scheduler_signals import SchedulerSignals

MAX_TEXT = 500
"""Characters of a free text, so that the whole stays below 10 kB."""

Status = dict[str, int | float | str]


def status_of(dial: Dial | None) -> Status:
    """Plain finite scalars by name, see docs/operations.md; never raises.

    One value that JSON has no word for would turn all of `/server_info` into an error, so `status_error`
    stands in for what went wrong.
    """
    try:
        found = _inactive() if dial is None else _active(dial)
        return {name: _plain(value) for name, value in found.items()}
    except Exception as error:
        return {"status_error": f"{type(error).__name__}: {error}"[:MAX_TEXT]}


def _inactive() -> dict[str, Any]:
    return {"version": _version(), "mode": "inactive", "reason": dials.inactive_reason()}


def _active(dial: Dial) -> dict[str, Any]:
    counters = dial.counters
    status: dict[str, Any] = {
        "version": _version(),
        "policy_id": dial.policy_id,
        "policy_name": dial.policy_name,
        "policy_kind": dial.file.card["kind"],
        "policy_sha256": sha256_of(dial.file.data),
        "mode": dial.mode,
        "is_bound": int(dial.signals is not None),
        "measuring": round_timer.description(),
        "forced_k": NO_FORCED_K if dial.forced_k is None else dial.forced_k,
        "k": dial.last_k,
        "wanted_k": dial.last_wanted_k,
        "off_mode": dial.off_mode,
        "one_token_graphs": one_token_verify.num_graphs,
        **_kv_only(dial.kv_only),
        "tiers": ",".join(map(str, dial.tiers)),
        "decisions": counters.decisions,
        "switches": counters.switches,
        **{f"rounds_at_k.{k}": rounds for k, rounds in counters.rounds_at_k.items()},
        **{f"seconds_at_k.{k}": seconds for k, seconds in counters.seconds_at_k.items()},
        **{
            f"steady_{name}_at_k.{k}": getattr(steady, name)
            for k, steady in sorted(counters.steady_at_k.items())
            for name in ("rounds", "seconds", "waited_s")
        },
        **_launches(dial),
        **_output(dial.signals),
        "observed": counters.observed,
        "drafted": counters.drafted,
        "wasted": counters.wasted,
        "fallback": dial.fallback or "",
        "fallbacks": counters.fallbacks,
        "errors": counters.errors,
        "last_error": dial.last_error,
        "telemetry_error": dial.telemetry.error,
        "deploys": counters.deploys,
        "last_control": dial.last_control,
        "decision_hash": f"{dial.decision_hash:x}",
        "acceptance_replay": acceptance_replay.description(),
    }
    followed = lockstep.current()
    if followed is not None:
        status |= followed.status()
    if dial.log is not None:
        status["log_error"] = dial.log.error
        status["log_lost"] = dial.log.num_lost
    seen = dial.last_signals
    if seen is not None and dial.last_k >= 0:
        status |= {f"signals.{field.name}": getattr(seen, field.name)[0] for field in fields(RoundSignals)}
        prediction = Prediction.of(dial.policy, dial.last_k)
        if prediction is not None:
            status["acceptance"] = prediction.acceptance
            status["predicted_speedup"] = prediction.speedup
    if dial.shadow is not None:
        status |= {f"shadow.{name}": value for name, value in dial.shadow.summary().items()}
    return status


def _output(signals: SchedulerSignals | None) -> Status:
    if signals is None:
        return {}
    return {"output_tokens": signals.output_tokens(), "processed_s": signals.processed_s}


def _launches(dial: Dial) -> dict[str, float]:
    """Nothing where it is not known what the host waits for."""
    counts = asdict(dial.counters.launches) if dial.clock.sees_waits else {}
    return {f"launch_{name}": count for name, count in counts.items()}


def _kv_only(kv_only: KvOnly | None) -> Status:
    if kv_only is None:
        return {}
    return {
        "kv_only_fallback": kv_only.fallback,
        "kv_only_rounds": kv_only.num_rounds,
        "kv_only_prefills": kv_only.num_prefills,
        "kv_only_restarts": kv_only.restart.num_restarts,
    }


def _plain(value: Any) -> int | float | str:
    """`value` as JSON has it: NumPy's scalars unpacked, floats rounded, what is not finite as text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return int(value)
    return str(value)[:MAX_TEXT]


def _version() -> str:
    return importlib.metadata.version("draftdial")
