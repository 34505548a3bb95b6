"""How long prompts and outputs are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.errors import UserError
from draftdial.controller.signals import FloatArray
from draftdial.envs.factories import build

Int32Array = NDArray[np.int32]


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
            model: LengthModel = import_module("draftdial.envs.trace_workload").trace_lengths(
                spec[len("trace:") :]
            )
            return model
        if spec not in LENGTHS:
            raise UserError(f"lengths: found {spec}, allowed: {', '.join(LENGTHS)}, trace:FILE")
        return LENGTHS[spec]
    if isinstance(spec, Mapping):
        laws = {
            key: build(TokenLaw, value, f"lengths.{key}") if isinstance(value, Mapping) else value
            for key, value in spec.items()
        }
        return build(Lengths, laws, "lengths")
    return spec
