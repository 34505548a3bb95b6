"""One decode round of many simulated servers, compiled.

`run_round` takes each server from one decision to the next: the decode round itself, then whatever
SGLang does before it asks again (arrivals, chunked prefill first, retraction when the KV pool is
full, idle time). Nothing here draws random numbers: whether a draft token is right belongs to the
token (the bank's `accepted`), so two policies that choose alike see the same bits, and no choice
disturbs another request.

All of it is one file: numba's cache of a function does not notice a change of another file that it
was compiled with.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from draftdial.envs.state import MAX_K

# SGLang's estimate of how much of their allowance running requests will still use (schedule policy,
# release 0.5.17): starts at 0.7, decays to 0.098 over 600 rounds, rises when requests are retracted.
NEW_TOKEN_RATIO_START = 0.7
NEW_TOKEN_RATIO_FLOOR = 0.098
NEW_TOKEN_RATIO_DECAY = (NEW_TOKEN_RATIO_START - NEW_TOKEN_RATIO_FLOOR) / 600
RETRACT_LOOKAHEAD_TOKENS = 20
TO_UNIT = 1.0 / 9007199254740992.0  # 2^-53

# Without numba's runtime there are no atomic reference counts, which cost more than everything else here
# together. The arrays outlive every call, and nothing compiled allocates any (numba refuses it).
compiled = njit(cache=True, _nrt=False)


@njit(cache=True, inline="always", _nrt=False)
def mix(x):
    """splitmix64's finaliser (Steele, Lea, Flood 2014): a counter-based hash, so no draw moves another."""
    x = np.uint64(x) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled
def _array_of(sim, request, hop):
    """The hop-th acceptance array that a request walks."""
    h = mix(request.request_hash + np.uint64(hop) * np.uint64(0x9E3779B97F4A7C15))
    count = np.uint64(sim.domain_count[request.domain])
    return sim.domain_first[request.domain] + np.int64(h % count)


@compiled
def _move(sim, slot, request, tokens):
    """Let a request walk on by so many tokens: that is where its next round starts."""
    slot.position += tokens
    while slot.position >= slot.array_end:
        over = slot.position - slot.array_end
        slot.hop += 1
        array = _array_of(sim, request, np.int64(slot.hop))
        slot.position = sim.array_start[array] + over
        slot.array_end = sim.array_start[array] + sim.array_length[array]
    slot.accepted = sim.accepted[slot.position]
    slot.latent = sim.latent[slot.position]


@compiled
def gap_factor(server, gap):
    """Factor on every depth's acceptance when `gap` tokens are missing from the draft's KV."""
    return 1.0 - (1.0 - server.gap_floor) * min(1.0, gap / server.gap_tokens)


@compiled
def _survivors(server, slot, request_hash, n):
    """How many of n right drafts survive the gap in the draft's KV."""
    factor = gap_factor(server, slot.gap)
    key = request_hash ^ mix(np.uint64(slot.remaining))
    for d in range(n):
        if np.float64(mix(key + np.uint64(d)) >> np.uint64(11)) * TO_UNIT >= factor:
            return d
    return n


@compiled
def round_time_s(table, tier, num_rows, mean_context):
    """Seconds of a decode round of `num_rows` requests at a tier; the same rule as CostProfile.round_s."""
    pieces = table[min(num_rows, table.shape[0] - 1)]
    last = pieces.shape[0] - 1
    seconds = pieces[1, tier] * mean_context + pieces[0, tier]
    for hinge in range(2, last, 2):
        seconds += max(mean_context - pieces[hinge, tier], 0.0) * pieces[hinge + 1, tier]
    return max(seconds, pieces[last, tier])


@compiled
def runs_as(server, tier):
    """The tier that the coming round runs where `tier` is decided; see engine_patch/kv_only.py."""
    if tier > 0:
        return 0 if server.is_cold else tier
    return server.owed_tier


@compiled
def next_round_s(sim, s, tier, num_rows):
    """Seconds of the coming round where `tier` is decided, a switch not counted."""
    server = sim.servers[s]
    is_restart = tier > 0 and server.is_cold
    row = server.warm_profile if is_restart else server.profile
    context = np.float64(server.mean_context_tokens)
    runs = runs_as(server, tier)
    # The host is one batch ahead of the GPU: prefills and the round behind them count as one.
    late_s = server.step_prefills * server.host_prefill_s - server.step_prefill_s
    host_s = sim.host_round_s[s, runs] + max(0.0, late_s)
    return max(round_time_s(sim.round_table[row], runs, num_rows, context), host_s)


