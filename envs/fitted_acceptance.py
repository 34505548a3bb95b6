"""Acceptance drawn from a small generative model, the default source. docs/acceptance.md has the formulas."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numba
import numpy as np
from numpy.typing import NDArray

from draftdial.controller.errors import UserError
from draftdial.controller.signals import FloatArray, IntArray
from draftdial.envs.acceptance import MAX_K, AcceptanceBank

NUM_LEVELS = 16
"""Equally likely values that stand for the normal spread between requests."""
NUM_LOOP_STEPS = 8
"""Steps in which the log-odds of a looping request change."""
NUM_SPANS = 2
"""Hidden states of the chain within a request: hard and easy."""
MAX_RUN = 15
"""Longest run of accepted drafts that is drawn."""
BEYOND_RETENTION = 0.8
"""Share of drafts that survive each depth past MAX_K: heads are not trained that deep."""


@dataclass(frozen=True)
class FittedDomain:
    """Parameters of one domain. A draft for one token is right with probability `sigmoid(log-odds)`."""

    name: str
    hard_logit: float
    """Log-odds in a hard span of the median request."""
    easy_logit: float
    """The same in an easy span."""
    stay_hard: float
    """P(the next token is in a hard span | this one is): 1 / (1 - stay) tokens is the mean dwell."""
    stay_easy: float
    """The same for easy spans."""
    request_sd: float
    """Standard deviation over requests of an offset added to the log-odds."""
    retention_2: float
    """Share of drafts right at depth 2 that depth costs nothing else; depth 1 loses none."""
    retention_7: float
    """The same at depth 7; linear in between."""
    loop_share: float = 0.0
    """Share of requests that repeat themselves until the token limit. They know no easy spans."""
    loop_stretch: float = 1.0
    """Length of a looping request over that of an ordinary one."""
    loop_first_logit: float = 0.0
    """Log-odds at the start of a looping request."""
    loop_last_logit: float = 0.0
    """Log-odds at its end, reached in equal steps."""


RECORDED_DOMAINS = (
    FittedDomain("maths-gsm8k", -1.850, 2.150, 0.401, 0.841, 0.427, 0.844, 0.830),
    FittedDomain(
        "code-edit", 0.462, 2.397, 0.952, 0.972, 0.545, 0.887, 0.909,
        loop_share=0.0082, loop_stretch=44.5, loop_first_logit=2.33, loop_last_logit=-2.28,
    ),
)  # fmt: skip
"""Fitted to recorded arrays of Llama-3.1-8B-Instruct with an EAGLE-3 head on GSM8K and InstructCoder
(SpecDecode-Bench, arXiv 2601.11580)."""

DRIFT5_DOMAINS = (
    FittedDomain("finance", -0.800, 3.200, 0.756, 0.587, 0.295, 0.896, 1.000),
    FittedDomain("maths", -1.062, 1.680, 0.425, 0.896, 0.318, 0.891, 0.746),
    FittedDomain("chat", 1.045, 3.676, 0.972, 0.945, 0.327, 0.963, 0.885),
    FittedDomain("code", 1.452, 5.452, 0.969, 0.973, 0.437, 0.972, 0.851),
    FittedDomain("reasoning", 1.558, 4.020, 0.944, 0.977, 0.328, 0.958, 0.874),
)
"""Fitted to SpecBundle's accept lengths at k = 3, 5, 7 for FinanceQA, GSM8K, MT-bench, HumanEval and MATH-500
(Llama-3.1-8B, SpecForge head); spread and correlation are borrowed from the recorded domains."""

POOR_DOMAIN = FittedDomain("poor", -2.451, 1.549, 0.758, 0.570, 0.462, 0.651, 0.600)
"""A head that does not know the domain: three drafts in ten are right. Made up, not measured."""

SHIPPED = {domain.name: domain for domain in (*RECORDED_DOMAINS, *DRIFT5_DOMAINS, POOR_DOMAIN)}


class FittedAcceptance:
    """Banks of freshly drawn requests from a list of domains, given by shipped name or by parameters.

    Every domain holds `num_arrays` arrays of `num_positions` output positions; looping requests are
    longer, and their number is rounded, so it takes some hundred arrays to hold their share. Raises
    UserError for a name that is not shipped.
    """

    name = "fitted"

    def __init__(
        self,
        domains: Sequence[str | FittedDomain] = tuple(SHIPPED),
        num_arrays: int = 512,
        num_positions: int = 512,
    ) -> None:
        self._parameters = tuple(
            _shipped(domain) if isinstance(domain, str) else domain for domain in domains
        )
        self.domains = tuple(domain.name for domain in self._parameters)
        self._num_arrays = num_arrays
        self._num_positions = num_positions
        self._survival = np.concatenate([domain_survival(domain) for domain in self._parameters])

    def bank(self, seed: int) -> AcceptanceBank:
        """The bank of a seed; a domain's arrays depend on the seed and its own name and parameters only."""
        parts = [self._draw(domain, seed) for domain in self._parameters]
        lengths = np.concatenate([length for _, _, length in parts])
        num_rows = np.array([num_latents(domain) for domain in self._parameters])
        first_rows = np.cumsum(num_rows) - num_rows
        return AcceptanceBank(
            accepted=np.concatenate([accepted for accepted, _, _ in parts]),
            latent=np.concatenate(
                [latent + row for (_, latent, _), row in zip(parts, first_rows, strict=True)]
            ).astype(np.uint16),
            array_start=np.cumsum(lengths, dtype=np.int64) - lengths,
            array_length=lengths.astype(np.int32),
            domain_first=np.arange(len(parts), dtype=np.int64) * self._num_arrays,
            domain_count=np.full(len(parts), self._num_arrays, np.int32),
            survival=self._survival,
            domain_names=self.domains,
        )

    def _draw(
        self, domain: FittedDomain, seed: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint16], IntArray]:
        """Accepted drafts, latents counted from the domain's first row, and the length of every array."""
        rng = np.random.default_rng([seed, zlib.crc32(domain.name.encode())])
        num_loops = round(domain.loop_share * self._num_arrays)
        level = rng.permutation(np.arange(self._num_arrays) % NUM_LEVELS)
        lengths = np.full(self._num_arrays, self._num_positions)
        looping = rng.permutation(self._num_arrays) < num_loops
        level[looping] = NUM_LEVELS
        lengths[looping] = round(self._num_positions * domain.loop_stretch)
        num_draws = int(lengths.sum()) + MAX_RUN * self._num_arrays
        accepted, latent = _draw_arrays(
            level,
            lengths,
            right_probability(domain),
            np.array([1 - domain.stay_hard, domain.stay_easy]),
            np.cumprod(retention(domain), dtype=np.float64),
            rng.random((3, num_draws), np.float32),
        )
        return accepted, latent, lengths


