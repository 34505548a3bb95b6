"""Open loops: requests arrive by a clock of their own, however fast the server is.

Every process is exact in distribution: stationary ones are renewal processes started in
equilibrium, those with piecewise constant rates map a unit-rate process through the integrated
rate (time rescaling), and the sinusoid is thinned from its peak rate (Lewis and Shedler 1979).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np

from draftdial.controller.errors import UserError
from draftdial.controller.signals import FloatArray
from draftdial.envs.domains import DomainSchedule, as_domains
from draftdial.envs.factories import build
from draftdial.envs.lengths import LengthModel, as_lengths
from draftdial.envs.workload import RequestList, Stream, draw_hashes, register, stream

WARMUP_SHARE = 0.05


@dataclass(frozen=True)
class ArrivalProcess(ABC):
    """Arrival times at a mean rate of `rate_per_s` requests a second."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _within(self.rate_per_s, "rate_per_s", above=0)

    def at_rate(self, rate_per_s: float) -> Self:
        """The same process at another mean rate; dwell times and periods stay as they are."""
        return replace(self, rate_per_s=rate_per_s)

    @abstractmethod
    def draw(self, rng: np.random.Generator, num_requests: int) -> FloatArray:
        """Ascending arrival times in seconds, shape `(num_requests,)`."""


def unit_renewals(rng: np.random.Generator, num_requests: int, cv: float) -> FloatArray:
    """Times of a stationary renewal process with Gamma gaps of mean 1 and coefficient of variation `cv`.

    The first gap is the rest of a gap that began before time 0: a uniform share of a gap drawn with
    probability proportional to its length. `cv` 1 is the Poisson process.
    """
    shape, scale = cv**-2, cv**2
    gaps = rng.gamma(shape, scale, num_requests)
    gaps[0] = rng.random() * rng.gamma(shape + 1, scale)
    return np.cumsum(gaps)


@dataclass(frozen=True)
class Poisson(ArrivalProcess):
    """Independent arrivals at a constant rate."""

    def draw(self, rng: np.random.Generator, num_requests: int) -> FloatArray:
        return unit_renewals(rng, num_requests, 1.0) / self.rate_per_s


@dataclass(frozen=True)
class GammaBursts(ArrivalProcess):
    """Gamma-distributed gaps between arrivals; `cv` is their coefficient of variation, bursty above 1."""

    cv: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _within(self.cv, "cv", above=0)

    def draw(self, rng: np.random.Generator, num_requests: int) -> FloatArray:
        return unit_renewals(rng, num_requests, self.cv) / self.rate_per_s


@dataclass(frozen=True)
class MarkovModulated(ArrivalProcess):
    """Poisson arrivals whose rate jumps between quiet and burst after exponential dwell times.

    In a burst the rate is `burst_ratio` times the quiet one. The dwell times are means in seconds.
    """

    burst_ratio: float = 4.0
    quiet_s: float = 60.0
    burst_s: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _within(self.burst_ratio, "burst_ratio", above=0)
        _within(self.quiet_s, "quiet_s", above=0)
        _within(self.burst_s, "burst_s", above=0)

    def draw(self, rng: np.random.Generator, num_requests: int) -> FloatArray:
        cycle_s = self.quiet_s + self.burst_s
        quiet_rate = self.rate_per_s * cycle_s / (self.quiet_s + self.burst_ratio * self.burst_s)
        work = unit_renewals(rng, num_requests, 1.0)
        starts_quiet = rng.random() < self.quiet_s / cycle_s
        is_quiet = np.array([starts_quiet, not starts_quiet])
        mean_s = np.where(is_quiet, self.quiet_s, self.burst_s)
        rates = np.where(is_quiet, quiet_rate, self.burst_ratio * quiet_rate)
        dwell_s = np.empty(0)
        while dwell_s.reshape(-1, 2).sum(axis=0) @ rates <= work[-1]:
            dwell_s = np.append(dwell_s, (rng.standard_exponential((64, 2)) * mean_s).ravel())
        return _rescale(work, dwell_s, np.resize(rates, len(dwell_s)))