@compiled
def prefill_time_s(knots, times, tokens):
    """Seconds of one prefill batch; the same rule as CostProfile.prefill_s."""
    j = 0
    while j < knots.shape[0] - 2 and tokens > knots[j + 1]:
        j += 1
    if tokens <= knots[j]:
        return times[j]
    return times[j] + (times[j + 1] - times[j]) * (tokens - knots[j]) / (knots[j + 1] - knots[j])


@compiled
def _spend(server, seconds):
    server.step_in_system_s += seconds * (server.next_request - server.requests_finished)
    server.step_elapsed_s += seconds
    server.clock_s += seconds


@compiled
def _enqueue(server, queue, requests, r):
    queue[(server.queue_head + server.num_waiting) % queue.shape[0]] = r
    server.num_waiting += 1
    server.num_waiting_prompt_tokens += requests[r].prompt_tokens + requests[r].emitted


@compiled
def _due_s(server, requests, r):
    """When request `r`, the next one, reaches the scheduler; infinite while another has to end first."""
    if not server.closed:
        return requests[r].arrival_s
    due_s = requests[r - 1].arrived_s if r > 0 else 0.0
    freed = r - requests[r].concurrency
    if freed < 0:
        return due_s
    if freed >= server.requests_finished:
        return np.inf
    return max(due_s, requests[freed].freed_s + server.turnaround_s)


@compiled
def _arrive(server, queue, requests):
    """Move every request that has arrived by now into the queue."""
    while server.next_request < server.num_requests:
        r = server.next_request
        arrived_s = _due_s(server, requests, r)
        if arrived_s > server.clock_s:
            return
        server.step_in_system_s += server.clock_s - arrived_s
        server.next_request += 1
        request = requests[r]
        request.arrived_s = arrived_s
        request.arrived_round = server.round_id
        request.emitted = request.head_start
        _enqueue(server, queue, requests, r)
        if r == server.warmup:
            server.window_open = True
            server.window_start_s = arrived_s


@compiled
def _charge(server, request):
    if not request.charged:
        request.charged = True
        server.step_violations += 1


@compiled
def _charge_decoding(server, request):
    """Charge a request with a first token if it took too long, or its decoding already has."""
    slow_start = request.first_token_s - request.arrived_s > server.ttft_limit_s
    decoded = request.output_tokens - 1
    if slow_start or server.clock_s - request.first_token_s > server.tpot_limit_s * decoded:
        _charge(server, request)


@compiled
def charge_violations(sim):
    """Add to `step_violations` the requests whose TTFT or TPOT limit has passed, whether finished or not.

    Charged when it passes, a violation cannot be put off by finishing late or not at all.
    """
    for s in range(sim.servers.shape[0]):
        server = sim.servers[s]
        queue = sim.queue[s]
        for i in range(server.num_active):
            _charge_decoding(server, sim.requests[s, sim.slots[s, i].request])
        for i in range(server.num_waiting):
            request = sim.requests[s, queue[(server.queue_head + i) % queue.shape[0]]]
            if request.emitted == request.head_start:
                if server.clock_s - request.arrived_s > server.ttft_limit_s:
                    _charge(server, request)
            else:
                _charge_decoding(server, request)


@compiled
def _finish(server, requests, r):
    request = requests[r]
    request.finish_s = server.clock_s
    requests[server.requests_finished].freed_s = server.clock_s
    server.requests_finished += 1
    _charge_decoding(server, request)
    if server.warmup <= r and r < server.num_requests - server.warmup:
        server.counted_finished += 1
        if server.counted_finished == server.num_requests - 2 * server.warmup:
            server.window_open = False
            server.window_end_s = server.clock_s
            server.done = True


@compiled
def _admit(sim, s, r):
    """A request's prefill is complete: it has its next token and joins the decode batch."""
    server = sim.servers[s]
    request = sim.requests[s, r]
    if request.emitted == request.head_start:
        request.first_token_s = server.clock_s
    emitted = request.emitted + 1
    server.step_tokens += 1
    if server.window_open:
        server.window_tokens += 1
    remaining = request.output_tokens - emitted
    if remaining == 0:
        _finish(server, sim.requests[s], r)
        return
    slot = sim.slots[s, server.num_active]
    slot.request = r
    slot.par_s = request.par_s
    array = _array_of(sim, request, np.int64(0))
    slot.hop = 0
    slot.position = sim.array_start[array]
    slot.array_end = sim.array_start[array] + sim.array_length[array]
    _move(sim, slot, request, emitted - 1)
    slot.remaining = remaining
    slot.context = request.prompt_tokens + emitted
    slot.gap = 0
    server.num_active += 1
    server.num_admitted += 1
    server.context_tokens += slot.context
    server.remaining_tokens += remaining