def random_domains(
    rng: np.random.Generator, num_domains: int, num_arrays: int = 512, num_positions: int = 512
) -> FittedAcceptance:
    """Domains to train on, drawn from ranges that cover the shipped ones without centring on them."""
    return FittedAcceptance(
        [_random_domain(rng, f"random-{index}") for index in range(num_domains)], num_arrays, num_positions
    )


def _random_domain(rng: np.random.Generator, name: str) -> FittedDomain:
    right_share = rng.uniform(0.2, 0.97)
    gap = rng.uniform(0, 4)
    dwell_hard, dwell_easy = np.exp(rng.uniform(np.log(1.5), np.log(100), 2))
    easy_share = dwell_easy / (dwell_hard + dwell_easy)
    hard_logit = _solve_hard_logit(right_share, gap, easy_share)
    return FittedDomain(
        name,
        hard_logit,
        hard_logit + gap,
        stay_hard=1 - 1 / dwell_hard,
        stay_easy=1 - 1 / dwell_easy,
        request_sd=rng.uniform(0.1, 0.8),
        retention_2=1 - 0.35 * rng.random() ** 2,
        retention_7=1 - 0.4 * rng.random() ** 2,
    )


def _solve_hard_logit(right_share: float, gap: float, easy_share: float) -> float:
    """The log-odds in hard spans at which `right_share` of all tokens are right, by bisection."""
    low, high = -10.0, 10.0
    for _ in range(50):
        middle = (low + high) / 2
        hard, easy = 1 / (1 + np.exp(-middle)), 1 / (1 + np.exp(-middle - gap))
        if (1 - easy_share) * hard + easy_share * easy < right_share:
            low = middle
        else:
            high = middle
    return low


