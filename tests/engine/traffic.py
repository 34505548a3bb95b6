"""Requests, how they are sent, and what a server without speculation answers to them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from math import ceil
from types import TracebackType
from typing import Any, Self

from cpu_server import CpuServer
from policies import TIERS
from tiny_models import VOCAB

LEAST_MARGIN = 1e-4
"""Least logit distance to the runner-up along a reference answer. Sums in another order are off by 1e-5 at
most, which must not decide a comparison."""

ABORT_OVERSHOOT = max(TIERS)
"""So many tokens more than it asked for may come back of an aborted request, with or without draftdial:
SGLang cuts at `max_new_tokens` only where that is what ends a request (`Req.update_finish_state`)."""


@dataclass(frozen=True)
class Request:
    """Token ids in, so many token ids out."""

    prompt: tuple[int, ...]
    new_tokens: int
    delay_s: float = 0.0
    """Wait before it is sent."""

    @property
    def parameters(self) -> dict[str, Any]:
        return {"temperature": 0, "max_new_tokens": self.new_tokens, "ignore_eos": True}


@dataclass(frozen=True)
class Answer:
    """Token ids and SGLang's `meta_info`."""

    tokens: list[int]
    meta: dict[str, Any]


def random_requests(
    seed: int,
    *,
    prompt_tokens: tuple[int, int] = (3, 120),
    new_tokens: tuple[int, int] = (10, 120),
    spread_s: float = 2.0,
) -> Iterator[Request]:
    """Endless requests of uniformly drawn lengths, sent within `spread_s` seconds."""
    rng = random.Random(seed)
    while True:
        prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(*prompt_tokens)))
        yield Request(prompt, rng.randint(*new_tokens), rng.random() * spread_s)


class Sending:
    """Requests on their way, each in a thread of its own."""

    def __init__(self, server: CpuServer, requests: Sequence[Request], name: str = "") -> None:
        """Begin; with a `name`, the ids of the requests are NAME-0, NAME-1 and so on."""
        self._server = server
        self._pool = ThreadPoolExecutor(len(requests))
        self._futures: list[Future[Answer]] = [
            self._pool.submit(self._send, request, f"{name}-{i}" if name else None)
            for i, request in enumerate(requests)
        ]

    def _send(self, request: Request, rid: str | None) -> Answer:
        time.sleep(request.delay_s)
        return _answer(self._server, request, rid)

    def done(self) -> bool:
        """Have all been answered?"""
        return all(future.done() for future in self._futures)

    def answers(self) -> list[Answer]:
        """The answers, when all are there."""
        with self._pool:
            return [future.result() for future in self._futures]


class Load:
    """Requests sent again and again, each in a thread of its own; a context manager that lets them end.

    As long as it lasts all of them are in flight, whatever the speed of the machine.
    """

    def __init__(self, server: CpuServer, requests: Sequence[Request]) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(len(requests))
        self._futures = [self._pool.submit(self._repeat, request) for request in requests]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._pool.shutdown()

    def tokens(self) -> list[list[int]]:
        """For every request, what it was answered, once it has ended.

        Raises:
            AssertionError: it was not answered the same every time.
        """
        answered = [future.result() for future in self._futures]
        for first, *others in answered:
            assert others == [first] * len(others)
        return [first for first, *_ in answered]

    def _repeat(self, request: Request) -> list[list[int]]:
        answers = []
        while not (answers and self._is_over.is_set()):
            answers.append(_answer(self._server, request, None).tokens)
        return answers


def _answer(server: CpuServer, request: Request, rid: str | None) -> Answer:
    body = {"input_ids": request.prompt, "sampling_params": request.parameters}
    answer = server.post("/generate", body | ({"rid": rid} if rid else {}))
    return Answer(answer["output_ids"], answer["meta_info"])


def tokens_of(answers: Iterable[Answer]) -> list[list[int]]:
    """Their token ids."""
    return [answer.tokens for answer in answers]


def fewest_rounds(requests: Iterable[Request], largest_k: int) -> int:
    """No server can take less, however many of them it runs at once: a prefill gives each one token."""
    return max(ceil((request.new_tokens - 1) / (largest_k + 1)) for request in requests)


class Reference:
    """What the target says on its own: a server without speculation, asked once for each request."""

    def __init__(self, server: CpuServer) -> None:
        self.server = server
        self._known: dict[tuple[tuple[int, ...], int], tuple[list[int], float]] = {}

    def choose(self, candidates: Iterable[Request], count: int) -> list[Request]:
        """The first `count` of `candidates` whose answers no rounding could change."""
        endless, chosen = iter(candidates), list[Request]()
        while len(chosen) < count:
            some = list(islice(endless, count - len(chosen)))
            self._ask(some)
            chosen += [request for request in some if self._found(request)[1] >= LEAST_MARGIN]
        return chosen

    def tokens(self, requests: Iterable[Request]) -> list[list[int]]:
        """The right answer to each of `requests`."""
        wanted = list(requests)
        self._ask(wanted)
        return [self._found(request)[0] for request in wanted]

    def _found(self, request: Request) -> tuple[list[int], float]:
        return self._known[request.prompt, request.new_tokens]

    def _ask(self, requests: Sequence[Request]) -> None:
        unknown = [r for r in requests if (r.prompt, r.new_tokens) not in self._known]
        if not unknown:
            return
        answers = self.server.post(
            "/generate",
            {
                "input_ids": [request.prompt for request in unknown],
                "sampling_params": [request.parameters for request in unknown],
                "return_logprob": True,
                "top_logprobs_num": 2,
            },
        )
        for request, answer in zip(unknown, answers, strict=True):
            pairs = answer["meta_info"]["output_top_logprobs"]
            margin = min(best[0] - second[0] for best, second in pairs)
            self._known[request.prompt, request.new_tokens] = answer["output_ids"], margin
