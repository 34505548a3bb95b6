"""A learned policy of fixed random weights: it decides badly, and takes as long as a trained one."""

from __future__ import annotations

import numpy as np

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.features import Features
from draftdial.controller.learned import LearnedPolicy, Network
from draftdial.controller.policy_card import Training
from draftdial.controller.policy_export import learned_file
from draftdial.controller.policy_file import PolicyFile
from draftdial.controller.rules import Threshold

SEEDED = "seeded"
"""Its name."""
PROFILE = "h200-llama3-8b"
WIDTH = 64
"""Units of each hidden layer, as trained by default (conf/ppo)."""


def seeded_policy() -> PolicyFile:
    """The file of a policy for the shipped profile; the same one every time."""
    profile = CostProfile.load(PROFILE)
    features = Features(profile, "warm")
    num_features, num_tiers = len(features.table), len(profile.tiers)
    num_advice = sum(feature.name.startswith("advice/") for feature in features.table)
    shapes = {
        "hidden.0": (WIDTH, num_features),
        "hidden.1": (WIDTH, WIDTH),
        "logits": (num_tiers, WIDTH + num_advice),
    }
    rng = np.random.default_rng(0)
    weights = {}
    for layer, (num_out, num_in) in shapes.items():
        matrix = rng.normal(0.0, num_in**-0.5, (num_out, num_in))
        weights[f"{layer}.weight"] = matrix.astype(np.float32)
        weights[f"{layer}.bias"] = np.zeros(num_out, np.float32)
    return learned_file(
        LearnedPolicy(features, Network(weights)),
        name=SEEDED,
        fallback=Threshold(profile.tiers, k=0, batch=0),
        training=Training(config="", command="none", seed=0, hashes={}, versions={}),
        evaluation={},
    )
