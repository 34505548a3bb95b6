"""A long run of real SGLang under everything that may change while it serves.

    python tests/engine/soak.py [--rounds 200000]

Requests come without pause while policies are swapped, modes and forced k change, and requests are aborted.
Prints a JSON summary. Exit status 1 if an output differs from the target's own, the policy fell back, or the
scheduler's memory or the time of `/server_info` grew.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import policies
import psutil
from cpu_server import CpuServer, draft_arguments, target_arguments
from steered_server import SteeredServer
from tiny_models import write_models
from traffic import ABORT_OVERSHOOT, Reference, Request, random_requests

CLIENTS = 3
"""Requests in flight: few, for the most rounds a second."""
CHANGE_EVERY_S = 0.1
SAMPLE_EVERY_S = 5.0
ABORTED_SHARE = 0.05

MOST_GROWTH_MIB = 6.0
"""Of the scheduler's memory, from the second third of the run to the last; the first fills caches. Of 200,000
rounds these are 67,000: 100 bytes kept in each would be 6.4."""
MOST_SLOWDOWN_MS = 2.0
"""Of `/server_info` between the same, beyond that of another request to the scheduler, as other work on the
machine slows both. Without the shim for it (see `compat.py`) it would be 6 and more."""


@dataclass(frozen=True)
class Sample:
    """The server at one time."""

    rounds: int
    memory_mib: float
    info_ms: float
    """Of `/server_info`."""
    control_ms: float
    """Of a change that changes nothing: as long a way, and no log of SGLang's to fold."""


