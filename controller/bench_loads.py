"""The loads of a benchmark: lists of requests by seed, and what each request asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftdial.controller.chat_prompts import ChatPrompt, read_prompts
from draftdial.controller.errors import UserError
from draftdial.engine_patch.acceptance_arrays import tagged_rid
from draftdial.envs.closed_loop import TIME_EXPONENT
from draftdial.envs.domains import DomainSchedule
from draftdial.envs.lengths import LengthModel, as_lengths
from draftdial.envs.open_loop import ARRIVALS
from draftdial.envs.workload import RequestList, Workload, make_workload

FIRST_ID, LAST_ID = 3, 999
"""Synthetic prompts are random token ids that every vocabulary has."""
SEGMENTS = 20
"""Of a load that swings."""
PER_SLOT = 8
"""A closed loop sends at least so many requests for each that it keeps in the system."""

Domains = Sequence[int] | DomainSchedule
"""Of which every request draws its own, or which says whose turn it is."""


@dataclass(frozen=True)
class Load:
    """A workload at one load."""

    workload: str
    mode: Literal["closed", "open"]
    value: float | None
    """Concurrency, or requests a second; None where it is not one number."""
    source: Workload

    @property
    def label(self) -> str:
        if self.value is None:
            return self.workload
        value = f"C = {self.value:g}" if self.mode == "closed" else f"{self.value:g}/s"
        return f"{self.workload} {value}"


def closed_loads(
    concurrencies: Sequence[int], num_requests: int, per_slot: int = PER_SLOT, **common: Any
) -> list[Load]:
    """A closed loop at each concurrency, of `num_requests`, or of `per_slot` for each in the system."""
    return [
        Load(
            "closed",
            "closed",
            float(concurrency),
            make_workload(
                "stationary",
                concurrency=concurrency,
                num_requests=max(num_requests, per_slot * concurrency),
                **common,
            ),
        )
        for concurrency in concurrencies
    ]


def open_loads(process: str, rates: Sequence[float], num_requests: int, **common: Any) -> list[Load]:
    """An open loop at each mean rate, in requests a second.

    Raises:
        UserError: there is no arrival process of this name.
    """
    if process not in ARRIVALS:
        raise UserError(f"--arrivals: found {process}, allowed: {', '.join(ARRIVALS)}")
    return [
        Load(
            process,
            "open",
            rate,
            make_workload(process, num_requests=num_requests, rate_per_s=rate, **common),
        )
        for rate in rates
    ]


def swing_load(low: int, high: int, num_requests: int, **common: Any) -> Load:
    """A closed loop whose concurrency jumps between two values, about equally long at each."""
    source = make_workload(
        "swing",
        low=low,
        high=high,
        num_segments=SEGMENTS,
        requests_at_one=_at_one(low, high, num_requests),
        **common,
    )
    return Load(f"swing {low}:{high}", "closed", None, source)


def trace_load(path: Path, num_requests: int, time_scale: float, domains: Domains) -> Load:
    """The start of a trace, or a window of it that the seed picks."""
    source = make_workload(
        "trace", path=path, num_requests=num_requests, time_scale=time_scale, domains=domains
    )
    return Load(source.name, "open", None, source)


def _at_one(low: int, high: int, num_requests: int) -> float:
    """`requests_at_one` of `SwingingLoad` for about so many requests in all."""
    per_segment = num_requests / (SEGMENTS / 2)
    return float(per_segment / (low**TIME_EXPONENT + high**TIME_EXPONENT))


@dataclass(frozen=True)
class Asking:
    """Turns a request of a list into the body of `/generate`."""

    prompts: tuple[ChatPrompt, ...] = ()
    """Used in a random order; none: random token ids, as many as the list says."""
    domains: tuple[str, ...] = ()
    """Names of the list's domains, for a server that replays recorded acceptance."""
    stops_at_eos: bool = False
    sampling: tuple[tuple[str, float], ...] = (("temperature", 0.0),)

    @classmethod
    def read(cls, path: Path | None, tokenizer: Path | None, **options: Any) -> Asking:
        """With the prompts of a JSONL file, where one is given; see `chat_prompts.read_prompts`."""
        prompts = () if path is None else tuple(read_prompts(path, tokenizer or Path(".")))
        return cls(prompts, **options)

    def requests(self, load: Load, seed: int) -> RequestList:
        """The list of `seed`, with the prompts' own lengths."""
        return self.fitted(load.source.requests(seed), seed)

    def fitted(self, requests: RequestList, seed: int) -> RequestList:
        """`requests` with the lengths of the prompts that `bodies` gives them."""
        if not self.prompts:
            return requests
        lengths = [len(self.prompts[place].ids) for place in self._order(requests, seed)]
        return replace(requests, prompt_tokens=np.array(lengths, np.int32)).check()

    def bodies(self, requests: RequestList, seed: int, run: str) -> Callable[[int], dict[str, Any]]:
        """What request i asks; `run` makes its id unlike that of any other run."""
        order = self._order(requests, seed) if self.prompts else []

        def body(i: int) -> dict[str, Any]:
            rid = f"{run}-{i}"
            if self.domains:
                rid = tagged_rid(rid, self.domains[requests.domain[i]], int(requests.request_hash[i]))
            if self.prompts:
                ids: list[int] = list(self.prompts[order[i]].ids)
            else:
                rng = np.random.default_rng([seed, i])
                ids = rng.integers(FIRST_ID, LAST_ID + 1, requests.prompt_tokens[i]).tolist()
            parameters = {
                **dict(self.sampling),
                "max_new_tokens": int(requests.output_tokens[i]),
                "ignore_eos": not self.stops_at_eos,
            }
            return {"input_ids": ids, "sampling_params": parameters, "rid": rid}

        return body

    def _order(self, requests: RequestList, seed: int) -> list[int]:
        """Prompts of the list: a shuffle of all, then another one."""
        rng = np.random.default_rng([seed, len(self.prompts)])
        laps = -(-requests.num_requests // len(self.prompts))
        order = np.concatenate([rng.permutation(len(self.prompts)) for _ in range(laps)])
        places: list[int] = order[: requests.num_requests].tolist()
        return places


def lengths_of(spec: str) -> LengthModel:
    """The length model of a name or `trace:FILE`."""
    return as_lengths(spec)
