"""What a server is asked to do: a fixed list of requests, drawn from a seed alone.

A workload turns a seed into a `RequestList`. Lengths, domains, arrivals, concurrency and request
hashes come from random streams of their own, so that changing one (a burstier arrival process,
say) leaves the others as they were and two cells stay comparable request by request.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from typing import Literal, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.errors import UserError
from draftdial.controller.signals import FloatArray

Int32Array = NDArray[np.int32]
HashArray = NDArray[np.uint64]


class Stream(IntEnum):
    """Random streams of a workload; the numbers are part of what a seed means and never change."""

    LENGTHS = 7101
    DOMAINS = 7102
    ARRIVALS = 7103
    CONCURRENCY = 7104
    HASHES = 7105


def stream(seed: int, which: Stream) -> np.random.Generator:
    """The generator of one stream of one seed (a non-negative integer)."""
    return np.random.default_rng([seed, int(which)])


def draw_hashes(seed: int, num_requests: int) -> HashArray:
    """The hashes by which requests pick their acceptance, shape `(num_requests,)`."""
    return stream(seed, Stream.HASHES).integers(0, 2**64, num_requests, np.uint64)


@dataclass
class RequestList:
    """The fixed work of one server. Every array has shape `(num_requests,)`."""

    mode: Literal["open", "closed"]
    arrival_s: FloatArray
    """Open loop: ascending arrival times. Closed loop: zeros."""
    concurrency: Int32Array
    """Closed loop: requests in the system while this request is the next to start. Open loop: zeros."""
    prompt_tokens: Int32Array
    output_tokens: Int32Array
    domain: Int32Array
    """Index into the domains of the acceptance source."""
    request_hash: HashArray
    warmup: int
    """Statistics use requests `[warmup, num_requests - warmup)`."""

    @property
    def num_requests(self) -> int:
        return len(self.arrival_s)

    def check(self) -> Self:
        """This list, or ValueError naming the field that breaks what the fields promise."""
        arrays: tuple[tuple[str, NDArray[np.generic], type[np.generic]], ...] = (
            ("arrival_s", self.arrival_s, np.float64),
            ("concurrency", self.concurrency, np.int32),
            ("prompt_tokens", self.prompt_tokens, np.int32),
            ("output_tokens", self.output_tokens, np.int32),
            ("domain", self.domain, np.int32),
            ("request_hash", self.request_hash, np.uint64),
        )
        for name, array, dtype in arrays:
            _require(array.dtype == dtype, name, f"dtype {array.dtype}, not {dtype.__name__}")
            _require(array.shape == (self.num_requests,), name, f"shape {array.shape}")
        is_open = self.mode == "open"
        _require(is_open or self.mode == "closed", "mode", f"{self.mode!r}, neither 'open' nor 'closed'")
        _require(bool(np.isfinite(self.arrival_s).all()), "arrival_s", "not finite")
        if is_open:
            ascending = bool((np.diff(self.arrival_s, prepend=0.0) >= 0).all())
            _require(ascending, "arrival_s", "negative or not ascending")
            _require(not self.concurrency.any(), "concurrency", "not zero in open loop")
        else:
            _require(not self.arrival_s.any(), "arrival_s", "not zero in closed loop")
            _require(bool((self.concurrency >= 1).all()), "concurrency", "below 1 in closed loop")
        _require(bool((self.prompt_tokens >= 1).all()), "prompt_tokens", "below 1")
        _require(bool((self.output_tokens >= 1).all()), "output_tokens", "below 1")
        _require(bool((self.domain >= 0).all()), "domain", "negative")
        _require(0 <= 2 * self.warmup < self.num_requests, "warmup", f"{self.warmup} leaves no request")
        return self


def _require(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise ValueError(f"RequestList.{field}: {problem}")


class Workload(Protocol):
    """A pure function from a seed to the work of one server."""

    @property
    def name(self) -> str: ...

    def requests(self, seed: int) -> RequestList: ...


class OpenWorkload(Workload, Protocol):
    """A workload whose load is a mean arrival rate, which the caller derives from a server's capacity."""

    @property
    def lengths(self) -> LengthModel: ...

    def at_rate(self, rate_per_s: float) -> OpenWorkload:
        """The same workload at another mean rate, in requests per second."""
        ...


# Lengths


class LengthModel(Protocol):
    """Prompt and output lengths, drawn together because a request has both."""

    @property
    def mean_prompt_tokens(self) -> float: ...

    @property
    def mean_output_tokens(self) -> float: ...

    def draw(self, rng: np.random.Generator, num_requests: int) -> tuple[Int32Array, Int32Array]:
        """Prompt tokens and output tokens, each of shape `(num_requests,)`."""
        ...


@dataclass(frozen=True)
class TokenLaw:
    """A log-normal number of tokens, clipped into `[low, high]` as a server's limits clip it."""

    median: float
    sigma: float
    low: int
    high: int

    def __post_init__(self) -> None:
        if not (1 <= self.low <= self.median <= self.high and 0 <= self.sigma < math.inf):
            raise UserError(f"lengths: {self} must have 1 <= low <= median <= high and sigma >= 0")

    def of_normal(self, z: FloatArray) -> Int32Array:
        """Token counts of standard normal draws."""
        return np.clip(np.rint(self.median * np.exp(self.sigma * z)), self.low, self.high).astype(np.int32)

    @property
    def mean(self) -> float:
        """Expected tokens, clipping included (rounding left out)."""
        if self.sigma == 0:
            return self.median
        z_low, z_high = (math.log(end / self.median) / self.sigma for end in (self.low, self.high))
        middle = _normal_cdf(z_high - self.sigma) - _normal_cdf(z_low - self.sigma)
        inside = self.median * math.exp(self.sigma**2 / 2) * middle
        return self.low * _normal_cdf(z_low) + inside + self.high * _normal_cdf(-z_high)


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


