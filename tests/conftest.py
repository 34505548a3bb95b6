"""Tiny worlds whose every number can be worked out by hand.

Session-wide factories, not data: a test says what it needs and reads what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.features import Features
from draftdial.controller.learned import LearnedPolicy, Network
from draftdial.controller.policy_card import Training
from draftdial.controller.policy_export import learned_file, rule_file
from draftdial.controller.policy_file import PolicyFile, load_policy
from draftdial.controller.rules import FixedK, Threshold
from draftdial.engine_patch.decision_log import DecisionLog
from draftdial.engine_patch.dial import Dial
from draftdial.envs.acceptance import MAX_K, AcceptanceBank
from draftdial.envs.simulated_engine import SimulatedEngine
from draftdial.envs.workload import RequestList

# How long an example takes says nothing of whether it is right.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

COVERED = (
    "captured_batches",
    "eager",
    "prefill",
    "switch_ms",
    "max_running",
    "kv_pool_tokens",
    "chunked_prefill_tokens",
)


def _round_ms(row: str, batch: int) -> float:
    """A round: 8 ms in `nospec`, 9 off-skip, 10 off-warm and 2 more per draft; 1 ms per row, padding too."""
    base = {"nospec": 8.0, "off-skip": 9.0, "off-warm": 10.0}.get(row)
    return (10.0 + 2.0 * int(row.removeprefix("k=")) if base is None else base) + batch


@pytest.fixture(scope="session")
def make_profile() -> Callable[..., CostProfile]:
    """Profiles with `_round_ms` at batches 1, 2 and 4, `ms_per_token` for context beyond `least_context`.

    Prefill takes 5 ms up to 100 tokens and 0.04 ms for each one more unless `prefill_ms` gives other
    knots; so two batches cost more than one.
    """

    def make(
        tiers: Sequence[int] = (0, 1, 3),
        *,
        ms_per_token: float = 0.0,
        least_context: int = 0,
        switch_ms: float = 0.0,
        max_running: int = 8,
        kv_pool_tokens: int = 1_000_000,
        chunked_prefill_tokens: int = 8192,
        prefill_ms: Sequence[Sequence[float]] = ((100, 5.0), (300, 13.0)),
    ) -> CostProfile:
        rows = ["nospec", "off-warm", "off-skip", *(f"k={k}" for k in tiers[1:])]
        document = {
            "schema": "draftdial.profile/1",
            "name": "tiny",
            "description": "made up for tests",
            "hardware": "none",
            "model": "none",
            "draft": "none",
            "engine": "none",
            "engine_version": "0",
            "date": "2026-01-31",
            "units": {"time": "ms", "context": "tokens"},
            "provenance": [
                {
                    "covers": [*rows, *COVERED],
                    "source": "tests",
                    "measured": "nothing",
                    "inferred": "all",
                }
            ],
            "tiers": [{"k": k, "label": f"k={k}", "draft_tokens": k + 1} for k in tiers],
            "captured_batches": [1, 2, 4],
            "max_running": max_running,
            "kv_pool_tokens": kv_pool_tokens,
            "chunked_prefill_tokens": chunked_prefill_tokens,
            "switch_ms": switch_ms,
            "eager": {"factor_per_batch": 0.5, "extra_ms": 3.0},
            "prefill": {engine: [list(knot) for knot in prefill_ms] for engine in ("nospec", "speculative")},
            "rows": [
                {
                    "row": row,
                    "cells": [
                        {
                            "batch": batch,
                            "context_tokens": [least_context, least_context + 1000],
                            "round_ms": [_round_ms(row, batch), _round_ms(row, batch) + 1000 * ms_per_token],
                        }
                        for batch in (1, 2, 4)
                    ],
                }
                for row in rows
            ],
        }
        return CostProfile.from_document(document, "tests")

    return make


class StockRule:
    """Stands in for SGLang's own rule: always the same step, and what it was told."""

    def __init__(self, candidate_steps: Sequence[int], step: int) -> None:
        self.candidate_steps = list(candidate_steps)
        self.step = step
        self.told: list[tuple[list[int], int]] = []

    def get_steps_for_batch(self, batch_size: int) -> int:
        return self.step

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        self.told.append((num_correct_drafts_per_req, batch_size))
        return self.step

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self.cuda_graph_bs = cuda_graph_bs

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        return self.cuda_graph_bs


