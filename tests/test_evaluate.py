"""The figures of an evaluation, recomputed slowly from what a run shows round by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from draftdial.controller.errors import UserError
from draftdial.controller.signals import IntArray, RoundOutcome, RoundSignals
from draftdial.envs.evaluate import Metrics, evaluate, run
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine

Factory = Callable[..., Any]
SWITCH_S = 0.0005
LEVELS = [(1, 20), (3, 50), (8, 120)]


class Recorder:
    """Chooses k by a seed and keeps what the engine showed before every round."""

    def __init__(self, engine: SimulatedEngine, ks: tuple[int, ...]) -> None:
        self.tiers = engine.tiers
        self._engine = engine
        self._ks = ks

    def reset(self, num_servers: int) -> None:
        self._rng = np.random.default_rng(5)
        self.shown: list[tuple[np.ndarray, ...]] = []
        self.outcomes: list[RoundOutcome] = []

    def decide(self, signals: RoundSignals) -> IntArray:
        k = self._rng.choice(self._ks, self._engine.num_servers)
        servers = self._engine.servers
        self.shown.append(
            (
                servers["done"].copy(),
                servers["clock_s"].copy(),
                servers["num_active"].copy(),
                self._engine.realised_tokens(),
                self._engine.round_s(),
                k,
            )
        )
        return k

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(
            RoundOutcome(outcome.round_id.copy(), outcome.k.copy(), outcome.accept_counts.copy())
        )

    def rounds(self, server: int) -> Iterator[tuple[float, int, list[float], list[float], int, bool]]:
        """Of every round of a server: start, requests, tokens and seconds by tier, k, whether k changed."""
        before = None
        for done, clock, active, tokens, seconds, k in self.shown:
            if not done[server]:
                now = int(k[server])
                yield (
                    float(clock[server]),
                    int(active[server]),
                    tokens[server].tolist(),
                    seconds[server].tolist(),
                    now,
                    before not in (None, now),
                )
                before = now


@pytest.fixture(scope="module")
def make_cell(make_profile: Factory, make_bank: Factory, make_requests: Factory) -> Factory:
    rng = np.random.default_rng(0)
    bank = make_bank({d: [rng.integers(0, 6, 30) for _ in range(5)] for d in "abc"})
    profile = make_profile((0, 1, 2, 5), switch_ms=1e3 * SWITCH_S)
    closed = [
        make_requests(
            rng.integers(2, 40, n),
            prompt_tokens=rng.integers(10, 300, n),
            domain=rng.integers(0, 3, n),
            concurrency=c,
            warmup=n // 10,
            seed=c,
        )
        for c, n in LEVELS
    ]
    arriving = make_requests(
        rng.integers(1, 40, 90), arrival_s=np.cumsum(rng.exponential(0.1, 90)), warmup=7, seed=9
    )

    def make(*, open_loop: bool = False, **options: Any) -> SimulatedEngine:
        return SimulatedEngine([arriving] if open_loop else closed, bank, profile, ServerOptions(**options))

    return make


def quantile(values: list[float], share: float) -> float:
    values = sorted(values)
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


@pytest.mark.parametrize("lag", [1, 2])
def test_metrics_of_closed_loops_recomputed(lag: int, make_cell: Factory) -> None:
    options = {"lag": lag, "ttft_limit_s": 0.012, "tpot_limit_s": 0.011}
    engine = make_cell(**options)
    policy = Recorder(engine, engine.tiers)
    metrics = evaluate(policy, engine)
    results = engine.results()
    for s, (_, n) in enumerate(LEVELS):
        counted = range(n // 10, n - n // 10)
        arrival, first, finish = (
            [float(x) for x in times[s, :n]]
            for times in (results.arrival_s, results.first_token_s, results.finish_s)
        )
        output = [int(x) for x in results.output_tokens[s, :n]]
        e2e = [finish[r] - arrival[r] for r in counted]
        ttft = [first[r] - arrival[r] for r in counted]
        tpot = [(finish[r] - first[r]) / max(output[r] - 1, 1) for r in counted]
        start, end = arrival[counted[0]], max(finish[r] for r in counted)

        tokens = sum(start < t <= end for t in first)  # every prefill gives one; nothing is retracted
        rounds = switches = drafted = accepted = 0
        tier_s = dict.fromkeys(engine.tiers, 0.0)
        for began, active, by_tier, seconds, k, switched in policy.rounds(s):
            if start <= began < end:
                tier = engine.tiers.index(k)
                rounds += 1
                switches += switched
                drafted += k * active
                accepted += int(by_tier[tier]) - active
                tokens += int(by_tier[tier])
                tier_s[k] += seconds[tier] + SWITCH_S * switched

        met = [
            t <= options["ttft_limit_s"] and p <= options["tpot_limit_s"]
            for t, p in zip(ttft, tpot, strict=True)
        ]
        assert 0 < sum(met) < len(met) or s != 1
        assert one(metrics, s) == pytest.approx(
            {
                "e2e_mean_s": sum(e2e) / len(e2e),
                "e2e_p50_s": quantile(e2e, 0.5),
                "e2e_p90_s": quantile(e2e, 0.9),
                "e2e_p99_s": quantile(e2e, 0.99),
                "ttft_mean_s": sum(ttft) / len(ttft),
                "ttft_p99_s": quantile(ttft, 0.99),
                "tpot_mean_s": sum(tpot) / len(tpot),
                "output_tok_s": tokens / (end - start),
                "slo_attainment": sum(met) / len(met),
                "switches_per_1k_rounds": 1000 * switches / rounds,
                "wasted_draft_share": 1 - accepted / drafted,
                "rounds": rounds,
                "num_requests": len(counted),
            },
            rel=1e-9,
        )
        shares = [tier_s[k] / sum(tier_s.values()) for k in engine.tiers]
        assert metrics.tier_time_share[s] == pytest.approx(shares, rel=1e-9)


def one(metrics: Metrics, server: int) -> dict[str, float]:
    """A server's row of every metric with one value per server."""
    return {name: float(v[server]) for name, v in vars(metrics).items() if name != "tier_time_share"}


