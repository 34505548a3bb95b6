"""Whether draft tokens will be accepted: a property of the token, fixed before any policy acts.

A request walks arrays of an `AcceptanceBank`. Every position of an array says how many drafts a
round started there would have accepted, so any sequence of k can be replayed on the same world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numba
import numpy as np
from numpy.typing import NDArray

from draftdial.controller.signals import FloatArray, IntArray

MAX_K = 7
"""Deepest draft that a bank describes; EAGLE-3 heads are trained to this depth and fall off past it."""

MAX_LAG = 20
"""Longest lag, in rounds, of `WalkStatistics.autocorrelation`."""

PREDICTION_DECAY = 0.8
"""Decay per round of the moving average whose forecast `WalkStatistics.predictability` scores."""


@dataclass
class AcceptanceBank:
    """Arrays of coming acceptance, grouped by domain, for one seed.

    An array stored at `accepted[start : start + length]` holds one value per output position. A
    round of k drafts started at position t accepts `min(accepted[t], k)` of them, commits one token
    more, and the next round starts right after what was committed.
    """

    accepted: NDArray[np.uint8]
    """Shape `(num_positions,)`: drafts a round started here would have accepted, uncapped by k."""
    latent: NDArray[np.uint16]
    """Shape `(num_positions,)`: the row of `survival` that describes the hidden state here."""
    array_start: IntArray
    """Shape `(num_arrays,)`: first position of every array."""
    array_length: NDArray[np.int32]
    """Shape `(num_arrays,)`: positions of every array, at least 1."""
    domain_first: IntArray
    """Shape `(num_domains,)`: first array of every domain; arrays of one domain are consecutive."""
    domain_count: NDArray[np.int32]
    """Shape `(num_domains,)`: arrays of every domain, at least 1."""
    survival: FloatArray
    """Shape `(num_latents, MAX_K + 1)`: P(at least d drafts accepted | latent); column 0 is 1."""
    domain_names: tuple[str, ...]
    """One name per domain."""

    def arrays_of(self, domain: int) -> slice:
        """The arrays of a domain, by its index, as a slice of `array_start` and `array_length`."""
        first = int(self.domain_first[domain])
        return slice(first, first + int(self.domain_count[domain]))


class AcceptanceSource(Protocol):
    """Where banks come from."""

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains, in the order of every bank."""
        ...

    def bank(self, seed: int) -> AcceptanceBank:
        """The bank of a seed: the same seed gives the same bank, whatever any policy does."""
        ...


def concatenate(banks: Sequence[AcceptanceBank]) -> tuple[AcceptanceBank, IntArray]:
    """One bank that holds all `banks`, and the offset of each bank's domains in it.

    Domain i of bank j becomes domain `offsets[j] + i`. Banks with equal `survival` tables, such as
    those that one source made for many seeds, share its rows. Raises ValueError when the distinct
    tables have more rows together than a 16-bit latent can tell apart.
    """
    tables: list[FloatArray] = []
    table_row: dict[bytes, int] = {}
    num_rows = 0
    latents = []
    for bank in banks:
        key = bank.survival.tobytes()
        if key not in table_row:
            table_row[key] = num_rows
            tables.append(bank.survival)
            num_rows += len(bank.survival)
        latents.append(bank.latent.astype(np.int64) + table_row[key])
    if num_rows > np.iinfo(np.uint16).max + 1:
        raise ValueError(f"{num_rows} latent states do not fit 16 bits: concatenate fewer distinct sources")
    position_offsets = _offsets([len(bank.accepted) for bank in banks])
    array_offsets = _offsets([len(bank.array_start) for bank in banks])
    domain_offsets = _offsets([len(bank.domain_first) for bank in banks])
    merged = AcceptanceBank(
        accepted=np.concatenate([bank.accepted for bank in banks]),
        latent=np.concatenate(latents).astype(np.uint16),
        array_start=np.concatenate(
            [bank.array_start + offset for bank, offset in zip(banks, position_offsets, strict=True)]
        ),
        array_length=np.concatenate([bank.array_length for bank in banks]),
        domain_first=np.concatenate(
            [bank.domain_first + offset for bank, offset in zip(banks, array_offsets, strict=True)]
        ),
        domain_count=np.concatenate([bank.domain_count for bank in banks]),
        survival=np.concatenate(tables),
        domain_names=tuple(name for bank in banks for name in bank.domain_names),
    )
    return merged, domain_offsets


def _offsets(sizes: list[int]) -> IntArray:
    """Where each part begins when parts of these sizes follow one another."""
    ends = np.cumsum(sizes, dtype=np.int64)
    return ends - np.array(sizes, np.int64)


