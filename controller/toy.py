"""`draftdial toy`: how near PPO comes to the exact optimum of a decode queue that can be solved."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger

from draftdial.controller.errors import UserError
from draftdial.controller.ppo import SemiMarkovRolloutBuffer
from draftdial.envs.toy_queue import (
    MAX_IN_SYSTEM,
    TIERS,
    Arrivals,
    ToyQueue,
    ToyQueueEnv,
    expected_tokens,
    mean_in_system,
    optimum,
)

IntArray = NDArray[np.int64]

ARRIVALS = (
    Arrivals((45.0,)),
    Arrivals((12.0, 60.0), dwell_s=3.0),
    Arrivals((5.0, 64.0), dwell_s=1.0),
    Arrivals((5.0, 64.0), dwell_s=10.0),
)
TAU_S = 2.0
NUM_ENVS = 128
TOTAL_ROUNDS = 2_000_000


def greedy(queue: ToyQueue, charge_restart: bool = False) -> IntArray:
    """(num_states,) the tier with the most tokens per second, this round alone.

    With `charge_restart` that one round bears the whole restart.
    """
    tokens = np.array([expected_tokens(k) for k in TIERS])
    choice: IntArray = (tokens / (queue.step_s if charge_restart else queue.round_s)).argmax(axis=1)
    return choice


def fixed(queue: ToyQueue, tier: int) -> IntArray:
    """(num_states,) one tier everywhere."""
    return np.full(queue.in_system.size, tier)


def threshold(queue: ToyQueue, tier: int, batch: int) -> IntArray:
    """(num_states,) one tier while at most `batch` requests run, else off."""
    return np.where(queue.in_system <= batch, tier, 0)


def train(queue: ToyQueue, seed: int, total_rounds: int = TOTAL_ROUNDS) -> IntArray:
    """(num_states,) the most likely tier of a policy that PPO learned by playing the queue."""
    torch.set_num_threads(1)  # the networks are small: more threads only wait for each other
    env = ToyQueueEnv(queue, NUM_ENVS, mean_in_system(queue, greedy(queue)), TAU_S)
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=128,
        batch_size=2048,
        n_epochs=5,
        learning_rate=lambda remaining: 2e-3 * remaining,
        gamma=1.0,  # the buffer discounts by time
        gae_lambda=0.9,
        ent_coef=0.03,
        rollout_buffer_class=SemiMarkovRolloutBuffer,
        rollout_buffer_kwargs={"env": env, "tau_s": TAU_S},
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
        device="cpu",
    )
    model.set_logger(Logger(None, []))  # its default would leave a folder behind
    model.learn(total_rounds)
    with torch.no_grad():
        distribution: Any = model.policy.get_distribution(torch.as_tensor(env.observations)).distribution
    choice: IntArray = distribution.logits.argmax(dim=1).numpy()
    return choice


@dataclass
class Case:
    """One toy: its optimum, and by how much each policy's mean number in the system exceeds it."""

    arrivals: Arrivals
    with_restart: bool
    optimum: float = 0.0
    fixed_k: int = 0
    threshold_k: int = 0
    threshold_batch: int = 0
    excess: dict[str, float] = field(default_factory=dict)
    learned: list[float] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        dwell_s = self.arrivals.dwell_s
        return {
            "arrivals_per_s": list(self.arrivals.rates_per_s),
            "dwell_s": dwell_s if np.isfinite(dwell_s) else None,
            "restart": self.with_restart,
            "optimum_mean_in_system": self.optimum,
            "fixed": {"k": self.fixed_k},
            "threshold": {"k": self.threshold_k, "batch": self.threshold_batch},
            "excess": self.excess | {"learned": self.learned},
        }


def solve(queue: ToyQueue, case: Case) -> None:
    """Fill in the optimum and the rules, each with its best setting in hindsight."""
    case.optimum, _ = optimum(queue, greedy(queue))

    def excess(choice: IntArray) -> float:
        return mean_in_system(queue, choice) / case.optimum - 1.0

    case.excess["greedy"] = excess(greedy(queue))
    case.excess["greedy-charged"] = excess(greedy(queue, charge_restart=True))
    case.excess["fixed"], tier = min((excess(fixed(queue, tier)), tier) for tier in range(len(TIERS)))
    case.fixed_k = TIERS[tier]
    case.excess["threshold"], tier, case.threshold_batch = min(
        (excess(threshold(queue, tier, batch)), tier, batch)
        for tier in range(1, len(TIERS))
        for batch in range(4, MAX_IN_SYSTEM + 1, 4)
    )
    case.threshold_k = TIERS[tier]


def cases(num_seeds: int) -> Iterator[Case]:
    """Every toy, solved, and PPO trained on it with seeds 0 to num_seeds - 1."""
    for with_restart in (False, True):
        for arrivals in ARRIVALS:
            queue = ToyQueue(arrivals, with_restart)
            case = Case(arrivals, with_restart)
            solve(queue, case)
            for seed in range(num_seeds):
                case.learned.append(mean_in_system(queue, train(queue, seed)) / case.optimum - 1.0)
            yield case


def run(args: argparse.Namespace) -> int:
    """Solve, train and print; 0, or a `UserError`."""
    if args.seeds < 1:
        raise UserError(f"--seeds: {args.seeds} is not allowed; at least 1")
    if args.json:
        done = [case.record() for case in cases(args.seeds)]
        worst = max(max(case["excess"]["learned"]) for case in done)
        print(json.dumps({"cases": done, "worst_learned_excess": worst}))
        return 0
    print("Mean number in the system (= mean latency, by Little's law) above the exact optimum, %")
    print(HEADER)
    worst = 0.0
    for case in cases(args.seeds):
        print(_line(case), flush=True)
        worst = max(worst, *case.learned)
    print(f"learned: the worst of {args.seeds} training seeds; over all cases {100 * worst:.2f} %")
    return 0


COLUMNS = ("learned", "greedy", "greedy-charged", "fixed", "threshold")
HEADER = f"{'arrivals/s':<18}{'restart':<9}{'optimum':>8}" + "".join(f"{name:>16}" for name in COLUMNS)


def _line(case: Case) -> str:
    arrivals = " <-> ".join(f"{rate:g}" for rate in case.arrivals.rates_per_s)
    if len(case.arrivals.rates_per_s) > 1:
        arrivals += f", {case.arrivals.dwell_s:g} s"
    excess = case.excess | {"learned": max(case.learned)}
    shown = {name: f"{round(100 * excess[name], 2) + 0.0:.2f}" for name in COLUMNS}  # no "-0.00"
    shown["fixed"] += f" k={case.fixed_k}"
    shown["threshold"] += f" k={case.threshold_k}<={case.threshold_batch}"
    columns = "".join(f"{shown[name]:>16}" for name in COLUMNS)
    return f"{arrivals:<18}{'yes' if case.with_restart else 'no':<9}{case.optimum:>8.2f}{columns}"
