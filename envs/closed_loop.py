"""Closed loops: a fixed number of requests in the system, each finished one replaced at once.

Load and domain follow the request index and never the clock, so a policy that serves faster meets
the same work in the same order. Load and domain are drawn from streams of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draftdial.controller.errors import UserError
from draftdial.envs.domains import DomainSchedule, DomainSwitches, as_domains
from draftdial.envs.lengths import Int32Array, LengthModel, as_lengths
from draftdial.envs.workload import RequestList, Stream, draw_hashes, register, stream

TIME_EXPONENT = 2 / 3
MAX_WARMUP_SHARE = 0.1
DRIFT5_DOMAINS = ("finance", "maths", "chat", "code", "reasoning")
"""Domains of `drift5` in the order of its indices; acceptance per token about .51, .70, .79, .88 and .91."""


class Load(Protocol):
    """Requests to keep in the system, one number per request of the list."""

    def draw(self, rng: np.random.Generator) -> Int32Array: ...


@dataclass(frozen=True)
class ConstantLoad:
    """The same concurrency throughout."""

    concurrency: int
    num_requests: int

    def __post_init__(self) -> None:
        _at_least_one(concurrency=self.concurrency, num_requests=self.num_requests)

    def draw(self, rng: np.random.Generator) -> Int32Array:
        return np.full(self.num_requests, self.concurrency, np.int32)


@dataclass(frozen=True)
class LogUniformLoad:
    """Piecewise constant concurrency, log-uniform on `low..high`, in `num_segments` segments.

    A segment at concurrency C holds `requests_at_one * C^(2/3)` requests. A server's throughput grows
    about as fast as that with C, so every level lasts about equally long and none dominates the time.
    The draws are stratified (one from each of `num_segments` equal shares of the law, in random
    order): each segment is log-uniform, and no seed is all light or all heavy.
    """

    low: int = 1
    high: int = 256
    num_segments: int = 20
    requests_at_one: float = 40.0

    def __post_init__(self) -> None:
        _at_least_one(low=self.low, num_segments=self.num_segments)
        _check_span(self.low, self.high, self.requests_at_one)

    def draw(self, rng: np.random.Generator) -> Int32Array:
        share = (rng.permutation(self.num_segments) + rng.random(self.num_segments)) / self.num_segments
        # The law of x on [low, high + 1) rounded down: P(C) is log((C + 1) / C) / log((high + 1) / low).
        levels = self.low * ((self.high + 1) / self.low) ** share
        return _segments(np.minimum(levels, self.high).astype(np.int32), self.requests_at_one)


@dataclass(frozen=True)
class SwingingLoad:
    """Concurrency that alternates between `low` and `high`; the seed picks which comes first."""

    low: int
    high: int
    num_segments: int = 20
    requests_at_one: float = 40.0

    def __post_init__(self) -> None:
        _at_least_one(low=self.low, num_segments=self.num_segments)
        _check_span(self.low, self.high, self.requests_at_one)

    def draw(self, rng: np.random.Generator) -> Int32Array:
        is_high = (np.arange(self.num_segments) + rng.integers(2)) % 2 == 1
        levels = np.where(is_high, self.high, self.low).astype(np.int32)
        return _segments(levels, self.requests_at_one)


def _segments(levels: Int32Array, requests_at_one: float) -> Int32Array:
    lengths = np.maximum(np.rint(requests_at_one * levels**TIME_EXPONENT), 1)
    return np.repeat(levels, lengths.astype(np.int64))


@dataclass(frozen=True)
class ClosedLoop:
    """A load, domains and lengths, each drawn from a stream of its own."""

    name: str
    load: Load
    domains: DomainSchedule
    lengths: LengthModel

    def requests(self, seed: int) -> RequestList:
        """The list of `seed`; it is a function of the seed and the parameters alone."""
        concurrency = self.load.draw(stream(seed, Stream.CONCURRENCY))
        num_requests = len(concurrency)
        prompt_tokens, output_tokens = self.lengths.draw(stream(seed, Stream.LENGTHS), num_requests)
        return RequestList(
            mode="closed",
            arrival_s=np.zeros(num_requests),
            concurrency=concurrency,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            domain=self.domains.draw(stream(seed, Stream.DOMAINS), num_requests),
            request_hash=draw_hashes(seed, num_requests),
            warmup=warmup_requests(num_requests, int(max(concurrency[0], concurrency[-1]))),
        ).check()


def warmup_requests(num_requests: int, concurrency: int) -> int:
    """Requests left out at either end: two batches, but no more than a tenth of the list.

    The same number covers both ends, so `concurrency` is the larger of the first and the last: the
    requests behind the window must keep its last batch full.
    """
    return min(2 * concurrency, int(MAX_WARMUP_SHARE * num_requests))


def num_requests_for(
    num_rounds: int, concurrency: int, mean_output_tokens: float, max_tokens_per_round: float
) -> int:
    """Requests that make the counted window last at least `num_rounds` decode rounds, on average.

    Conservative: it takes every round to run a full batch and to commit `max_tokens_per_round`
    tokens a request (the accept length of the best case, bonus token included). A policy that
    speculates less, or a batch not quite full, only adds rounds.
    """
    counted = num_rounds * concurrency * max_tokens_per_round / mean_output_tokens
    return math.ceil(min(counted + 4 * concurrency, counted / (1 - 2 * MAX_WARMUP_SHARE)))


def stationary(
    concurrency: int,
    num_requests: int,
    domains: Sequence[int] | DomainSchedule = (0,),
    lengths: str | LengthModel = "general",
) -> ClosedLoop:
    """Constant concurrency and one domain, or a fixed mix of domains."""
    load = ConstantLoad(concurrency, num_requests)
    return ClosedLoop("stationary", load, as_domains(domains), as_lengths(lengths))


def switches(
    concurrency: int,
    num_requests: int,
    domains: Sequence[int] = (0, 1, 2, 3, 4),
    min_requests: int = 200,
    max_requests: int = 800,
    lengths: str | LengthModel = "general",
) -> ClosedLoop:
    """Constant concurrency; the domain changes every `min_requests` to `max_requests` requests."""
    load = ConstantLoad(concurrency, num_requests)
    schedule = DomainSwitches(tuple(domains), min_requests, max_requests)
    return ClosedLoop("switches", load, schedule, as_lengths(lengths))


def drift5(
    domains: Sequence[int] = range(len(DRIFT5_DOMAINS)),
    min_requests: int = 200,
    max_requests: int = 800,
    low: int = 1,
    high: int = 256,
    num_segments: int = 20,
    requests_at_one: float = 40.0,
    lengths: str | LengthModel = "general",
) -> ClosedLoop:
    """Five domains that switch, under a load that jumps between 1 and 256; the two are independent."""
    load = LogUniformLoad(low, high, num_segments, requests_at_one)
    schedule = DomainSwitches(tuple(domains), min_requests, max_requests)
    return ClosedLoop("drift5", load, schedule, as_lengths(lengths))


def swing(
    low: int,
    high: int,
    num_segments: int = 20,
    requests_at_one: float = 40.0,
    domains: Sequence[int] | DomainSchedule = (0,),
    lengths: str | LengthModel = "general",
) -> ClosedLoop:
    """Concurrency that alternates between a low and a high value."""
    load = SwingingLoad(low, high, num_segments, requests_at_one)
    return ClosedLoop("swing", load, as_domains(domains), as_lengths(lengths))


register("stationary", stationary)
register("switches", switches)
register("drift5", drift5)
register("swing", swing)


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise UserError(f"closed loop: {name} is {value}; allowed: whole numbers >= 1")


def _check_span(low: int, high: int, requests_at_one: float) -> None:
    if high < low:
        raise UserError(f"closed loop: high is {high}; allowed: at least low, which is {low}")
    if not 0 < requests_at_one < math.inf:
        raise UserError(f"closed loop: requests_at_one is {requests_at_one}; allowed: above 0")
