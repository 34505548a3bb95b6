"""Which kind of text each request is: acceptance depends on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draftdial.controller.errors import UserError
from draftdial.envs.factories import build, pick
from draftdial.envs.lengths import Int32Array


class DomainSchedule(Protocol):
    """Which domain each request belongs to, by its index in the list."""

    def draw(self, rng: np.random.Generator, num_requests: int) -> Int32Array: ...


@dataclass(frozen=True)
class DomainMix:
    """Every request draws its domain independently; `weights` default to equal shares."""

    domains: tuple[int, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_domains(self.domains)
        _check_weights(self.weights or (1.0,) * len(self.domains), self.domains)

    def draw(self, rng: np.random.Generator, num_requests: int) -> Int32Array:
        weights = np.array(self.weights or (1.0,) * len(self.domains))
        drawn = rng.choice(np.array(self.domains), num_requests, p=weights / weights.sum())
        return drawn.astype(np.int32)


@dataclass(frozen=True)
class DomainSwitches:
    """One domain at a time; after `min_requests` to `max_requests` (uniform) comes another one."""

    domains: tuple[int, ...]
    min_requests: int = 200
    max_requests: int = 800

    def __post_init__(self) -> None:
        _check_domains(self.domains)
        if len(self.domains) < 2:
            raise UserError(f"domains: {list(self.domains)} cannot switch; at least two are needed")
        if not 1 <= self.min_requests <= self.max_requests:
            raise UserError(
                f"domains: min_requests {self.min_requests} and max_requests {self.max_requests} "
                "must be whole numbers with 1 <= min_requests <= max_requests"
            )

    def draw(self, rng: np.random.Generator, num_requests: int) -> Int32Array:
        first = rng.integers(len(self.domains))
        # One row per span, so that a longer list starts with the domains of a shorter one.
        u = rng.random((num_requests // self.min_requests + 1, 2))
        spans = self.min_requests + (u[:, 0] * (self.max_requests + 1 - self.min_requests)).astype(np.int64)
        steps = 1 + (u[:, 1] * (len(self.domains) - 1)).astype(np.int64)
        places = (first + np.cumsum(steps)) % len(self.domains)
        return np.repeat(np.array(self.domains, np.int32)[places], spans)[:num_requests]


@dataclass(frozen=True)
class DomainDrift:
    """The mix moves evenly from `start_weights` at the first request to `end_weights` at the last."""

    domains: tuple[int, ...]
    start_weights: tuple[float, ...]
    end_weights: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_domains(self.domains)
        _check_weights(self.start_weights, self.domains)
        _check_weights(self.end_weights, self.domains)

    def draw(self, rng: np.random.Generator, num_requests: int) -> Int32Array:
        start, end = (np.array(w) / np.sum(w) for w in (self.start_weights, self.end_weights))
        place = np.linspace(0.0, 1.0, num_requests)[:, None]
        upper = np.cumsum(start + place * (end - start), axis=1)[:, :-1]
        choice = (rng.random(num_requests)[:, None] >= upper).sum(axis=1)
        domain: Int32Array = np.array(self.domains, np.int32)[choice]
        return domain


SCHEDULES: dict[str, Callable[..., DomainSchedule]] = {
    "mix": DomainMix,
    "switches": DomainSwitches,
    "drift": DomainDrift,
}


def as_domains(spec: Sequence[int] | Mapping[str, object] | DomainSchedule) -> DomainSchedule:
    """Domains from a list (drawn in equal shares) or from a configuration such as
    `{"schedule": "switches", "domains": [0, 1]}`; a schedule comes back as it is."""
    if isinstance(spec, Mapping):
        parameters = {key: _as_tuple(value) for key, value in spec.items() if key != "schedule"}
        schedule = pick(SCHEDULES, str(spec.get("schedule", "mix")), "domains.schedule")
        return build(schedule, parameters, "domains")
    return DomainMix(tuple(spec)) if isinstance(spec, Sequence) else spec


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _check_domains(domains: tuple[int, ...]) -> None:
    if not domains or min(domains) < 0 or len(set(domains)) < len(domains):
        raise UserError(f"domains: {list(domains)} must be one or more different indices >= 0")


def _check_weights(weights: tuple[float, ...], domains: tuple[int, ...]) -> None:
    if len(weights) != len(domains) or not all(0 <= w < math.inf for w in weights) or sum(weights) <= 0:
        raise UserError(
            f"domains: weights {list(weights)} must be {len(domains)} numbers >= 0 that do not sum to 0"
        )
