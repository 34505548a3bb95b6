"""Makes the file of a policy: what `read` and `load_policy` take apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.controller.features import Features
from draftdial.controller.files import sha256_of
from draftdial.controller.golden import replay_policy
from draftdial.controller.learned import LearnedPolicy
from draftdial.controller.policy_card import FORMAT, Card, Training, belief_constants, canonical, plain
from draftdial.controller.policy_file import PolicyFile, features_of, load_policy, pack, read
from draftdial.controller.policy_weights import WEIGHTS, columns_of, golden_tensors
from draftdial.controller.rule_cards import Rule, rule_from_card
from draftdial.controller.rules import Threshold


def learned_file(
    policy: LearnedPolicy,
    *,
    name: str,
    fallback: Threshold,
    training: Training,
    evaluation: Mapping[str, Any],
) -> PolicyFile:
    """The file of a trained policy.

    Args:
        policy: What to export; its state is left alone.
        name: What tables call it.
        fallback: The rule a server falls back on should the policy fail there; one k and batch.
        training: Where the policy comes from.
        evaluation: Results with their intervals, structured as the trainer likes.

    Raises:
        UserError: the file could not be loaded again (weights that are not finite, say).
    """
    features, network = policy.features, policy.network
    assert isinstance(features.profile, CostProfile), "a policy file holds the profile of one server"
    fresh = Features(
        features.profile,
        features.off_mode,
        ttft_limit_s=features.ttft_limit_s,
        tpot_limit_s=features.tpot_limit_s,
    )
    tensors = {weight: network.tensors[weight] for weight in WEIGHTS}
    tensors |= golden_tensors(fresh, network)
    columns = columns_of(network, len(features.table))
    card = {
        **_common_card("learned", name, features.tiers, features.profile, features.off_mode, fallback),
        "features": [asdict(features.table[column]) for column in columns],
        "belief": belief_constants(),
        "limits": {"ttft_s": features.ttft_limit_s, "tpot_s": features.tpot_limit_s},
        "training": training.card(),
        "evaluation": evaluation,
    }
    return _loadable(pack(plain(card), tensors))


def rule_file(
    rule: Rule,
    profile: CostProfile,
    off_mode: OffMode,
    *,
    name: str,
    fallback: Threshold,
    training: Training | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> PolicyFile:
    """The file of a rule with one set of parameters; its state is left alone.

    `training` says how it was tuned, if it was. For the rest see `learned_file`.
    """
    rule_card = rule.card()
    fresh = rule_from_card(rule_card, rule.tiers, profile, off_mode)
    card = {
        **_common_card(rule_card["kind"], name, rule.tiers, profile, off_mode, fallback),
        "rule": rule_card,
        "golden": {"k": replay_policy(fresh, profile.max_running, profile.tiers[-1])},
        "training": training.card() if training else None,
        "evaluation": evaluation or {},
    }
    return _loadable(pack(plain(card), {}))


def repriced(file: PolicyFile, profile: CostProfile, evaluation: Mapping[str, Any]) -> PolicyFile:
    """The same policy reckoning with other costs, for the same tiers.

    `evaluation` replaces the file's own, which was of the costs before.

    Raises:
        UserError: the policy cannot be loaded, or not with this profile.
    """
    policy, card = load_policy(file), file.card
    fallback = Threshold(card["tiers"], **card["fallback"])
    origin = card.get("training")
    training = Training(**{field.name: origin[field.name] for field in fields(Training)}) if origin else None
    if isinstance(policy, LearnedPolicy):
        assert training is not None, "a learned policy's card is checked for it"
        learned = LearnedPolicy(features_of(card, profile), policy.network)
        return learned_file(
            learned, name=card["name"], fallback=fallback, training=training, evaluation=evaluation
        )
    rule = rule_from_card(card["rule"], card["tiers"], profile, card["off_mode"])
    return rule_file(rule, profile, card["off_mode"], name=card["name"], fallback=fallback, training=training)


def _common_card(
    kind: str,
    name: str,
    tiers: tuple[int, ...],
    profile: CostProfile,
    off_mode: OffMode,
    fallback: Threshold,
) -> Card:
    document = plain(profile.to_document())
    rule = fallback.card()
    return {
        "format": FORMAT,
        "kind": kind,
        "name": name,
        "tiers": tiers,
        "off_mode": off_mode,
        "cost_profile": {"document": document, "sha256": sha256_of(canonical(document).encode())},
        "fallback": {"k": rule["k"], "batch": rule["batch"]},
    }


def _loadable(data: bytes) -> PolicyFile:
    """The file, read and tried, so that nothing leaves here that no server could load."""
    file = read(data)
    load_policy(file)
    return file
