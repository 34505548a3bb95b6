"""Numbers on the command line: types for argparse, whose complaints say what is allowed."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"found {text}, allowed: a whole number from 1 to 1000000")
    return int(text)


def count_or_none(text: str) -> int:
    """A whole number, 0 for none."""
    return 0 if text == "0" else count(text)


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between."""
    return tuple(count(part) for part in text.split(","))


def positive(text: str) -> float:
    """A number above 0, below a million: of seconds, what a socket can wait for."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"found {text}, allowed: a number above 0 and below a million")
    return value


def share(text: str) -> float:
    """A number above 0 and below 1."""
    value = positive(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"found {text}, allowed: a number above 0 and below 1")
    return value


def positives(text: str) -> tuple[float, ...]:
    """Numbers above 0 with commas between."""
    return tuple(positive(part) for part in text.split(","))


def span(text: str) -> tuple[int, int]:
    """`LOW:HIGH`, two whole numbers above 0 that may be the same."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"found {text}, allowed: LOW:HIGH, LOW not above HIGH")
    return count(low), count(high)
