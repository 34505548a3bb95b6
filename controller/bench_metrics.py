"""The figures of one benchmark run, by the formulas of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from draftdial.controller.load_run import LoadResult
from draftdial.controller.signals import FloatArray

Figures = dict[str, Any]


def figures(result: LoadResult, warmup: int, ttft_limit_s: float, tpot_limit_s: float) -> Figures:
    """Latency, throughput and attainment over the counted requests, those `warmup` off either end.

    Requests that failed are in `failed` and in nothing else; where one did, the run is void.
    """
    num_requests = len(result.tokens)
    counted = np.zeros(num_requests, bool)
    counted[warmup : num_requests - warmup] = True
    counted[list(result.errors)] = False
    arrival_s, first_s, finish_s = (
        result.arrival_s[counted],
        result.first_s[counted],
        result.finish_s[counted],
    )
    found: Figures = {
        "requests": int(counted.sum()),
        "failed": len(result.errors),
        "driver_lag_s": result.lag_s,
        "driver_cpu_share": result.cpu_share,
    }
    if not counted.any():
        return found
    ttft_s, e2e_s = first_s - arrival_s, finish_s - arrival_s
    tpot_s = (finish_s - first_s) / np.maximum(result.tokens[counted] - 1, 1)
    begin_s, end_s = float(arrival_s.min()), float(finish_s.max())
    found |= _spread("ttft", ttft_s) | _spread("tpot", tpot_s) | _spread("e2e", e2e_s)
    found["output_tok_s"] = _tokens_between(result, begin_s, end_s) / (end_s - begin_s)
    found["window_s"] = end_s - begin_s
    found["slo_attainment"] = float(np.mean((ttft_s <= ttft_limit_s) & (tpot_s <= tpot_limit_s)))
    return found


def policy_figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> Figures:
    """What the policy did meanwhile, by the difference of two statuses; nothing without one."""
    if "decisions" not in after:
        return {}
    gained = {name: after[name] - before[name] for name in ("decisions", "switches", "drafted", "wasted")}
    rounds, steady, seconds, waited_s = (
        _by_k(before, after, name)
        for name in ("rounds_at_k", "steady_rounds_at_k", "steady_seconds_at_k", "steady_waited_s_at_k")
    )
    host_ms = {k: 1e3 * (seconds[k] - waited_s[k]) / n for k, n in steady.items() if n and rounds[k]}
    return {
        "rounds": gained["decisions"],
        "rounds_at_k": rounds,
        **({"host_ms_at_k": host_ms} if host_ms else {}),
        **_host_in_prefill(before, after, rounds, host_ms),
        "switches_per_1k_rounds": 1e3 * gained["switches"] / max(1, gained["decisions"]),
        "wasted_draft_share": gained["wasted"] / gained["drafted"] if gained["drafted"] else None,
        "fallbacks": after["fallbacks"] - before["fallbacks"],
    }


def _host_in_prefill(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    rounds: Mapping[str, int],
    host_ms: Mapping[str, float],
) -> Figures:
    """What a prefill adds to the host's work: the rest of its time, beyond all rounds, for each prefill."""
    names = ("launch_seconds", "launch_waited_s", "launch_prefills")
    seconds, waited_s, prefills = (after.get(name, 0) - before.get(name, 0) for name in names)
    if not prefills or not host_ms:
        return {}
    usual_ms = float(np.mean(list(host_ms.values())))  # of a k that never ran twice in a row
    rounds_ms = sum(n * host_ms.get(k, usual_ms) for k, n in rounds.items())
    return {"host_ms_in_prefill": max(0.0, 1e3 * (seconds - waited_s) - rounds_ms) / prefills}


def _by_k(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> dict[str, Any]:
    """How much each count `name.K` has grown."""
    keys = [key for key in after if key.startswith(f"{name}.")]
    return {key.removeprefix(f"{name}."): after[key] - before.get(key, 0) for key in keys}


def _spread(name: str, values_s: FloatArray) -> Figures:
    p50, p90, p99 = np.quantile(values_s, [0.5, 0.9, 0.99])
    return {
        f"{name}_mean_s": float(values_s.mean()),
        f"{name}_p50_s": float(p50),
        f"{name}_p90_s": float(p90),
        f"{name}_p99_s": float(p99),
    }


def _tokens_between(result: LoadResult, begin_s: float, end_s: float) -> float:
    """Output tokens that came between two times: of every answer, evenly from its first to its last."""
    answered = np.ones(len(result.tokens), bool)
    answered[list(result.errors)] = False
    first_s, finish_s, tokens = result.first_s[answered], result.finish_s[answered], result.tokens[answered]
    overlap_s = np.minimum(finish_s, end_s) - np.maximum(first_s, begin_s)
    share = np.clip(overlap_s, 0.0, None) / np.maximum(finish_s - first_s, 1e-9)
    is_first_inside = (first_s >= begin_s) & (first_s <= end_s)
    return float((share * (tokens - 1)).sum() + is_first_inside.sum())
