"""The compiled simulator against a slow one, written from the rules in docs/simulator.md and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from assumed_kv_only import assumed_kv_only, with_kv_only_prefill

from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.engine_patch.warm_restart import WarmRestart
from draftdial.envs.acceptance import AcceptanceBank
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine
from draftdial.envs.workload import RequestList

Factory = Callable[..., Any]
TIERS = (0, 1, 2, 3, 5, 7)
WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = (x + GOLDEN) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


@dataclass
class Row:
    """A request in the decode batch."""

    request: int
    emitted: int
    gap: int = 0


@dataclass
class SlowServer:
    """One server, in plain Python."""

    requests: RequestList
    bank: AcceptanceBank
    profile: CostProfile
    options: ServerOptions
    clock_s: float = 0.0
    formed_s: float = 0.0  # when the batch that comes next was formed: what arrived later misses it
    round_id: int = 0
    last_k: int | None = None
    ratio: float = 0.7
    started: int = 0
    chunk: int = 0  # tokens of the queue's head that are already prefilled
    rows: list[Row] = field(default_factory=list)
    ghosts: list[Row] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    has: dict[int, int] = field(
        default_factory=dict
    )  # output tokens of a request when it last left the batch
    arrival_s: dict[int, float] = field(default_factory=dict)
    arrival_round: dict[int, int] = field(default_factory=dict)
    first_token_s: dict[int, float] = field(default_factory=dict)
    finish_s: dict[int, float] = field(default_factory=dict)
    retracted: int = 0
    failed: bool = False
    step: dict[str, Any] = field(default_factory=dict)
    held_back: tuple[int, int, list[int]] = (-1, 0, [0] * 8)
    restart: WarmRestart = field(default_factory=WarmRestart)  # the server's own

    def __post_init__(self) -> None:
        self.pool = self.options.kv_pool_tokens or self.profile.kv_pool_tokens
        self.max_running = self.options.max_running or self.profile.max_running
        self.reserve = 2 * (TIERS[-1] + 1)
        self.advance()

    @property
    def done(self) -> bool:
        return self.failed or len(self.finish_s) == self.requests.num_requests

    def context(self, row: Row) -> int:
        return int(self.requests.prompt_tokens[row.request]) + row.emitted

    def remaining(self, row: Row) -> int:
        return int(self.requests.output_tokens[row.request]) - row.emitted

    def held(self) -> int:
        return sum(self.context(row) for row in self.rows + self.ghosts)

    def num_rows(self) -> int:
        return len(self.rows) + len(self.ghosts)

    def coming(self, row: Row) -> int:
        """Drafts that a round with any number of drafts would have accepted."""
        place, hop = row.emitted - 1, 0
        while True:
            domain = int(self.requests.domain[row.request])
            draw = mix((int(self.requests.request_hash[row.request]) + hop * GOLDEN) & WORD)
            array = int(self.bank.domain_first[domain]) + draw % int(self.bank.domain_count[domain])
            if place < self.bank.array_length[array]:
                break
            place -= int(self.bank.array_length[array])
            hop += 1
        right = min(7, int(self.bank.accepted[self.bank.array_start[array] + place]))
        factor = 1 - (1 - self.options.gap_floor) * min(1.0, row.gap / self.options.gap_tokens)
        key = int(self.requests.request_hash[row.request]) ^ mix(self.remaining(row))
        for depth in range(right):
            if row.gap and (mix((key + depth) & WORD) >> 11) / 2**53 >= factor:
                return depth
        return right

    def yields(self) -> list[int]:
        """Tokens of the coming round at every tier that may be decided."""
        return [
            sum(min(min(self.coming(row), k) + 1, self.remaining(row)) for row in self.rows)
            for k, _ in (self.runs(k, copy(self.restart)) for k in TIERS)
        ]

    def runs(self, k: int, restart: WarmRestart) -> tuple[int, OffMode]:
        """What a round runs where `k` is decided, and what k = 0 does for the draft in it."""
        if self.options.off_mode != "kv-only":
            return k, self.options.off_mode
        return restart.decide(k), "kv-only" if restart.leaves_out else "warm"

    def spend(self, seconds: float) -> None:
        self.clock_s += seconds

    def finish(self, request: int) -> None:
        self.finish_s[request] = self.clock_s

    def run_round(self, k: int) -> tuple[int, int, list[int]]:
        """The round, and all until the next decision; the outcome that arrives."""
        mean = np.array([self.held() // self.num_rows()])
        k, off_mode = self.runs(k, self.restart)
        seconds = float(self.profile.round_s(np.array([self.num_rows()]), mean, off_mode)[0, TIERS.index(k)])
        if self.last_k not in (None, k):
            seconds += self.profile.switch_s
        self.last_k = k
        overlapped = self.options.lag == 2
        self.formed_s = self.clock_s + (0.0 if overlapped else seconds)
        self.spend(seconds)
        self.step = {"left": 0}
        self.drop_ghosts()
        counts = [0] * 8
        for row in list(self.rows):
            accepted = min(k, self.coming(row))
            counts[accepted] += 1
            tokens = min(accepted + 1, self.remaining(row))
            row.emitted += tokens
            if k == 0 and self.options.off_mode == "skip":
                row.gap += tokens
            if self.remaining(row) == 0:
                self.finish(row.request)
                self.rows.remove(row)
                if overlapped:
                    self.ghosts.append(row)
                else:
                    self.step["left"] += 1
        outcome = (self.round_id, k, counts)
        self.round_id += 1
        self.ratio = max(0.098, self.ratio - (0.7 - 0.098) / 600)
        if not self.done:
            self.advance()
        if overlapped:
            outcome, self.held_back = self.held_back, outcome
        return outcome

    def advance(self) -> None:
        self.step = {"left": 0, "admitted": 0, "prefilled": 0} | self.step
        while True:
            self.arrive()
            if self.num_rows() == 0:
                self.formed_s = self.clock_s
            if self.prefill():
                if self.done:
                    return
                continue
            if self.num_rows() > 0:
                self.retract()
                return
            if self.queue:
                self.failed = True
                return
            self.ratio = 0.7
            self.spend(float(self.requests.arrival_s[self.started]) - self.clock_s)

    def arrive(self) -> None:
        closed = self.requests.mode == "closed"
        while self.started < self.requests.num_requests:
            if closed and self.started - len(self.finish_s) >= self.requests.concurrency[self.started]:
                return
            if not closed and self.requests.arrival_s[self.started] > self.clock_s:
                return
            self.arrival_s[self.started] = self.clock_s if closed else self.requests.arrival_s[self.started]
            self.arrival_round[self.started] = self.round_id
            self.has[self.started] = 0
            self.queue.append(self.started)
            self.started += 1

    def length(self, request: int) -> int:
        return int(self.requests.prompt_tokens[request]) + self.has[request]

    def prefill(self) -> bool:
        budget, joined = self.profile.chunked_prefill_tokens, []
        while self.queue and budget > 0 and self.num_rows() + len(joined) < self.max_running:
            request = self.queue[0]
            length = self.length(request)
            if self.arrival_s[request] > self.formed_s:
                break
            if self.chunk == 0 and not self.fits(request, joined):
                break
            part = min(budget, length - self.chunk)
            budget -= part
            self.chunk += part
            if self.chunk < length:
                break
            self.chunk = 0
            joined.append(self.queue.pop(0))
        tokens = self.profile.chunked_prefill_tokens - budget
        if tokens == 0:
            return False
        mode, leaves_draft_out = self.options.off_mode, self.restart.is_cold
        seconds = float(self.profile.prefill_s(tokens, mode, leaves_draft_out=leaves_draft_out))
        self.formed_s = self.clock_s + (0.0 if self.options.lag == 2 else seconds)
        self.spend(seconds)
        self.drop_ghosts()  # the last round's result has been read by the time the next batch is formed
        self.step["prefilled"] += tokens
        for request in joined:
            self.first_token_s.setdefault(request, self.clock_s)
            row = Row(request, self.has[request] + 1)
            if self.remaining(row) == 0:
                self.finish(request)
            else:
                self.rows.append(row)
                self.step["admitted"] += 1
        return True

    def drop_ghosts(self) -> None:
        self.step["left"] += len(self.ghosts)
        self.ghosts = []

    def fits(self, request: int, joined: list[int]) -> bool:
        """Whether there is room for a queued request beside those running and those joining with it."""
        rows = self.num_rows() + len(joined) + 1
        needs = self.length(request) + self.reserve * rows
        if rows == 1:
            return needs <= self.pool
        needs += self.held() + sum(self.length(other) for other in joined)
        needs += self.ratio * sum(self.remaining(row) for row in self.rows)
        needs += sum(self.left(other) for other in [*joined, request])
        return needs <= self.pool

    def left(self, request: int) -> int:
        return int(self.requests.output_tokens[request]) - self.has[request]

    def retract(self) -> None:
        gone = []
        while len(self.rows) > 1 and self.held() + self.reserve * self.num_rows() > self.pool:
            row = min(self.rows, key=lambda row: (row.emitted, -self.requests.prompt_tokens[row.request]))
            self.rows.remove(row)
            self.has[row.request] = row.emitted
            gone.append(row.request)
        self.queue += gone
        self.retracted += len(gone)
        self.failed = len(self.rows) == 1 and self.context(self.rows[0]) + self.reserve > self.pool
        if gone:
            produced = sum(row.emitted for row in self.rows) + 20 * len(self.rows)
            self.ratio = min(1.0, produced / sum(row.emitted + self.remaining(row) for row in self.rows))

    def signals(self) -> dict[str, float]:
        waiting = sum(self.length(request) for request in self.queue) - self.chunk
        oldest = self.round_id - self.arrival_round[self.queue[0]] if self.queue else 0
        return {
            "round_id": self.round_id,
            "num_running": self.num_rows(),
            "num_waiting": len(self.queue),
            "num_waiting_prompt_tokens": waiting,
            "oldest_wait_rounds": oldest,
            "mean_context_tokens": self.held() // max(1, self.num_rows()),
            "kv_used_fraction": (self.held() + self.reserve * self.num_rows()) / self.pool,
            "max_running": self.max_running,
            "num_admitted": self.step["admitted"],
            "num_finished": self.step["left"],
            "num_prefill_tokens": self.step["prefilled"],
        }


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("off_mode", ["warm", "skip", "kv-only"])
@pytest.mark.parametrize("pool", [1 << 20, 4000, 900])
def test_the_compiled_simulator_is_the_slow_one(
    lag: int, off_mode: Any, pool: int, make_profile: Factory, make_bank: Factory, make_requests: Factory
) -> None:
    rng = np.random.default_rng(lag + pool)
    bank = make_bank({d: [rng.integers(0, 10, rng.integers(3, 40)) for _ in range(5)] for d in "abc"})
    profile = make_profile(TIERS, ms_per_token=0.01, switch_ms=0.3, chunked_prefill_tokens=256)
    if off_mode == "kv-only":
        without_draft_ms = ((50, 3.0), (150, 6.0), (300, 12.0))
        profile = with_kv_only_prefill(assumed_kv_only(profile, "assumed", 0.2, 0.01), without_draft_ms)
    options = ServerOptions(off_mode, lag=lag, kv_pool_tokens=pool, max_running=8)
    lists = []
    for s in range(6):
        n = 40
        load: dict[str, Any] = {"concurrency": np.repeat(rng.integers(1, 12, 4), 10)}
        if s % 2:
            load = {"arrival_s": np.cumsum(rng.exponential((0.02, 0.1, 0.4)[s // 2], n))}
        prompts = rng.permutation(400)[:n] + 1  # all different: no ties in who is sent back
        lists.append(
            make_requests(
                rng.integers(1, 250, n), prompt_tokens=prompts, domain=rng.integers(0, 3, n), seed=s, **load
            )
        )
    engine = SimulatedEngine(lists, bank, profile, options)
    slow = [SlowServer(requests, bank, profile, options) for requests in lists]
    signals = engine.signals()
    while not engine.servers["done"].all():
        k = rng.choice(TIERS, len(lists), p=(0.3, 0.1, 0.1, 0.3, 0.1, 0.1))
        going = [s for s in range(len(lists)) if not engine.servers["done"][s]]
        tokens = engine.realised_tokens()
        for s in going:
            assert engine.servers["clock_s"][s] == pytest.approx(slow[s].clock_s, rel=1e-9)
            assert engine.servers["new_token_ratio"][s] == pytest.approx(slow[s].ratio)
            seen = {name: float(getattr(signals, name)[s]) for name in slow[s].signals()}
            assert seen == pytest.approx(slow[s].signals()), s
            assert tokens[s].tolist() == slow[s].yields()
        (outcome,) = engine.run_round(k)
        for s in going:
            got = int(outcome.round_id[s]), int(outcome.k[s]), outcome.accept_counts[s].tolist()
            assert got == slow[s].run_round(int(k[s]))
            assert bool(engine.servers["done"][s]) == slow[s].done
    results = engine.results()
    for s, server in enumerate(slow):
        assert bool(results.failed[s]) == server.failed
        assert results.retracted[s] == server.retracted
        for name in ("arrival_s", "first_token_s", "finish_s"):
            times = getattr(server, name)
            assert getattr(results, name)[s, list(times)] == pytest.approx(list(times.values()), rel=1e-9)
