"""Whatever decides k, and however often it changes, outputs are those of the target alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import policies
import pytest
from steered_server import SteeredServer, num_switches, shares
from traffic import Load, Reference, Request, Sending, fewest_rounds, random_requests, tokens_of

from draftdial.engine_patch import kv_lengths


@pytest.fixture
def requests(reference: Reference) -> list[Request]:
    """24 requests, of which a `Sending` staggers the starts; more than run at once."""
    return reference.choose(random_requests(seed=11), 24)


@pytest.fixture(autouse=True)
def _sound(steered: SteeredServer) -> Iterator[None]:
    """Each test begins in mode steer with the first policy, and ends without an error."""
    assert steered.set(draftdial_mode=0)
    assert steered.set(draftdial_force_k=-1)
    assert steered.deploy(policies.learned(seed=0))
    before = steered.status()
    yield
    after = steered.status()
    assert after["fallback"] == ""
    assert after["errors"] == before["errors"], after["last_error"]


def test_a_learned_policy_changes_no_output(
    steered: SteeredServer, reference: Reference, requests: list[Request]
) -> None:
    before = steered.status()
    assert tokens_of(Sending(steered, requests).answers()) == reference.tokens(requests)
    after = steered.status()
    assert after["mode"] == "steer"
    assert after["policy_id"] == policies.learned(seed=0).policy_id
    assert after["decisions"] - before["decisions"] >= fewest_rounds(requests, max(policies.TIERS))
    assert after["observed"] == after["decisions"]
    assert sum(after[f"rounds_at_k.{k}"] for k in policies.TIERS) == after["decisions"]
    assert not any(name.startswith("steady_") for name in after), "nothing overlaps on a CPU"


def test_lengths_of_kv_are_a_list_where_sglang_would_read_them_off_a_tensor(
    steered: SteeredServer, release: str
) -> None:
    begun = len(steered.rounds())
    Sending(steered, [Request((5, 6, 7), 40)]).answers()
    rounds = steered.rounds()
    lengths = steered.kv_lengths()
    assert len(lengths) >= len(rounds) > begun  # of every round, also at k = 0
    assert set(lengths) == {"list" if release in kv_lengths.RELEASES else "Tensor"}


def test_switching_in_most_rounds_changes_no_output(
    steered: SteeredServer, reference: Reference, requests: list[Request]
) -> None:
    assert steered.deploy(policies.jumping(seed=1))
    start = len(steered.rounds())
    with Load(steered, requests) as load:
        steered.await_rounds(200)
    assert load.tokens() == reference.tokens(requests)
    rounds = steered.rounds()[start:]
    assert num_switches(rounds) > 0.5 * len(rounds)
    assert min(shares(rounds).get(k, 0.0) for k in policies.TIERS) > 0.05
    assert max(batch_size for batch_size, _ in rounds) >= 8


@pytest.mark.parametrize("kind", ["greedy", "sglang-adaptive", "threshold"])
def test_rules_deploy_like_policies(steered: SteeredServer, reference: Reference, kind: str) -> None:
    # All at once, and one that is left alone at the end.
    together = reference.choose(random_requests(seed=16, new_tokens=(60, 120), spread_s=0.0), 8)
    alone = reference.choose(random_requests(seed=17, new_tokens=(250, 250), spread_s=0.0), 1)
    requests = together + alone
    parameters = {"k": 3, "batch": 2} if kind == "threshold" else {}
    file = policies.rule(kind, **parameters)
    assert steered.deploy(file)
    start = len(steered.rounds())
    assert tokens_of(Sending(steered, requests).answers()) == reference.tokens(requests)
    assert steered.status()["policy_kind"] == kind
    if kind == "threshold":
        assert {k == 3 for batch_size, k in steered.rounds()[start:] if batch_size <= 2} == {True}
        assert {k for batch_size, k in steered.rounds()[start:] if batch_size > 2} == {0}


def test_a_policy_is_swapped_under_load(
    steered: SteeredServer, reference: Reference, requests: list[Request]
) -> None:
    before = steered.status()["deploys"]
    files = [policies.jumping(seed) for seed in (2, 3, 4)] * 3
    with Load(steered, requests) as load:
        for file in files:
            steered.await_rounds(10)
            assert steered.deploy(file)
        steered.await_rounds(10)
    assert load.tokens() == reference.tokens(requests)
    status = steered.status()
    assert status["deploys"] == before + len(files)
    assert status["policy_id"] == files[-1].policy_id


def test_off_and_on_again_under_load(
    steered: SteeredServer, reference: Reference, requests: list[Request]
) -> None:
    assert steered.deploy(policies.rule("fixed", k=3))
    start = len(steered.rounds())
    modes = [2, 0] * 5
    with Load(steered, requests) as load:
        for mode in modes:
            steered.await_rounds(10)
            assert steered.set(draftdial_mode=mode)
        steered.await_rounds(10)
    assert load.tokens() == reference.tokens(requests)
    rounds = steered.rounds()[start:]
    assert set(shares(rounds)) == {0, 3}
    assert num_switches(rounds) == len(modes)


def test_forcing_k_overrides_the_policy(steered: SteeredServer, reference: Reference) -> None:
    requests = reference.choose(random_requests(seed=12, spread_s=0.0), 4)
    for k in policies.TIERS:
        assert steered.set(draftdial_force_k=k)
        start = len(steered.rounds())
        assert tokens_of(Sending(steered, requests).answers()) == reference.tokens(requests)
        assert set(shares(steered.rounds()[start:])) == {k}
        assert (steered.status()["forced_k"], steered.status()["k"]) == (k, k)


def test_shadow_leaves_the_rounds_to_sglang(
    steered: SteeredServer, reference: Reference, requests: list[Request]
) -> None:
    assert steered.deploy(policies.rule("fixed", k=0))
    assert steered.set(draftdial_mode=1)
    start = len(steered.rounds())
    assert tokens_of(Sending(steered, requests).answers()) == reference.tokens(requests)
    status = steered.status()
    assert (status["mode"], status["wanted_k"]) == ("shadow", 0)
    assert max(shares(steered.rounds()[start:])) > 0


def test_second_turns_hit_the_prefix_cache(steered: SteeredServer, reference: Reference) -> None:
    assert steered.deploy(policies.jumping(seed=5))
    first = reference.choose(random_requests(seed=13, new_tokens=(60, 120), spread_s=0.3), 8)
    said = Sending(steered, first).answers()
    assert tokens_of(said) == reference.tokens(first)
    turns = [(*request.prompt, *answer.tokens) for request, answer in zip(first, said, strict=True)]
    before = {
        Request((*turn, *range(m, m + n)), 60): turn for n, turn in enumerate(turns, 1) for m in (5, 50)
    }
    second = reference.choose(before, 6)
    answers = Sending(steered, second).answers()
    assert tokens_of(answers) == reference.tokens(second)
    for answer, request in zip(answers, second, strict=True):
        # The first turn's output and not only its prompt. Its last token was never fed back, and with
        # EAGLE the cache is keyed by pairs of tokens.
        assert answer.meta["cached_tokens"] >= len(before[request]) - 2


def test_aborts_leave_the_others_alone(
    steered: SteeredServer, reference: Reference, requests: list[Request]
) -> None:
    assert steered.deploy(policies.jumping(seed=6))
    known = reference.choose(random_requests(seed=15, new_tokens=(200, 200), spread_s=0.0), 6)
    doomed = Sending(steered, [replace(request, new_tokens=2000) for request in known], name="doomed")
    steered.await_batch(len(known))
    with Load(steered, requests) as load:
        for i in range(len(known)):
            steered.await_rounds(5)
            steered.post("/abort_request", {"rid": f"doomed-{i}"})
        answers = doomed.answers()
        steered.await_rounds(5)
    for answer, right in zip(answers, reference.tokens(known), strict=True):
        assert answer.meta["finish_reason"]["type"] == "abort"
        assert 0 < len(answer.tokens) < 2000
        assert all(a == b for a, b in zip(answer.tokens, right, strict=False))
    assert load.tokens() == reference.tokens(requests)
