"""Files of recorded acceptance: JSON lines with `id, prompt_len, gen_len, acc`, perhaps after a header.

`acc[t]` counts the tokens that a round started at output position t yields, bonus token included, when
nothing caps it. `acc[0]` belongs to the token that prefill produced, so the first round starts at `acc[1]`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.errors import UserError
from draftdial.controller.files import atomic_write

FORMAT = "draftdial.acceptance/1"
"""The `format` of a header line, which says what was recorded and how."""
MIN_POSITIONS = 32
"""Requests with fewer positions are left out: they say little and start and end oddly."""
MIN_REQUESTS = 2
MAX_YIELD = 256
"""Largest `acc` kept: 255 drafts and the bonus token; what lies above counts as this."""

AcceptedDrafts = NDArray[np.uint8]
"""Shape `(num_positions,)`: drafts that a round started at each position accepts, `acc[1:] - 1`."""


def read_requests(path: Path) -> list[AcceptedDrafts]:
    """Every usable request of a file (`.gz`: compressed), in its order, of whatever domain.

    Raises:
        UserError: the file is missing, malformed, or has fewer than two usable requests.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"acceptance file {path}: cannot read it as text ({error})") from None
    lines = list(enumerate(text.splitlines(), 1))
    if lines and f'"{FORMAT}"' in lines[0][1]:
        del lines[0]
    requests = [_read_line(line, f"{path} line {number}") for number, line in lines]
    usable = [request for request in requests if len(request) >= MIN_POSITIONS]
    if len(usable) < MIN_REQUESTS:
        raise UserError(
            f"{path}: {len(usable)} of {len(requests)} requests have {MIN_POSITIONS} positions or more after "
            f"the first; at least {MIN_REQUESTS} are needed"
        )
    return usable


def write_requests(path: Path, requests: Iterable[AcceptedDrafts]) -> None:
    """Write a file that `read_requests` reads; prompts have no length, as arrays are drawn without one."""
    lines = []
    for index, accepted in enumerate(requests):
        acc = [1, *(accepted.astype(int) + 1).tolist()]
        record = {"id": index, "prompt_len": 0, "gen_len": len(acc), "acc": acc}
        lines.append(json.dumps(record, separators=(",", ":")) + "\n")
    atomic_write(path, "".join(lines))


def _read_line(line: str, where: str) -> AcceptedDrafts:
    """Accepted drafts at every position after the prefill token; raises UserError naming the field."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} column {error.colno}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{where}: not JSON that can be read: a number too long or lists too deep") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object with id, prompt_len, gen_len and acc")
    _require(isinstance(record.get("id"), str | int), where, "id", "a string or an integer", record.get("id"))
    for field in ("prompt_len", "gen_len"):
        value = record.get(field)
        _require(_is_count(value, least=0), where, field, "an integer >= 0", value)
    acc: Any = record.get("acc")
    _require(isinstance(acc, list) and len(acc) > 0, where, "acc", "a list of integers >= 1, not empty", acc)
    for position, value in enumerate(acc):
        _require(_is_count(value, least=1), where, f"acc[{position}]", "an integer >= 1", value)
    return np.array([min(value, MAX_YIELD) - 1 for value in acc[1:]], np.uint8)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(fulfilled: bool, where: str, field: str, allowed: str, found: object) -> None:
    if not fulfilled:
        shown = "nothing" if found is None else json.dumps(found)[:40]
        raise UserError(f"{where}, field {field}: expected {allowed}, found {shown}")
