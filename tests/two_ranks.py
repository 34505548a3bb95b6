"""Do ranks decide alike whose libraries work differently? Each rank is a process of its own, fed one history.

    python tests/two_ranks.py [--rounds 1000000] [--policy FILE]

A made-up scheduler history is recorded once; every rank decides its rounds and learns from outcomes with
other numbers of threads, other kernels of the BLAS, other vector instructions and other hash seeds. Prints
what each rank did as JSON. Exit status 1 if they differ in a decision or in a bit of a logit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from draftdial.controller import policy_file
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.features import Features
from draftdial.controller.learned import LearnedPolicy, Network
from draftdial.controller.policy_card import Training
from draftdial.controller.policy_export import learned_file
from draftdial.controller.rules import Threshold
from draftdial.controller.signals import RoundOutcome, RoundSignals

RANKS = (
    {
        "OPENBLAS_CORETYPE": "Haswell",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "1",
    },
    {
        "OPENBLAS_CORETYPE": "Nehalem",
        "OPENBLAS_NUM_THREADS": "2",
        "OMP_NUM_THREADS": "2",
        "PYTHONHASHSEED": "2",
    }
    # NumPy's own loops without AVX-512, as on a processor that has none.
    | {"NPY_DISABLE_CPU_FEATURES": "AVX512_ICL X86_V4"},
)
"""Environments. `OPENBLAS_CORETYPE` names the kernels that the OpenBLAS in NumPy's wheels uses on x86."""
LAG = 2
REGIME_ROUNDS = 400
CHUNK = 10_000
SAMPLED = 16
"""Of every so many rounds the logits are compared, too."""


def compare(policy: Path, num_rounds: int, folder: Path) -> list[dict[str, Any]]:
    """What every rank of `RANKS` did with `policy` in `num_rounds` rounds; see `decide_all`."""
    history = folder / "history.npz"
    loaded = policy_file.load_policy(policy_file.read(policy))
    np.savez(history, **record(num_rounds, loaded.tiers[-1]))
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(policy), str(history)],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for environment in RANKS
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("a rank ended with an error")
    return [json.loads(output) for output in outputs]


