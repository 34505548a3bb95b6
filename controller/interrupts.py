"""Ctrl-C while something is put back."""

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
