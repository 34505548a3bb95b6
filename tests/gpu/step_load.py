"""Steps the number of requests in flight up and down at a running server and records what its dial does.

    python tests/gpu/step_load.py URL --levels 1 8 32 128 32 8 1 --seconds 8 --out FILE.json

Prompts are random token ids, so the server needs no tokenizer. The exit status is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 400
OUTPUT_TOKENS = 200


class Load:
    """Keeps `level` requests in flight, each followed by the next; every level's tokens are counted."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.level = 0
        self.tokens = 0
        self.finished = 0
        self.errors: list[str] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def set_level(self, level: int) -> None:
        """From now on keep `level` requests in flight; those beyond it finish."""
        self.level = level
        while len(self._threads) < level:
            thread = threading.Thread(target=self._worker, args=(len(self._threads),), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _worker(self, index: int) -> None:
        rng = random.Random(index)
        while True:
            if index >= self.level:
                time.sleep(0.05)
                continue
            body = {
                "input_ids": [rng.randrange(1000, 100000) for _ in range(PROMPT_TOKENS)],
                "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True},
            }
            try:
                answer = post(f"{self.url}/generate", body)
                with self._lock:
                    self.finished += 1
                    self.tokens += len(answer["output_ids"])
            except (OSError, KeyError, ValueError) as error:
                with self._lock:
                    self.errors.append(repr(error))
                time.sleep(0.5)


def post(url: str, body: dict[str, Any]) -> Any:
    """The JSON answer to a JSON request."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def status(url: str) -> dict[str, Any]:
    """The dial's status of the first replica."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        state: dict[str, Any] = json.load(answer)["internal_states"][0].get("draftdial", {})
    return state


def main() -> int:
    """Run every level in turn; print and write one row per level."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 8, 32, 64, 128, 64, 32, 8, 1])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = Load(args.url.rstrip("/"))
    rows = []
    for level in args.levels:
        load.set_level(level)
        time.sleep(1.0)  # let the level settle
        before, tokens, started = status(load.url), load.tokens, time.monotonic()
        time.sleep(args.seconds)
        elapsed = time.monotonic() - started
        after = status(load.url)
        rounds = {
            name.rpartition(".")[2]: after[name] - before[name]
            for name in after
            if name.startswith("rounds_at_k.")
        }
        row = {
            "requests_in_flight": level,
            "output_tok_s": round((load.tokens - tokens) / elapsed, 1),
            "rounds_at_k": rounds,
            "switches": after.get("switches", 0) - before.get("switches", 0),
            "fallback": after.get("fallback", ""),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    load.set_level(0)
    result = {
        "levels": rows,
        "finished": load.finished,
        "errors": load.errors[:10],
        "status": status(load.url),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{load.finished} requests finished, {len(load.errors)} failed")
    return 1 if load.errors else 0


if __name__ == "__main__":
    sys.exit(main())
