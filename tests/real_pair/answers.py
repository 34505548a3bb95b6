"""The target's own answers to training prompts: what its draft is trained on.

    python answers.py TARGET OUT.npz PROMPTS.jsonl... [--samples 3] [--invented 12000] [--seconds 150]

Every prompt is answered greedily, then --samples times at temperature 0.8, as far as --seconds allow.
--invented more prompts are the target's own: it is given the beginning of a user turn and goes on at
temperature 1 (Magpie, Xu et al. 2024). One prompt in 25 is held out for validation.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import numpy as np
import torch

from draftdial.controller.chat_prompts import ChatPrompt, chat_encoder, read_prompts
from draftdial.controller.generate import generate
from draftdial.controller.llama import Llama
from draftdial.controller.model_folder import end_tokens

TEMPERATURE = 0.8
HELD_OUT = 25
"""One prompt in so many is for validation."""
MAX_PROMPT = 384
"""Tokens; longer training prompts are left out."""
INVENTED_DOMAIN = "invented"
INVENTED_TOKENS = 96


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--invented", type=int, default=12000)
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=150)
    args = parser.parse_args()
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Llama.load(args.target, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    ends = end_tokens(args.target)
    prompts = [prompt for path in args.prompts for prompt in read_prompts(path, args.target)]
    prompts += invent(target, args.target, args.invented, ends, args.batch)
    prompts = [prompt for prompt in prompts if len(prompt.ids) <= MAX_PROMPT]
    random.Random(0).shuffle(prompts)
    print(f"{time.monotonic() - began:6.1f} s: {len(prompts)} prompts", flush=True)

    domains = sorted({prompt.domain for prompt in prompts})
    tokens: list[int] = []
    rows: list[tuple[int, int, int, int, int, int]] = []
    for sample in range(1 + args.samples):
        lap = time.monotonic()
        temperature = TEMPERATURE if sample else 0.0
        made = generate(
            target,
            [prompt.ids for prompt in prompts],
            [temperature] * len(prompts),
            ends,
            args.max_new,
            args.batch,
            seed=1 + sample,
        )
        for index, answer in made:
            prompt = prompts[index]
            domain = domains.index(prompt.domain)
            rows.append((len(tokens), len(prompt.ids), len(answer), domain, sample, index % HELD_OUT == 0))
            tokens += [*prompt.ids, *answer]
        save(args.out, tokens, rows, domains)
        spent = time.monotonic() - began
        print(f"{spent:6.1f} s: sample {sample}, {len(rows)} answers, {len(tokens)} tokens", flush=True)
        if spent + (time.monotonic() - lap) > args.seconds:
            break


def invent(target: Llama, folder: Path, count: int, ends: frozenset[int], batch: int) -> list[ChatPrompt]:
    """Different prompts that the target makes up, fewer than `count`: those that end within a limit."""
    if count == 0:
        return []
    encode = chat_encoder(folder)
    one, other = encode("A"), encode("The")
    before = next(i for i in range(len(one)) if one[i] != other[i])
    head, tail = one[:before], one[before + 1 :]
    made = generate(target, [head] * count, [1.0] * count, ends, INVENTED_TOKENS, batch, seed=0)
    turns = {tuple(turn[:-1]) for _, turn in made if turn[-1] in ends and len(turn) > 4}
    return [
        ChatPrompt(f"invented-{i}", INVENTED_DOMAIN, (*head, *turn, *tail))
        for i, turn in enumerate(sorted(turns))
    ]


def save(
    path: Path, tokens: list[int], rows: list[tuple[int, int, int, int, int, int]], domains: list[str]
) -> None:
    """One array for each field of an answer; `tokens` holds prompt and answer of all, end to end."""
    start, prompt_len, answer_len, domain, sample, held_out = np.array(rows, np.int64).T
    np.savez(
        path,
        tokens=np.array(tokens, np.uint32),
        start=start,
        prompt_len=prompt_len,
        answer_len=answer_len,
        domain=domain,
        domains=np.array(domains),
        sampled=sample > 0,
        held_out=held_out,
    )


if __name__ == "__main__":
    main()
