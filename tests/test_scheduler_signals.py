"""Signals kept from a scheduler's events, against what they should be and a count from nothing."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
from scheduler_double import POOL_TOKENS, SchedulerDouble

from draftdial.controller.signals import RoundSignals
from draftdial.engine_patch.scheduler_signals import SchedulerSignals


def row(scheduler: SchedulerDouble) -> dict[str, float]:
    """The newest row as plain numbers."""
    values = scheduler.signals.values
    return {field.name: getattr(values, field.name)[0].item() for field in fields(RoundSignals)}


def test_a_round_is_described_as_the_simulator_would() -> None:
    scheduler = SchedulerDouble()
    first, second = scheduler.queue("a", 10), scheduler.queue("b", 21)
    scheduler.prefill(first, second)
    scheduler.queue("c", 30)
    scheduler.decode()
    assert row(scheduler) == {
        "round_id": 0,
        "num_running": 2,
        "num_waiting": 1,
        "num_waiting_prompt_tokens": 30,
        "oldest_wait_rounds": 0,
        "mean_context_tokens": (11 + 22) // 2,
        "kv_used_fraction": 33 / POOL_TOKENS,
        "max_running": 16,
        "num_admitted": 2,
        "num_finished": 0,
        "num_prefill_tokens": 31,
    }


def test_counts_since_the_last_decision_start_anew() -> None:
    scheduler = SchedulerDouble()
    scheduler.prefill(scheduler.queue("a", 10, num_output=2), scheduler.queue("b"))
    scheduler.decode()
    scheduler.decode()
    assert [row(scheduler)[name] for name in ("num_admitted", "num_prefill_tokens", "num_finished")] == [
        0,
        0,
        1,
    ]
    scheduler.decode()
    assert row(scheduler)["num_finished"] == 0


def test_waiting_is_counted_in_rounds_from_the_first_arrival() -> None:
    scheduler = SchedulerDouble()
    scheduler.prefill(scheduler.queue("a"))
    scheduler.decode()
    first = scheduler.queue("b")
    scheduler.decode()
    scheduler.queue("c")
    scheduler.decode()
    scheduler.decode()
    assert row(scheduler)["oldest_wait_rounds"] == 2
    scheduler.prefill(first)
    scheduler.decode()
    assert row(scheduler)["oldest_wait_rounds"] == 2, "c arrived one round later and waits one round more"


def test_a_retracted_request_keeps_its_arrival() -> None:
    scheduler = SchedulerDouble()
    request = scheduler.queue("a", 10)
    scheduler.prefill(request, scheduler.queue("b"))
    scheduler.decode()
    scheduler.decode()
    scheduler.retract(request)
    scheduler.decode()
    assert row(scheduler)["oldest_wait_rounds"] == 2
    assert row(scheduler)["num_waiting_prompt_tokens"] == 10 + 1 + 2
    assert scheduler.signals.recount() == scheduler.signals.totals()


def test_a_chunked_prefill_waits_with_what_is_left_of_it() -> None:
    scheduler = SchedulerDouble()
    scheduler.prefill(scheduler.queue("a"))
    long = scheduler.queue("b", 100)
    scheduler.prefill(long, chunk_end=40)
    scheduler.decode()
    seen = row(scheduler)
    assert (seen["num_waiting"], seen["num_waiting_prompt_tokens"], seen["num_running"]) == (1, 60, 1)
    scheduler.prefill(long)
    scheduler.decode()
    assert (row(scheduler)["num_waiting"], row(scheduler)["num_admitted"]) == (0, 1)


def test_a_retracted_request_keeps_its_output_while_it_is_prefilled_again_in_chunks() -> None:
    scheduler = SchedulerDouble()
    kept, sent_back = scheduler.queue("a"), scheduler.queue("b", num_prompt=20)
    scheduler.prefill(kept, sent_back)
    scheduler.decode()
    scheduler.retract(sent_back)
    assert scheduler.signals.output_tokens() == 4
    scheduler.prefill(sent_back, chunk_end=8)
    assert scheduler.signals.output_tokens() == 4
    scheduler.prefill(sent_back)
    assert scheduler.signals.output_tokens() == 5


def test_an_aborted_request_leaves_the_queue_unseen() -> None:
    scheduler = SchedulerDouble()
    scheduler.prefill(scheduler.queue("a"))
    aborted = scheduler.queue("b", 50)
    scheduler.waiting_queue.remove(aborted)
    scheduler.queue("c", 7)
    scheduler.decode()
    assert (row(scheduler)["num_waiting"], row(scheduler)["num_waiting_prompt_tokens"]) == (1, 7)
    assert scheduler.signals.resyncs == 1 and scheduler.over == [aborted]


def test_the_oldest_stays_the_oldest_when_a_sorted_queue_is_counted_anew() -> None:
    scheduler = SchedulerDouble()
    scheduler.prefill(scheduler.queue("a"))
    scheduler.queue("b")
    scheduler.decode()
    scheduler.decode()
    aborted = scheduler.queue("c")
    scheduler.decode()
    scheduler.waiting_queue.reverse()  # by prefix or by priority, the newest first
    scheduler.waiting_queue.remove(aborted)
    scheduler.waiting_queue.insert(0, scheduler.queue("d"))
    del scheduler.waiting_queue[-1]  # where it had come in
    scheduler.decode()
    assert scheduler.signals.resyncs == 1 and scheduler.over == [aborted]
    assert (row(scheduler)["num_waiting"], row(scheduler)["oldest_wait_rounds"]) == (2, 3)


def test_a_finished_request_still_in_the_batch_is_not_counted_twice() -> None:
    scheduler = SchedulerDouble(lag=2)
    scheduler.prefill(scheduler.queue("a", 10, num_output=2), scheduler.queue("b", 10))
    scheduler.decode()
    scheduler.decode()
    assert (row(scheduler)["num_running"], row(scheduler)["num_finished"]) == (2, 0)
    scheduler.decode()
    assert (row(scheduler)["num_running"], row(scheduler)["num_finished"]) == (1, 1)
    assert row(scheduler)["mean_context_tokens"] == 10 + 2


@pytest.mark.parametrize("lag", [1, 2])
def test_running_totals_equal_a_count_from_nothing(lag: int) -> None:
    rng = random.Random(lag)
    scheduler = SchedulerDouble(lag)
    requests = []
    for number in range(2000):
        action = rng.random()
        if action < 0.3:
            requests.append(scheduler.queue(f"r{number}", rng.randrange(1, 40), rng.randrange(1, 12)))
        elif action < 0.45 and scheduler.waiting_queue:
            count = rng.randrange(1, len(scheduler.waiting_queue) + 1)
            scheduler.prefill(*scheduler.waiting_queue[:count])
        elif action < 0.5 and scheduler.waiting_queue:
            scheduler.waiting_queue.pop(rng.randrange(len(scheduler.waiting_queue)))
        elif action < 0.53 and len(scheduler.running_batch.reqs) > 1:
            scheduler.settle()
            running = [r for r in scheduler.running_batch.reqs if r.finished_reason is None]
            if running:
                scheduler.retract(rng.choice(running))
        else:
            scheduler.decode(rng.randrange(4))
            assert scheduler.signals.totals() == scheduler.signals.recount()
            kept = [min(len(r.output_ids), r.sampling_params.max_new_tokens) for r in requests]
            assert scheduler.signals.output_tokens() == sum(kept), "also of those that left the queue"
    assert scheduler.signals.round_id > 500 and scheduler.signals.resyncs > 10


def test_health_checks_make_no_round_of_their_own() -> None:
    scheduler = SchedulerDouble(lag=2)  # else the check is over with its prefill
    scheduler.prefill(scheduler.queue("HEALTH_CHECK_1", num_output=1))
    assert scheduler.signals.is_probe_round(1)
    scheduler.prefill(scheduler.queue("a"))
    scheduler.decode()
    assert not scheduler.signals.is_probe_round(2)
    assert row(scheduler)["num_admitted"] == 1


def test_a_client_may_call_a_request_what_health_checks_are_called() -> None:
    scheduler = SchedulerDouble()
    scheduler.prefill(scheduler.queue("HEALTH_CHECK_mine", num_output=3))
    assert not scheduler.signals.is_probe_round(1)
    scheduler.decode()
    assert row(scheduler)["num_admitted"] == 1


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "earlier", "is_warm_up"),
    [
        (3, 8, None, True),
        (3, 8, "HEALTH_CHECK_1", True),
        (3, 8, "a", False),
        (3, 9, None, False),
        (99, 8, None, False),
    ],
)
def test_the_warm_up_is_the_first_request_of_a_server(
    num_prompt: int, num_output: int, earlier: str | None, is_warm_up: bool
) -> None:
    scheduler = SchedulerDouble()
    scheduler.signals = SchedulerSignals(scheduler, has_warm_up=True)
    if earlier is not None:
        scheduler.queue(earlier, num_output=1)
    request = scheduler.queue("w", num_prompt, num_output)
    assert request.draftdial.is_probe == is_warm_up  # type: ignore[attr-defined]
