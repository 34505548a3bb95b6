"""Policy files for the tiny server: four tiers, sixteen requests, a profile cut from a measured one."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np

from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.controller.features import Features, feature_table
from draftdial.controller.learned import LearnedPolicy, Network
from draftdial.controller.policy_card import Training
from draftdial.controller.policy_export import learned_file, rule_file
from draftdial.controller.policy_file import PolicyFile, write
from draftdial.controller.profile_document import KV_ONLY_PREFILL, row_names
from draftdial.controller.rule_cards import Rule, rule_from_card
from draftdial.controller.rules import Threshold
from draftdial.controller.signals import FloatArray

TIERS = (0, 1, 2, 3)
MAX_RUNNING = 16
HIDDEN = 16


def tiny_profile(*, has_kv_only: bool = False) -> CostProfile:
    """The shipped H200 profile without the tiers and batches that the tiny server has not got."""
    document = copy.deepcopy(CostProfile.load("h200-llama3-8b").document)
    document["name"] = "tiny"
    document["tiers"] = [tier for tier in document["tiers"] if tier["k"] in TIERS]
    kept = set(row_names(TIERS, has_kv_only=has_kv_only))
    document["rows"] = [row for row in document["rows"] if row["row"] in kept]
    if not has_kv_only:
        document["prefill"].pop(KV_ONLY_PREFILL, None)  # goes with the row
    gone = set(CostProfile.load("h200-llama3-8b").rows) - kept
    for covered in document["provenance"]:
        covered["covers"] = [name for name in covered["covers"] if name not in gone]
    document["provenance"] = [covered for covered in document["provenance"] if covered["covers"]]
    document["max_running"] = MAX_RUNNING
    document["kv_pool_tokens"] = 16384
    return CostProfile.from_document(document, "tiny profile")


PROFILE = tiny_profile()
FEATURES = [feature.name for feature in feature_table(TIERS)]
NUM_ADVICE = sum(name.startswith("advice/") for name in FEATURES)
SCALE_OF_K = next(feature.scale for feature in feature_table(TIERS) if feature.name == "last_k")
FALLBACK = Threshold(TIERS, k=2, batch=4)


def learned(seed: int) -> PolicyFile:
    """A small network of random weights beside the advice."""
    rng = np.random.default_rng(seed)

    def weights(*shape: int) -> FloatArray:
        return rng.normal(size=shape) / np.sqrt(shape[-1])

    return _file(
        f"random-{seed}",
        {
            "hidden.0.weight": weights(HIDDEN, len(FEATURES)),
            "hidden.0.bias": weights(HIDDEN),
            "hidden.1.weight": weights(HIDDEN, HIDDEN),
            "hidden.1.bias": weights(HIDDEN),
            "logits.weight": weights(len(TIERS), HIDDEN + NUM_ADVICE),
            "logits.bias": np.zeros(len(TIERS)),
        },
    )


def jumping(seed: int, *, in_turn: bool = False) -> PolicyFile:
    """A network that never chooses the same tier twice in a row: it takes the next one in turn, or the one
    after that while the drafts do well (`seed` says how well; never, if `in_turn`)."""
    n, steep = len(TIERS), 1e3  # steep: units are 1 or -1
    threshold = 2.0 if in_turn else np.random.default_rng(seed).uniform(0.65, 0.9)

    # First layer: n - 1 units that say whether the last k lay above each gap between tiers, one for "well".
    first, first_bias = np.zeros((2 * n, len(FEATURES))), np.zeros(2 * n)
    first[: n - 1, FEATURES.index("last_k")] = steep
    first_bias[: n - 1] = -steep * (np.array(TIERS[:-1]) + 0.5) / SCALE_OF_K
    first[n - 1, FEATURES.index("acceptance/0/1")] = steep
    first_bias[n - 1] = -steep * threshold

    # Of them, linearly: 1 for the tier that the last k was, 0 for the others.
    was, was_bias = np.zeros((n, 2 * n)), np.zeros(n)
    was[np.arange(1, n), np.arange(n - 1)] = 0.5
    was[np.arange(n - 1), np.arange(n - 1)] = -0.5
    was_bias[[0, -1]] = 0.5

    # Second layer: for every tier, "the last k was this one", then "and the drafts do well".
    well = np.eye(2 * n)[n - 1]
    second = steep * np.vstack([2 * was, 2 * was + well])
    second_bias = steep * np.concatenate([2 * was_bias - 1, 2 * was_bias - 2])
    turns = np.hstack([np.roll(np.eye(n), 1, axis=0), 2 * np.roll(np.eye(n), 2, axis=0)])
    return _file(
        f"jumping-{seed}",
        {
            "hidden.0.weight": first,
            "hidden.0.bias": first_bias,
            "hidden.1.weight": second,
            "hidden.1.bias": second_bias,
            "logits.weight": np.hstack([turns, np.zeros((n, NUM_ADVICE))]),
            "logits.bias": np.zeros(n),
        },
    )


def _file(name: str, tensors: dict[str, FloatArray]) -> PolicyFile:
    network = Network({name: tensor.astype(np.float32) for name, tensor in tensors.items()})
    return learned_file(
        LearnedPolicy(Features(PROFILE, "warm"), network),
        name=name,
        fallback=FALLBACK,
        training=Training("", "", 0, {}, {}),
        evaluation={},
    )


def rule(kind: str, off_mode: OffMode = "warm", **parameters: float) -> PolicyFile:
    """A rule as a policy file."""
    made: Rule = rule_from_card({"kind": kind, **parameters}, TIERS, PROFILE, off_mode)
    return rule_file(made, PROFILE, off_mode, name=kind, fallback=FALLBACK)


def saved(file: PolicyFile, path: Path) -> Path:
    """`path`, after writing `file` there."""
    write(path, file)
    return path