@dataclass(frozen=True)
class Ramp(ArrivalProcess):
    """Poisson arrivals whose rate moves evenly from `start_share` of the mean to `2 - start_share` of it.

    It arrives there after `num_requests / rate_per_s` seconds, where the list ends on average, and stays.
    """

    start_share: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.start_share < 2:
            raise UserError(f"arrivals: start_share is {self.start_share}; allowed: 0 up to but not 2")

    def draw(self, rng: np.random.Generator, num_requests: int) -> FloatArray:
        start, end = self.start_share, 2 - self.start_share
        work = unit_renewals(rng, num_requests, 1.0)
        climbing = np.minimum(work, num_requests)
        # In units of 1 / rate: start * t + (end - start) / (2 * num_requests) * t**2 = climbing.
        root = np.sqrt(start**2 + 2 * (end - start) / num_requests * climbing)
        return (2 * climbing / (start + root) + (work - climbing) / end) / self.rate_per_s


@dataclass(frozen=True)
class DayNight(ArrivalProcess):
    """Poisson arrivals at `rate_per_s * (1 + depth * sin)`, one cycle in `period_s`.

    The seed picks the hour at which the list begins.
    """

    period_s: float = 3600.0
    depth: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        _within(self.period_s, "period_s", above=0)
        if not 0 <= self.depth <= 1:
            raise UserError(f"arrivals: depth is {self.depth}; allowed: 0 to 1")

    def draw(self, rng: np.random.Generator, num_requests: int) -> FloatArray:
        phase = rng.uniform(0, 2 * math.pi)
        peak = self.rate_per_s * (1 + self.depth)
        arrival_s, end_s = np.empty(0), 0.0
        while len(arrival_s) < num_requests:
            candidate_s = end_s + np.cumsum(rng.standard_exponential(num_requests)) / peak
            rate = 1 + self.depth * np.sin(2 * math.pi * candidate_s / self.period_s + phase)
            kept = rng.random(num_requests) * (1 + self.depth) < rate
            arrival_s, end_s = np.append(arrival_s, candidate_s[kept]), candidate_s[-1]
        return arrival_s[:num_requests]


@dataclass(frozen=True)
class Swings(ArrivalProcess):
    """Poisson arrivals whose rate alternates every `dwell_s` seconds, `ratio` times as high as it is low."""

    ratio: float = 4.0
    dwell_s: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _within(self.ratio, "ratio", above=0)
        _within(self.dwell_s, "dwell_s", above=0)

    def draw(self, rng: np.random.Generator, num_requests: int) -> FloatArray:
        wave = RateProfile(self.dwell_s, np.array([1.0, self.ratio]))
        return ProfileArrivals(self.rate_per_s, wave).draw(rng, num_requests)


@dataclass(frozen=True, eq=False)
class RateProfile:
    """A recorded load curve: relative rates of equal steps, repeated for ever.

    `rates` has shape `(num_steps,)`; only its shape over time matters, the mean rate is set on replay.
    """

    step_s: float
    rates: FloatArray

    def __post_init__(self) -> None:
        _within(self.step_s, "step_s", above=0)
        if not (np.isfinite(self.rates).all() and (self.rates >= 0).all() and self.rates.any()):
            raise UserError("rate profile: rates must be finite, not negative and not all 0")