class Soak:
    """One run against one server."""

    def __init__(self, server: SteeredServer, reference: Reference, num_rounds: int) -> None:
        self.server = server
        self.num_rounds = num_rounds
        self.samples: list[Sample] = []
        self.changes = dict.fromkeys(("deploy", "mode", "force_k"), 0)
        self.num_answers = self.num_aborts = self.num_overshot = 0
        self.wrong: list[dict[str, Any]] = []
        longer = reference.choose(random_requests(seed=1, prompt_tokens=(3, 60), new_tokens=(50, 250)), 60)
        self._requests = [replace(r, new_tokens=r.new_tokens - ABORT_OVERSHOOT) for r in longer]
        self._right = reference.tokens(longer)
        self._files = [
            *map(policies.jumping, range(6)),
            *map(policies.learned, range(2)),
            policies.rule("greedy"),
        ]
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._scheduler = _scheduler_of(server)

    def run(self) -> None:
        """Serve until enough rounds have run."""
        tasks = [*[self._client] * CLIENTS, self._changer]
        threads = [
            threading.Thread(target=self._guarded, args=(task, random.Random(i)))
            for i, task in enumerate(tasks)
        ]
        for thread in threads:
            thread.start()
        try:
            while not self._is_over.is_set():
                self._sample()
                if self.samples[-1].rounds >= self.num_rounds:
                    break
                self._is_over.wait(SAMPLE_EVERY_S)
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def _guarded(self, task: Callable[[random.Random], None], rng: random.Random) -> None:
        try:
            while not self._is_over.is_set():
                task(rng)
        except BaseException as error:
            self._failure = error
            self._is_over.set()

    def _client(self, rng: random.Random) -> None:
        """One request, from time to time aborted, compared with the right answer."""
        i = rng.randrange(len(self._requests))
        rid = f"soak-{rng.getrandbits(64):x}"
        is_aborted = rng.random() < ABORTED_SHARE
        abort = threading.Timer(0.2 * rng.random(), self.server.post, ("/abort_request", {"rid": rid}))
        if is_aborted:
            abort.start()
        answer = self.server.post("/generate", _body(self._requests[i], rid))
        abort.cancel()
        tokens, right, asked = answer["output_ids"], self._right[i], self._requests[i].new_tokens
        cut = answer["meta_info"]["finish_reason"]["type"] == "abort"
        has_its_length = len(tokens) == asked or (cut and is_aborted)
        with self._lock:
            self.num_answers += 1
            self.num_aborts += cut
            self.num_overshot += len(tokens) > asked
            if not has_its_length or tokens != right[: len(tokens)]:
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, right)))  # noqa: B905
                lengths = {"tokens": len(tokens), "asked": asked, "same_at_first": same}
                self.wrong.append(
                    {"request": i, "rid": rid, "abort_asked": is_aborted, "cut": cut, **lengths}
                )

    def _changer(self, rng: random.Random) -> None:
        """One change; most of the time the policy steers."""
        kind = rng.choices(list(self.changes), (0.5, 0.3, 0.2))[0]
        if kind == "deploy":
            done = self.server.deploy(rng.choice(self._files))
        elif kind == "mode":
            done = self.server.set(draftdial_mode=rng.choices((0, 1, 2), (0.8, 0.1, 0.1))[0])
        else:
            done = self.server.set(draftdial_force_k=rng.choices((-1, *policies.TIERS), (8, 1, 1, 1, 1))[0])
        assert done, f"{kind} was refused"
        self.changes[kind] += 1
        time.sleep(CHANGE_EVERY_S * 2 * rng.random())

    def _sample(self) -> None:
        began = time.perf_counter()
        status = self.server.status()
        between = time.perf_counter()
        self.server.set(draftdial_force_k=-1)
        info_ms, control_ms = (between - began) * 1e3, (time.perf_counter() - between) * 1e3
        memory = self._scheduler.memory_info().rss / 2**20
        latest = Sample(status["decisions"], memory, info_ms, control_ms)
        self.samples.append(latest)
        print(
            f"{latest.rounds} rounds, {memory:.0f} MiB, {info_ms:.1f} ms ({control_ms:.1f})",
            file=sys.stderr,
            flush=True,
        )

    def summary(self) -> dict[str, Any]:
        """What came of it, with the reasons why it is not good enough."""
        status = self.server.status()
        memory_growth = self._growth(lambda sample: sample.memory_mib, 50)
        # The quickest ones are the least disturbed by other work.
        slowdown = self._growth(lambda sample: sample.info_ms, 10)
        slowdown -= self._growth(lambda sample: sample.control_ms, 10)
        failures = {
            "outputs differ": len(self.wrong) > 0,
            "the policy fell back": status["fallbacks"] > 0 or status["errors"] > 0,
            "fewer rounds than asked for": status["decisions"] < self.num_rounds,
            "the scheduler's memory grew": memory_growth > MOST_GROWTH_MIB,
            "/server_info slowed down": slowdown > MOST_SLOWDOWN_MS,
        }
        return {
            "rounds": status["decisions"],
            "switches": status["switches"],
            "rounds_at_k": {k: status[f"rounds_at_k.{k}"] for k in policies.TIERS},
            "answers": self.num_answers,
            "wrong": len(self.wrong),
            "wrong_answers": self.wrong[:10],
            "aborts": self.num_aborts,
            "aborts_longer_than_asked": self.num_overshot,
            "changes": self.changes,
            "fallbacks": status["fallbacks"],
            "errors": status["errors"],
            "memory_mib": [round(self.samples[i].memory_mib, 1) for i in (0, -1)],
            "memory_growth_mib": round(memory_growth, 2),
            "server_info_ms": [round(self.samples[i].info_ms, 1) for i in (0, -1)],
            "server_info_slowdown_ms": round(slowdown, 2),
            "failures": [failure for failure, holds in failures.items() if holds],
        }

    def _growth(self, value: Callable[[Sample], float], percentile: float) -> float:
        """From the second third of the samples to the last."""
        third = len(self.samples) // 3
        if not third:
            return 0.0
        middle, last = self.samples[third : 2 * third], self.samples[2 * third :]
        before, after = (np.percentile([value(s) for s in part], percentile) for part in (middle, last))
        return float(after - before)


def _body(request: Request, rid: str) -> dict[str, Any]:
    return {"input_ids": request.prompt, "sampling_params": request.parameters, "rid": rid}


def _scheduler_of(server: CpuServer) -> psutil.Process:
    """Its process: the largest, since it holds the models."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    return next(process for process in family if "scheduler" in " ".join(process.cmdline()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=200_000, help="decode rounds to run (default: %(default)s)"
    )
    num_rounds: int = parser.parse_args().rounds
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the servers too, as on Ctrl-C
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_models(folder)
        policy = policies.saved(policies.jumping(seed=0), folder / "policy.safetensors")
        arguments = [*target_arguments(folder), *draft_arguments(folder)]
        serve = [str(policy), "--log", str(folder / "decisions.log")]
        with CpuServer(target_arguments(folder), folder / "reference.log") as target:
            soak_folder = folder / "soak"
            soak_folder.mkdir()
            with SteeredServer(
                arguments, soak_folder, serve=serve, environment={"ENGINE_PROBE": ""}
            ) as server:
                soak = Soak(server, Reference(target), num_rounds)
                target.close()
                soak.run()
                summary = soak.summary()
    print(json.dumps(summary, indent=1))
    return 1 if summary["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