@dataclass(frozen=True)
class Lengths:
    """Log-normal prompts and outputs whose logarithms have the given correlation."""

    prompt: TokenLaw
    output: TokenLaw
    correlation: float = 0.0

    def __post_init__(self) -> None:
        if not -1 <= self.correlation <= 1:
            raise UserError(f"lengths: correlation is {self.correlation}; allowed: -1 to 1")

    @property
    def mean_prompt_tokens(self) -> float:
        return self.prompt.mean

    @property
    def mean_output_tokens(self) -> float:
        return self.output.mean

    def draw(self, rng: np.random.Generator, num_requests: int) -> tuple[Int32Array, Int32Array]:
        """Prompt tokens and output tokens, each of shape `(num_requests,)`."""
        # One row per request, so that a longer list starts with the requests of a shorter one.
        z = rng.standard_normal((num_requests, 2))
        rest = math.sqrt(1 - self.correlation**2)
        return self.prompt.of_normal(z[:, 0]), self.output.of_normal(
            self.correlation * z[:, 0] + rest * z[:, 1]
        )


LENGTHS: dict[str, Lengths] = {
    "general": Lengths(TokenLaw(400, 0.6, 16, 4096), TokenLaw(220, 0.7, 16, 1024)),
    # Azure 2023 conversations: prompts p50 1,020 and p95 4,083 give sigma .84; outputs p50 129, p95 451 and
    # p99 601 have a shorter tail than any log-normal, and .70 splits the error (p95 -10 %, p99 +10 %).
    "short-chat": Lengths(TokenLaw(1020, 0.84, 16, 8192), TokenLaw(129, 0.70, 8, 1024), 0.09),
    "agentic": Lengths(TokenLaw(570, 0.27, 64, 4096), TokenLaw(250, 0.4, 16, 1024)),
}
"""Shapes by name; docs/workloads.md says what each models."""


def as_lengths(spec: str | Mapping[str, object] | LengthModel) -> LengthModel:
    """Lengths from a name in `LENGTHS`, from `trace:PATH` (rows of a trace, default caps) or from a
    configuration of `Lengths`; a model comes back as it is."""
    if isinstance(spec, str):
        if spec.startswith("trace:"):
            model: LengthModel = import_module("draftdial.envs.traces").trace_lengths(spec[len("trace:") :])
            return model
        return _pick(LENGTHS, spec, "lengths")
    if isinstance(spec, Mapping):
        laws = {
            key: build(TokenLaw, value, f"lengths.{key}") if isinstance(value, Mapping) else value
            for key, value in spec.items()
        }
        return build(Lengths, laws, "lengths")
    return spec


# Domains


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
        schedule = _pick(SCHEDULES, str(spec.get("schedule", "mix")), "domains.schedule")
        return build(schedule, parameters, "domains")
    return DomainMix(tuple(spec)) if isinstance(spec, Sequence) else spec


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def domain_indices(names: Sequence[str], available: Sequence[str]) -> tuple[int, ...]:
    """Where `names` stand among the domains of an acceptance source; UserError on an unknown one."""
    for name in names:
        if name not in available:
            raise UserError(f"domain {name!r} is unknown; allowed: {', '.join(available)}")
    return tuple(list(available).index(name) for name in names)


def _check_domains(domains: tuple[int, ...]) -> None:
    if not domains or min(domains) < 0 or len(set(domains)) < len(domains):
        raise UserError(f"domains: {list(domains)} must be one or more different indices >= 0")


def _check_weights(weights: tuple[float, ...], domains: tuple[int, ...]) -> None:
    if len(weights) != len(domains) or not all(0 <= w < math.inf for w in weights) or sum(weights) <= 0:
        raise UserError(
            f"domains: weights {list(weights)} must be {len(domains)} numbers >= 0 that do not sum to 0"
        )


# Names

_T = TypeVar("_T")
_FACTORIES: dict[str, Callable[..., Workload]] = {}
_MODULES = ("closed_loop", "open_loop", "traces")


def register(name: str, factory: Callable[..., Workload]) -> None:
    """Make `factory` the maker of workloads called `name`."""
    _FACTORIES[name] = factory


def workload_names() -> tuple[str, ...]:
    """Names that `make_workload` knows."""
    for module in _MODULES:
        import_module(f"draftdial.envs.{module}")
    return tuple(_FACTORIES)


def make_workload(name: str, **parameters: object) -> Workload:
    """The named workload with these parameters; UserError on an unknown name or parameter."""
    workload_names()
    return build(_pick(_FACTORIES, name, "workload"), parameters, f"workload {name}")


def build(factory: Callable[..., _T], parameters: Mapping[str, object], where: str) -> _T:
    """Call `factory` with parameters a user wrote; UserError lists what is allowed if they do not fit."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**parameters)
    except TypeError as error:
        raise UserError(f"{where}: {error}; allowed: {', '.join(signature.parameters)}") from None
    return factory(**parameters)


def _pick(table: Mapping[str, _T], name: str, what: str) -> _T:
    if name not in table:
        raise UserError(f"{what} {name!r} is unknown; allowed: {', '.join(table)}")
    return table[name]
