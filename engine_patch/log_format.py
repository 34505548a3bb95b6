"""The decision log's file format: a JSON header line, then frames of records (docs/decision-log.md)."""

from __future__ import annotations

import json
import struct
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftdial.controller.signals import RoundSignals

SCHEMA = "draftdial.log/1"
_OPENING = f'{{"schema": "{SCHEMA}"'.encode()

Mode = Literal["steer", "shadow", "off"]
MODES: tuple[Mode, ...] = ("steer", "shadow", "off")
"""By the code that a round record carries."""

RequestKind = Literal["arrived", "finished", "aborted"]
REQUEST_KINDS: tuple[RequestKind, ...] = ("arrived", "finished", "aborted")
"""By the code that a request record carries."""

RESTARTS = ("start", "deploy")
"""Control events after which a policy begins with an empty memory; their data names the policy."""

FRAME = struct.Struct("<4sIII")
"""Opens a frame: kind of record, number of records, bytes of payload, CRC-32 of the payload."""

CONTROL, POLICY = b"ctrl", b"plcy"
"""Frames that hold no array: one JSON object, or the bytes of one policy file."""

_WIDE = ("round_id", "num_waiting_prompt_tokens", "num_prefill_tokens")


def record_types(max_k: int) -> dict[bytes, np.dtype[Any]]:
    """The record of every array frame by its kind, for a server whose largest tier is `max_k`.

    `order` counts the calls of all kinds together, so that sorting by it restores what came before what.
    Acceptance has no order of its own: each `span` says how many of the `acpt` records that follow are its.
    """
    signals = [
        (field.name, "<f8" if field.name == "kv_used_fraction" else "<i8" if field.name in _WIDE else "<i4")
        for field in fields(RoundSignals)
    ]
    called = [("order", "<i8"), ("time_s", "<f8")]
    return {
        b"rond": np.dtype([*called, *signals, ("policy_k", "<i2"), ("acted_k", "<i2"), ("mode", "<u1")]),
        b"outc": np.dtype(
            [("order", "<i8"), ("round_id", "<i8"), ("k", "<i2"), ("accept_counts", "<u4", (max_k + 1,))]
        ),
        b"reqs": np.dtype(
            [
                *called,
                ("request_id", "<i8"),
                ("kind", "<u1"),
                ("prompt_tokens", "<i4"),
                ("output_tokens", "<i4"),
            ]
        ),
        b"acpt": np.dtype([("request_id", "<u4"), ("position", "<u4"), ("accepted", "<u1")]),
        b"span": np.dtype([("round_id", "<i8"), ("k", "<i2"), ("num_requests", "<u4")]),
    }


def describe_types(max_k: int) -> dict[str, Any]:
    """`record_types` as it stands in the header: NumPy's `descr` of each record, in JSON's own types."""
    types = {kind.decode(): dtype.descr for kind, dtype in record_types(max_k).items()}
    described: dict[str, Any] = json.loads(json.dumps(types))
    return described


def is_decision_log(path: Path) -> bool:
    """Does the file there begin as a decision log does?"""
    with path.open("rb") as file:
        return file.read(len(_OPENING)) == _OPENING
