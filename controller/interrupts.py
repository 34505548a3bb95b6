"""Ctrl-C: while something is put back or begun, and in disguise."""

from __future__ import annotations

import signal
import threading
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


@contextmanager
def deferred() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block, which must end by itself.

    For steps that belong together: a thread that is started and that nobody knows of cannot be ended.
    In the main thread; in others Ctrl-C never arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


@contextmanager
def unmasked() -> Iterator[None]:
    """Let Ctrl-C leave the block as KeyboardInterrupt: numba, where it loads compiled code, makes a
    SystemError of it."""
    try:
        yield
    except SystemError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise KeyboardInterrupt from error
