"""Reads a decision log back, the part that was moved aside and the end that a killed server tore included."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.errors import UserError
from draftdial.controller.files import sha256_of
from draftdial.engine_patch.log_format import (
    CONTROL,
    FRAME,
    POLICY,
    SCHEMA,
    describe_types,
    record_types,
)

Records = NDArray[np.void]


@dataclass(frozen=True)
class Control:
    """Something that happened between two rounds: see `DecisionLog.control`."""

    order: int
    time_s: float
    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, eq=False)
class RecordedLog:
    """What one server recorded. Fields of the records: `log_format.record_types`."""

    source: str
    """Opens every complaint: the path it was read from."""
    header: dict[str, Any]
    is_whole: bool
    """Does it go back to the start of the server? If not, size forced the oldest part out."""
    rounds: Records
    """Shape `(num_rounds,)`, in the order they were launched."""
    outcomes: Records
    """Shape `(num_outcomes,)`, in the order the policy observed them."""
    requests: Records
    """Shape `(num_events,)`, in the order they happened."""
    accepts: Records
    """Shape `(num_rows,)`: `round_id, k, request_id, position, accepted`, one per request and round."""
    controls: tuple[Control, ...]
    policies: dict[str, bytes]
    """Policy files by their SHA-256."""

    @property
    def tiers(self) -> tuple[int, ...]:
        return tuple(self.header["tiers"])


@dataclass(frozen=True)
class _Part:
    """One file."""

    header: dict[str, Any]
    frames: dict[bytes, list[bytes]]

    def records(self, kind: bytes) -> Records:
        return np.frombuffer(b"".join(self.frames[kind]), record_types(self.header["tiers"][-1])[kind])

    def accepts(self) -> Records:
        """Each row with the round and the k of its span."""
        rows, spans = self.records(b"acpt"), self.records(b"span")
        ends = np.cumsum(spans["num_requests"], dtype=np.int64)
        owner = np.searchsorted(ends, np.arange(len(rows)), side="right")
        owner = owner[owner < len(spans)]
        joined = np.zeros(len(owner), [("round_id", "<i8"), ("k", "<i2"), *rows.dtype.descr])
        for name in ("round_id", "k"):
            joined[name] = spans[name][owner]
        for name in rows.dtype.names or ():
            joined[name] = rows[name][: len(owner)]
        return joined


def read_log(path: str | Path) -> RecordedLog:
    """The log at `path`, with `path`.1 before it where that is its first half.

    Raises:
        UserError: no decision log is there, it is of another version, or it is damaged before its end.
    """
    path = Path(path)
    parts = [_read_part(path)]
    earlier = path.with_name(f"{path.name}.1")
    if parts[0].header["part"] and earlier.exists():
        before = _read_part(earlier)
        if _follows(before, parts[0]):
            parts.insert(0, before)
    controls = [_control(text, path) for part in parts for text in part.frames[CONTROL]]
    policies = [data for part in parts for data in part.frames[POLICY]]
    return RecordedLog(
        source=str(path),
        header=parts[-1].header,
        is_whole=parts[0].header["part"] == 0,
        rounds=_joined(parts, b"rond"),
        outcomes=_joined(parts, b"outc"),
        requests=_joined(parts, b"reqs"),
        accepts=np.concatenate([part.accepts() for part in parts]),
        controls=tuple(controls),
        policies={sha256_of(data): data for data in policies},
    )


def _joined(parts: list[_Part], kind: bytes) -> Records:
    return np.concatenate([part.records(kind) for part in parts])


def _follows(first: _Part, second: _Part) -> bool:
    return bool(
        first.header["run"] == second.header["run"] and first.header["part"] + 1 == second.header["part"]
    )


def _control(text: bytes, path: Path) -> Control:
    try:
        event = json.loads(text)
        control = Control(event["order"], event["time_s"], event["kind"], event["data"])
    except (ValueError, LookupError, TypeError, RecursionError):
        control = None
    if control is None or not (
        type(control.order) is int
        and type(control.time_s) in (int, float)
        and isinstance(control.kind, str)
        and isinstance(control.data, dict)
    ):
        raise UserError(f"{path}: damaged: a ctrl frame holds no control event")
    return control


def _read_part(path: Path) -> _Part:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read the decision log: {error.strerror}") from None
    line, newline, _ = data.partition(b"\n")
    header = _header(line, path)
    frames: dict[bytes, list[bytes]] = defaultdict(list)
    types = record_types(header["tiers"][-1])
    known = {*types, CONTROL, POLICY}
    begin = len(line) + len(newline)
    while begin + FRAME.size <= len(data):
        kind, num_records, num_bytes, checksum = FRAME.unpack_from(data, begin)
        if kind not in known:
            raise UserError(f"{path}: damaged at byte {begin}: found no frame, allowed: {_names(known)}")
        payload = data[begin + FRAME.size : begin + FRAME.size + num_bytes]
        if len(payload) < num_bytes:
            break  # the server was killed while it wrote this
        if kind in types and num_bytes != num_records * types[kind].itemsize:
            raise UserError(
                f"{path}: damaged at byte {begin}: a {kind.decode()} frame of {num_bytes} bytes "
                f"says that it holds {num_records} records"
            )
        if zlib.crc32(payload) != checksum:
            raise UserError(f"{path}: damaged at byte {begin}: a {kind.decode()} frame's checksum is wrong")
        frames[kind].append(payload)
        begin += FRAME.size + num_bytes
    return _Part(header, frames)


def _header(line: bytes, path: Path) -> dict[str, Any]:
    """The first line, or a UserError if this is no log that this version can read."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or not str(header.get("schema", "")).startswith("draftdial.log/"):
        raise UserError(f"{path}: line 1: found no {SCHEMA} header, so this is no decision log")
    tiers: Any = header.get("tiers")
    has_tiers = (
        isinstance(tiers, list) and bool(tiers) and all(type(k) is int and 0 <= k < 256 for k in tiers)
    )
    if not (
        has_tiers and tiers == sorted(set(tiers)) and type(header.get("part")) is int and "run" in header
    ):
        raise UserError(f"{path}: line 1: the header lacks or misstates tiers, run or part: damaged")
    if header["schema"] != SCHEMA or header.get("records") != describe_types(tiers[-1]):
        raise UserError(
            f"{path}: line 1: found {header['schema']} of another version of draftdial, allowed: {SCHEMA} "
            "with this version's records"
        )
    return header


def _names(kinds: set[bytes]) -> str:
    return ", ".join(sorted(kind.decode() for kind in kinds))
