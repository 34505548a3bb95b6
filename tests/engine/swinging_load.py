"""Requests in flight at a server, as many as a level that swings says, some of them aborted, all checked."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ABORTED_SHARE = 0.05
ANSWER_S = 240.0


@dataclass(frozen=True)
class Asked:
    """A request, and the right answer to it where that is known."""

    prompt: tuple[int, ...]
    new_tokens: int
    right: list[int] | None = None
    """Goes on beyond `new_tokens`, as the answer to an aborted request may."""


class SwingingLoad:
    """Keeps `level` requests in flight, each followed by another; a thread for each."""

    def __init__(self, url: str, asked: Sequence[Asked], aborted_share: float = ABORTED_SHARE) -> None:
        self.url = url
        self.aborted_share = aborted_share
        self.level = 0
        self.num_answers = self.num_wrong = self.num_aborts = 0
        self.errors: list[str] = []
        self._asked = asked
        self._in_flight = 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def set_level(self, level: int) -> None:
        """From now on keep `level` requests in flight; those beyond it finish."""
        self.level = level
        while len(self._threads) < level:
            thread = threading.Thread(target=self._work, args=(len(self._threads),), daemon=True)
            self._threads.append(thread)
            thread.start()

    def drain(self, timeout_s: float = ANSWER_S) -> bool:
        """Send no more and wait for what is in flight; was all of it answered in time?"""
        self.level = 0
        deadline = time.monotonic() + timeout_s
        while self._in_flight and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self._in_flight

    def _work(self, index: int) -> None:
        rng = random.Random(index)
        while True:
            with self._lock:
                is_wanted = index < self.level
                self._in_flight += is_wanted
            if not is_wanted:
                time.sleep(0.02)
                continue
            try:
                self._ask(rng)
            except (OSError, ValueError, KeyError) as error:
                with self._lock:
                    self.errors.append(repr(error))
                time.sleep(0.5)
            finally:
                with self._lock:
                    self._in_flight -= 1

    def _ask(self, rng: random.Random) -> None:
        asked = rng.choice(self._asked)
        rid = f"load-{rng.getrandbits(64):x}"
        is_aborted = rng.random() < self.aborted_share
        abort = threading.Timer(0.3 * rng.random(), post, (f"{self.url}/abort_request", {"rid": rid}))
        parameters = {"temperature": 0, "max_new_tokens": asked.new_tokens, "ignore_eos": True}
        if is_aborted:
            abort.start()
        try:
            body = {"input_ids": asked.prompt, "sampling_params": parameters, "rid": rid}
            answer = post(f"{self.url}/generate", body)
            tokens = answer["output_ids"]
            was_cut = answer["meta_info"]["finish_reason"]["type"] == "abort"
        except urllib.error.HTTPError:
            if not is_aborted:
                raise
            tokens, was_cut = [], True  # aborted before it ran
        finally:
            abort.cancel()
        right = asked.right if asked.right is not None else tokens
        is_whole = len(tokens) == asked.new_tokens
        is_right = tokens == right[: len(tokens)] and (is_whole or (was_cut and is_aborted))
        with self._lock:
            self.num_answers += 1
            self.num_aborts += was_cut
            self.num_wrong += not is_right


def post(url: str, body: Any, timeout_s: float = ANSWER_S) -> Any:
    """The JSON answer to a JSON request; None where it is empty."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        content = answer.read()
    return json.loads(content) if content.strip() else None


def status_of(url: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """What the plugin says of itself."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=timeout_s) as answer:
        status: dict[str, Any] = json.load(answer)["internal_states"][0]["draftdial"]
    return status
