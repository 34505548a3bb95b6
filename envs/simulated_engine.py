"""Many simulated SGLang servers at once, in lockstep by decode round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.controller.errors import UserError
from draftdial.controller.signals import FloatArray, IntArray, RoundOutcome, RoundSignals
from draftdial.envs import kernels
from draftdial.envs.acceptance import AcceptanceBank
from draftdial.envs.state import FIRST_STATE_FIELD, MAX_K, REQUEST, SERVER, SLOT, Simulation
from draftdial.envs.workload import RequestList

REQUEST_FIELDS = ("arrival_s", "concurrency", "prompt_tokens", "output_tokens", "domain", "request_hash")


@dataclass(frozen=True)
class ServerOptions:
    """How the simulated servers behave beyond their cost profile."""

    off_mode: OffMode = "warm"
    """What k = 0 does: keep the draft's KV (`warm`, or `kv-only`, where one warm round comes before a round
    at k > 0), leave a gap in it, or `nospec`: no draft model at all."""
    lag: int = 2
    """Decisions until the outcome of a round is visible: 2 under overlap scheduling, 1 without."""
    gap_floor: float = 0.3
    """Factor on acceptance once `gap_tokens` are missing from the draft's KV (off mode `skip`)."""
    gap_tokens: int = 64
    """Gap at which acceptance has fallen to `gap_floor`; linear below."""
    max_running: int | None = None
    """Most requests decoded at once, no more than the profile prices; None takes the profile's."""
    kv_pool_tokens: int | None = None
    """KV slots; None takes the profile's."""
    mid_flight: bool = False
    """Start a closed loop as if it had been running: its first requests are part-way through."""
    ttft_limit_s: float = 1.0
    """Longest time to first token that meets the service level."""
    tpot_limit_s: float = 0.02
    """Longest mean time per output token after the first that meets it."""
    turnaround_s: float = 0.0
    """Closed loop: from the end of a request until the client's next one has reached the scheduler."""
    host_round_s: tuple[float, ...] = ()
    """How long the host is busy in a decode round of each tier: no round is shorter. Empty: not at all."""
    host_prefill_s: float = 0.0
    """The same of a prefill: prefills and the round behind them take no less than the host is busy in all."""


@dataclass(frozen=True)
class EngineResults:
    """What happened to the requests and inside the statistics window. S servers, R requests."""

    arrival_s: FloatArray
    """(S, R); nan where a request never arrived."""
    first_token_s: FloatArray
    finish_s: FloatArray
    output_tokens: IntArray
    """(S, R)"""
    counted: np.ndarray
    """(S, R) bool: requests inside the statistics."""
    failed: np.ndarray
    """(S,) bool: a request could not be served."""
    window_s: FloatArray
    """(S,) from the arrival of the first counted request to the finish of the last."""
    window_tokens: IntArray
    rounds: IntArray
    switches: IntArray
    drafted: IntArray
    accepted: IntArray
    tier_time_s: FloatArray
    """(S, num_tiers) decode time at each tier."""
    retracted: IntArray


