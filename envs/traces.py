"""Readers of public trace formats, and workloads that replay what was recorded.

A format is told by its header, or by a leading `{` for JSON lines; docs/workloads.md lists them.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from draftdial.controller.errors import UserError
from draftdial.controller.signals import FloatArray
from draftdial.envs.lengths import Int32Array
from draftdial.envs.open_loop import RateProfile

MAX_WINDOWS = 1_000_000


@dataclass(frozen=True)
class _Kind:
    """One kind of cell: how to read it and, for the user, what is allowed in it."""

    read: Callable[[Any], float]
    allowed: str


def _tokens(value: str | int) -> int:
    count = int(value)
    if count != float(value) or not 0 <= count < 2**31:
        raise ValueError
    return count


def _number(value: str | float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _rate(value: str) -> float:
    if _number(value) < 0:
        raise ValueError
    return float(value)


def _date(value: str) -> float:
    moment = datetime.fromisoformat(value)
    # Without a zone the local one would be taken, and its clock changes with it.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


TOKENS = _Kind(_tokens, "a whole number from 0 to 2147483647")
SECONDS = _Kind(_number, "a finite number of seconds")
MILLISECONDS = _Kind(lambda value: _number(value) / 1000, "a finite number of milliseconds")
DATE = _Kind(_date, "a date and time such as 2023-11-16 18:15:46.6805900")
RATE = _Kind(_rate, "a finite number >= 0")
TEXT = _Kind(lambda value: value, "text")


@dataclass(frozen=True)
class _Layout:
    """Columns a file must have to be of this format; those it has beyond them are not read."""

    name: str
    columns: dict[str, _Kind]
    step_s: float
    """Trace: the grid that recorded times lie on, 0 if none. Rate profile: length of one row's window."""


TRACE_LAYOUTS = (
    _Layout("Azure", {"TIMESTAMP": DATE, "ContextTokens": TOKENS, "GeneratedTokens": TOKENS}, 0.0),
    _Layout("BurstGPT", {"Timestamp": SECONDS, "Request tokens": TOKENS, "Response tokens": TOKENS}, 1.0),
    _Layout("plain", {"arrival_s": SECONDS, "input_tokens": TOKENS, "output_tokens": TOKENS}, 0.0),
    _Layout(
        "plain in ms", {"arrival_ms": MILLISECONDS, "input_tokens": TOKENS, "output_tokens": TOKENS}, 3.0
    ),
)
MOONCAKE = _Layout(
    "Mooncake", {"timestamp": MILLISECONDS, "input_length": TOKENS, "output_length": TOKENS}, 3.0
)
PROFILE_LAYOUTS = (
    _Layout("minutes", {"minute": TOKENS, "tokens_per_s": RATE}, 60.0),
    _Layout("ServeGen", {"window_start_s": TOKENS, "total_rate_rps": RATE, "pool": TEXT}, 600.0),
)


@dataclass(frozen=True, eq=False)
class Trace:
    """Recorded requests in order of arrival. Every array has shape `(num_requests,)`."""

    name: str
    arrival_s: FloatArray
    """From 0 at the first request."""
    prompt_tokens: Int32Array
    output_tokens: Int32Array
    grid_s: float
    """Arrivals were recorded rounded down to multiples of this; 0 if they are exact."""

    @property
    def num_requests(self) -> int:
        return len(self.arrival_s)

    @property
    def period_s(self) -> float:
        """Recorded time, a last step of the grid or a last mean gap included."""
        span_s = float(self.arrival_s[-1])
        return span_s + max(self.grid_s, span_s / (self.num_requests - 1))

    @property
    def rate_per_s(self) -> float:
        """Mean arrival rate as recorded."""
        return self.num_requests / self.period_s


