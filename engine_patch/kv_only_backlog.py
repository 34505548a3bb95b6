"""Rounds at k = 0 whose keys and values the draft is still owed.

A projection reads all its weights however few tokens it is given. So what it needs of many rounds is kept,
and projected at once before anything reads the draft's KV or may write to the same slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

CAPACITY = 1024
"""Rows. From a few hundred on a projection is bound by arithmetic, and more of them together save nothing."""


class Owed(NamedTuple):
    """What the projection of some tokens needs; a row for each, of one request or of several."""

    hidden: Tensor
    """The target's hidden states, `(rows, num_layers * width)`."""
    token_ids: Tensor
    """`(rows,)`, the token *after* each position."""
    positions: Tensor
    """`(rows,)`"""
    slots: Tensor
    """`(rows,)`, of the draft's pool."""


class Backlog:
    """Copies of what was owed since the last `take`, for requests that have been the same ones all the while.

    A request that ends frees its slots, and another one may be given them in the very next round. In one
    projection the two writes would have no order. So rounds of different requests are never kept together.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._kept: Owed | None = None
        self._num_rows = 0
        self._requests: Sequence[str] = ()

    def takes(self, owed: Owed, requests: Sequence[str]) -> bool:
        """Can this round be kept beside what there is?"""
        fits = self._num_rows + len(owed.slots) <= self.capacity
        return fits and (not self._num_rows or requests == self._requests)

    def add(self, owed: Owed, requests: Sequence[str]) -> None:
        """Keep a round that it `takes`; the tensors may be overwritten afterwards."""
        if self._kept is None:
            self._kept = Owed(*(new.new_empty((self.capacity, *new.shape[1:])) for new in owed))
        end = self._num_rows + len(owed.slots)
        for kept, new in zip(self._kept, owed, strict=True):
            kept[self._num_rows : end].copy_(new)
        self._num_rows, self._requests = end, requests

    def take(self) -> Owed | None:
        """All that is owed, if anything, in the order of its rounds; nothing is afterwards."""
        if not self._num_rows:
            return None
        assert self._kept is not None
        end, self._num_rows = self._num_rows, 0
        return Owed(*(kept[:end] for kept in self._kept))