@pytest.fixture(scope="session")
def make_policy_file(make_profile: Callable[..., CostProfile]) -> Callable[..., PolicyFile]:
    """Policy files for the server of `make_profile`: always `k`, or a network of random weights."""

    def make(
        k: int | None = None, *, tiers: Sequence[int] = (0, 1, 3), name: str = "tiny", seed: int = 0
    ) -> PolicyFile:
        profile = make_profile(tiers)
        fallback = Threshold(tiers, k=tiers[1], batch=2)
        if k is not None:
            return rule_file(FixedK(tiers, k), profile, "warm", name=name, fallback=fallback)
        features = Features(profile, "warm")
        rng = np.random.default_rng(seed)
        num_hidden, num_features, num_advice = 8, len(features.table), 4 * (len(tiers) - 1)
        shapes = {
            "hidden.0.weight": (num_hidden, num_features),
            "hidden.0.bias": (num_hidden,),
            "hidden.1.weight": (num_hidden, num_hidden),
            "hidden.1.bias": (num_hidden,),
            "logits.weight": (len(tiers), num_hidden + num_advice),
            "logits.bias": (len(tiers),),
        }
        weights = {weight: rng.normal(size=shape).astype(np.float32) for weight, shape in shapes.items()}
        training = Training("seed: 0\n", "tests", 0, {}, {})
        policy = LearnedPolicy(features, Network(weights))
        return learned_file(policy, name=name, fallback=fallback, training=training, evaluation={})

    return make


@pytest.fixture
def make_dial() -> Callable[..., Dial]:
    """Dials that `file` steers on a server with the tiers `built`; not bound to a scheduler."""

    def make(
        file: PolicyFile, *, built: Sequence[int] = (0, 1, 3), stock_step: int = 1, without_zero: bool = False
    ) -> Dial:
        dial = Dial(StockRule(built, stock_step), worker=None, without_zero=without_zero)
        dial.activate(dial.load(file.data))
        return dial

    return make


@pytest.fixture(scope="session")
def make_bank() -> Callable[..., AcceptanceBank]:
    """Banks from arrays of accepted drafts, one list of arrays per domain.

    Without `latent` and `survival` every position's hidden state tells its outcome: expected and
    realised tokens agree.
    """

    def make(
        domains: Mapping[str, Sequence[Sequence[int]]],
        latent: Sequence[int] | None = None,
        survival: Sequence[Sequence[float]] | None = None,
    ) -> AcceptanceBank:
        arrays = [np.array(array, np.uint8) for domain in domains.values() for array in domain]
        accepted = np.concatenate(arrays)
        lengths = np.array([len(array) for array in arrays], np.int32)
        counts = np.array([len(domain) for domain in domains.values()], np.int32)
        if survival is None:
            survival = np.tri(MAX_K + 1).tolist()
        return AcceptanceBank(
            accepted=accepted,
            latent=np.array(np.minimum(accepted, MAX_K) if latent is None else latent, np.uint16),
            array_start=np.cumsum(lengths, dtype=np.int64) - lengths,
            array_length=lengths,
            domain_first=np.cumsum(counts, dtype=np.int64) - counts,
            domain_count=counts,
            survival=np.array(survival, np.float64),
            domain_names=tuple(domains),
        )

    return make


