"""Accept length of a running server that serves the pair, against walks over its recorded arrays.

    python compare_server.py URL TARGET ARRAYS.jsonl.gz PROMPTS.jsonl... [--k 1 3 7] [--requests 160]

The server is one that `draftdial serve` started with `--skip-tokenizer-init`; every k of --k is forced in
turn. Exits with 1 where a k is off by more than 5 %.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from draftdial.controller.chat_prompts import ChatPrompt, read_prompts
from draftdial.controller.model_folder import end_tokens
from draftdial.engine_patch.client import Server

IN_FLIGHT = 16
TOLERANCE = 0.05
ANSWER_S = 600.0
FORCE_K = "draftdial_force_k"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("target", type=Path)
    parser.add_argument("arrays", type=Path)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--requests", type=int, default=160)
    args = parser.parse_args()
    header, *lines = map(json.loads, gzip.decompress(args.arrays.read_bytes()).splitlines())
    arrays = {line["id"]: line["acc"] for line in lines}
    prompts = [p for path in args.prompts for p in read_prompts(path, args.target) if p.id in arrays]
    prompts = prompts[:: max(1, len(prompts) // args.requests)][: args.requests]
    sampling = {
        "temperature": header["sampling"]["temperature"],
        "max_new_tokens": header["sampling"]["max_new"],
        "stop_token_ids": sorted(end_tokens(args.target)),
    }
    server = Server(args.url, timeout_s=ANSWER_S)
    worst = 0.0
    for k in args.k:
        if not all(server.change(FORCE_K, k)):
            raise SystemExit(f"the server would not be forced to k = {k}")
        served = serve(server, prompts, sampling)
        walked = [walk(arrays[prompt.id], k) for prompt in prompts]
        online, offline = tokens_per_round(served), tokens_per_round(walked)
        worst = max(worst, abs(online / offline - 1))
        print(
            f"k={k}: server {online:.3f}, arrays {offline:.3f}, {100 * (online / offline - 1):+.1f} %",
            flush=True,
        )
    return int(worst > TOLERANCE)


def serve(server: Server, prompts: list[ChatPrompt], sampling: dict[str, object]) -> list[tuple[int, int]]:
    """(tokens after the first, rounds) of the server's answer to every prompt."""

    def ask(prompt: ChatPrompt) -> tuple[int, int]:
        meta = json.loads(server.post("/generate", {"input_ids": prompt.ids, "sampling_params": sampling}))[
            "meta_info"
        ]
        return meta["completion_tokens"] - 1, meta["spec_verify_ct"]

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return list(pool.map(ask, prompts))


def walk(acc: list[int], k: int) -> tuple[int, int]:
    """(tokens after the first, rounds) of rounds of k drafts over an answer's array."""
    position, rounds = 1, 0
    while position < len(acc):
        position += min(acc[position], k + 1)
        rounds += 1
    return len(acc) - 1, rounds


def tokens_per_round(walks: list[tuple[int, int]]) -> float:
    """The accept length of all together."""
    return sum(tokens for tokens, _ in walks) / sum(rounds for _, rounds in walks)


if __name__ == "__main__":
    sys.exit(main())