@compiled
def _prefill(sim, s):
    """Run one prefill batch if a queued request may start; False if none may."""
    server = sim.servers[s]
    requests = sim.requests[s]
    queue = sim.queue[s]
    budget = server.chunk_tokens
    tokens = np.int64(0)
    first_joined = server.queue_head
    num_joined = 0
    joined_remaining = np.int64(0)
    held = server.context_tokens + server.ghost_tokens
    in_batch = server.num_active + server.num_ghosts
    while server.num_waiting > 0 and budget > 0 and in_batch + num_joined < server.max_running:
        request = requests[queue[server.queue_head]]
        if request.arrived_s > server.batch_start_s:
            break
        length = np.int64(request.prompt_tokens + request.emitted)
        remaining = np.int64(request.output_tokens - request.emitted)
        if server.chunk_done == 0:
            reserve = (in_batch + num_joined + 1) * server.reserve_tokens
            # Requests that join together are charged all they may still produce, as SGLang does.
            expected = server.new_token_ratio * server.remaining_tokens + joined_remaining
            alone = in_batch + num_joined == 0
            if not alone and held + reserve + expected + length + remaining > server.kv_pool_tokens:
                break
            if length + reserve > server.kv_pool_tokens:
                break
        part = min(budget, length - server.chunk_done)
        budget -= part
        tokens += part
        server.chunk_done += part
        server.num_waiting_prompt_tokens -= part
        if server.chunk_done < length:
            break
        server.chunk_done = 0
        server.queue_head = (server.queue_head + 1) % queue.shape[0]
        server.num_waiting -= 1
        num_joined += 1
        held += length
        joined_remaining += remaining
    if tokens == 0:
        return False
    # Behind a round that left the draft out a prefill does, too; see engine_patch/kv_only_prefill.py.
    row = server.profile if server.is_cold else server.warm_profile
    seconds = prefill_time_s(sim.prefill_tokens[row], sim.prefill_s[row], tokens)
    # Under overlap the next batch is formed while this one runs: later arrivals miss it.
    server.batch_start_s = server.clock_s + (seconds if server.lag == 1 else 0.0)
    _spend(server, seconds)
    server.step_prefill_s += seconds
    server.step_prefills += 1
    server.num_prefill_tokens += tokens
    # The last round's result is read while this batch runs: its finished requests leave the batch.
    _drop_ghosts(server)
    for i in range(num_joined):
        _admit(sim, s, np.int64(queue[(first_joined + i) % queue.shape[0]]))
    return True


@compiled
def _drop_ghosts(server):
    server.num_finished += server.num_ghosts
    server.num_ghosts = 0
    server.ghost_tokens = 0


@compiled
def _drop_slot(server, slots, i):
    server.num_active -= 1
    slots[i] = slots[server.num_active]


@compiled
def _retract(server, requests, queue, slots):
    """Send requests back to the queue, least output first, until the coming round fits in the KV pool."""
    before = server.retracted
    while server.num_active > 1 and _kv_needed(server) > server.kv_pool_tokens:
        victim = 0
        least = np.int64(1 << 60)
        for i in range(server.num_active):
            emitted = np.int64(requests[slots[i].request].output_tokens - slots[i].remaining)
            longer = slots[i].context > slots[victim].context
            if emitted < least or (emitted == least and longer):
                least = emitted
                victim = i
        r = slots[victim].request
        requests[r].emitted = least
        server.context_tokens -= slots[victim].context
        server.remaining_tokens -= slots[victim].remaining
        _drop_slot(server, slots, victim)
        _enqueue(server, queue, requests, r)
        server.retracted += 1
    # What finished requests still hold comes free with the coming round; the last request must fit alone.
    if server.num_active == 1 and server.context_tokens + server.reserve_tokens > server.kv_pool_tokens:
        server.failed = True
        server.done = True
    if server.retracted == before:
        return
    produced = np.int64(0)
    total = np.int64(0)
    for i in range(server.num_active):
        output = requests[slots[i].request].output_tokens
        produced += output - slots[i].remaining
        total += output
    server.new_token_ratio = min(1.0, (produced + RETRACT_LOOKAHEAD_TOKENS * server.num_active) / total)


@compiled
def _kv_needed(server):
    rows = server.num_active + server.num_ghosts
    return server.context_tokens + server.ghost_tokens + rows * server.reserve_tokens


