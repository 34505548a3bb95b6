"""Whether a server can answer what a benchmark asks, looked at before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftdial.controller.bench_work import Work
from draftdial.controller.errors import UserError
from draftdial.engine_patch.acceptance_arrays import replayed_domains
from draftdial.engine_patch.client import Server


def check_domains(domains: Sequence[str], status: Mapping[str, Any], source: str) -> None:
    """UserError unless `source`, the server of this status, replays each of `domains`."""
    if not domains:
        return
    found, replayed = ", ".join(domains), str(status.get("acceptance_replay", ""))
    if not replayed:
        raise UserError(
            f"--domains: found {found}, allowed: none, as {source} replays no recorded acceptance: "
            "leave --domains out, or start it with `draftdial serve --replay-acceptance`"
        )
    allowed = replayed_domains(replayed)
    if allowed and not set(domains) <= set(allowed):
        raise UserError(f"--domains: found {found}, allowed: {', '.join(allowed)}, which {source} replays")


def check_lengths(work: Work, server: Server) -> None:
    """UserError if a request of any repeat is longer than the server answers whole, where it says so."""
    allowed = server.longest_request()
    if allowed is None:
        return
    for load in work.loads:
        for seed in work.seeds:
            requests = work.requests(load, seed)
            tokens = requests.prompt_tokens + requests.output_tokens
            longest = int(tokens.argmax())
            if tokens[longest] > allowed:
                parts = f"{requests.prompt_tokens[longest]} + {requests.output_tokens[longest]}"
                raise UserError(
                    f"bench: {load.label}, seed {seed}: found a prompt and an answer of {parts} tokens, "
                    f"allowed: {allowed} in all on {server.url}: "
                    "choose other --lengths or --prompts, or give it more context (or memory for KV)"
                )
