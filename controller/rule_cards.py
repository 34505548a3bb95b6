"""Rules as JSON cards, so that a rule travels in the same policy file as a trained policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from draftdial.controller.bandit import Bandit
from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.controller.errors import UserError
from draftdial.controller.greedy import GoodputGreedy
from draftdial.controller.policy import Policy
from draftdial.controller.rules import FixedK, Threshold
from draftdial.controller.sglang_rule import SglangRule


class Rule(Policy, Protocol):
    """A policy that its card describes completely, tiers and profile apart."""

    def card(self) -> dict[str, Any]:
        """`kind` and parameters, JSON-serialisable: `rule_from_card` builds the same rule of it."""
        ...


FIELDS: dict[str, tuple[str, ...]] = {
    "fixed": ("k",),
    "threshold": ("k", "batch"),
    "sglang-adaptive": ("config",),
    "greedy": ("half_life_samples", "prior_samples", "hysteresis", "probe_interval", "max_probe_interval"),
    "bandit": ("discount", "exploration", "lock_rounds"),
}
"""Kinds of rule and the fields of their cards; `fixed` and `threshold` need theirs, others have defaults."""


def rule_from_card(
    card: Mapping[str, Any], tiers: Sequence[int], profile: CostProfile, off_mode: OffMode
) -> Rule:
    """The rule that `card` describes, for a server with these tiers, costs and kind of k = 0.

    Raises:
        UserError: unknown kind or field, a missing field, or a value that the rule refuses.
    """
    kind = card.get("kind")
    if kind not in FIELDS:
        raise UserError(f"rule card: kind is {kind!r}, allowed: {', '.join(FIELDS)}")
    given = {field: value for field, value in card.items() if field != "kind"}
    unknown = sorted(set(given) - set(FIELDS[kind]))
    if unknown:
        raise UserError(f"rule card {kind}: unknown field {unknown[0]!r}, allowed: {', '.join(FIELDS[kind])}")
    try:
        match kind:
            case "fixed":
                return FixedK(tiers, **given)
            case "threshold":
                return Threshold(tiers, **given)
            case "sglang-adaptive":
                return SglangRule(tiers, **given)
            case "greedy":
                return GoodputGreedy(tiers, profile, off_mode, **given)
            case _:
                return Bandit(tiers, profile, off_mode, **given)
    except (TypeError, ValueError) as error:
        raise UserError(f"rule card {kind}: {error}") from None