def test_metrics_of_an_open_loop_recomputed(make_cell: Factory) -> None:
    engine = make_cell(open_loop=True)
    policy = Recorder(engine, (1, 2))
    metrics = evaluate(policy, engine)
    results = engine.results()
    counted = range(7, 83)
    e2e = [float(results.finish_s[0, r] - results.arrival_s[0, r]) for r in counted]
    assert metrics.e2e_mean_s[0] == pytest.approx(sum(e2e) / len(e2e))
    assert metrics.num_requests[0] == len(counted)
    assert metrics.tier_time_share[0, [0, 3]].tolist() == [0.0, 0.0]
    # The round under way when the first counted request arrives is not counted: a few tokens less or more.
    window_s = max(results.finish_s[0, r] for r in counted) - results.arrival_s[0, 7]
    longest = 8 * 6
    of_counted = sum(int(results.output_tokens[0, r]) for r in counted)
    assert of_counted - longest <= metrics.output_tok_s[0] * window_s <= of_counted + 14 * 40


def test_a_run_shows_the_policy_every_outcome_once(make_cell: Factory) -> None:
    for lag in (1, 2):
        engine = make_cell(lag=lag)
        policy = Recorder(engine, engine.tiers)
        run(policy, engine)
        for s in range(engine.num_servers):
            rounds = list(policy.rounds(s))
            seen = [
                (int(o.round_id[s]), int(o.k[s]), int(o.accept_counts[s].sum()))
                for o in policy.outcomes[: len(rounds)]
            ]
            expected = [(i, k, active) for i, (_, active, _, _, k, _) in enumerate(rounds)]
            late = lag - 1
            assert all(o.round_id[s] == -1 for o in policy.outcomes[len(rounds) :])
            assert seen == [(-1, 0, 0)] * late + expected[: len(expected) - late]


def test_evaluations_repeat_to_the_bit(make_cell: Factory) -> None:
    engine = make_cell()
    first = evaluate(Recorder(engine, engine.tiers), engine)
    second = evaluate(Recorder(engine, engine.tiers), engine)
    assert all((a == b).all() for a, b in zip(vars(first).values(), vars(second).values(), strict=True))


def test_a_request_that_is_never_served_voids_the_cell(make_cell: Factory) -> None:
    engine = make_cell(kv_pool_tokens=250)
    with pytest.raises(UserError, match="kv_pool_tokens"):
        evaluate(Recorder(engine, (0,)), engine)
