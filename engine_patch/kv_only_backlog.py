"""Rounds at k = 0, and prefills between them, whose keys and values the draft is still owed.

A projection reads all its weights however few tokens it is given, and takes the host as long to launch, for
which the GPU waits behind a prefill. So what it needs of many of them is kept, and projected at once before
the draft runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

CAPACITY = 1024
"""Rows. From a few hundred on a projection is bound by arithmetic, and more of them together save nothing:
half of it is for a prefill that comes between."""


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
    """Copies of what was owed since the last `take`, projected at once, written in parts.

    A request that ends frees its slots, and another one may be given them in the very next batch. In one
    write the two would have no order. So only rounds of the same requests make one part.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._kept: Owed | None = None
        self._num_rows = 0
        self._begins: list[int] = []
        """Of each part, its first row."""
        self._requests: Sequence[str] | None = None
        """Of the last part."""

    def takes(self, owed: Owed) -> bool:
        """Is there room for it?"""
        return self._num_rows + len(owed.slots) <= self.capacity

    @property
    def is_half_full(self) -> bool:
        return 2 * self._num_rows >= self.capacity

    def add(self, owed: Owed, requests: Sequence[str] | None) -> None:
        """Keep what it `takes`; the tensors may be overwritten afterwards.

        Args:
            requests: Of a decode round; None is a part of its own.
        """
        if self._kept is None:
            self._kept = Owed(*(new.new_empty((self.capacity, *new.shape[1:])) for new in owed))
        begin, end = self._num_rows, self._num_rows + len(owed.slots)
        for kept, new in zip(self._kept, owed, strict=True):
            kept[begin:end].copy_(new)
        if not begin or requests is None or requests != self._requests:
            self._begins.append(begin)
        self._num_rows, self._requests = end, requests

    def take(self) -> tuple[Owed, list[slice]] | None:
        """All that is owed, if anything, and which rows to write after which; nothing is owed afterwards."""
        if not self._num_rows:
            return None
        assert self._kept is not None
        end, self._num_rows = self._num_rows, 0
        begins, self._begins = self._begins, []
        parts = [slice(*bounds) for bounds in pairwise([*begins, end])]
        return Owed(*(kept[:end] for kept in self._kept)), parts
