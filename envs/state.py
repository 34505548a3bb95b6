"""The arrays of the simulated servers: one record per server, per request and per running request."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

MAX_K = 7

SERVER = np.dtype(
    [
        # What no policy can change.
        ("closed", np.bool_),
        ("off_is_stale", np.bool_),  # off rounds leave a gap in the draft's KV
        ("off_restarts", np.bool_),  # off mode kv-only: a warm off round comes before speculation
        ("lag", np.int64),
        ("profile", np.int64),  # row of the cost tables
        ("warm_profile", np.int64),  # the one of such a warm off round, and of prefills that run the draft
        ("num_requests", np.int64),
        ("warmup", np.int64),  # statistics use requests [warmup, num_requests - warmup)
        ("max_running", np.int64),
        ("kv_pool_tokens", np.int64),
        ("chunk_tokens", np.int64),
        ("reserve_tokens", np.int64),  # KV slots held per running request beyond its context
        ("switch_s", np.float64),
        ("gap_floor", np.float64),  # acceptance factor left at a gap of gap_tokens and more
        ("gap_tokens", np.float64),
        ("ttft_limit_s", np.float64),
        ("tpot_limit_s", np.float64),
        ("turnaround_s", np.float64),  # closed loop: from the end of a request to the arrival of the next
        ("host_prefill_s", np.float64),  # the host is busy for so long in a prefill
        # Clock and batch.
        ("clock_s", np.float64),
        ("batch_start_s", np.float64),  # arrivals after it missed the batch being formed
        ("round_id", np.int64),
        ("last_tier", np.int64),
        ("is_cold", np.bool_),  # the last round was off and no warm one
        ("owed_tier", np.int64),  # what the last round was to run, had it not been a restart
        ("done", np.bool_),
        ("failed", np.bool_),  # a request that cannot fit in the KV pool
        ("num_active", np.int64),
        ("num_ghosts", np.int64),  # finished requests in the batch launched before that was known
        ("context_tokens", np.int64),  # of active requests
        ("ghost_tokens", np.int64),
        ("remaining_tokens", np.int64),  # output the active requests still have to produce
        ("new_token_ratio", np.float64),
        # Requests and queue.
        ("next_request", np.int64),  # first request that has not arrived
        ("requests_finished", np.int64),
        ("counted_finished", np.int64),  # of those inside the statistics
        ("retracted", np.int64),
        ("queue_head", np.int64),
        ("chunk_done", np.int64),  # tokens of the queue's head already prefilled
        # RoundSignals.
        ("num_running", np.int64),
        ("num_waiting", np.int64),
        ("num_waiting_prompt_tokens", np.int64),
        ("oldest_wait_rounds", np.int64),
        ("mean_context_tokens", np.int64),
        ("kv_used_fraction", np.float64),
        ("num_admitted", np.int64),
        ("num_finished", np.int64),
        ("num_prefill_tokens", np.int64),
        # RoundOutcome that has arrived, and the one the lag holds back.
        ("outcome_round", np.int64),
        ("outcome_k", np.int64),
        ("pending_round", np.int64),
        ("pending_k", np.int64),
        # What the last step did, for rewards.
        ("step_decode_s", np.float64),
        ("step_prefill_s", np.float64),
        ("step_prefills", np.int64),
        ("step_elapsed_s", np.float64),  # decode, switch, prefill and idle time
        ("step_tokens", np.int64),
        ("step_in_system_s", np.float64),  # integral of the requests in the system
        ("step_violations", np.int64),  # requests found outside their TTFT or TPOT limit
        # The statistics window: from the arrival of the first counted request to the finish of the last.
        ("window_open", np.bool_),
        ("window_start_s", np.float64),
        ("window_end_s", np.float64),
        ("window_tokens", np.int64),
        ("window_rounds", np.int64),
        ("window_switches", np.int64),
        ("window_drafted", np.int64),
        ("window_accepted", np.int64),
    ],
    align=True,
)
FIRST_STATE_FIELD = "clock_s"

REQUEST = np.dtype(
    [
        ("arrival_s", np.float64),  # open loop: when it arrives
        ("concurrency", np.int32),  # closed loop: requests to keep in the system while it is next
        ("prompt_tokens", np.int32),
        ("output_tokens", np.int32),
        ("domain", np.int32),
        ("request_hash", np.uint64),
        ("par_s", np.float64),  # rewards: seconds a token of this request is worth (see scenario.par_s)
        ("charged", np.bool_),  # rewards: it has been counted as outside its limits
        ("head_start", np.int32),  # output tokens it already has when it arrives
        ("emitted", np.int32),  # output tokens it had when it last left the batch
        ("arrived_round", np.int64),
        ("arrived_s", np.float64),
        ("first_token_s", np.float64),
        ("finish_s", np.float64),
        ("freed_s", np.float64),  # of the i-th record: when the i-th request to end did so
    ],
    align=True,
)

# A round reads these and not the bank or the requests, which lie all over memory.
SLOT = np.dtype(
    [
        ("request", np.int32),
        ("position", np.int32),  # in the bank: where the next round of this request starts
        ("array_end", np.int32),  # in the bank: end of the array it walks
        ("hop", np.int32),  # arrays walked so far
        ("remaining", np.int32),
        ("context", np.int32),
        ("gap", np.int32),  # tokens missing from the draft's KV
        ("latent", np.uint16),  # of the bank, at `position`
        ("accepted", np.uint8),  # likewise
        ("par_s", np.float64),  # of the request
    ],
    align=True,
)


class Simulation(NamedTuple):
    """Everything the kernel touches. S servers, R requests each, M slots, P cost tables, T tiers."""

    servers: Any  # (S,) SERVER
    requests: Any  # (S, R) REQUEST
    slots: Any  # (S, M) SLOT
    queue: Any  # (S, R) int32 ring of waiting requests
    outcome_counts: Any  # (S, MAX_K + 1) int64
    pending_counts: Any  # (S, MAX_K + 1) int64
    window_tier_s: Any  # (S, T) float64
    tiers: Any  # (T,) int64
    round_table: Any  # (P, max rows + 1, pieces, T): see CostProfile.round_table
    host_round_s: Any  # (S, T): the host is busy for so long in a decode round
    prefill_tokens: Any  # (P, knots), of prefills that leave the draft out where the off mode has such
    prefill_s: Any  # (P, knots)
    accepted: Any  # (positions,) uint8: the acceptance bank, from here on
    latent: Any  # (positions,) uint16
    array_start: Any  # (arrays,) int64
    array_length: Any  # (arrays,) int32
    domain_first: Any  # (domains,) int64
    domain_count: Any  # (domains,) int32
    survival: Any  # (latents, MAX_K + 1) float64
