"""How much has been measured, on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftdial.controller.progress_lines import ProgressLines

SPEED_OF_LAST_S = 3600.0
"""The time left follows from the speed over so long: one measurement may take a minute."""


@contextmanager
def measuring_progress(command: str, what: str, total: int) -> Iterator[MeasuringProgress]:
    """Of `draftdial command`, which is to measure `total` of `what`, or more."""
    console = Console(file=sys.stderr)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=SPEED_OF_LAST_S,
        get_time=monotonic,
    ) as progress:
        yield MeasuringProgress(command, what, total, progress)


class MeasuringProgress:
    """What `measuring_progress` shows."""

    def __init__(self, command: str, what: str, total: int, progress: Progress) -> None:
        self._what = what
        self._total = total
        self._progress = progress
        self._bar = progress.add_task(what, total=total)
        self._lines = ProgressLines(command)

    def begin_pass(self, num_done: int, num_left: int) -> None:
        """So much has been measured by now, and so much is to be in the coming pass."""
        total = max(self._total, num_done + num_left)
        self._progress.update(self._bar, completed=num_done, total=total)

    def measuring(self, name: str) -> None:
        """This is being measured now."""
        self._progress.update(self._bar, description=name)

    def measured(self, count: int = 1) -> None:
        """It has been, or `count` of them are left out."""
        self._progress.advance(self._bar, count)
        self._lines.now_and_then(self._line)

    def _line(self) -> str:
        [task] = self._progress.tasks
        left_s = task.time_remaining
        left = "" if left_s is None else f", {timedelta(seconds=left_s)} left"
        return f"{self._what}: {task.completed:.0f} of {task.total:.0f} measured{left}"