@compiled
def _to_next_decision(sim, s):
    """Arrivals, prefill first, retraction and idling until a decode round is due or all is done."""
    server = sim.servers[s]
    requests = sim.requests[s]
    queue = sim.queue[s]
    while not server.done:
        _arrive(server, queue, requests)
        rows = server.num_active + server.num_ghosts
        if rows == 0:
            server.batch_start_s = server.clock_s
        if server.num_waiting > 0 and _prefill(sim, s):
            continue
        if rows > 0:
            _retract(server, requests, queue, sim.slots[s])
            break
        if server.num_waiting > 0 or server.next_request >= server.num_requests:
            # Nothing runs and nothing can start: the queue's head does not fit, or the list is empty.
            server.failed = server.num_waiting > 0
            server.done = True
            break
        server.new_token_ratio = NEW_TOKEN_RATIO_START
        _spend(server, _due_s(server, requests, server.next_request) - server.clock_s)
    server.num_running = server.num_active + server.num_ghosts
    server.oldest_wait_rounds = 0
    if server.num_waiting > 0:
        server.oldest_wait_rounds = server.round_id - requests[queue[server.queue_head]].arrived_round
    held = server.context_tokens + server.ghost_tokens
    server.mean_context_tokens = held // max(1, server.num_running)
    server.kv_used_fraction = _kv_needed(server) / server.kv_pool_tokens


@compiled
def _clear_step(server):
    server.step_decode_s = 0.0
    server.step_prefill_s = 0.0
    server.step_prefills = 0
    server.step_elapsed_s = 0.0
    server.step_tokens = 0
    server.step_in_system_s = 0.0
    server.step_violations = 0
    server.num_admitted = 0
    server.num_finished = 0
    server.num_prefill_tokens = 0


@compiled
def start(sim, rows):
    """Bring freshly cleared servers `rows` to their first decision."""
    for s in rows:
        _clear_step(sim.servers[s])
        _to_next_decision(sim, s)


@compiled
def run_round(sim, tier_of_server):
    """Run one decode round of every server that is not done, at its tier, and go to its next decision."""
    for s in range(sim.servers.shape[0]):
        server = sim.servers[s]
        if server.done:
            _clear_step(server)
            server.outcome_round = -1
            continue
        decided = tier_of_server[s]
        tier = runs_as(server, decided)
        k = sim.tiers[tier]
        counted = server.window_open
        seconds = next_round_s(sim, s, decided, server.num_running)
        _clear_step(server)
        is_restart = decided > 0 and server.is_cold
        server.owed_tier = decided if is_restart else 0
        server.is_cold = server.off_restarts and tier == 0 and not is_restart
        if server.last_tier >= 0 and tier != server.last_tier:
            seconds += server.switch_s
            server.window_switches += counted
        server.last_tier = tier
        # Under overlap the next batch is formed while this round runs: later arrivals miss it.
        server.batch_start_s = server.clock_s + (seconds if server.lag == 1 else 0.0)
        _spend(server, seconds)
        server.step_decode_s = seconds
        _drop_ghosts(server)
        drafted = k * server.num_active

        if server.lag == 1:
            server.outcome_round = server.round_id
            server.outcome_k = k
            counts = sim.outcome_counts[s]
        else:
            server.outcome_round = server.pending_round
            server.outcome_k = server.pending_k
            for n in range(MAX_K + 1):
                sim.outcome_counts[s, n] = sim.pending_counts[s, n]
            server.pending_round = server.round_id
            server.pending_k = k
            counts = sim.pending_counts[s]
        for n in range(MAX_K + 1):
            counts[n] = 0
        tokens, accepted = _decode(sim, s, k, counts)

        server.step_tokens += tokens
        if counted:
            server.window_tokens += tokens
            server.window_rounds += 1
            server.window_drafted += drafted
            server.window_accepted += accepted
            sim.window_tier_s[s, tier] += seconds
        server.round_id += 1
        server.new_token_ratio = max(NEW_TOKEN_RATIO_FLOOR, server.new_token_ratio - NEW_TOKEN_RATIO_DECAY)
        _to_next_decision(sim, s)