@dataclass(frozen=True)
class ProfileArrivals(ArrivalProcess):
    """Arrivals that follow a recorded load curve, from a point in it that the seed picks.

    `rate_per_s` is the mean over the whole curve. `time_compression` 24 plays a day in an hour.
    Gaps have coefficient of variation `cv` where the rate is constant (1: Poisson).
    """

    profile: RateProfile
    time_compression: float = 1.0
    cv: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _within(self.time_compression, "time_compression", above=0)
        _within(self.cv, "cv", above=0)

    def draw(self, rng: np.random.Generator, num_requests: int) -> FloatArray:
        step_s = self.profile.step_s / self.time_compression
        rates = self.rate_per_s * self.profile.rates / self.profile.rates.mean()
        first, elapsed = divmod(rng.random() * len(rates), 1.0)
        rates = np.roll(rates, -int(first))
        work = unit_renewals(rng, num_requests, self.cv) + elapsed * step_s * rates[0]
        cycles, rest = np.divmod(work, np.cumsum(step_s * rates)[-1])
        in_cycle_s = _rescale(rest, np.full(len(rates), step_s), rates)
        arrival_s = in_cycle_s + (cycles * len(rates) - elapsed) * step_s
        # Rounding at the edge of a step may put a time a hair before its neighbour.
        return np.maximum.accumulate(np.maximum(arrival_s, 0.0))


def _rescale(work: FloatArray, duration_s: FloatArray, rates: FloatArray) -> FloatArray:
    """When a process with piecewise constant rates has done `work`, its integrated rate (any shape)."""
    start_s = np.concatenate(([0.0], np.cumsum(duration_s)))
    done = np.concatenate(([0.0], np.cumsum(duration_s * rates)))
    piece = np.minimum(np.searchsorted(done, work, side="right"), len(rates)) - 1
    time_s: FloatArray = start_s[piece] + (work - done[piece]) / rates[piece]
    return time_s


def _within(value: float, name: str, above: float) -> None:
    if not above < value < math.inf:
        raise UserError(f"arrivals: {name} is {value}; allowed: finite numbers above {above}")


@dataclass(frozen=True)
class OpenLoop:
    """An arrival process, domains and lengths, each drawn from a stream of its own."""

    name: str
    arrivals: ArrivalProcess
    num_requests: int
    domains: DomainSchedule
    lengths: LengthModel

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise UserError(f"open loop: num_requests is {self.num_requests}; allowed: whole numbers >= 1")

    def at_rate(self, rate_per_s: float) -> Self:
        """The same workload at another mean rate, in requests per second."""
        return replace(self, arrivals=self.arrivals.at_rate(rate_per_s))

    def requests(self, seed: int) -> RequestList:
        """The list of `seed`; it is a function of the seed and the parameters alone."""
        prompt_tokens, output_tokens = self.lengths.draw(stream(seed, Stream.LENGTHS), self.num_requests)
        return RequestList(
            mode="open",
            arrival_s=self.arrivals.draw(stream(seed, Stream.ARRIVALS), self.num_requests),
            concurrency=np.zeros(self.num_requests, np.int32),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            domain=self.domains.draw(stream(seed, Stream.DOMAINS), self.num_requests),
            request_hash=draw_hashes(seed, self.num_requests),
            warmup=int(WARMUP_SHARE * self.num_requests),
        ).check()


ARRIVALS: dict[str, type[ArrivalProcess]] = {
    "poisson": Poisson,
    "markov": MarkovModulated,
    "gamma": GammaBursts,
    "ramp": Ramp,
    "day-night": DayNight,
    "swings": Swings,
}
"""Named open loops; each takes the parameters of its process besides those of `open_loop`."""


def open_loop(
    process: str,
    num_requests: int,
    domains: Sequence[int] | DomainSchedule = (0,),
    lengths: str | LengthModel = "short-chat",
    **arrivals: object,
) -> OpenLoop:
    """The open loop whose arrivals are `ARRIVALS[process]` with the parameters `arrivals`."""
    drawn = build(ARRIVALS[process], arrivals, f"workload {process}")
    return OpenLoop(process, drawn, num_requests, as_domains(domains), as_lengths(lengths))


for _process in ARRIVALS:
    register(_process, partial(open_loop, _process))
