"""`draftdial explain FILE [ROUND]`: reads a decision log out in words."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from draftdial.controller.errors import UserError
from draftdial.engine_patch.explain import explanation, summary
from draftdial.engine_patch.log_reader import read_log

NEARLY = 0.005
"""Tiers whose predicted speeds are closer than this are called equal."""
WHY_NOT = {
    "steer": "k was forced",
    "shadow": "in shadow SGLang's own rule acts",
    "off": "the mode is off, or k was forced",
}
"""Why something else ran than the policy said, by mode."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `explain` to the commands."""
    parser = subparsers.add_parser("explain", help="read a decision log out in words")
    parser.add_argument("file", type=Path, help="a decision log")
    parser.add_argument("round", nargs="?", type=int, help="a round (default: a summary of all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the summary or the round; 0, or a `UserError`."""
    log = read_log(args.file)
    lines = summary_lines if args.round is None else round_lines
    try:
        facts = summary(log) if args.round is None else explanation(log, args.round)
        text = json.dumps(facts) if args.json else "\n".join(lines(facts))
    except (ValueError, LookupError, TypeError, ArithmeticError, OSError) as error:
        # What no server writes, behind checksums that are right.
        raise UserError(f"{args.file}: damaged: a record is out of range ({error})") from None
    print(text)
    return 0


def summary_lines(facts: dict[str, Any]) -> Iterator[str]:
    """`explain.summary` in words."""
    header = facts["header"]
    yield "log      " + ", ".join(f"{k} {v}" for k, v in header.items() if isinstance(v, str | int | float))
    if not facts["is_whole"]:
        yield "         its oldest part has been overwritten (DRAFTDIAL_LOG_MB)"
    if not facts["num_rounds"]:
        yield "rounds   none"
        return
    first, last = facts["round_ids"]
    begin, end = facts["time_s"]
    yield f"rounds   {facts['num_rounds']:,} ({first} to {last}), {_time(begin)} to {_time(end)}"
    modes = ", ".join(f"{mode} {count:,}" for mode, count in facts["modes"].items() if count)
    yield f"         {modes}; {facts['num_switches']:,} switches"
    for k, row in facts["k"].items():
        share, said = row["acted"] / facts["num_rounds"], row["policy"] / facts["num_rounds"]
        tokens = row["tokens_per_round"]
        came = "" if tokens is None else f", {tokens:.2f} tokens per request and round"
        yield f"k = {k:<4} ran in {share:6.1%} of rounds; the policy said so in {said:.1%}{came}"
    if facts["drafted"]:
        wasted = 1 - facts["accepted"] / facts["drafted"]
        yield f"drafts   {facts['drafted']:,}, of which {wasted:.1%} were wasted"
    requests = ", ".join(f"{kind} {count:,}" for kind, count in facts["requests"].items())
    yield f"requests {requests}"
    for event in facts["events"]:
        data = {name: value for name, value in event.items() if name not in ("time_s", "kind")}
        yield f"event    {_time(event['time_s'])} {event['kind']} {json.dumps(data) if data else ''}".rstrip()


def round_lines(facts: dict[str, Any]) -> Iterator[str]:
    """`explain.explanation` in words."""
    policy = facts["policy"]
    yield f"round {facts['round_id']}, {_time(facts['time_s'])}, policy {policy['name']} ({policy['id']})"
    yield ""
    yield from _server_lines(facts["signals"])
    yield ""
    yield from _belief_lines(facts["belief"])
    yield ""
    yield from _prediction_lines(facts["prediction"], facts["belief"], facts["signals"]["num_running"])
    yield ""
    yield from _choice_lines(facts)
    yield from _outcome_lines(facts)


def _server_lines(signals: dict[str, Any]) -> Iterator[str]:
    yield (
        f"The server ran {_count(signals['num_running'], 'request')} of at most {signals['max_running']} at "
        f"{signals['mean_context_tokens']} tokens of context each, with "
        f"{signals['kv_used_fraction']:.0%} of the KV pool in use."
    )
    if signals["num_waiting"]:
        yield (
            f"{_count(signals['num_waiting'], 'request')} waited with {signals['num_waiting_prompt_tokens']} "
            f"prompt tokens, the oldest for {_count(signals['oldest_wait_rounds'], 'round')}."
        )
    else:
        yield "Nothing waited."
    yield (
        f"Since the decision before: {signals['num_admitted']} admitted, {signals['num_finished']} finished, "
        f"{signals['num_prefill_tokens']} prompt tokens prefilled."
    )


def _belief_lines(belief: dict[str, Any]) -> Iterator[str]:
    num_depths = len(belief["acceptance"][0])
    since = "its policy began" if belief["is_whole"] else "the log begins; what came before is lost, so"
    yield f"Acceptance by depth, from {_count(belief['num_outcomes'], 'outcome')} since {since}:"
    yield f"{'half-life':>12} |" + "".join(f"{f'depth {d + 1}':>9}" for d in range(num_depths))
    for memory, half_life in enumerate(belief["half_lives_requests"]):
        cells = "".join(f"{p:9.2f}" for p in belief["acceptance"][memory])
        yield f"{half_life:>7g} req. |{cells}"
    longest = "".join(f"{n:9.0f}" for n in belief["evidence_requests"][-1])
    yield f"{'evidence':>12} |{longest}   requests, in the longest memory"


def _prediction_lines(prediction: dict[str, Any], belief: dict[str, Any], num_running: int) -> Iterator[str]:
    memories = belief["half_lives_requests"]
    yield "Predicted tokens per second of the batch, by memory of the belief:"
    yield f"{'k':>12} | {'round':>10}" + "".join(f"{f'{m:g} req.':>12}" for m in memories)
    for tier, k in enumerate(prediction["k"]):
        cells = "".join(f"{row[tier]:12.0f}" for row in prediction["tokens_per_s"])
        yield f"{k:12d} | {1e3 * prediction['round_s'][tier]:7.2f} ms{cells}"


def _choice_lines(facts: dict[str, Any]) -> Iterator[str]:
    said, acted, mode = facts["policy_k"], facts["acted_k"], facts["mode"]
    if facts["fallback"]:
        yield f"The policy had failed ({facts['fallback']}): the file's threshold rule decided in its place."
    if said < 0:
        yield f"k = {acted} ran (mode {mode})."
        return
    if said == acted:
        ran = f"It ran (mode {mode})."
    else:
        ran = f"k = {acted} ran instead ({WHY_NOT[mode]})."
    yield f"The policy chose k = {said}. {ran}"
    yield from _greedy_lines(facts["prediction"], facts["belief"]["half_lives_requests"], said)


def _greedy_lines(prediction: dict[str, Any], memories: list[float], said: int) -> Iterator[str]:
    """Where the choice differs from the tier that looks fastest."""
    if said not in prediction["k"]:
        return
    tier = prediction["k"].index(said)
    agree, differ = [], []
    for memory, speed in zip(memories, prediction["tokens_per_s"], strict=True):
        best = max(range(len(speed)), key=speed.__getitem__)
        if speed[tier] >= (1 - NEARLY) * speed[best]:
            agree.append(f"{memory:g}")
        else:
            gain = speed[best] / speed[tier] - 1
            differ.append(f"k = {prediction['k'][best]} by the memory of {memory:g} requests (+{gain:.1%})")
    if not differ:
        yield "It is what goodput-greedy takes by every memory of the belief, or within 0.5 % of it."
        return
    yield f"Goodput-greedy would have taken {', '.join(differ)}."
    if agree:
        yield f"The choice is fastest, or within 0.5 % of that, by the memory of {', '.join(agree)} requests."
    else:
        yield "No memory speaks for the choice: it comes from what was learned beyond them, or from a rule."


def _outcome_lines(facts: dict[str, Any]) -> Iterator[str]:
    outcome = facts["outcome"]
    if outcome is None:
        yield "What came of it is not in the log."
        return
    tokens, requests = _count(outcome["num_tokens"], "token"), _count(outcome["num_requests"], "request")
    histogram = ", ".join(f"{count} x {n}" for n, count in enumerate(outcome["accept_counts"]) if count)
    yield (
        f"It gave {tokens} to {requests} (requests x drafts accepted: {histogram or 'none'}); "
        f"{outcome['num_wasted']} drafts were wasted."
    )
    expected = _expected_tokens(facts, outcome["k"])
    if expected is not None and outcome["num_requests"]:
        realised = outcome["num_tokens"] / outcome["num_requests"]
        yield f"That is {realised:.2f} tokens per request; the memory of 64 requests expected {expected:.2f}."


def _expected_tokens(facts: dict[str, Any], k: int) -> float | None:
    acceptance: list[float] = facts["belief"]["acceptance"][1]
    if k > len(acceptance):
        return None
    return 1 + math.fsum(math.prod(acceptance[: depth + 1]) for depth in range(k))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="milliseconds")
