"""`draftdial bench-sim`: how fast the simulator and the vector environment run, per second of one core."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

CONCURRENCY = 32
NUM_SERVERS = 64
NUM_ENVS = 512
SECONDS = 5.0


def bench() -> dict[str, float]:
    """Rounds per second at a mean batch near 32, and steps per second of the vector environment."""
    from draftdial.controller.cost_profile import CostProfile
    from draftdial.envs.closed_loop import stationary
    from draftdial.envs.episodes import Episodes
    from draftdial.envs.fitted_acceptance import FittedAcceptance
    from draftdial.envs.scenario import Scenario
    from draftdial.envs.simulated_engine import SimulatedEngine
    from draftdial.envs.vector_env import SpeculationVectorEnv

    profile = CostProfile.load("h200-llama3-8b")
    source = FittedAcceptance(["chat"])
    lists = [stationary(CONCURRENCY, 40_000).requests(seed) for seed in range(NUM_SERVERS)]
    engine = SimulatedEngine(lists, source.bank(0), profile)
    k = np.full(NUM_SERVERS, 3)
    engine.run_round(k)  # compiles
    batch = num_rounds = 0
    start = time.process_time()
    while time.process_time() - start < SECONDS:
        batch += int(engine.signals().num_running.sum())
        engine.run_round(k)
        num_rounds += NUM_SERVERS
        if engine.servers["done"].any():
            engine.reset()
    rounds_per_s = num_rounds / (time.process_time() - start)

    env = SpeculationVectorEnv(Episodes(NUM_ENVS, [profile], FittedAcceptance(), Scenario()))
    env.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, len(profile.tiers), (16, NUM_ENVS))
    env.step(actions[0])
    num_steps = 0
    start = time.process_time()
    while time.process_time() - start < SECONDS:
        env.step(actions[num_steps // NUM_ENVS % len(actions)])
        num_steps += NUM_ENVS
    steps_per_s = num_steps / (time.process_time() - start)
    return {
        "rounds_per_s": round(rounds_per_s),
        "mean_batch": round(batch / num_rounds, 2),
        "vector_env_steps_per_s": round(steps_per_s),
    }


def add_parser(subparsers: Any) -> None:
    """`draftdial bench-sim [--json]`."""
    parser: argparse.ArgumentParser = subparsers.add_parser("bench-sim", help="time the simulator")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    result = bench()
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{result['rounds_per_s']:,} decode rounds/s at a mean batch of {result['mean_batch']}")
        print(f"{result['vector_env_steps_per_s']:,} vector-environment steps/s, features included")
    return 0
