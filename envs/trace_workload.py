"""Workloads that replay what was recorded: whole traces, or the load curve of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from draftdial.controller.errors import UserError
from draftdial.envs.domains import DomainSchedule, as_domains
from draftdial.envs.lengths import Int32Array, LengthModel, as_lengths
from draftdial.envs.open_loop import WARMUP_SHARE, OpenLoop, ProfileArrivals
from draftdial.envs.traces import Trace, read_rate_profile, read_trace
from draftdial.envs.workload import RequestList, Stream, draw_hashes, register, stream

MAX_PROMPT_TOKENS = 8192
MAX_OUTPUT_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class TraceLengths:
    """Lengths of whole rows of a trace, drawn with replacement and cut at the caps."""

    trace: Trace
    max_prompt_tokens: int = MAX_PROMPT_TOKENS
    max_output_tokens: int = MAX_OUTPUT_TOKENS

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_output_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"trace: {name} is {getattr(self, name)}; allowed: whole numbers >= 1")

    @property
    def mean_prompt_tokens(self) -> float:
        return float(self.prompt_tokens.mean())

    @property
    def mean_output_tokens(self) -> float:
        return float(self.output_tokens.mean())

    @property
    def prompt_tokens(self) -> Int32Array:
        """Of every row, cut at the cap."""
        return np.minimum(self.trace.prompt_tokens, np.int32(self.max_prompt_tokens))

    @property
    def output_tokens(self) -> Int32Array:
        """Of every row, cut at the cap."""
        return np.minimum(self.trace.output_tokens, np.int32(self.max_output_tokens))

    def draw(self, rng: np.random.Generator, num_requests: int) -> tuple[Int32Array, Int32Array]:
        """Prompt tokens and output tokens, each of shape `(num_requests,)`."""
        rows = rng.integers(self.trace.num_requests, size=num_requests)
        return self.prompt_tokens[rows], self.output_tokens[rows]


@dataclass(frozen=True, eq=False)
class TraceWorkload:
    """Replays a window of a trace, arrivals and lengths together as they were recorded.

    The seed picks where the window begins; it runs on from the start of the trace when it passes
    the end. Arrivals on a grid are spread evenly at random over their step. `time_scale` replayed
    seconds pass per recorded second, so 0.5 doubles the load.
    """

    name: str
    lengths: TraceLengths
    num_requests: int
    time_scale: float
    domains: DomainSchedule

    def __post_init__(self) -> None:
        most = self.lengths.trace.num_requests
        if not 1 <= self.num_requests <= most:
            raise UserError(f"trace: num_requests is {self.num_requests}; allowed: 1 to {most}, all it holds")
        if not 0 < self.time_scale < math.inf:
            raise UserError(f"trace: time_scale is {self.time_scale}; allowed: finite numbers above 0")

    def at_rate(self, rate_per_s: float) -> Self:
        """The same replay with time scaled so that the whole trace arrives at this mean rate."""
        return replace(self, time_scale=self.lengths.trace.rate_per_s / rate_per_s)

    def requests(self, seed: int) -> RequestList:
        """The list of `seed`; it is a function of the seed and the parameters alone."""
        trace, rng = self.lengths.trace, stream(seed, Stream.ARRIVALS)
        spread_s = trace.arrival_s + trace.grid_s * rng.random(trace.num_requests)
        order = np.argsort(spread_s, kind="stable")
        laps, place = np.divmod(rng.integers(len(order)) + np.arange(self.num_requests), len(order))
        rows = order[place]
        arrival_s = spread_s[rows] + laps * trace.period_s
        return RequestList(
            mode="open",
            arrival_s=self.time_scale * (arrival_s - arrival_s[0]),
            concurrency=np.zeros(self.num_requests, np.int32),
            prompt_tokens=self.lengths.prompt_tokens[rows],
            output_tokens=self.lengths.output_tokens[rows],
            domain=self.domains.draw(stream(seed, Stream.DOMAINS), self.num_requests),
            request_hash=draw_hashes(seed, self.num_requests),
            warmup=int(WARMUP_SHARE * self.num_requests),
        ).check()


def trace_lengths(path: str | Path) -> TraceLengths:
    """Lengths of the rows of a trace file, cut at the default caps."""
    return TraceLengths(read_trace(path))


def trace(
    path: str | Path,
    num_requests: int | None = None,
    time_scale: float = 1.0,
    domains: Sequence[int] | DomainSchedule = (0,),
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    max_output_tokens: int = MAX_OUTPUT_TOKENS,
) -> TraceWorkload:
    """The trace in `path`, `num_requests` of it (all by default)."""
    recorded = read_trace(path)
    lengths = TraceLengths(recorded, max_prompt_tokens, max_output_tokens)
    num_requests = recorded.num_requests if num_requests is None else num_requests
    return TraceWorkload(f"trace-{recorded.name}", lengths, num_requests, time_scale, as_domains(domains))


def rate_profile(
    path: str | Path,
    rate_per_s: float,
    num_requests: int,
    time_compression: float = 1.0,
    cv: float = 1.0,
    pool: str | None = None,
    domains: Sequence[int] | DomainSchedule = (0,),
    lengths: str | LengthModel = "short-chat",
) -> OpenLoop:
    """Synthetic requests whose arrivals follow the load curve recorded in `path`."""
    arrivals = ProfileArrivals(rate_per_s, read_rate_profile(path, pool), time_compression, cv)
    name = f"rate-profile-{pool or Path(path).stem}"
    return OpenLoop(name, arrivals, num_requests, as_domains(domains), as_lengths(lengths))


register("trace", trace)
register("rate-profile", rate_profile)
