"""Progress in lines on standard error, where there is no terminal to show a bar."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic

from rich.console import Console

LINE_EVERY_S = 10.0
"""How often there is one."""


class ProgressLines:
    """Those of one command; on a terminal none."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._due_s = monotonic() + LINE_EVERY_S

    def say(self, text: str) -> None:
        """A line now."""
        if not Console(file=sys.stderr).is_terminal:
            print(f"draftdial {self._command}: {text}", file=sys.stderr, flush=True)

    def now_and_then(self, text: Callable[[], str]) -> None:
        """A line if the last one, or the beginning, is long enough ago; `text` is asked for then alone."""
        if monotonic() >= self._due_s:
            self._due_s = monotonic() + LINE_EVERY_S
            self.say(text())
