"""The decision log of one server: what was seen, decided and accepted, in a file of bounded size.

Only rank 0 writes it. Calls copy a few numbers into preallocated arrays; `flush_if_due` writes them out
after the next round has been launched. `log_reader.read_log` reads the file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import ArrayLike

from draftdial.controller.errors import UserError
from draftdial.controller.files import sha256_of
from draftdial.controller.signals import RoundOutcome, RoundSignals
from draftdial.engine_patch.log_format import (
    CONTROL,
    FRAME,
    POLICY,
    REQUEST_KINDS,
    SCHEMA,
    RequestKind,
    describe_types,
    is_decision_log,
    record_types,
)
from draftdial.engine_patch.settings import MIN_LOG_MB

CAPACITY = {b"rond": 1024, b"outc": 1024, b"reqs": 2048, b"acpt": 65536, b"span": 1024}
"""Records held in memory by kind."""
FLUSH_INTERVAL_S = 1.0
"""A killed server loses no more than this of its log."""
MIN_BYTES = MIN_LOG_MB << 20

_IN_USE = "another server writes it: name another file"
_SIGNALS = tuple(field.name for field in fields(RoundSignals))


class DecisionLog:
    """Appends records to `path`; when half the bound is reached, `path` moves to `path`.1 and starts anew.

    An error of the disk closes the log for good: `error` then says why, `num_lost` counts the calls that
    were not recorded, and no call ever raises.
    """

    def __init__(self, path: Path, max_bytes: int, header: dict[str, Any], file: BinaryIO) -> None:
        self.error = ""
        self.num_lost = 0
        self._path, self._part_bytes, self._header = path, max_bytes // 2, header
        self._file: BinaryIO | None = file
        self._num_counts = header["tiers"][-1] + 1
        types = record_types(header["tiers"][-1])
        self._buffers = {kind: _Buffer(np.zeros(CAPACITY[kind], dtype)) for kind, dtype in types.items()}
        self._rounds, self._outcomes = self._buffers[b"rond"], self._buffers[b"outc"]
        self._requests, self._accepts, self._spans = (self._buffers[k] for k in (b"reqs", b"acpt", b"span"))
        self._controls: list[bytes] = []
        self._order = 0
        self._num_open = 0
        self._num_bytes = 0
        self._policy = b""
        self._flushed_at_s = time.monotonic()

    @classmethod
    def open(cls, path: str | Path, max_bytes: int, header: dict[str, Any]) -> DecisionLog:
        """A new log at `path`; what an earlier server left there moves to `path`.1.

        Args:
            path: The file.
            max_bytes: Bound on the size of both files together.
            header: Plain JSON that says what wrote the log; `tiers`, ascending, is required.

        Raises:
            UserError: the file cannot be written, the bound is below 4 MiB, another file is in the way, or
                another server writes this log.
        """
        path = Path(path)
        if max_bytes < MIN_BYTES:
            raise UserError(
                f"decision log: size bound: found {max_bytes} bytes, allowed: {MIN_BYTES} or more"
            )
        types = describe_types(header["tiers"][-1])
        header = {"schema": SCHEMA, **header, "run": os.urandom(8).hex(), "part": 0, "records": types}
        try:
            in_the_way = obstacle(path)
            if in_the_way is not None:
                raise UserError(f"decision log {path}: {in_the_way}")
            file = _fresh_file(path)
            log = cls(path, max_bytes, header, file)
            log._begin_part(file)
        except OSError as error:
            raise UserError(f"decision log {path}: cannot be written: {error.strerror}") from None
        return log

    def round(self, signals: RoundSignals, policy_k: int, acted_k: int, mode_code: int) -> None:
        """A decision: row 0 of what the policy saw, what it said (-1 if not asked), what runs, the mode."""
        if self._has_room(self._rounds):
            seen = [getattr(signals, name)[0] for name in _SIGNALS]
            order = self._next_order()
            self._rounds.append((order, time.time(), *seen, policy_k, acted_k, mode_code))

    def outcome(self, outcome: RoundOutcome) -> None:
        """Row 0 of an outcome, at the moment the policy observes it."""
        if self._has_room(self._outcomes):
            order, counts = self._next_order(), outcome.accept_counts[0, : self._num_counts]
            self._outcomes.append((order, outcome.round_id[0], outcome.k[0], counts))

    def accepts(
        self, round_id: int, k: int, request_ids: ArrayLike, positions: ArrayLike, accepted: ArrayLike
    ) -> None:
        """A finished round request by request, each array of shape `(num_requests,)`.

        Args:
            round_id: The round.
            k: Its draft tokens.
            request_ids: The numbers that `request` calls them by.
            positions: Output tokens each had when the round was launched, 1 right after prefill.
            accepted: Drafts accepted of each, 0..k.
        """
        ids = np.asarray(request_ids)
        if self._has_room(self._spans) and self._has_room(self._accepts, len(ids)):
            first, self._accepts.count = self._accepts.count, self._accepts.count + len(ids)
            rows = self._accepts.records[first : self._accepts.count]
            rows["request_id"], rows["position"], rows["accepted"] = ids, positions, accepted
            self._spans.append((round_id, k, len(ids)))

    def request(
        self, kind: RequestKind, request_id: int, time_s: float, prompt_tokens: int, output_tokens: int
    ) -> None:
        """A request arrived, finished or was aborted, at `time_s` on the server's wall clock."""
        if self._has_room(self._requests):
            code, order = REQUEST_KINDS.index(kind), self._next_order()
            self._requests.append((order, time_s, request_id, code, prompt_tokens, output_tokens))
            self._num_open += 1 if kind == "arrived" else -1

    def control(self, kind: str, data: dict[str, Any]) -> None:
        """Something that is no round: `start`, `deploy`, `mode`, `force_k`, `fallback`, `error`, ...

        `data` is plain JSON. `start` and `deploy` say that a policy begins with an empty memory; they carry
        the bytes of its file as `policy`, which the log keeps once, and are recorded with `policy_sha256`.
        """
        if self._file is None:
            self.num_lost += 1
            return
        policy = data.get("policy")
        if isinstance(policy, bytes):
            data = {key: value for key, value in data.items() if key != "policy"}
            data["policy_sha256"] = sha256_of(policy)
            if policy != self._policy:
                self._policy = policy
                self._controls.append(self._policy_frame())
        event = {"order": self._next_order(), "time_s": time.time(), "kind": kind, "data": data}
        self._controls.append(_frame(CONTROL, json.dumps(event, default=str).encode(), 1))
        self.flush()  # they are rare, and an idle server has no round that would take them along

    def flush_if_due(self) -> None:
        """Write out what has gathered, if it is much or has waited or nothing will follow soon.

        Called off the launch path, after the requests that ended were recorded.
        """
        has_waited = time.monotonic() - self._flushed_at_s >= FLUSH_INTERVAL_S
        is_idle = self._num_open <= 0 and self._requests.count > 0
        if has_waited or is_idle or any(buffer.is_half_full for buffer in self._buffers.values()):
            self.flush()

    def flush(self) -> None:
        """Write out everything that has gathered."""
        self._flushed_at_s = time.monotonic()
        if self._file is None:
            return
        # Acceptance before the spans that count it: a torn end then leaves rows that nobody counts.
        frames = [_frame(kind, *buffer.take()) for kind, buffer in self._buffers.items() if buffer.count]
        chunk = b"".join(self._controls + frames)
        self._controls.clear()
        try:
            if self._num_bytes + len(chunk) > self._part_bytes:
                full, fresh = self._file, _fresh_file(self._path, self._file)
                full.close()
                self._header["part"] += 1
                self._begin_part(fresh)
            self._write(chunk)
        except OSError as error:
            self.error = f"{self._path}: {error.strerror or error}"
            self.close()

    def close(self) -> None:
        """Write out what is left and end the log."""
        if self._file is not None and not self.error:
            self.flush()
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.error = self.error or f"{self._path}: {error.strerror or error}"

    def _has_room(self, buffer: _Buffer, num_records: int = 1) -> bool:
        """Makes room for so many records if it can; they count as lost if not."""
        if buffer.count + num_records > len(buffer.records):
            self.flush()
        has_room = self._file is not None and buffer.count + num_records <= len(buffer.records)
        self.num_lost += not has_room
        return has_room

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _begin_part(self, file: BinaryIO) -> None:
        """Header and policy, so that each file can be read without the one before it."""
        self._file, self._num_bytes = file, 0
        self._write(json.dumps(self._header, default=str).encode() + b"\n")
        if self._policy:
            self._write(self._policy_frame())

    def _policy_frame(self) -> bytes:
        # A file too big for the bound is left to the user, who has it.
        return _frame(POLICY, self._policy, 1) if 4 * len(self._policy) <= self._part_bytes else b""

    def _write(self, chunk: bytes) -> None:
        assert self._file is not None
        self._file.write(chunk)
        self._file.flush()
        self._num_bytes += len(chunk)