def read_trace(path: str | Path) -> Trace:
    """Requests of a trace file in any known format; UserError names file, line and column of a bad cell.

    Rows are sorted by time. Rows without output tokens, which BurstGPT has for failed requests, are
    left out; a prompt of 0 tokens counts as 1.
    """
    path = Path(path)
    layout, rows = _read_table(path, TRACE_LAYOUTS, MOONCAKE)
    table = np.array([row for row in rows if row[2] > 0], np.float64).reshape(-1, 3)
    table = table[np.argsort(table[:, 0], kind="stable")]
    stamps = np.unique(table[:, 0])
    if len(stamps) < 2:
        raise UserError(f"{path}: a trace needs requests with output at two different times or more")
    return Trace(
        name=path.stem,
        arrival_s=table[:, 0] - stamps[0],
        prompt_tokens=np.maximum(table[:, 1], 1).astype(np.int32),
        output_tokens=table[:, 2].astype(np.int32),
        # A file of this format with finer times than its grid has no grid, and nothing to spread.
        grid_s=min(layout.step_s, float(np.diff(stamps).min())),
    )


def read_rate_profile(path: str | Path, pool: str | None = None) -> RateProfile:
    """The load curve of a minute table (`minute, tokens_per_s`) or of one pool of a ServeGen rate table.

    Windows that the file leaves out had no traffic.
    """
    path = Path(path)
    layout, rows = _read_table(path, PROFILE_LAYOUTS)
    if layout.columns.get("pool"):
        pools = list(dict.fromkeys(row[2] for row in rows))
        if pool not in pools:
            raise UserError(f"{path}: pool is {pool!r}; allowed: {', '.join(pools)}")
        rows = [(row[0] // layout.step_s, row[1]) for row in rows if row[2] == pool]
    elif pool is not None:
        raise UserError(f"{path}: pool is {pool!r}, but the file has no column 'pool'; leave it out")
    if not rows:
        raise UserError(f"{path}: holds no rows")
    window, rate = np.array(rows, np.float64).T
    place = (window - window.min()).astype(np.int64)
    if place.max() >= MAX_WINDOWS:
        raise UserError(f"{path}: spans {place.max() + 1} windows; allowed: up to {MAX_WINDOWS}")
    rates = np.zeros(place.max() + 1)
    rates[place] = rate
    return RateProfile(layout.step_s, rates)


def _read_table(
    path: Path, layouts: tuple[_Layout, ...], json_layout: _Layout | None = None
) -> tuple[_Layout, list[tuple[Any, ...]]]:
    """The layout of a file and, row by row, the cells of its columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            if json_layout and file.read(1) == "{":
                file.seek(0)
                return json_layout, list(_json_rows(path, file, json_layout))
            file.seek(0)
            return _csv_table(path, file, layouts)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text") from None


def _csv_table(
    path: Path, file: TextIO, layouts: tuple[_Layout, ...]
) -> tuple[_Layout, list[tuple[Any, ...]]]:
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    layout = next((layout for layout in layouts if set(layout.columns) <= set(header)), None)
    if layout is None:
        known = "; ".join(f"{', '.join(layout.columns)} ({layout.name})" for layout in layouts)
        found = ", ".join(header)[:80] or "nothing"
        raise UserError(f"{path}, line 1: columns are {found}; allowed: {known}")
    cells = [(name, kind, header.index(name)) for name, kind in layout.columns.items()]
    rows = []
    try:
        for row in reader:
            if row and len(row) != len(header):
                raise UserError(
                    f"{path}, line {reader.line_num}, column {len(row)}: the line ends here; "
                    f"allowed: {len(header)} columns as in the header"
                )
            if row:
                rows.append(
                    tuple(_cell(path, reader.line_num, name, kind, row[at]) for name, kind, at in cells)
                )
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from None
    return layout, rows


def _json_rows(path: Path, file: TextIO, layout: _Layout) -> Iterator[tuple[Any, ...]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {number}, column {error.colno}: {error.msg}; allowed: one JSON object a line"
            ) from None
        except (ValueError, RecursionError):
            raise UserError(
                f"{path}, line {number}, column 1: a number too long or lists too deep; "
                "allowed: one JSON object a line"
            ) from None
        if not isinstance(request, dict):
            raise UserError(f"{path}, line {number}, column 1: allowed: one JSON object a line")
        yield tuple(
            _cell(path, number, name, kind, request.get(name)) for name, kind in layout.columns.items()
        )


def _cell(path: Path, line: int, column: str, kind: _Kind, value: object) -> Any:
    try:
        return kind.read(value)
    except (ValueError, TypeError, OverflowError):
        found = "missing" if value is None else repr(value)[:40]
        raise UserError(
            f"{path}, line {line}, column {column!r}: is {found}; allowed: {kind.allowed}"
        ) from None
