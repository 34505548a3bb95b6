"""What a server is asked to do: a fixed list of requests, drawn from a seed alone.

A workload turns a seed into a `RequestList`. Lengths, domains, arrivals, concurrency and request
hashes come from random streams of their own, so that changing one (a burstier arrival process,
say) leaves the others as they were and two cells stay comparable request by request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.signals import FloatArray
from draftdial.envs.factories import build, pick
from draftdial.envs.lengths import Int32Array, LengthModel

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


_FACTORIES: dict[str, Callable[..., Workload]] = {}
_MODULES = ("closed_loop", "open_loop", "trace_workload")


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
    return build(pick(_FACTORIES, name, "workload"), parameters, f"workload {name}")
