"""Acceptance replayed from recorded arrays: one JSON object a line with `id, prompt_len, gen_len, acc`.

`acc[t]` counts the tokens that a round started at output position t yields, bonus token included, when
nothing caps it. `acc[0]` belongs to the token that prefill produced, so the walk starts at `acc[1]`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.errors import UserError
from draftdial.controller.signals import FloatArray
from draftdial.envs.acceptance import MAX_K, AcceptanceBank, walk_rounds

MIN_POSITIONS = 32
"""Requests with fewer positions are left out: they say little and start and end oddly."""

SURVIVAL_POSITIONS = 1024
"""Positions of a request that count for `survival`; a few requests that repeat themselves for thousands
of tokens would otherwise speak for all the others."""

NUM_HALVES = 2
MAX_YIELD = 256
"""Largest `acc` kept: 255 drafts and the bonus token; what lies above counts as this."""


class ReplayedAcceptance:
    """Recorded requests, one JSONL file per domain: a mapping from names, or paths named by file stem.

    A request's latent says to which half of its domain it belongs, even or odd by order in the file.
    The `survival` of a half is measured on the other one, so that nobody is told their own future:
    column d is `E[d] - E[d - 1]`, E[k] being the tokens per round of a walk that always uses k. Raises
    UserError for a file that is missing, malformed, or has fewer than two usable requests.
    """

    name = "replayed"

    def __init__(self, paths: Mapping[str, str | Path] | Sequence[str | Path]) -> None:
        named = paths.items() if isinstance(paths, Mapping) else [(Path(path).stem, path) for path in paths]
        self.domains = tuple(name for name, _ in named)
        if not named or len(set(self.domains)) < len(self.domains):
            raise UserError(
                f"acceptance replay needs one file per domain, each domain once; found {list(self.domains)}"
            )
        self._bank = bank_of_arrays({name: _read_requests(Path(path)) for name, path in named})

    def bank(self, seed: int) -> AcceptanceBank:
        """The recorded bank, the same for every seed: requests differ by the arrays their hashes pick."""
        return self._bank


def bank_of_arrays(requests: dict[str, list[NDArray[np.uint8]]]) -> AcceptanceBank:
    """The bank of recorded arrays by domain, in the order given; two arrays or more in each."""
    arrays = [array for domain in requests.values() for array in domain]
    lengths = np.array([len(array) for array in arrays], np.int32)
    counts = np.array([len(domain) for domain in requests.values()], np.int32)
    row = np.concatenate(
        [NUM_HALVES * index + np.arange(count) % NUM_HALVES for index, count in enumerate(counts)]
    )
    return AcceptanceBank(
        accepted=np.concatenate(arrays),
        latent=np.repeat(row, lengths).astype(np.uint16),
        array_start=np.cumsum(lengths, dtype=np.int64) - lengths,
        array_length=lengths,
        domain_first=np.cumsum(counts, dtype=np.int64) - counts,
        domain_count=counts,
        survival=np.stack(
            [
                _walked_survival(domain[1 - half :: NUM_HALVES])
                for domain in requests.values()
                for half in range(NUM_HALVES)
            ]
        ),
        domain_names=tuple(requests),
    )


def _walked_survival(arrays: list[NDArray[np.uint8]]) -> FloatArray:
    """Shape `(MAX_K + 1,)`: gain in tokens per round of a walk with d over one with d - 1; column 0 is 1.

    With k drafts in every round the columns up to k add up to the tokens per round of just that walk,
    which differs from walk to walk since a deeper one starts its rounds at harder positions. So these
    are gains rather than probabilities: in odd data one may exceed the gain before it, or 1.
    """
    heads = [array[:SURVIVAL_POSITIONS] for array in arrays]
    lengths = np.array([len(head) for head in heads], np.int32)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    accepted = np.concatenate(heads)
    drafts = [walk_rounds(accepted, starts, lengths, k)[0].mean() for k in range(MAX_K + 1)]
    return np.concatenate([[1.0], np.diff(drafts)])


def _read_requests(path: Path) -> list[NDArray[np.uint8]]:
    """Accepted drafts at every position of every usable request of a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"acceptance file {path}: cannot read it as text ({error})") from None
    requests = [_read_line(line, f"{path} line {number}") for number, line in enumerate(text.splitlines(), 1)]
    usable = [request for request in requests if len(request) >= MIN_POSITIONS]
    if len(usable) < NUM_HALVES:
        raise UserError(
            f"{path}: {len(usable)} of {len(requests)} requests have {MIN_POSITIONS} positions or more after "
            f"the first; at least {NUM_HALVES} are needed"
        )
    return usable


def _read_line(line: str, where: str) -> NDArray[np.uint8]:
    """Accepted drafts at every position after the prefill token; raises UserError naming the field."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} column {error.colno}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{where}: not JSON that can be read: a number too long or lists too deep") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object with id, prompt_len, gen_len and acc")
    _require(isinstance(record.get("id"), str | int), where, "id", "a string or an integer", record.get("id"))
    for field in ("prompt_len", "gen_len"):
        value = record.get(field)
        _require(_is_count(value, least=0), where, field, "an integer >= 0", value)
    acc: Any = record.get("acc")
    _require(isinstance(acc, list) and len(acc) > 0, where, "acc", "a list of integers >= 1, not empty", acc)
    for position, value in enumerate(acc):
        _require(_is_count(value, least=1), where, f"acc[{position}]", "an integer >= 1", value)
    return np.array([min(value, MAX_YIELD) - 1 for value in acc[1:]], np.uint8)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(fulfilled: bool, where: str, field: str, allowed: str, found: object) -> None:
    if not fulfilled:
        shown = "nothing" if found is None else json.dumps(found)[:40]
        raise UserError(f"{where}, field {field}: expected {allowed}, found {shown}")
