"""`draftdial status URL`: what the policy of a running server does, in words."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from draftdial.engine_patch.client import Server, Status, add_server_arguments, run_against_server

_WIDTH = 11


def add_parser(subparsers: Any) -> None:
    """Add `status` to the commands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "status", help="ask a running server what its policy does"
    )
    add_server_arguments(parser)
    parser.add_argument(
        "--report", action="store_true", help="after a time in mode shadow: what steering would have gained"
    )
    parser.set_defaults(run=lambda args: run_against_server(args, _status))


def _status(server: Server, args: argparse.Namespace) -> None:
    replicas = server.replicas()
    if args.json:
        print(json.dumps(replicas))
        return
    lines: list[str] = []
    for i, replica in enumerate(replicas):
        if len(replicas) > 1:
            lines.append(f"replica {i}")
        is_steerable = replica.get("mode", "inactive") != "inactive"
        lines += report_lines(replica) if args.report and is_steerable else status_lines(replica)
    print("\n".join(lines))


def status_lines(status: Status) -> Iterator[str]:
    """One replica's status, a subject a line."""
    if "status_error" in status:
        yield _line("status", f"could not be read: {status['status_error']}")
        return
    if status["mode"] == "inactive":
        yield _line("mode", f"inactive: {status['reason']}")
        return
    tiers = status["tiers"].replace(",", ", ")
    yield _line("policy", f"{status['policy_id']} ({status['policy_name']}), tiers {tiers}")
    forced = f", k = {status['forced_k']} forced" if status["forced_k"] >= 0 else ""
    now = f"k = {status['k']} now" if status["k"] >= 0 else "no round yet"
    yield _line("mode", f"{status['mode']}{forced}; {now}")
    if not status.get("is_bound", 1):
        yield _line("NOT BOUND", "the scheduler's loop was not hooked: SGLang's own rule decides")
    if status.get("measuring"):
        yield _line("MEASURING", f"{status['measuring']}: it decides k in the rounds that it counts")
    decisions = status["decisions"]
    per_1000 = f" ({1000 * status['switches'] / decisions:.1f} per 1000)" if decisions else ""
    yield _line("decisions", f"{decisions:,}, {status['switches']:,} switches{per_1000}")
    yield _line("rounds", ", ".join(f"k={k} {share:.1%}" for k, share in shares(status, "rounds_at_k.")))
    if any(share for _, share in shares(status, "seconds_at_k.")):
        yield _line("time", ", ".join(f"k={k} {share:.1%}" for k, share in shares(status, "seconds_at_k.")))
    busy = [
        f"k={k} {1 - float(status[name]) / float(status[f'steady_seconds_at_k.{k}']):.0%}"
        for name in status
        if (k := name.removeprefix("steady_waited_s_at_k.")) != name
    ]
    if busy:
        yield _line("host busy", f"{', '.join(busy)} of a round; near 100 % the GPU waits for it")
    if status["drafted"]:
        yield _line("drafts", f"{status['drafted']:,}, {status['wasted'] / status['drafted']:.1%} wasted")
    if "acceptance" in status:
        belief = f"first draft token accepted {status['acceptance']:.2f}"
        if status["k"]:
            times = f"{status['predicted_speedup']:.2f} times the tokens per second of k = 0"
            belief += f", k = {status['k']} makes {times}"
        yield _line("belief", belief)
    if "signals.round_id" in status:
        yield _line("last seen", _seen_text(status))
    if status.get("ranks", 1) > 1:
        alike = (
            "all decided alike" if status["ranks_agree"] else "NOT ALIKE: restart the server and report it"
        )
        yield _line("ranks", f"{status['ranks']}, {alike}")
    if status.get("kv_only_fallback"):
        yield _line("off mode", f"kv-only, but k = 0 stays warm: {status['kv_only_fallback']}")
    elif "kv_only_prefills" in status:
        left_out = f"{status['kv_only_rounds']:,} rounds and {status['kv_only_prefills']:,} prefills"
        yield _line(
            "off mode", f"kv-only, {left_out} without the draft, {status['kv_only_restarts']:,} restarts"
        )
    yield _line("fallback", status["fallback"] or "none")
    yield _line("errors", f"{status['errors']}: {status['last_error']}" if status["errors"] else "none")
    if status.get("telemetry_error"):
        yield _line("telemetry", f"ended by an error: {status['telemetry_error']}")
    if status.get("log_error"):
        yield _line("log", f"stopped: {status['log_error']}")
    yield _line("deploys", f"{status['deploys']}")
    if status["last_control"]:
        yield _line("refused", f"the last change: {status['last_control']}")
    if status.get("acceptance_replay"):
        yield _line("REPLAYED", f"acceptance: {status['acceptance_replay']}")


