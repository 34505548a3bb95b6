"""Benches as a server would have made them: a simulated one, driven by other means than `draftdial bench`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from draftdial.controller.acceptance_file import write_requests
from draftdial.controller.bench_work import Work, fingerprint
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.files import sha256_of
from draftdial.controller.host_time import HostTime
from draftdial.controller.policy import Policy
from draftdial.controller.policy_file import PolicyFile, load_policy
from draftdial.controller.rules import FixedK
from draftdial.controller.sglang_rule import SglangRule
from draftdial.engine_patch.acceptance_arrays import AcceptanceArrays
from draftdial.envs.domains import DomainSwitches
from draftdial.envs.evaluate import evaluate
from draftdial.envs.replayed_acceptance import ReplayedAcceptance
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine
from draftdial.envs.workload import make_workload

MEANS = {"good": 2.5, "mixed": 1.2, "poor": 0.3}
LENGTHS = "arrival_s,input_tokens,output_tokens\n0,20,16\n0.1,40,30\n0.2,9,24\n0.3,30,40\n"
CONCURRENCIES, SEEDS = (1, 4), (3, 4)
TURNAROUND_S = 0.004
FIGURES = ("output_tok_s", "e2e_mean_s", "ttft_mean_s", "tpot_mean_s", "wasted_draft_share")


class SimulatedBenches:
    """Writes `bench.json` files as a server of `profile` would have made them, lag 1 and off mode skip."""

    def __init__(self, folder: Path, profile: CostProfile, policy: PolicyFile, own: PolicyFile) -> None:
        """`policy` is deployed as an arm, `own` is what the server had."""
        self.folder, self.profile = folder, profile
        self.own = folder / "own.safetensors"
        self.own.write_bytes(own.data)
        self.policy = folder / "mine.safetensors"
        self.policy.write_bytes(policy.data)
        self.host_of: Callable[[str, int], HostTime] | None = None
        """How busy the host is for an arm in a repeat, as runs then say; None: not at all, as they do not."""
        (folder / "lengths.csv").write_text(LENGTHS)
        self.lengths = f"trace:{folder / 'lengths.csv'}"
        rng = np.random.default_rng(5)
        self.files = {name: folder / f"{name}.jsonl" for name in MEANS}
        for name, mean in MEANS.items():
            write_requests(self.files[name], [rng.poisson(mean, 200).astype(np.uint8) for _ in range(8)])
        self.deciders: dict[str, Policy] = {
            "off": FixedK(profile.tiers, 0),
            "fixed-1": FixedK(profile.tiers, 1),
            "fixed-3": FixedK(profile.tiers, 3),
            "sglang-adaptive": SglangRule(profile.tiers),
            "policy:mine": load_policy(policy),
            "steer": load_policy(own),
        }

    def bench(self, name: str, *domains: str, span: tuple[int, int] | None = None, **changed: Any) -> Path:
        """Every arm at both concurrencies for both seeds; `changed` are values of the document."""
        options = {"closed": CONCURRENCIES, "per_slot": 6, "requests": 24, "lengths": self.lengths}
        options |= {"seed": SEEDS[0], "repeats": 2}
        work = Work.of(options | {"domains": domains, "domain_span": span})
        document = {
            "schema": "draftdial.bench/1",
            "server": {
                "disable_overlap_schedule": True,
                "idle_request": {
                    "prompt_tokens": 64.0,
                    "e2e_s": TURNAROUND_S + float(self.profile.prefill_s(64, "skip")),
                },
                "status": self.status(),
            },
            "options": work.options,
            "arms": list(self.deciders),
            "policies": {"policy:mine": sha256_of(self.policy.read_bytes())},
            "runs": [
                run
                for arm, policy in self.deciders.items()
                for repeat, seed in enumerate(SEEDS)
                for run in self._runs(arm, policy, domains, span, repeat, seed)
            ],
            "cells": [],
        }
        path = self.folder / name
        path.write_text(json.dumps(document | changed))
        return path

    def status(self) -> dict[str, Any]:
        arrays = AcceptanceArrays.read(self.files.items())
        replayed = f"{arrays}, 9 rounds"
        own = sha256_of(self.own.read_bytes())
        return {"acceptance_replay": replayed, "tiers": "0,1,3", "off_mode": "skip", "policy_sha256": own}

    def _runs(
        self,
        arm: str,
        policy: Policy,
        domains: tuple[str, ...],
        span: tuple[int, int] | None,
        repeat: int,
        seed: int,
    ) -> list[dict[str, Any]]:
        """The lists are drawn from the simulator's workloads."""
        indices = tuple(range(len(domains)))
        lists = [
            make_workload(
                "stationary",
                concurrency=concurrency,
                num_requests=24,
                domains=DomainSwitches(indices, *span) if span else indices,
                lengths=self.lengths,
            ).requests(seed)
            for concurrency in CONCURRENCIES
        ]
        bank = ReplayedAcceptance({name: self.files[name] for name in domains}).bank(0)
        options = ServerOptions(off_mode="skip", lag=1, turnaround_s=TURNAROUND_S)
        told: dict[str, Any] = {}
        if self.host_of is not None:
            host = self.host_of(arm, repeat)
            busy_ms = {k: host.round_ms(k) for k in self.profile.tiers}
            told = {
                "host_ms_at_k": {str(k): ms for k, ms in busy_ms.items()},
                "rounds_at_k": {str(k): 5 for k in busy_ms},
                "requests": 22,
            }
            if host.prefill_ms is not None:
                told["host_ms_in_prefill"] = host.prefill_ms
            options = replace(
                options,
                host_round_s=tuple(1e-3 * ms for ms in busy_ms.values()),
                host_prefill_s=1e-3 * (host.prefill_ms or 0.0),
            )
        engine = SimulatedEngine(lists, bank, self.profile, options)
        metrics = evaluate(policy, engine)
        found = []
        for i, concurrency in enumerate(CONCURRENCIES):
            figures = {name: float(getattr(metrics, name)[i]) for name in FIGURES}
            figures |= {name: figures[name] + TURNAROUND_S for name in ("e2e_mean_s", "ttft_mean_s")}
            if arm == "off":
                figures["wasted_draft_share"] = None  # type: ignore[assignment]
            where = {"arm": arm, "workload": "closed", "mode": "closed", "load": float(concurrency)}
            drawn = {"repeat": repeat, "seed": seed, "list": fingerprint(lists[i]), "failed": 0}
            found.append(where | drawn | figures | told)
        return found
