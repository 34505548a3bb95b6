"""The contract between any engine and any policy.

Both sides speak of `num_servers` servers at once; a real server is the case of one row. Every
value is an integer or an exact ratio of scheduler state that all tensor-parallel ranks share, so
that ranks which decide separately decide alike. No measured time appears here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(slots=True)
class RoundSignals:
    """What a policy sees before one decode round. Every array has shape `(num_servers,)`.

    Arrays are views that the engine overwrites at the next round: copy what must outlive it.
    """

    round_id: IntArray
    """Decode rounds launched so far; the id of the round about to run."""
    num_running: IntArray
    """Requests in the decode batch of the coming round."""
    num_waiting: IntArray
    """Requests in the queue that have not been prefilled."""
    num_waiting_prompt_tokens: IntArray
    """Prompt tokens of the waiting requests."""
    oldest_wait_rounds: IntArray
    """Rounds since the longest-waiting queued request arrived; 0 when none waits."""
    mean_context_tokens: IntArray
    """Prompt and output tokens per running request, rounded down."""
    kv_used_fraction: FloatArray
    """Share of the KV pool in use, reservations for drafts included."""
    max_running: IntArray
    """Most requests the server decodes at once."""
    num_admitted: IntArray
    """Requests that joined the decode batch since the last decision."""
    num_finished: IntArray
    """Requests that left it finished since the last decision."""
    num_prefill_tokens: IntArray
    """Prompt tokens prefilled since the last decision."""

    @classmethod
    def zeros(cls, num_servers: int) -> RoundSignals:
        """Signals of `num_servers` idle servers, each field in an array of its own."""
        values: dict[str, Any] = {field.name: np.zeros(num_servers, np.int64) for field in fields(cls)}
        values["kv_used_fraction"] = np.zeros(num_servers)
        return cls(**values)


@dataclass(slots=True)
class RoundOutcome:
    """What one finished decode round revealed, one row per server.

    The draft tokens of a request are accepted from the first on, so the number accepted tells the
    fate of every depth up to the first rejection and nothing deeper. Beliefs need no more than
    how often each number occurred, which is why a round is a histogram and not a list.
    """

    round_id: IntArray
    """Shape `(num_servers,)`: the round these outcomes belong to, -1 where nothing arrived."""
    k: IntArray
    """Shape `(num_servers,)`: draft tokens that round used."""
    accept_counts: IntArray
    """Shape `(num_servers, max_k + 1)`: `[s, n]` requests of server s had exactly n drafts accepted."""

    @classmethod
    def from_num_accepted(cls, round_id: int, k: int, num_accepted: list[int], max_k: int) -> RoundOutcome:
        """The outcome of one server's round from the accepted drafts of each request, each 0..k."""
        counts = np.bincount(np.asarray(num_accepted, np.int64), minlength=max_k + 1)
        return cls(np.array([round_id]), np.array([k]), counts.reshape(1, -1))
