"""Runs a policy on simulated servers to the end and says what came of it (formulas: docs/metrics.md)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftdial.controller.errors import UserError
from draftdial.controller.policy import Policy
from draftdial.controller.signals import FloatArray
from draftdial.envs.simulated_engine import EngineResults, SimulatedEngine


@dataclass(frozen=True)
class Metrics:
    """One value per server, each of shape `(num_servers,)` unless said otherwise."""

    e2e_mean_s: FloatArray
    e2e_p50_s: FloatArray
    e2e_p90_s: FloatArray
    e2e_p99_s: FloatArray
    ttft_mean_s: FloatArray
    ttft_p99_s: FloatArray
    tpot_mean_s: FloatArray
    output_tok_s: FloatArray
    slo_attainment: FloatArray
    switches_per_1k_rounds: FloatArray
    wasted_draft_share: FloatArray
    rounds: FloatArray
    num_requests: FloatArray
    tier_time_share: FloatArray
    """(num_servers, num_tiers)"""


def run(policy: Policy, engine: SimulatedEngine) -> EngineResults:
    """Drive every server of `engine` from its first request to its last counted one."""
    engine.reset()
    policy.reset(engine.num_servers)
    done = engine.servers["done"]
    while not done.all():
        for outcome in engine.run_round(policy.decide(engine.signals())):
            policy.observe(outcome)
    results = engine.results()
    unfinished = np.isnan(results.finish_s) & results.counted
    if results.failed.any() or unfinished.any():
        row = int(np.flatnonzero(results.failed | unfinished.any(axis=1))[0])
        raise UserError(
            f"profile {engine.profiles[row].name}: kv_pool_tokens: too small for a request of the workload; "
            "a cell in which a request is not served is void"
        )
    return results


def evaluate(policy: Policy, engine: SimulatedEngine) -> Metrics:
    """`run`, then the metrics of every server."""
    results = run(policy, engine)
    ttft_limit_s = np.array([o.ttft_limit_s for o in engine.options])
    tpot_limit_s = np.array([o.tpot_limit_s for o in engine.options])
    return metrics(results, ttft_limit_s, tpot_limit_s)


def metrics(results: EngineResults, ttft_limit_s: FloatArray, tpot_limit_s: FloatArray) -> Metrics:
    """Metrics of every server from its results; the limits have shape `(num_servers,)`."""
    e2e = np.where(results.counted, results.finish_s - results.arrival_s, np.nan)
    ttft = np.where(results.counted, results.first_token_s - results.arrival_s, np.nan)
    decoded = np.maximum(results.output_tokens - 1, 1)
    tpot = np.where(results.counted, (results.finish_s - results.first_token_s) / decoded, np.nan)
    met = (ttft <= ttft_limit_s[:, None]) & (tpot <= tpot_limit_s[:, None])
    num_requests = results.counted.sum(axis=1)
    p50, p90, p99 = np.nanquantile(e2e, [0.5, 0.9, 0.99], axis=1)
    return Metrics(
        e2e_mean_s=np.nanmean(e2e, axis=1),
        e2e_p50_s=p50,
        e2e_p90_s=p90,
        e2e_p99_s=p99,
        ttft_mean_s=np.nanmean(ttft, axis=1),
        ttft_p99_s=np.nanquantile(ttft, 0.99, axis=1),
        tpot_mean_s=np.nanmean(tpot, axis=1),
        output_tok_s=results.window_tokens / results.window_s,
        slo_attainment=(met & results.counted).sum(axis=1) / num_requests,
        switches_per_1k_rounds=1e3 * results.switches / results.rounds,
        wasted_draft_share=1.0 - results.accepted / np.where(results.drafted > 0, results.drafted, np.nan),
        rounds=results.rounds.astype(np.float64),
        num_requests=num_requests.astype(np.float64),
        tier_time_share=results.tier_time_s / results.tier_time_s.sum(axis=1, keepdims=True),
    )
