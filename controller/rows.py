"""Arithmetic with one number per server: NumPy arrays for many servers, Python's own numbers for one.

A NumPy call on one element costs ten times what Python's arithmetic does, and a decision makes dozens.
Formulas written with these few functions and operators hold for both and give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.signals import FloatArray, IntArray

Numbers = Any
"""One number per server: an array of shape `(num_servers,)` from `ManyRows`, a number from `OneRow`."""


class OneRow:
    """One server: its numbers are `int` and `float`."""

    maximum = staticmethod(max)
    minimum = staticmethod(min)

    def full(self, value: float) -> Numbers:
        return value

    def read(self, array: Numbers) -> Numbers:
        """The number in an array of shape `(1,)`."""
        return array.item()

    def where(self, condition: Numbers, true: Numbers, false: Numbers) -> Numbers:
        return true if condition else false

    def table(self, values: IntArray) -> Any:
        """`values` as something to be indexed with numbers."""
        return values.tolist()

    def pick(self, columns: FloatArray, index: Numbers) -> Numbers:
        """Entry `index` of an array of shape `(num_columns,)`."""
        return columns.item(index)

    def accumulate(self, operation: np.ufunc, array: FloatArray) -> FloatArray:
        """`operation.accumulate` along axis 1, in place."""
        return operation.accumulate(array, axis=1, out=array)

    def write(self, into: NDArray[Any], values: Sequence[Numbers]) -> None:
        """Fill `into`, shape `(len(values), 1)` and contiguous."""
        into.reshape(-1)[:] = values


class ManyRows:
    """`num_servers` servers: arrays of that length. Results may be views of what was given."""

    maximum = staticmethod(np.maximum)
    minimum = staticmethod(np.minimum)
    where = staticmethod(np.where)

    def __init__(self, num_servers: int) -> None:
        self._index = np.arange(num_servers)

    def full(self, value: float) -> Numbers:
        return np.full(len(self._index), value)

    def read(self, array: Numbers) -> Numbers:
        """`array` itself."""
        return array

    def table(self, values: IntArray) -> Any:
        """`values` as something to be indexed with arrays."""
        return values

    def pick(self, columns: FloatArray, index: Numbers) -> Numbers:
        """Entry `index[s]` of column s of an array of shape `(num_columns, num_servers)`."""
        return columns[index, self._index]

    def accumulate(self, operation: np.ufunc, array: FloatArray) -> FloatArray:
        """`operation.accumulate` along axis 1, in place."""
        # NumPy's own takes one server at a time: seven times as long for 512 of them.
        for i in range(1, array.shape[1]):
            operation(array[:, i - 1], array[:, i], out=array[:, i])
        return array

    def write(self, into: NDArray[Any], values: Sequence[Numbers]) -> None:
        """Fill `into`, shape `(len(values), num_servers)`."""
        for row, value in zip(into, values, strict=True):
            row[:] = value


def rows_of(num_servers: int) -> OneRow | ManyRows:
    """The arithmetic for so many servers."""
    return OneRow() if num_servers == 1 else ManyRows(num_servers)