class _Buffer:
    """Records of one kind that wait to be written."""

    def __init__(self, records: np.ndarray) -> None:
        self.records = records
        self.count = 0

    def append(self, record: tuple[Any, ...]) -> None:
        self.records[self.count] = record
        self.count += 1

    @property
    def is_half_full(self) -> bool:
        return 2 * self.count >= len(self.records)

    def take(self) -> tuple[bytes, int]:
        count, self.count = self.count, 0
        return self.records[:count].tobytes(), count


def _frame(kind: bytes, payload: bytes, num_records: int) -> bytes:
    return FRAME.pack(kind, num_records, len(payload), zlib.crc32(payload)) + payload


def obstacle(path: Path) -> str | None:
    """Why no server can write its log to `path` because of what is there, if so. Never waits.

    Raises:
        OSError: that cannot be looked at.
    """
    for file in (path, Path(f"{path}.1")):
        try:
            found = file.stat()
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(found.st_mode):
            return f"found {file}, which is no regular file, allowed: a new file or a decision log"
        if found.st_size and not is_decision_log(file):
            return f"found a file of another kind ({file}), allowed: a new file or a decision log"
    try:
        if path.exists():
            _locked(path, "r+b").close()
    except BlockingIOError:
        return _IN_USE
    return None


def _locked(path: Path, mode: str) -> BinaryIO:
    """The file there, locked until it is closed. Raises BlockingIOError where another server holds it."""
    file = cast(BinaryIO, path.open(mode))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BlockingIOError(errno.EWOULDBLOCK, _IN_USE) from None
    except OSError:
        pass  # a file system without locks
    return file


def _fresh_file(path: Path, ours: BinaryIO | None = None) -> BinaryIO:
    """An empty file at `path`, locked; what was there, `ours` or nobody's, moves to `path`.1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        if ours is not None and os.path.samestat(os.fstat(ours.fileno()), path.stat()):
            os.replace(path, f"{path}.1")
        else:
            with _locked(path, "r+b"):
                os.replace(path, f"{path}.1")
    return _locked(path, "ab")  # truncates nothing that another server may have begun meanwhile