class SimulatedEngine:
    """`SpeculativeEngine` over a simulator: see docs/simulator.md for what it models.

    Arguments:
        request_lists: one list of requests per server; their domains index `bank`.
        bank: acceptance at every output position.
        profiles: the measured cost of a round: one for all servers or one each, all with the same tiers.
        options: one for all servers or one each; the off mode must not mix `nospec` with others.
        max_requests: room for the longest list that `replace` will bring, if longer than these.
    """

    def __init__(
        self,
        request_lists: Sequence[RequestList],
        bank: AcceptanceBank,
        profiles: CostProfile | Sequence[CostProfile],
        options: ServerOptions | Sequence[ServerOptions] = ServerOptions(),
        max_requests: int = 0,
    ) -> None:
        self.num_servers = len(request_lists)
        self.request_lists = list(request_lists)
        self.options = [options] * self.num_servers if isinstance(options, ServerOptions) else list(options)
        self.profiles = [profiles] * self.num_servers if isinstance(profiles, CostProfile) else list(profiles)
        if self.options[0].off_mode == "nospec":
            self.tiers: tuple[int, ...] = (0,)
        else:
            self.tiers = self.profiles[0].tiers
        assert all(p.tiers == self.profiles[0].tiers for p in self.profiles), "profiles differ in tiers"
        if self.tiers[-1] > MAX_K:
            raise UserError(
                f"profile {self.profiles[0].name}: tiers: {self.tiers[-1]}; allowed: up to {MAX_K}"
            )
        self.num_tiers = len(self.tiers)
        self._tier_of_k = np.full(self.tiers[-1] + 1, -1, np.int64)
        self._tier_of_k[list(self.tiers)] = np.arange(self.num_tiers)
        self._by_depth = np.empty(MAX_K + 1)
        self._sim = self._allocate(max(max_requests, *(r.num_requests for r in request_lists)), bank)
        servers = self._sim.servers
        self._signals = RoundSignals(**{field.name: servers[field.name] for field in fields(RoundSignals)})
        self._outcome = RoundOutcome(servers["outcome_round"], servers["outcome_k"], self._sim.outcome_counts)
        self.replace(np.arange(self.num_servers), request_lists)

    def reset(self) -> None:
        """Put every server back before its first request; the requests stay the same."""
        self._clear(np.arange(self.num_servers))

    def replace(
        self, servers: IntArray, request_lists: Sequence[RequestList], par_s: Sequence[FloatArray] = ()
    ) -> None:
        """Give `servers` new requests and start them over; lists must fit in the room allocated.

        `par_s`, if given, says what a token of each request is worth (see objectives.Throughput).
        """
        for s, requests in zip(servers.tolist(), request_lists, strict=True):
            self.request_lists[s] = requests
            n = requests.num_requests
            self._sim.servers["closed"][s] = requests.mode == "closed"
            self._sim.servers["num_requests"][s] = n
            self._sim.servers["warmup"][s] = requests.warmup
            num_domains = len(self._sim.domain_first)
            if n and int(requests.domain.max()) >= num_domains:
                raise UserError(
                    f"workload: a request has domain {int(requests.domain.max())}; "
                    f"the acceptance source has domains 0 to {num_domains - 1}"
                )
            rows = self._sim.requests[s, :n]
            for name in REQUEST_FIELDS:
                rows[name] = getattr(requests, name)
            rows["head_start"] = 0
            if self.options[s].mid_flight:
                # The first requests are part-way through their output, as on a server that has been running.
                first = int(requests.concurrency[0])
                share = (requests.request_hash[:first] >> np.uint64(40)).astype(np.float64) / 2.0**24
                rows["head_start"][:first] = share * requests.output_tokens[:first]
        self._sim.requests["par_s"][servers] = 0.0
        for s, worth in zip(servers.tolist(), par_s, strict=False):
            self._sim.requests["par_s"][s, : len(worth)] = worth
        self._clear(servers)

    def signals(self) -> RoundSignals:
        """Views that the next round overwrites."""
        return self._signals

    def run_round(self, k: IntArray) -> list[RoundOutcome]:
        """Run one round of every server that is not done; rows that are done ignore `k`."""
        tier = self._tier_of_k[k]
        assert tier.min() >= 0, f"k must be one of {self.tiers}"
        kernels.run_round(self._sim, tier)
        return [self._outcome]

    @property
    def servers(self) -> np.ndarray:
        """(num_servers,) records of state.SERVER: clocks, flags and what the last step did."""
        servers: np.ndarray = self._sim.servers
        return servers

    def round_s(self) -> FloatArray:
        """(num_servers, num_tiers) seconds the coming round takes at each tier, switching aside."""
        into = np.empty((self.num_servers, self.num_tiers))
        kernels.round_times(self._sim, into)
        return into

    def expected_tokens(self) -> FloatArray:
        """(num_servers, num_tiers) expected tokens of the coming round, given the hidden state."""
        into = np.empty((self.num_servers, self.num_tiers))
        kernels.expected(self._sim, False, self._by_depth, into)
        return into

    def realised_tokens(self) -> FloatArray:
        """(num_servers, num_tiers) tokens the coming round will yield, the coming flips known."""
        into = np.empty((self.num_servers, self.num_tiers))
        kernels.realised_tokens(self._sim, into)
        return into

    def expected_worth_s(self) -> FloatArray:
        """(num_servers, num_tiers) seconds that the coming round's tokens are expected to be worth."""
        into = np.empty((self.num_servers, self.num_tiers))
        kernels.expected(self._sim, True, self._by_depth, into)
        return into

    def expected_worth_at_s(self, tier_index: IntArray) -> FloatArray:
        """(num_servers,) `expected_worth_s` at one tier of each server, which costs less than at all."""
        into = np.empty(self.num_servers)
        kernels.expected_worth_at(self._sim, tier_index, self._by_depth, into)
        return into

    def violations(self) -> IntArray:
        """(num_servers,) requests whose TTFT or TPOT limit passed in the last round, each told once."""
        kernels.charge_violations(self._sim)
        violations: IntArray = self._sim.servers["step_violations"]
        return violations

    def results(self) -> EngineResults:
        """Copies of the per-request times and the window totals so far."""
        servers, requests = self._sim.servers, self._sim.requests
        index = np.arange(requests.shape[1])
        first, last = servers["warmup"], servers["num_requests"] - servers["warmup"]
        return EngineResults(
            arrival_s=requests["arrived_s"].copy(),
            first_token_s=requests["first_token_s"].copy(),
            finish_s=requests["finish_s"].copy(),
            output_tokens=requests["output_tokens"].astype(np.int64),
            counted=(index >= first[:, None]) & (index < last[:, None]),
            failed=servers["failed"].copy(),
            window_s=servers["window_end_s"] - servers["window_start_s"],
            window_tokens=servers["window_tokens"].copy(),
            rounds=servers["window_rounds"].copy(),
            switches=servers["window_switches"].copy(),
            drafted=servers["window_drafted"].copy(),
            accepted=servers["window_accepted"].copy(),
            tier_time_s=self._sim.window_tier_s.copy(),
            retracted=servers["retracted"].copy(),
        )

    def _allocate(self, num_requests: int, bank: AcceptanceBank) -> Simulation:
        num_servers = self.num_servers
        off_modes = sorted({o.off_mode for o in self.options})
        assert "nospec" not in off_modes or len(off_modes) == 1, "nospec servers need an engine of their own"
        unique = {id(p): p for p in self.profiles}
        priced = sorted({*off_modes, "warm"}) if "kv-only" in off_modes else off_modes
        tables = [(p, mode) for p in unique.values() for mode in priced]
        table_of = {(id(p), mode): i for i, (p, mode) in enumerate(tables)}
        prefill_knots = [p.prefill_knots(mode, leaves_draft_out=True) for p, mode in tables]
        servers = np.zeros(num_servers, SERVER)
        for s, (p, o) in enumerate(zip(self.profiles, self.options, strict=True)):
            constants = {
                "off_is_stale": o.off_mode == "skip",
                "off_restarts": o.off_mode == "kv-only",
                "lag": o.lag,
                "profile": table_of[id(p), o.off_mode],
                "warm_profile": table_of[id(p), "warm" if o.off_mode == "kv-only" else o.off_mode],
                "max_running": min(o.max_running or p.max_running, p.max_running),
                "kv_pool_tokens": o.kv_pool_tokens or p.kv_pool_tokens,
                "chunk_tokens": p.chunked_prefill_tokens,
                # SGLang reserves twice the widest round for each request, whatever k is (allocation_sizing).
                "reserve_tokens": 1 if self.tiers == (0,) else 2 * max(p.draft_tokens),
                "switch_s": p.switch_s,
                "gap_floor": o.gap_floor,
                "gap_tokens": o.gap_tokens,
                "ttft_limit_s": o.ttft_limit_s,
                "tpot_limit_s": o.tpot_limit_s,
                "turnaround_s": o.turnaround_s,
                "host_prefill_s": o.host_prefill_s,
            }
            for name, value in constants.items():
                servers[name][s] = value
        return Simulation(
            servers=servers,
            requests=np.zeros((num_servers, num_requests), REQUEST),
            slots=np.zeros((num_servers, int(servers["max_running"].max())), SLOT),
            queue=np.zeros((num_servers, num_requests), np.int32),
            outcome_counts=np.zeros((num_servers, MAX_K + 1), np.int64),
            pending_counts=np.zeros((num_servers, MAX_K + 1), np.int64),
            window_tier_s=np.zeros((num_servers, self.num_tiers)),
            tiers=np.array(self.tiers, np.int64),
            round_table=_stack_tables([p.round_table(mode)[..., : self.num_tiers] for p, mode in tables]),
            host_round_s=np.array([o.host_round_s or [0.0] * self.num_tiers for o in self.options]),
            prefill_tokens=_pad_knots([tokens for tokens, _ in prefill_knots]),
            prefill_s=_pad_knots([seconds for _, seconds in prefill_knots]),
            accepted=bank.accepted,
            latent=bank.latent,
            array_start=bank.array_start,
            array_length=bank.array_length,
            domain_first=bank.domain_first,
            domain_count=bank.domain_count,
            survival=bank.survival,
        )

    def _clear(self, rows: IntArray) -> None:
        names = SERVER.names or ()
        servers = self._sim.servers
        for name in names[names.index(FIRST_STATE_FIELD) :]:
            servers[name][rows] = 0
        servers["last_tier"][rows] = -1
        servers["outcome_round"][rows] = -1
        servers["pending_round"][rows] = -1
        servers["new_token_ratio"][rows] = kernels.NEW_TOKEN_RATIO_START
        for name in ("arrived_s", "first_token_s", "finish_s", "freed_s"):
            self._sim.requests[name][rows] = np.nan
        self._sim.requests["charged"][rows] = False
        for array in (self._sim.outcome_counts, self._sim.pending_counts, self._sim.window_tier_s):
            array[rows] = 0
        kernels.start(self._sim, rows)


def _stack_tables(tables: Sequence[FloatArray]) -> FloatArray:
    """Stack `CostProfile.round_table`s; shorter ones get hinges of slope 0 and repeat their last batch."""
    num_rows = max(len(table) for table in tables)
    num_pieces = max(table.shape[1] for table in tables)
    stacked = np.zeros((len(tables), num_rows, num_pieces, tables[0].shape[2]))
    for i, table in enumerate(tables):
        stacked[i, : len(table), : table.shape[1] - 1] = table[:, :-1]
        stacked[i, : len(table), -1] = table[:, -1]
        stacked[i, len(table) :] = stacked[i, len(table) - 1]
    return stacked


def _pad_knots(rows: Sequence[FloatArray]) -> FloatArray:
    """Stack knots of unequal number; the last one lies beyond any prefill, so repeats are never read."""
    width = max(len(row) for row in rows)
    return np.stack([np.pad(row, (0, width - len(row)), mode="edge") for row in rows])