def _shipped(name: str) -> FittedDomain:
    if name not in SHIPPED:
        raise UserError(f"acceptance domain {name!r} is not shipped: choose from {', '.join(SHIPPED)}")
    return SHIPPED[name]


def num_latents(domain: FittedDomain) -> int:
    """Hidden states of a domain: levels of a request, steps of a loop if it has any, times spans."""
    return (NUM_LEVELS + (NUM_LOOP_STEPS if domain.loop_share > 0 else 0)) * NUM_SPANS


def right_probability(domain: FittedDomain) -> FloatArray:
    """Shape `(num_latents / NUM_SPANS, NUM_SPANS)`: P(the draft for one token is right), hard and easy."""
    middles = (np.arange(NUM_LEVELS) + 0.5) / NUM_LEVELS
    offsets = np.array([NormalDist().inv_cdf(middle) for middle in middles])
    offsets *= domain.request_sd / offsets.std()
    logits = offsets[:, None] + np.array([domain.hard_logit, domain.easy_logit])
    if domain.loop_share > 0:
        steps = (np.arange(NUM_LOOP_STEPS) + 0.5) / NUM_LOOP_STEPS
        looping = domain.loop_first_logit + (domain.loop_last_logit - domain.loop_first_logit) * steps
        logits = np.concatenate([logits, np.repeat(looping[:, None], NUM_SPANS, axis=1)])
    return np.asarray(1 / (1 + np.exp(-logits)), np.float64)


def retention(domain: FittedDomain) -> FloatArray:
    """Shape `(MAX_RUN,)`: share of right drafts that survive depths 1, 2, .. for being so deep."""
    depths = np.arange(1, MAX_RUN + 1)
    kept = np.interp(depths, [2, MAX_K], [domain.retention_2, domain.retention_7])
    kept[0] = 1
    kept[MAX_K:] *= BEYOND_RETENTION
    return kept


def domain_survival(domain: FittedDomain) -> FloatArray:
    """Shape `(num_latents, MAX_K + 1)`: P(at least d drafts accepted | level, span at the start).

    Exact, by a forward recursion over the span of the token at each depth.
    """
    right = right_probability(domain)
    move = np.array([[domain.stay_hard, 1 - domain.stay_hard], [1 - domain.stay_easy, domain.stay_easy]])
    alive = np.tile(np.eye(NUM_SPANS), (len(right), 1))
    right_of_row = np.repeat(right, NUM_SPANS, axis=0)
    survival = np.ones((len(alive), MAX_K + 1))
    for depth, kept in enumerate(retention(domain)[:MAX_K], start=1):
        alive = alive * right_of_row * kept
        survival[:, depth] = alive.sum(axis=1)
        alive = alive @ move
    return survival


@numba.njit(cache=True)
def _draw_arrays(
    level: IntArray,
    lengths: IntArray,
    right: FloatArray,
    next_easy: FloatArray,
    kept: FloatArray,
    uniform: NDArray[np.float32],
) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """Accepted drafts and latent of every position of all arrays, each drawn from its end to its start.

    `kept[d - 1]` is the probability that depth alone spares the first d drafts. The span chain has two
    states, so it is reversible and may be drawn backwards; then the run of right drafts that starts at a
    position is known from the run at the next one. MAX_RUN positions past the end are drawn and dropped.
    """
    num_positions = lengths.sum()
    accepted = np.empty(num_positions, np.uint8)
    latent = np.empty(num_positions, np.uint16)
    always_easy = next_easy[0] / (1 - next_easy[1] + next_easy[0])
    draw = 0
    start = 0
    for array in range(len(lengths)):
        length = lengths[array]
        easy = 1 if uniform[0, draw] < always_easy else 0
        run = 0
        for position in range(length + MAX_RUN - 1, -1, -1):
            row = level[array]
            if row == NUM_LEVELS:
                row += min(position, length - 1) * NUM_LOOP_STEPS // length
            run = min(run + 1, MAX_RUN) if uniform[1, draw] < right[row, easy] else 0
            if position < length:
                spared = 0
                while spared < run and uniform[2, draw] < kept[spared]:
                    spared += 1
                accepted[start + position] = spared
                latent[start + position] = row * NUM_SPANS + easy
            draw += 1
            if position > 0:
                easy = 1 if uniform[0, draw] < next_easy[easy] else 0
        start += length
    return accepted, latent
