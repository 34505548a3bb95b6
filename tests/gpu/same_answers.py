"""Does a server at k = 0 answer what a server without speculation answers?

    python3 tests/gpu/same_answers.py URL PLAIN_URL

Greedy, one request at a time, so that both run the same shapes: the tokens must be equal. Then many at once,
where the order in which they are read may change last bits: the plain server is asked twice, to say how many
answers differ by that alone. Exit status 1 if an answer to one request differs, or if all are one token.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor

from draftdial.engine_patch.client import Server

SINGLE_PROMPTS = (20, 150, 500, 1500, 4000, 8000)
"""Tokens: attention over long ones is split among multiprocessors."""
AT_ONCE, PROMPT_TOKENS = 48, 300
NEW_TOKENS = 96
VOCABULARY = 100_000
PATIENT_S = 120.0


def prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, VOCABULARY) for _ in range(num_tokens)]


def answer(url: str, tokens: list[int]) -> list[int]:
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": parameters}
    output: list[int] = json.loads(Server(url, timeout_s=PATIENT_S).post("/generate", body))["output_ids"]
    return output


def num_equal(first: list[list[int]], second: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(first, second, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("urls", nargs=2)
    url, plain_url = parser.parse_args().urls
    singles = [prompt(size, size) for size in SINGLE_PROMPTS]
    right = [answer(plain_url, tokens) for tokens in singles]
    equal = num_equal([answer(url, tokens) for tokens in singles], right)
    many = [prompt(-1 - index, PROMPT_TOKENS) for index in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        once, again, dialled = (
            list(pool.map(lambda tokens, server=server: answer(server, tokens), many))
            for server in (plain_url, plain_url, url)
        )
    num_distinct = len({token for tokens in right for token in tokens})
    [status] = Server(url).replicas()
    print(f"graphs of k = 0 with attention scheduled once: {status['one_token_graphs']}")
    print(f"single requests equal: {equal} of {len(singles)}, {num_distinct} different tokens in them")
    print(f"of {AT_ONCE} at once: {num_equal(once, dialled)}; plain twice: {num_equal(once, again)}")
    return 0 if equal == len(singles) and num_distinct > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