def agree(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all did the same. Where only logits differ, decisions are the same by chance."""
    return all(len({rank[name] for rank in ranks}) == 1 for name in ("decisions", "logits"))


def record(num_rounds: int, max_k: int) -> dict[str, np.ndarray[Any, Any]]:
    """A history in which load, queue and acceptance change every few hundred rounds.

    Columns are those of `RoundSignals`; `at_least`, `(num_rounds, max_k + 1)`, counts the requests that would
    have at least d drafts accepted.
    """
    rng = np.random.default_rng(0)
    regime = np.arange(num_rounds) // REGIME_ROUNDS
    num_regimes = int(regime[-1]) + 1
    level = np.exp2(rng.uniform(0, 7.5, num_regimes))[regime]
    acceptance = rng.uniform(0.0, 0.95, num_regimes)[regime]
    running = np.clip(rng.normal(level, 0.1 * level).astype(np.int64), 1, 256)
    waiting = rng.poisson(np.maximum(0, level - 60) / 10)
    joined = rng.poisson(running / 100)
    at_least = np.empty((num_rounds, max_k + 1), np.int64)
    at_least[:, 0] = running
    for depth in range(1, max_k + 1):
        at_least[:, depth] = rng.binomial(at_least[:, depth - 1], acceptance)
    return {
        "num_running": running,
        "num_waiting": waiting,
        "num_waiting_prompt_tokens": waiting * rng.integers(20, 2000, num_rounds),
        "oldest_wait_rounds": np.minimum(waiting * rng.integers(0, 40, num_rounds), np.arange(num_rounds)),
        "mean_context_tokens": rng.integers(50, 4000, num_regimes)[regime] + np.arange(num_rounds) % 200,
        "kv_used_fraction": rng.uniform(0.01, 0.95, num_rounds),
        "max_running": np.full(num_rounds, 256),
        "num_admitted": joined,
        "num_finished": joined[::-1].copy(),
        "num_prefill_tokens": joined * rng.integers(20, 2000, num_rounds),
        "at_least": at_least,
    }


def decide_all(policy_path: Path, history_path: Path) -> dict[str, Any]:
    """Decide a recorded history, learning from outcomes `LAG` rounds late.

    Returns:
        `decisions` and `logits`, digests of all decisions and of some rounds' logits; `switches` and
        `rounds_at_k`; `single_sums`, a digest of sums in single precision by the BLAS and of NumPy's
        logarithms, which shows whether ranks do work differently.
    """
    policy = policy_file.load_policy(policy_file.read(policy_path))
    assert isinstance(policy, LearnedPolicy)
    policy.reset(1)
    with np.load(history_path) as recorded:
        history = dict(recorded)
    names = [field.name for field in fields(RoundSignals) if field.name != "round_id"]
    at_least = history["at_least"]
    num_rounds = len(at_least)
    max_k = at_least.shape[1] - 1
    signals = RoundSignals.zeros(1)
    chosen = np.zeros(num_rounds, np.int64)
    logits = hashlib.sha256()
    for start in range(0, num_rounds, CHUNK):
        columns = [history[name][start : start + CHUNK].tolist() for name in names]
        for i, row in enumerate(zip(*columns, strict=True), start):
            if i >= LAG:
                policy.observe(_outcome(i - LAG, int(chosen[i - LAG]), at_least[i - LAG], max_k))
            signals.round_id[0] = i
            for name, value in zip(names, row, strict=True):
                getattr(signals, name)[0] = value
            if i % SAMPLED == 0:
                logits.update(policy.network.logits(policy.features.compute(signals)).tobytes())
            chosen[i] = policy.decide(signals)[0]
    single = np.random.default_rng(0).normal(size=(1, 300, 64)).astype(np.float32)
    sums = np.dot(single[0, :, 0], single[0]), np.log1p(np.abs(single))
    return {
        "rounds": num_rounds,
        "decisions": hashlib.sha256(chosen.tobytes()).hexdigest(),
        "logits": logits.hexdigest(),
        "switches": int(np.count_nonzero(np.diff(chosen))),
        "rounds_at_k": {str(k): int(np.count_nonzero(chosen == k)) for k in policy.tiers},
        "single_sums": hashlib.sha256(b"".join(part.tobytes() for part in sums)).hexdigest(),
    }


def made_up_policy(path: Path) -> Path:
    """Write a learned policy whose random weights let every tier win now and then."""
    profile = CostProfile.load("h200-llama3-8b")
    features = Features(profile, "warm")
    rng = np.random.default_rng(0)
    num_tiers, num_hidden = len(profile.tiers), 64
    num_advice = sum(feature.name.startswith("advice/") for feature in features.table)
    advice = np.tile(2 * np.eye(num_tiers)[:, 1:], 4)
    shapes = {
        "hidden.0.weight": (num_hidden, len(features.table)),
        "hidden.0.bias": (num_hidden,),
        "hidden.1.weight": (num_hidden, num_hidden),
        "hidden.1.bias": (num_hidden,),
    }
    weights = {name: rng.normal(size=shape) / np.sqrt(shape[-1]) for name, shape in shapes.items()}
    weights["logits.weight"] = np.hstack([rng.normal(size=(num_tiers, num_hidden)) / 8, advice])
    weights["logits.bias"] = np.zeros(num_tiers)
    assert advice.shape[1] == num_advice
    network = Network({name: weight.astype(np.float32) for name, weight in weights.items()})
    file = learned_file(
        LearnedPolicy(features, network),
        name="two-ranks",
        fallback=Threshold(profile.tiers, k=3, batch=64),
        training=Training("", "", 0, {}, {}),
        evaluation={},
    )
    policy_file.write(path, file)
    return path


def _outcome(round_id: int, k: int, at_least: np.ndarray[Any, Any], max_k: int) -> RoundOutcome:
    """What the round reveals when it ran at `k`."""
    reached = np.where(np.arange(max_k + 1) <= k, at_least, 0)
    counts = reached.copy()
    counts[:-1] -= reached[1:]
    return RoundOutcome(np.array([round_id]), np.array([k]), counts[None])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--policy", type=Path, help="a learned policy (default: one of random weights)")
    parser.add_argument("--rank", type=Path, nargs=2, metavar=("POLICY", "HISTORY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        print(json.dumps(decide_all(*args.rank)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        policy = args.policy or made_up_policy(Path(folder) / "policy.safetensors")
        ranks = compare(policy, args.rounds, Path(folder))
    print(json.dumps([environment | rank for environment, rank in zip(RANKS, ranks, strict=True)], indent=1))
    return 0 if agree(ranks) else 1


if __name__ == "__main__":
    sys.exit(main())
