"""What the policy saw and said in a live scheduler, against counts and computations of the tests' own.

Runs on the server of test_steering.py and looks back on its whole history.
"""

from __future__ import annotations

import math

import numpy as np
import policies
import pytest
from steered_server import SteeredServer
from traffic import Load, Reference, Request, Sending, random_requests

from draftdial.engine_patch.log_reader import RecordedLog
from draftdial.engine_patch.log_replay import replay

NUM_ROUNDS = 200


@pytest.fixture(scope="module")
def traffic(steered: SteeredServer, reference: Reference) -> list[Request]:
    """Requests that have been served under a policy that jumps: more than fit at once, so that some wait."""
    assert steered.set(draftdial_mode=0)
    assert steered.set(draftdial_force_k=-1)
    assert steered.deploy(policies.jumping(seed=7))
    requests = reference.choose(random_requests(seed=21, new_tokens=(40, 160)), 40)
    with Load(steered, requests) as load:
        steered.await_rounds(NUM_ROUNDS)
    assert load.tokens() == reference.tokens(requests)
    return requests


@pytest.fixture(scope="module")
def recorded(steered: SteeredServer, traffic: list[Request]) -> RecordedLog:
    """The decision log so far."""
    return steered.recorded()


def test_signals_equal_a_recount_of_the_scheduler(steered: SteeredServer, traffic: list[Request]) -> None:
    lines = steered.signals()
    assert len(lines) >= NUM_ROUNDS
    assert max(line["counted"]["num_waiting"] for line in lines) > 5
    for line in lines:
        seen, counted = line["seen"], line["counted"]
        if counted.pop("is_chunking"):
            continue  # a request in the middle of its prefill is in neither of the probe's lists
        assert math.isclose(seen["kv_used_fraction"], counted.pop("kv_used_fraction"), abs_tol=1e-12), line
        assert {name: seen[name] for name in counted} == counted, line


def test_signals_account_for_every_request(steered: SteeredServer, traffic: list[Request]) -> None:
    lines = steered.signals()
    before = len(lines)
    requests = [Request((7,) * 600 + (n,), 20) for n in range(3, 9)]
    Sending(steered, requests).answers()
    Sending(steered, [Request((11, 13), 12)]).answers()  # takes up what finished after the last decision
    new = [line["seen"] for line in steered.signals()[before:]]
    assert sum(row["num_admitted"] for row in new) == 7
    assert sum(row["num_finished"] for row in new) >= 6
    assert [row["round_id"] for row in new] == list(range(new[0]["round_id"], new[0]["round_id"] + len(new)))
    # The prompts share all but their last token, so at least one of them is prefilled whole.
    assert 600 <= sum(row["num_prefill_tokens"] for row in new) <= 6 * 601 + 2


def test_the_server_decides_what_the_same_policy_decides_offline(recorded: RecordedLog) -> None:
    replayed = replay(recorded)
    assert len(replayed.round_id) >= NUM_ROUNDS
    assert len(np.unique(replayed.logged_k)) == len(policies.TIERS)
    np.testing.assert_array_equal(replayed.offline_k, replayed.logged_k)


def test_the_log_shows_the_rounds_that_ran(steered: SteeredServer, recorded: RecordedLog) -> None:
    """The log's rows are a part of the probe's: it saw health checks too."""
    logged = list(
        zip(recorded.rounds["num_running"].tolist(), recorded.rounds["acted_k"].tolist(), strict=True)
    )
    ran = iter(steered.rounds())
    assert len(logged) >= NUM_ROUNDS
    assert all(row in ran for row in logged)


def test_outcomes_are_those_of_their_own_round(recorded: RecordedLog) -> None:
    k_of = dict(zip(recorded.rounds["round_id"].tolist(), recorded.rounds["acted_k"].tolist(), strict=True))
    running = dict(
        zip(recorded.rounds["round_id"].tolist(), recorded.rounds["num_running"].tolist(), strict=True)
    )
    assert len(recorded.outcomes) >= NUM_ROUNDS
    for outcome in recorded.outcomes:
        round_id, counts = int(outcome["round_id"]), outcome["accept_counts"]
        assert outcome["k"] == k_of[round_id]
        assert counts[outcome["k"] + 1 :].sum() == 0
        assert 0 < counts.sum() <= running[round_id]


def test_accepted_drafts_and_rounds_add_up_to_the_output(
    steered: SteeredServer, reference: Reference, traffic: list[Request]
) -> None:
    """Every round gives a request one token and its accepted drafts, except where its length cut them."""
    before = steered.status()
    [request] = reference.choose(random_requests(seed=23, new_tokens=(300, 300), spread_s=0.0), 1)
    Sending(steered, [request]).answers()
    after = steered.status()
    rounds = after["observed"] - before["observed"]
    accepted = (after["drafted"] - before["drafted"]) - (after["wasted"] - before["wasted"])
    first_from_prefill, cut = 1, max(policies.TIERS)
    assert 300 <= first_from_prefill + rounds + accepted <= 300 + cut


def test_health_checks_are_no_decisions(steered: SteeredServer, traffic: list[Request]) -> None:
    before, rounds = steered.status(), len(steered.rounds())
    for _ in range(3):
        steered.get("/health_generate")
    after = steered.status()
    assert len(steered.rounds()) >= rounds
    for name in ("decisions", "observed", "switches", "decision_hash"):
        assert after[name] == before[name]
