"""Rules that do not learn: one fixed k, and the batch threshold of the static baseline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.signals import IntArray, RoundOutcome, RoundSignals


class FixedK:
    """The same k in every round; k = 0 is `off`."""

    def __init__(self, tiers: Sequence[int], k: int) -> None:
        self.tiers = checked_tiers(tiers)
        self._k = int(tiers_only("fixed rule", "k", k, self.tiers))

    def reset(self, num_servers: int) -> None:
        pass

    def decide(self, signals: RoundSignals) -> IntArray:
        return np.full(len(signals.num_running), self._k)

    def observe(self, outcome: RoundOutcome) -> None:
        pass

    def card(self) -> dict[str, Any]:
        return {"kind": "fixed", "k": self._k}


class Threshold:
    """Speculate with k while at most `batch` requests run, else not at all.

    `k` and `batch` are scalars, or arrays `(num_servers,)` when a grid of rules is tuned as one
    batch. "Not at all" is the smallest tier: 0, unless the server was built without it (rejection
    sampling).
    """

    def __init__(self, tiers: Sequence[int], k: ArrayLike, batch: ArrayLike) -> None:
        self.tiers = checked_tiers(tiers)
        self._k = tiers_only("threshold rule", "k", k, self.tiers)
        self._batch = whole_numbers("threshold rule", "batch", batch)

    def reset(self, num_servers: int) -> None:
        per_server(self._k, num_servers, "k")
        per_server(self._batch, num_servers, "batch")

    def decide(self, signals: RoundSignals) -> IntArray:
        return np.where(signals.num_running <= self._batch, self._k, self.tiers[0])

    def observe(self, outcome: RoundOutcome) -> None:
        pass

    def card(self) -> dict[str, Any]:
        return {"kind": "threshold", "k": self._k.tolist(), "batch": self._batch.tolist()}


def checked_tiers(tiers: Sequence[int]) -> tuple[int, ...]:
    """`tiers` as a tuple, or a UserError unless they are ascending, distinct and not negative."""
    result = tuple(int(tier) for tier in tiers)
    if not result or result[0] < 0 or any(a >= b for a, b in pairwise(result)):
        raise UserError(f"tiers must be ascending integers from 0 up, got {list(tiers)}")
    return result


def whole_numbers(rule: str, field: str, value: ArrayLike) -> IntArray:
    """`value` as an integer array, or a UserError if any of it is no whole number."""
    array = np.asarray(value)
    if not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"{rule}: {field} = {array.tolist()} must be whole numbers")
    return array.astype(np.int64)


def tiers_only(rule: str, field: str, value: ArrayLike, tiers: tuple[int, ...]) -> IntArray:
    """`value` as an integer array, or a UserError if any of it is not a tier."""
    array = whole_numbers(rule, field, value)
    if not np.isin(array, tiers).all():
        raise UserError(f"{rule}: {field} = {array.tolist()} is not among the tiers {list(tiers)}")
    return array


def per_server(value: ArrayLike, num_servers: int, field: str) -> NDArray[Any]:
    """A scalar or `(num_servers,)` parameter as an array of shape `(num_servers,)`."""
    array = np.asarray(value)
    if array.shape not in ((), (num_servers,)):
        raise UserError(f"{field} must be one value or one per server ({num_servers}), got {array.shape}")
    return np.broadcast_to(array, (num_servers,))


def profile_columns(profile: CostProfile, tiers: tuple[int, ...]) -> IntArray:
    """Columns of `profile.round_s` that hold `tiers`, or a UserError if the profile lacks one."""
    missing = sorted(set(tiers) - set(profile.tiers))
    if missing:
        raise UserError(f"profile {profile.name} has no tier {missing[0]}; it has {list(profile.tiers)}")
    return np.searchsorted(profile.tiers, tiers)
