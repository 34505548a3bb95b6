"""The shape of `compare.json`, every field checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftdial.controller.errors import UserError

SCHEMA = "draftdial.compare/1"
METRICS = (
    "e2e_mean_s",
    "e2e_p99_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "output_tok_s",
    "slo_attainment",
    "switches_per_1k_rounds",
    "wasted_draft_share",
)
BEST_REFERENCE = "best_reference"


def validate(document: object) -> dict[str, Any]:
    """The document if it is a whole `compare.json`; UserError naming the first field that is not."""
    _check(document, _DOCUMENT, "compare.json")
    assert isinstance(document, dict)
    return document


@dataclass(frozen=True)
class _Leaf:
    allowed: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class _Each:
    """A list, or an object with keys that are not fixed, whose items share one shape."""

    container: type
    item: Any


def _check(value: Any, shape: Any, where: str) -> None:
    """UserError unless `value` has `shape`: a leaf, an `_Each`, or a dict of fields, all present."""
    if isinstance(shape, _Leaf):
        _require(shape.holds(value), where, value, shape.allowed)
    elif isinstance(shape, _Each):
        is_list = shape.container is list
        _require(isinstance(value, shape.container), where, value, "a list" if is_list else "an object")
        for key, item in enumerate(value) if is_list else value.items():
            _check(item, shape.item, f"{where}[{key}]" if is_list else f"{where}.{key}")
    else:
        allowed = "an object with " + ", ".join(shape)
        _require(isinstance(value, dict), where, value, allowed)
        for name in [*shape, *value]:
            _require(name in value, where, f"no {name}", allowed)
            _require(name in shape, where, name, allowed)
        for name, part in shape.items():
            _check(value[name], part, f"{where}.{name}")


def _require(ok: bool, where: str, found: object, allowed: str) -> None:
    if not ok:
        raise UserError(f"{where}: found {str(found)[:80]}; allowed: {allowed}")


def _one_of(*allowed: str) -> _Leaf:
    return _Leaf(" or ".join(allowed), lambda value: value in allowed)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_TEXT = _Leaf("text", lambda value: isinstance(value, str))
_COUNT = _Leaf("whole numbers above 0", lambda value: _is_number(value) and value > 0 and value == int(value))
_NUMBER = _Leaf("finite numbers or null", lambda value: value is None or _is_number(value))
_INTERVAL = _Leaf(
    "[low, high], finite numbers or null",
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(_NUMBER.holds, value)),
)
_OBJECT = _Leaf("an object", lambda value: isinstance(value, dict))
_ESTIMATE = {"value": _NUMBER, "ci95": _INTERVAL, "simultaneous_upper": _NUMBER}
_VERSUS = {
    "e2e_mean_ratio": _ESTIMATE,
    "output_tok_s_ratio": _ESTIMATE,
    "slo_diff": _ESTIMATE,
    "verdict": _one_of("better", "not-worse", "worse", "undecided"),
}
_CELL = {
    **dict.fromkeys(("profile", "workload", "off_mode", "policy"), _TEXT),
    **dict.fromkeys(("n_seeds", "n_requests", "rounds"), _COUNT),
    **dict.fromkeys(("load", "headroom"), _NUMBER),
    "mode": _one_of("open", "closed"),
    "metrics": {**dict.fromkeys(METRICS, _NUMBER), "time_share_at_k": _Each(dict, _NUMBER)},
    "vs": _Each(dict, _VERSUS),
}
_SUMMARY = {"ratio": _NUMBER, "ci95": _INTERVAL, "worst_cell": {"ratio": _NUMBER, "upper": _NUMBER}}
_DOCUMENT = {
    "schema": _one_of(SCHEMA),
    **dict.fromkeys(("versions", "hashes", "tuned_rules", "seed_ranges"), _OBJECT),
    "cells": _Each(list, _CELL),
    "summary": _Each(dict, _Each(dict, _Each(dict, _SUMMARY))),
}