def report_lines(status: Status) -> Iterator[str]:
    """What steering would have done in one replica's shadow rounds; `ShadowReport` has the method."""
    shadow = {name[len("shadow.") :]: value for name, value in status.items() if name[:7] == "shadow."}
    rounds = shadow.get("rounds", 0)
    if not rounds:
        yield _line("shadow", _why_no_report(status))
        return
    if status["fallback"]:
        yield _line("FALLBACK", f"only the rounds before the policy failed: {status['fallback']}")
    yield _line("policy", f"{status['policy_id']} ({status['policy_name']}), against SGLang's adaptive rule")
    yield _line("rounds", f"{rounds:,}; both chose the same k in {shadow['same_k'] / rounds:.1%}")
    wanted = ", ".join(f"k={k} {share:.1%}" for k, share in shares(status, "shadow.rounds_at_k."))
    yield _line("steering", f"would have run {wanted}")
    interval = (
        f"95 % interval {shadow['gain_low']:+.1%} to {shadow['gain_high']:+.1%}"
        if "gain_low" in shadow
        else "no interval yet, too few rounds"
    )
    yield _line("gain", f"{shadow['gain']:+.1%} decode tokens per second predicted; {interval}")
    yield _line(
        "of which", f"{shadow['guessed_share']:.1%} of the tokens are guessed: the rule did not draft so deep"
    )
    if shadow["unpriced"]:
        yield _line("left out", f"{shadow['unpriced']:,} rounds whose k the policy's profile has no cost for")
    yield _line(
        "assuming",
        "the costs of the policy's profile, and the batches that the rule met; see docs/operations.md",
    )


def _why_no_report(status: Status) -> str:
    if "shadow: " in status.get("telemetry_error", ""):
        return f"the report has ended: {status['telemetry_error']}"
    if status["fallback"]:
        return f"no rounds: the policy failed, and its threshold rule is not judged: {status['fallback']}"
    if status["forced_k"] >= 0:
        return f"no rounds while k = {status['forced_k']} is forced: `draftdial set URL --force-k none`"
    if status["mode"] == "shadow":
        return "no rounds yet: ask again after some load"
    return "no rounds yet: `draftdial set URL --mode shadow`, and ask again after some load"


def _seen_text(status: Status) -> str:
    waiting = status["signals.num_waiting"]
    queue = (
        f"{waiting} waiting with {status['signals.num_waiting_prompt_tokens']:,} prompt tokens, "
        f"the oldest for {status['signals.oldest_wait_rounds']} rounds"
    )
    return (
        f"{status['signals.num_running']} of {status['signals.max_running']} running, "
        f"{queue if waiting else 'none waiting'}, "
        f"{status['signals.mean_context_tokens']:,} tokens of context each, "
        f"KV {status['signals.kv_used_fraction']:.1%} used"
    )


def shares(status: Status, prefix: str) -> list[tuple[str, float]]:
    """The counts whose names begin with `prefix`, by what follows it, as shares of their sum."""
    counts = {name[len(prefix) :]: value for name, value in status.items() if name.startswith(prefix)}
    total = sum(counts.values())
    return [(k, count / total if total else 0.0) for k, count in counts.items()]


def _line(label: str, text: str) -> str:
    printable = "".join(character if character.isprintable() else "?" for character in text)
    return f"{label:<{_WIDTH}}{printable}"
