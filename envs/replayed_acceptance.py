"""Acceptance replayed from recorded arrays, see `controller/acceptance_file.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from draftdial.controller.acceptance_file import AcceptedDrafts, read_requests
from draftdial.controller.errors import UserError
from draftdial.controller.signals import FloatArray
from draftdial.envs.acceptance import MAX_K, AcceptanceBank, walk_rounds

SURVIVAL_POSITIONS = 1024
"""Positions of a request that count for `survival`; a few requests that repeat themselves for thousands
of tokens would otherwise speak for all the others."""

NUM_HALVES = 2


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
        self._bank = bank_of_arrays({name: read_requests(Path(path)) for name, path in named})

    def bank(self, seed: int) -> AcceptanceBank:
        """The recorded bank, the same for every seed: requests differ by the arrays their hashes pick."""
        return self._bank


def bank_of_arrays(requests: dict[str, list[AcceptedDrafts]]) -> AcceptanceBank:
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


def _walked_survival(arrays: list[AcceptedDrafts]) -> FloatArray:
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