@dataclass(frozen=True)
class WalkStatistics:
    """What a walk that always uses the same k sees on every array of a domain."""

    accept_length: float
    """Tokens per round, bonus token included, over all rounds."""
    conditional: FloatArray
    """Shape `(k,)`: P(draft d accepted | the d - 1 before it were), d = 1..k; NaN where never reached."""
    request_accept_length: FloatArray
    """Shape `(num_arrays,)`: tokens per round of every array."""
    first_depth_sd: float
    """Standard deviation over arrays of the depth-1 rate, binomial sampling noise removed."""
    autocorrelation: FloatArray
    """Shape `(MAX_LAG,)`: of accepted drafts at lags 1.. rounds, each array's own mean removed."""
    predictability: float
    """Squared correlation of a round's accepted drafts with the moving average of the array's past."""


def walk_statistics(bank: AcceptanceBank, domain: int, k: int) -> WalkStatistics:
    """Walk every array of a domain (an index into `bank.domain_names`) with k drafts in every round."""
    arrays = bank.arrays_of(domain)
    starts, lengths = bank.array_start[arrays], bank.array_length[arrays]
    rounds, num_rounds = walk_rounds(bank.accepted, starts, lengths, k)
    owner = np.repeat(np.arange(len(num_rounds)), num_rounds)
    reached = np.array([np.count_nonzero(rounds >= depth) for depth in range(k + 1)], np.float64)
    with np.errstate(invalid="ignore"):
        conditional = reached[1:] / reached[:-1]
    request_mean = np.bincount(owner, weights=rounds) / num_rounds
    first_rate = np.bincount(owner, weights=rounds >= 1) / num_rounds
    repeated = num_rounds > 1
    noise = np.mean((first_rate * (1 - first_rate))[repeated] / (num_rounds[repeated] - 1))
    return WalkStatistics(
        accept_length=1 + float(rounds.mean()),
        conditional=conditional,
        request_accept_length=1 + request_mean,
        first_depth_sd=float(np.sqrt(max(0.0, first_rate.var() - noise))),
        autocorrelation=_autocorrelation(rounds - request_mean[owner], owner),
        predictability=_predictability(rounds, num_rounds),
    )


def _autocorrelation(deviation: FloatArray, owner: IntArray) -> FloatArray:
    """Correlation at lags 1..MAX_LAG over all pairs of rounds of the same array; NaN without a pair."""
    correlation = np.full(MAX_LAG, np.nan)
    for lag in range(1, min(MAX_LAG, len(owner) - 1) + 1):
        same = owner[lag:] == owner[:-lag]
        early, late = deviation[:-lag][same], deviation[lag:][same]
        scale = np.sqrt(np.sum(early**2) * np.sum(late**2))
        if scale > 0:
            correlation[lag - 1] = np.sum(early * late) / scale
    return correlation


def _predictability(rounds: NDArray[np.uint8], num_rounds: IntArray) -> float:
    """Squared correlation of rounds with forecasts from the rounds before; 0 when either is flat."""
    forecast = _moving_average(rounds, num_rounds, PREDICTION_DECAY)
    known = ~np.isnan(forecast)
    seen = rounds[known].astype(np.float64)
    if len(seen) < 2 or seen.std() == 0 or forecast[known].std() == 0:
        return 0.0
    return float(np.corrcoef(forecast[known], seen)[0, 1] ** 2)


@numba.njit(cache=True)
def walk_rounds(
    accepted: NDArray[np.uint8], starts: IntArray, lengths: NDArray[np.int32], k: int
) -> tuple[NDArray[np.uint8], IntArray]:
    """Accepted drafts of every round of walks with k, array after array, and the rounds of each array."""
    rounds = np.empty(lengths.sum(), np.uint8)
    num_rounds = np.zeros(len(starts), np.int64)
    written = 0
    for array in range(len(starts)):
        position = starts[array]
        end = position + lengths[array]
        while position < end:
            yielded = min(accepted[position], k)
            rounds[written] = yielded
            written += 1
            num_rounds[array] += 1
            position += yielded + 1
    return rounds[:written], num_rounds


@numba.njit(cache=True)
def _moving_average(rounds: NDArray[np.uint8], num_rounds: IntArray, decay: float) -> FloatArray:
    """Exponentially weighted mean of an array's earlier rounds, for every round; NaN for its first."""
    forecast = np.empty(len(rounds), np.float64)
    index = 0
    for array in range(len(num_rounds)):
        total, weight = 0.0, 0.0
        for _ in range(num_rounds[array]):
            forecast[index] = total / weight if weight > 0 else np.nan
            total = total * decay + rounds[index]
            weight = weight * decay + 1
            index += 1
    return forecast
