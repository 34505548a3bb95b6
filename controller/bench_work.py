"""What a benchmark sends: a function of its options alone, which `bench.json` keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftdial.controller.bench_loads import (
    PER_SLOT,
    Asking,
    Domains,
    Load,
    closed_loads,
    lengths_of,
    open_loads,
    swing_load,
    trace_load,
)
from draftdial.controller.errors import UserError
from draftdial.envs.domains import DomainSwitches
from draftdial.envs.workload import RequestList

Options = dict[str, Any]
"""Plain values by name, as JSON has them; what is not there is `DEFAULTS`'."""

DEFAULTS: Options = {
    "closed": (),
    "per_slot": None,
    "rates": (),
    "arrivals": "poisson",
    "swing": None,
    "trace": None,
    "time_scale": 1.0,
    "requests": 200,
    "lengths": "general",
    "prompts": None,
    "tokenizer": None,
    "stop_at_eos": False,
    "domains": (),
    "domain_span": None,
    "repeats": 3,
    "seed": 0,
}


@dataclass(frozen=True)
class Work:
    """The loads, what their requests ask, and the seeds of their repeats."""

    options: Options
    loads: tuple[Load, ...]
    asking: Asking

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Work:
        """The work of these options.

        Raises:
            UserError: there is no load, or an option fits none; a file is missing or malformed.
        """
        options = DEFAULTS | {name: _plain(value) for name, value in options.items()}
        prompts, tokenizer = (
            Path(options[name]) if options[name] else None for name in ("prompts", "tokenizer")
        )
        loads = tuple(_loads(options))
        labels = [load.label for load in loads]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise UserError(
                f"bench: {twice}: found twice, allowed: each load once (--repeats serves it again)"
            )
        asking = Asking.read(
            prompts, tokenizer, domains=tuple(options["domains"]), stops_at_eos=options["stop_at_eos"]
        )
        return cls(options, loads, asking)

    @property
    def seeds(self) -> range:
        """One for each repeat."""
        return range(self.options["seed"], self.options["seed"] + self.options["repeats"])

    def requests(self, load: Load, seed: int) -> RequestList:
        return self.asking.requests(load, seed)


def fingerprint(requests: RequestList) -> str:
    """Of all that a list says: where it is the same, so is the work."""
    digest = hashlib.sha256(f"{requests.mode} {requests.warmup}".encode())
    for array in (
        requests.arrival_s,
        requests.concurrency,
        requests.prompt_tokens,
        requests.output_tokens,
        requests.domain,
        requests.request_hash,
    ):
        digest.update(array.tobytes())
    return digest.hexdigest()[:12]


def _loads(options: Options) -> list[Load]:
    domains = _domains(options)
    common: dict[str, Any] = {"lengths": lengths_of(options["lengths"]), "domains": domains}
    num_requests = options["requests"]
    if options["per_slot"] is not None and not options["closed"]:
        raise UserError("--per-slot: no --closed, allowed: with it, since other loads have no slots to fill")
    loads = closed_loads(options["closed"], num_requests, options["per_slot"] or PER_SLOT, **common)
    loads += open_loads(options["arrivals"], options["rates"], num_requests, **common)
    if options["swing"] is not None:
        low, high = options["swing"]
        loads.append(swing_load(low, high, num_requests, **common))
    if options["trace"] is not None:
        loads.append(trace_load(Path(options["trace"]), num_requests, options["time_scale"], domains))
    if not loads:
        raise UserError("bench: no load, allowed: one or more of --closed, --rates, --swing, --trace")
    return loads


def _domains(options: Options) -> Domains:
    names, span = options["domains"], options["domain_span"]
    indices = tuple(range(max(1, len(names))))
    if span is None:
        return indices
    if len(names) < 2:
        found = ", ".join(names) or "none"
        raise UserError(f"--domain-span: found {found} to change between, allowed: two --domains or more")
    return DomainSwitches(indices, *span)


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value
