"""Acceptance at output positions from a decision log: what rounds saw, and what is filled in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.errors import UserError
from draftdial.engine_patch.log_format import REQUEST_KINDS
from draftdial.engine_patch.log_reader import RecordedLog, Records, read_log

_LOG_ONLY = ("records", "part", "run", "schema")
"""Fields of a log's header that say nothing about the server."""


def record_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and a line for every request that arrived, finished and was decoded by draft rounds alone.

    acc[t] is exact where a round started at output position t (the list `starts`): drafts accepted, and one.
    It means "or more" where the round accepted all of its k drafts, k + 1; those positions are the list
    `censored`, which stays short where the server was forced to its largest tier. At the positions in
    between, acc is one less than at the position before, as if the chain drafted anew from there were the
    rest of that round's; a walk with the recorded k never starts there. gen_len counts what the last round
    made past the answer's end, too.

    Raises:
        UserError: the log cannot be read, or holds no such request.
    """
    log = read_log(path)
    finished = _lengths(log)
    lines = []
    order = np.argsort(log.accepts, order=("request_id", "round_id"), kind="stable")
    rows = log.accepts[order]
    ids, first = np.unique(rows["request_id"], return_index=True)
    for request_id, part in zip(ids.tolist(), np.split(rows, first)[1:], strict=True):
        prompt_len, gen_len = finished.get(request_id, (0, 0))
        if gen_len and _covers(part, gen_len):
            lines.append({"id": request_id, "prompt_len": prompt_len, **_line(part, gen_len)})
    if not lines:
        raise UserError(
            f"{path}: found no request whose every round is in the log, allowed: a log of finished requests; "
            "record with --log-mb large enough"
        )
    header = {
        "mode": "decision-log",
        "engine": {name: value for name, value in log.header.items() if name not in _LOG_ONLY},
        "max_k": log.tiers[-1],
        "exact": "positions in `starts`; those in `censored` mean that or more; the others are filled in",
    }
    return header, lines


def _lengths(log: RecordedLog) -> dict[int, tuple[int, int]]:
    """Prompt and output tokens of every request that arrived and finished while the log was kept."""
    kinds = {kind: code for code, kind in enumerate(REQUEST_KINDS)}
    arrived = set(log.requests["request_id"][log.requests["kind"] == kinds["arrived"]].tolist())
    ended = log.requests[log.requests["kind"] == kinds["finished"]]
    return {
        int(row["request_id"]): (int(row["prompt_tokens"]), int(row["output_tokens"]))
        for row in ended
        if int(row["request_id"]) in arrived
    }


def _covers(part: Records, gen_len: int) -> bool:
    """Do a request's rounds follow one another without a gap, from the first output token to the end?"""
    position = part["position"].astype(np.int64)
    after = position + part["accepted"] + 1
    return bool(position[0] == 1 and (position[1:] == after[:-1]).all() and after[-1] >= gen_len)


def _line(part: Records, gen_len: int) -> dict[str, Any]:
    starts = part["position"].astype(np.int64)
    acc: NDArray[np.int64] = np.ones(gen_len, np.int64)
    for start, accepted in zip(starts.tolist(), part["accepted"].tolist(), strict=True):
        stop = min(start + accepted + 1, gen_len)
        acc[start:stop] = accepted + 1 - np.arange(stop - start)
    censored = starts[part["accepted"] == part["k"]]
    return {
        "gen_len": gen_len,
        "acc": acc.tolist(),
        "starts": starts.tolist(),
        "censored": censored.tolist(),
    }
