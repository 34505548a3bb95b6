"""Ctrl-C: while something is put back, and in disguise."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C in the block, which must end by itself.

    Who presses it twice still wants the block's work done: what it puts back would be left half as it was.
    In the main thread only, as all signal handling in Python.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def is_interrupt(error: BaseException | None) -> bool:
    """Was it Ctrl-C that ended the work? Numba, where it loads compiled code, makes a SystemError of that."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