@compiled
def _decode(sim, s, k, counts):
    """Every running request takes its tokens; returns tokens committed and drafts among them."""
    server = sim.servers[s]
    requests = sim.requests[s]
    slots = sim.slots[s]
    leaves_gap = k == 0 and server.off_is_stale
    tokens = np.int64(0)
    drafts = np.int64(0)
    # Kept out of the record while the loop runs: the compiler cannot prove that slots do not alias it.
    active = server.num_active
    context_tokens = server.context_tokens
    i = np.int64(0)
    while i < active:
        slot = slots[i]
        n = min(k, np.int64(slot.accepted))
        if n > 0 and slot.gap > 0:
            n = _survivors(server, slot, requests[slot.request].request_hash, n)
        counts[n] += 1
        remaining = np.int64(slot.remaining)
        emitted = min(n + 1, remaining)
        tokens += emitted
        drafts += emitted - 1
        if emitted == remaining:
            context = slot.context + emitted
            if server.lag == 2:
                server.num_ghosts += 1
                server.ghost_tokens += context
            else:
                server.num_finished += 1
            context_tokens -= slot.context
            _finish(server, requests, np.int64(slot.request))
            active -= 1
            slots[i] = slots[active]
            continue
        slot.remaining = remaining - emitted
        slot.context += emitted
        context_tokens += emitted
        if leaves_gap:
            slot.gap += emitted
        _move(sim, slot, requests[slot.request], emitted)
        i += 1
    server.num_active = active
    server.context_tokens = context_tokens
    server.remaining_tokens -= tokens
    return tokens, drafts


@compiled
def _add_survivals(sim, s, depths, by_depth, in_worth):
    """Fill `by_depth` (MAX_K + 1,): over the requests, the sum of P(the token at each of the first `depths`).

    Weighted by the request's par if `in_worth`.
    """
    survival = sim.survival
    slots = sim.slots[s]
    server = sim.servers[s]
    for d in range(MAX_K + 1):
        by_depth[d] = 0.0
    for i in range(server.num_active):
        slot = slots[i]
        latent = slot.latent
        power = slot.par_s if in_worth else 1.0
        if slot.gap > 0:
            factor = gap_factor(server, slot.gap)
            for d in range(min(depths, slot.remaining)):
                by_depth[d] += survival[latent, d] * power
                power *= factor
        elif slot.remaining > MAX_K and depths > MAX_K:
            for d in range(MAX_K + 1):  # a length known in advance becomes one vector instruction
                by_depth[d] += survival[latent, d] * power
        else:
            for d in range(min(depths, slot.remaining)):
                by_depth[d] += survival[latent, d] * power


@compiled
def expected(sim, in_worth, by_depth, into):
    """Fill `into` (S, T): expected tokens of the coming round at each tier, given the hidden state.

    Or what they are worth, if `in_worth`: each token weighted by its request's par. `by_depth`
    (MAX_K + 1,) is room to work in.
    """
    for s in range(sim.servers.shape[0]):
        _add_survivals(sim, s, MAX_K + 1, by_depth, in_worth)
        total = 0.0
        d = 0
        for t in range(sim.tiers.shape[0]):
            while d <= sim.tiers[t]:
                total += by_depth[d]
                d += 1
            into[s, t] = total
        _as_run(sim.servers[s], into[s])


@compiled
def _as_run(server, by_tier):
    """Where deciding a tier means running another one, let it have what that one has."""
    if server.is_cold:
        by_tier[1:] = by_tier[0]
    by_tier[0] = by_tier[server.owed_tier]


@compiled
def expected_worth_at(sim, tier_of_server, by_depth, into):
    """Fill `into` (S,): as `expected` in worth, at one tier of each server."""
    for s in range(sim.servers.shape[0]):
        k = sim.tiers[runs_as(sim.servers[s], tier_of_server[s])]
        _add_survivals(sim, s, k + 1, by_depth, True)
        total = 0.0
        for d in range(k + 1):
            total += by_depth[d]
        into[s] = total


@compiled
def realised_tokens(sim, into):
    """Fill `into` (S, T): tokens the coming round will yield at each tier, the flips known."""
    for s in range(sim.servers.shape[0]):
        server = sim.servers[s]
        for t in range(sim.tiers.shape[0]):
            into[s, t] = 0.0
        for i in range(server.num_active):
            slot = sim.slots[s, i]
            n = min(MAX_K, np.int64(slot.accepted))
            if n > 0 and slot.gap > 0:
                n = _survivors(server, slot, sim.requests[s, slot.request].request_hash, n)
            for t in range(sim.tiers.shape[0]):
                into[s, t] += min(n + 1, sim.tiers[t] + 1, np.int64(slot.remaining))
        _as_run(server, into[s])


@compiled
def round_times(sim, into):
    """Fill `into` (S, T): seconds of the coming round at each tier, a switch not counted."""
    for s in range(sim.servers.shape[0]):
        server = sim.servers[s]
        rows = max(1, server.num_running)
        for t in range(sim.tiers.shape[0]):
            into[s, t] = next_round_s(sim, s, t, rows)