@pytest.fixture(scope="session")
def make_requests() -> Callable[..., RequestList]:
    """Lists of requests: open loop where `arrival_s` is given, else closed at `concurrency`."""

    def make(
        output_tokens: Sequence[int],
        *,
        prompt_tokens: int | Sequence[int] = 100,
        arrival_s: Sequence[float] | None = None,
        concurrency: int | Sequence[int] = 1,
        domain: int | Sequence[int] = 0,
        warmup: int = 0,
        seed: int = 0,
        **others: Any,
    ) -> RequestList:
        shape = len(output_tokens)
        is_open = arrival_s is not None
        return RequestList(
            mode="open" if is_open else "closed",
            arrival_s=np.array(arrival_s if is_open else np.zeros(shape), np.float64),
            concurrency=np.full(shape, 0 if is_open else concurrency, np.int32),
            prompt_tokens=np.full(shape, prompt_tokens, np.int32),
            output_tokens=np.array(output_tokens, np.int32),
            domain=np.full(shape, domain, np.int32),
            request_hash=np.random.default_rng(seed).integers(0, 2**64, shape, np.uint64),
            warmup=warmup,
            **others,
        )

    return make


@pytest.fixture(scope="session")
def state_of() -> Callable[..., dict[str, list[bytes]]]:
    """Every bit that matters of an engine's state, by array and field, for one server or for all.

    Requests that have not arrived and entries of `slots` and `queue` that are not in use do not matter.
    """

    def state(engine: SimulatedEngine, servers: Sequence[int] | None = None) -> dict[str, list[bytes]]:
        bits: dict[str, list[bytes]] = {}
        for s in range(engine.num_servers) if servers is None else servers:
            server, sim = engine.servers[s], engine._sim
            waiting = (int(server["queue_head"]) + np.arange(server["num_waiting"])) % sim.queue.shape[1]
            arrays = {
                "servers": server,
                "requests": sim.requests[s, : server["next_request"]],
                "slots": sim.slots[s, : server["num_active"]],
                "queue": sim.queue[s, waiting],
                "outcome_counts": sim.outcome_counts[s],
                "pending_counts": sim.pending_counts[s],
                "window_tier_s": sim.window_tier_s[s],
            }
            for name, array in arrays.items():
                for field in array.dtype.names or ("",):  # one by one: padding between fields is noise
                    bits.setdefault(f"{name}.{field}", []).append(
                        (array[field] if field else array).tobytes()
                    )
        return bits

    return state


@pytest.fixture(scope="session")
def record_server() -> Callable[..., DecisionLog]:
    """Serves the one list of an engine under the policy of a file and records it as a server does.

    `deploys` maps a round to the file that takes over there; `ran` says what runs in place of what was said.
    """

    def record(
        path: Path,
        engine: SimulatedEngine,
        file: PolicyFile,
        *,
        deploys: Mapping[int, PolicyFile] | None = None,
        ran: Callable[[int, int], int] = lambda round_id, k: k,
        max_bytes: int = 64 << 20,
    ) -> DecisionLog:
        header = {"policy_id": file.policy_id, "tiers": list(engine.tiers), "lag": engine.options[0].lag}
        log = DecisionLog.open(path, max_bytes, header)
        log.control("start", {"policy": file.data, "mode": "steer"})
        policy = load_policy(file)
        sim = engine._sim
        output_tokens = engine.request_lists[0].output_tokens
        while not engine.servers["done"][0]:
            round_id = int(engine.servers["round_id"][0])
            if round_id in (deploys or {}):
                policy = load_policy((deploys or {})[round_id])
                log.control("deploy", {"policy": (deploys or {})[round_id].data})
            signals = engine.signals()
            said = int(policy.decide(signals)[0])
            k = ran(round_id, said)
            log.round(signals, said, k, 0)
            slots = sim.slots[0, : engine.servers["num_active"][0]].copy()
            accepted = np.minimum(sim.accepted[slots["position"]], k)
            log.accepts(
                round_id, k, slots["request"], output_tokens[slots["request"]] - slots["remaining"], accepted
            )
            for outcome in engine.run_round(np.array([k])):
                if outcome.round_id[0] >= 0:
                    log.outcome(outcome)
                    policy.observe(outcome)
            log.flush_if_due()
        results = engine.results()
        for request, prompt_tokens in enumerate(engine.request_lists[0].prompt_tokens.tolist()):
            tokens = int(output_tokens[request])
            for kind, time_s in (("arrived", results.arrival_s), ("finished", results.finish_s)):
                if np.isfinite(time_s[0, request]):
                    log.request(kind, request, time_s[0, request], prompt_tokens, tokens)
        log.close()
        return log

    return record
