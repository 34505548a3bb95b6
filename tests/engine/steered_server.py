"""A `CpuServer` with draftdial in it, and what tests do to it again and again."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from cpu_server import ANSWER_S, CpuServer
from traffic import Request, Sending

from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch.control_keys import policy_key
from draftdial.engine_patch.decision_log import FLUSH_INTERVAL_S
from draftdial.engine_patch.log_reader import RecordedLog, read_log


class SteeredServer(CpuServer):
    """Writes into `folder`: its log and what the probe sees (`engine_probe.plugin`)."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        serve: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        environment = {"ENGINE_PROBE": str(folder)} | dict(environment or {})
        super().__init__(arguments, folder / "server.log", serve=serve, environment=environment)

    def deploy(self, file: PolicyFile) -> bool:
        """Swap the policy, as `draftdial deploy` does without its checks before and after."""
        return self.set(**{policy_key(file.data): 1})

    def break_policy(self, fault: int) -> bool:
        """Let its next decision raise (1), be no built tier (2), or be no number (3); see the probe."""
        return self.set(probe_fault=fault)

    def rounds(self, rank: int = 0) -> list[tuple[int, int]]:
        """Batch size and k of every decode round so far."""
        lines = (self.folder / f"rounds-{rank}.txt").read_text().splitlines()
        return [(int(batch_size), int(k)) for batch_size, k in map(str.split, lines)]

    def signals(self) -> list[dict[str, Any]]:
        """What the policy saw before each round, and the probe's own count."""
        return [json.loads(line) for line in (self.folder / "signals-0.jsonl").read_text().splitlines()]

    def kv_lengths(self) -> list[str]:
        """The type of the lengths of KV that SGLang was told, round by round."""
        return (self.folder / "kv-lengths-0.txt").read_text().splitlines()

    def recorded(self) -> RecordedLog:
        """The decision log, where there is one, up to now."""
        time.sleep(1.1 * FLUSH_INTERVAL_S)
        Sending(self, [Request((3,), 2)]).answers()  # the log is written when a result is processed
        return read_log(self.folder / "decisions.log")

    def await_rounds(self, count: int) -> None:
        """Wait until so many more decode rounds have run."""
        wanted = len(self.rounds()) + count
        self._await(lambda: len(self.rounds()) >= wanted, f"{count} more rounds")

    def await_batch(self, batch_size: int, start: int | None = None) -> None:
        """Wait for a decode round of at least so many requests, after the first `start` or all so far."""
        start = len(self.rounds()) if start is None else start
        self._await(
            lambda: max(self.rounds()[start:], default=(0, 0))[0] >= batch_size, f"a batch of {batch_size}"
        )

    def _await(self, has_come: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not has_come():
            assert time.monotonic() < deadline, f"{what}: not within {ANSWER_S:.0f} s"
            time.sleep(0.01)


def shares(rounds: Sequence[tuple[int, int]]) -> dict[int, float]:
    """The share of rounds at each k."""
    counts = Counter(k for _, k in rounds)
    return {k: count / len(rounds) for k, count in sorted(counts.items())}


def num_switches(rounds: Sequence[tuple[int, int]]) -> int:
    """Rounds whose k differs from the round before."""
    return sum(a[1] != b[1] for a, b in pairwise(rounds))
