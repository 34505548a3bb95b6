"""The traffic of a decision log as a workload: its requests when they came, and what they accepted.

A log knows acceptance where rounds ran, not at every output position. `known_right` says what it proves,
`filled` completes it; docs/decision-log.md says what that is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.acceptance_file import MAX_YIELD
from draftdial.controller.errors import UserError
from draftdial.controller.signals import FloatArray, IntArray
from draftdial.engine_patch.log_format import REQUEST_KINDS
from draftdial.engine_patch.log_reader import RecordedLog, Records, read_log
from draftdial.envs.acceptance import AcceptanceBank
from draftdial.envs.domains import DomainSchedule
from draftdial.envs.lengths import Int32Array
from draftdial.envs.open_loop import WARMUP_SHARE
from draftdial.envs.replayed_acceptance import bank_of_arrays
from draftdial.envs.workload import HashArray, RequestList, Stream, draw_hashes, stream

MIN_KNOWN = 0.25
"""A log that shows the fate of a smaller share of its output positions brings no acceptance of its own."""
PRIOR_POSITIONS = 8.0
"""What the whole log's rate counts as, in positions, where a request's own rate fills in what is unknown."""
FILL_SEED = 7401
UNKNOWN = -1


@dataclass(frozen=True, eq=False)
class LoggedTraffic:
    """The requests of a log in order of arrival, each array of shape `(num_requests,)`."""

    name: str
    arrival_s: FloatArray
    """From 0 at the first request."""
    finish_s: FloatArray
    """When it was over on the server, on the same clock."""
    prompt_tokens: Int32Array
    output_tokens: Int32Array
    right: tuple[NDArray[np.int8], ...]
    """For each request: see `known_right`."""
    deepest_k: int
    """Of all rounds whose acceptance was recorded request by request; 0 if there is none."""

    @classmethod
    def read(cls, path: str | Path) -> LoggedTraffic:
        """The requests whose arrival and end the log at `path` both holds, aborted ones as far as they came.

        Raises:
            UserError: no readable log, or fewer than two such requests at different times.
        """
        log = read_log(path)
        requests = _finished(log)
        if len(np.unique(requests["arrival_s"])) < 2:
            raise UserError(
                f"{path}: holds {len(requests)} requests from arrival to end, allowed: two or more, at "
                "different times"
            )
        return cls(
            name=Path(path).stem,
            arrival_s=requests["arrival_s"] - requests["arrival_s"][0],
            finish_s=requests["finish_s"] - requests["arrival_s"][0],
            prompt_tokens=np.maximum(requests["prompt_tokens"], 1).astype(np.int32),
            output_tokens=requests["output_tokens"].astype(np.int32),
            right=tuple(known_right(log.accepts, requests["request_id"], requests["output_tokens"])),
            deepest_k=int(log.accepts["k"].max(initial=0)),
        )

    @property
    def num_requests(self) -> int:
        return len(self.arrival_s)

    @property
    def period_s(self) -> float:
        """Recorded time and a last mean gap."""
        span_s = float(self.arrival_s[-1])
        return span_s + span_s / (self.num_requests - 1)

    @cached_property
    def known_share(self) -> float:
        """Of all output positions, those whose draft token the log shows to be right or wrong."""
        positions = np.concatenate(self.right)
        return float(np.mean(positions != UNKNOWN))

    @property
    def has_acceptance(self) -> bool:
        """Does it show enough of its own acceptance to be replayed with it?"""
        recorded = sum(bool((right != UNKNOWN).any()) for right in self.right)
        return recorded >= 2 and self.known_share >= MIN_KNOWN

    def describe_acceptance(self) -> str:
        """What the log says of acceptance, in one line."""
        if not self.has_acceptance:
            return (
                f"log:{self.name}: shows too little acceptance ({self.known_share:.0%} of positions); fitted"
            )
        return (
            f"log:{self.name}: acceptance as recorded at {self.known_share:.0%} of positions, drawn at each "
            f"request's own rate at the others; drafts beyond k = {self.deepest_k} were never tried"
        )


class LoggedAcceptance:
    """`AcceptanceSource` of one domain whose array i is what the log shows of request i."""

    domains = ("logged",)

    def __init__(self, traffic: LoggedTraffic) -> None:
        self._bank = bank_of_arrays({"logged": filled(traffic.right)})

    def bank(self, seed: int) -> AcceptanceBank:
        """The same for every seed: what was recorded does not change."""
        return self._bank


@dataclass(frozen=True, eq=False)
class LoggedWorkload:
    """A window of the recorded requests, at the times they came, each with the acceptance it had.

    The seed picks the request at which the window begins; it runs on from the log's start past its end.
    """

    name: str
    traffic: LoggedTraffic
    num_requests: int
    domains: DomainSchedule

    def requests(self, seed: int) -> RequestList:
        """The list of `seed`; it is a function of the seed and the log alone."""
        first = int(stream(seed, Stream.ARRIVALS).integers(self.traffic.num_requests))
        domain = self.domains.draw(stream(seed, Stream.DOMAINS), self.num_requests)
        return _window(self.traffic, first, domain, seed)


def logged_requests(traffic: LoggedTraffic) -> RequestList:
    """All recorded requests once, from the first to the last, each with the acceptance it had."""
    return _window(traffic, 0, np.zeros(traffic.num_requests, np.int32), seed=0)


def _window(traffic: LoggedTraffic, first: int, domain: Int32Array, seed: int) -> RequestList:
    """`len(domain)` requests from the one numbered `first` on."""
    num_requests = len(domain)
    laps, rows = np.divmod(first + np.arange(num_requests), traffic.num_requests)
    arrival_s = traffic.arrival_s[rows] + laps * traffic.period_s
    return RequestList(
        mode="open",
        arrival_s=arrival_s - arrival_s[0],
        concurrency=np.zeros(num_requests, np.int32),
        prompt_tokens=traffic.prompt_tokens[rows],
        output_tokens=traffic.output_tokens[rows],
        domain=domain,
        request_hash=hashes_for(rows, traffic.num_requests, draw_hashes(seed, num_requests)),
        warmup=int(WARMUP_SHARE * num_requests),
    ).check()


def known_right(accepts: Records, request_ids: IntArray, output_tokens: IntArray) -> list[NDArray[np.int8]]:
    """Per request and output position after the first: was the draft for the next token right?

    1 yes, 0 no, `UNKNOWN` where no draft was tried. A round at position t that accepts n of k drafts shows
    that t .. t + n - 1 were right and, if n < k, that t + n was wrong; of n = k it shows no more than that.
    """
    lengths = np.maximum(output_tokens - 1, 1)
    ends = np.cumsum(lengths)
    flat = np.full(int(ends[-1]), UNKNOWN, np.int8)
    order = np.argsort(request_ids)
    found = np.minimum(np.searchsorted(request_ids, accepts["request_id"], sorter=order), len(order) - 1)
    owner = order[found]
    mine = (request_ids[owner] == accepts["request_id"]) & (accepts["position"] >= 1)
    accepts, owner = accepts[mine], owner[mine]
    start = (ends - lengths)[owner] + accepts["position"].astype(np.int64) - 1
    num_right = accepts["accepted"].astype(np.int64)
    for depth in range(int(accepts["k"].max(initial=0))):
        tried = (depth <= num_right) & (depth < accepts["k"]) & (start + depth < ends[owner])
        flat[start[tried] + depth] = depth < num_right[tried]
    return np.split(flat, ends[:-1])


def filled(right: tuple[NDArray[np.int8], ...]) -> list[NDArray[np.uint8]]:
    """Accepted drafts at every position: how many in a row are right from there on.

    Replayed with the k it was recorded with, a request accepts what it did. Where the log is silent a draft
    is right with the request's own rate, shrunk to the log's, drawn once. A request without any record
    takes the array of the recorded one before it, or of the first.
    """
    rng = np.random.default_rng(FILL_SEED)
    everything = np.concatenate(right)
    pooled = float(np.mean(everything[everything != UNKNOWN]))
    arrays: list[NDArray[np.uint8]] = []
    num_missing = 0
    for known in right:
        tried = known[known != UNKNOWN]
        if not len(tried):
            num_missing += not arrays
            arrays += arrays[-1:]
            continue
        rate = (tried.sum() + PRIOR_POSITIONS * pooled) / (len(tried) + PRIOR_POSITIONS)
        is_right = np.where(known == UNKNOWN, rng.random(len(known)) < rate, known == 1)
        places = np.arange(len(known))
        next_wrong = np.minimum.accumulate(np.where(is_right, len(known), places)[::-1])[::-1]
        arrays.append(np.minimum(next_wrong - places, MAX_YIELD - 1).astype(np.uint8))
    return arrays[:1] * num_missing + arrays


def hashes_for(rows: IntArray, num_arrays: int, draws: HashArray) -> HashArray:
    """Request hashes with which the simulator picks array `rows[i]` of `num_arrays`, one per draw.

    The simulator takes `mix(hash) % num_arrays`; `mix` is one to one, so its inverse gives the hash.
    """
    count = np.uint64(num_arrays)
    halved = draws >> np.uint64(1)
    mixed: HashArray = halved - halved % count + rows.astype(np.uint64)
    mixed = mixed ^ (mixed >> np.uint64(31)) ^ (mixed >> np.uint64(62))
    mixed = mixed * np.uint64(pow(0x94D049BB133111EB, -1, 1 << 64))
    mixed = mixed ^ (mixed >> np.uint64(27)) ^ (mixed >> np.uint64(54))
    mixed = mixed * np.uint64(pow(0xBF58476D1CE4E5B9, -1, 1 << 64))
    mixed = mixed ^ (mixed >> np.uint64(30)) ^ (mixed >> np.uint64(60))
    return mixed - np.uint64(0x9E3779B97F4A7C15)


def _finished(log: RecordedLog) -> Records:
    """Requests with both ends in the log and output between them, by arrival."""
    of_kind = {kind: log.requests[log.requests["kind"] == code] for code, kind in enumerate(REQUEST_KINDS)}
    arrived = of_kind["arrived"]
    ended = np.concatenate([of_kind["finished"], of_kind["aborted"]])
    _, first, second = np.intersect1d(arrived["request_id"], ended["request_id"], return_indices=True)
    times = [("arrival_s", "<f8"), ("finish_s", "<f8")]
    kinds = [("request_id", "<i8"), *times, ("prompt_tokens", "<i8"), ("output_tokens", "<i8")]
    requests = np.zeros(len(first), kinds)
    requests["request_id"] = arrived["request_id"][first]
    requests["arrival_s"] = arrived["time_s"][first]
    requests["finish_s"] = ended["time_s"][second]
    requests["prompt_tokens"] = arrived["prompt_tokens"][first]
    requests["output_tokens"] = ended["output_tokens"][second]
    requests = requests[requests["output_tokens"] >= 1]
    return requests[np.argsort(requests["arrival_s"], kind="stable")]
