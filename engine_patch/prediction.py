"""What a policy believes at the moment, for people to read; nothing here is decided on."""

from __future__ import annotations

import math
from typing import NamedTuple

from draftdial.controller.learned import LearnedPolicy
from draftdial.controller.policy import Policy

MEMORY = 1
"""Of the belief's memories: the one of 64 requests."""


class Prediction(NamedTuple):
    """A belief in two numbers, of the last decision."""

    acceptance: float
    """P(the first draft token is accepted)."""
    speedup: float
    """Tokens per second at the last k over those at k = 0."""

    @classmethod
    def of(cls, policy: Policy, k: int) -> Prediction | None:
        """What `policy` believes of a round with `k`; None for a rule, which keeps no such belief."""
        if not isinstance(policy, LearnedPolicy) or k not in policy.tiers:
            return None
        features = policy.features
        return cls(
            float(features.belief.mean()[MEMORY, 0, 0]),
            math.exp(float(features.speedup[MEMORY, 0, policy.tiers.index(k)])),
        )
