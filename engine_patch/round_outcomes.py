"""What a finished decode round revealed, read off SGLang's result."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from draftdial.engine_patch.decision_log import DecisionLog
from draftdial.engine_patch.log_format import RequestKind
from draftdial.engine_patch.scheduler_signals import is_probe

ROUND_ATTRIBUTE = "draftdial_round"
"""Set on a result at launch, so that it carries its own round however late it is read."""


class FinishedRound(NamedTuple):
    """A decided round and the requests it taught something about."""

    round_id: int
    k: int
    requests: list[Any]
    accepted: list[int]
    """Drafts accepted, 0..k, one for each of `requests`."""

    @classmethod
    def read(cls, result: Any, batch: Any, *, has_probes: bool) -> FinishedRound | None:
        """The round of `result`, whose counts have just arrived on the host; None if it was not decided.

        k is the width on the result, since the worker may have moved on. Left out are probes, requests that
        an earlier round finished (they ride along one round under overlap; the simulator leaves them out
        too) and requests sent back to the queue, whose tokens SGLang drops. `has_probes`: may some of them be
        probes? Most rounds have none, and asking each request takes longer than the rest of this.
        """
        round_id = getattr(result, ROUND_ATTRIBUTE, None)
        if round_id is None:
            return None
        requests, accepted = batch.reqs, result.num_correct_drafts_per_req_cpu
        kept = [
            row
            for row, req in enumerate(requests)
            if req.finished_reason is None and not req.is_retracted and not (has_probes and is_probe(req))
        ]
        if len(kept) < len(requests):
            requests, accepted = [requests[row] for row in kept], [accepted[row] for row in kept]
        return cls(round_id, result.speculative_num_draft_tokens - 1, requests, accepted)


def write_accepts(log: DecisionLog, finished: FinishedRound) -> None:
    """Record each request's acceptance, with the output tokens it had before this round's."""
    rows = [
        (req.draftdial.id, len(req.output_ids), accepted)
        for req, accepted in zip(finished.requests, finished.accepted, strict=True)
        if hasattr(req, "draftdial")
    ]
    if rows:
        log.accepts(finished.round_id, finished.k, *zip(*rows, strict=True))


def write_arrival(log: DecisionLog, req: Any) -> None:
    """Record that `req` has come in."""
    log.request("arrived", req.draftdial.id, time.time(), len(req.origin_input_ids), 0)


def write_end(log: DecisionLog, req: Any) -> None:
    """Record that `req` has finished, or was aborted, in the queue or while it ran."""
    is_abort = req.finished_reason is None or type(req.finished_reason).__name__ == "FINISH_ABORT"
    kind: RequestKind = "aborted" if is_abort else "finished"
    log.request(kind, req.draftdial.id, time.time(), len(req.origin_input_ids), len(req.output_ids))
