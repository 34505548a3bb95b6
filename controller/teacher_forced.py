"""Acceptance at every output position: a target's answers, and what chains of its draft get right."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from draftdial.controller.chat_prompts import ChatPrompt, read_prompts
from draftdial.controller.eagle3 import Eagle3, captured_layers, chain_acceptance
from draftdial.controller.generate import generate
from draftdial.controller.llama import Llama
from draftdial.controller.model_folder import end_tokens

DEPTH = 7
"""Drafts of a chain: EAGLE-3 heads are trained to this depth and fall off past it."""
BATCH_TOKENS = 8192
"""Tokens, padding included, of sequences whose chains are walked together."""
GENERATION_BATCH = 256


def record(
    target_folder: Path, draft_folder: Path, prompt_file: Path, temperature: float, max_new: int, seed: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header, and a line for every prompt: its answer, and what chains of the draft get right there.

    On a GPU in bfloat16, else in float32. Raises UserError for a folder or file that cannot be used.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    prompts = read_prompts(prompt_file, target_folder)
    target = Llama.load(target_folder, dtype, device, captured_layers(draft_folder))
    draft = Eagle3.load(draft_folder, dtype, device)
    answered = answer_prompts(target, prompts, temperature, end_tokens(target_folder), max_new, DEPTH, seed)
    lines = dict(acceptance_lines(target, draft, answered, max_new, DEPTH))
    header = {
        "mode": "teacher-forced",
        "target": _model(target_folder),
        "draft": _model(draft_folder),
        "engine": f"draftdial {_version()}, torch {torch.__version__}, {dtype}, {device.type}",
        "sampling": {"temperature": temperature, "max_new": max_new, "seed": seed},
        "prompts": {"file": prompt_file.name, "sha256": _sha256(prompt_file), "count": len(prompts)},
        "domains": sorted({prompt.domain for prompt in prompts}),
        "max_k": DEPTH,
        "exact": "every position; acc of max_k + 1 means that or more",
    }
    return header, [lines[index] for index in range(len(prompts))]


@dataclass(frozen=True)
class Answered:
    """A prompt and its answer."""

    prompt: ChatPrompt
    answer: list[int]
    """Token ids; a few more than are recorded where it was cut, so that the last chains are known too."""


def answer_prompts(
    target: Llama,
    prompts: Sequence[ChatPrompt],
    temperature: float,
    eos: frozenset[int],
    max_new: int,
    depth: int,
    seed: int,
) -> list[Answered]:
    """The target's own answers, in the order of `prompts`."""
    made = dict(
        generate(
            target,
            [prompt.ids for prompt in prompts],
            [temperature] * len(prompts),
            eos,
            max_new + depth,
            GENERATION_BATCH,
            seed,
        )
    )
    return [Answered(prompt, made[index]) for index, prompt in enumerate(prompts)]


def acceptance_lines(
    target: Llama, draft: Eagle3, answered: Sequence[Answered], max_new: int, depth: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (index, line of the file) of every answer, in an order of its own.

    acc[t] is the number of tokens, bonus token included, that a round of `depth` drafts started at output
    position t yields: 1 to depth + 1, the latter meaning "or more". acc[0] = 1 is the token that prefill
    makes. p1[t] is the draft's probability of its first guess there, in percent; p1[0] is 0.

    The draft has seen the target's hidden states of all tokens before the round, as it has in a server
    whose draft is never skipped. For a sampled answer a draft counts as right when the sample equals it:
    SGLang accepts a draft token x with the target's probability p(x) and otherwise samples from p
    without x, so that the tokens of a round are distributed just so.
    """
    device = target.lm_head.weight.device
    order = sorted(range(len(answered)), key=lambda i: len(answered[i].prompt.ids) + len(answered[i].answer))
    while order:
        longest = len(answered[order[-1]].prompt.ids) + len(answered[order[-1]].answer)
        count = max(1, BATCH_TOKENS // longest)
        part, order = order[-count:], order[:-count]
        sequences = [[*answered[i].prompt.ids, *answered[i].answer] for i in part]
        ids = torch.tensor([s + [0] * (longest - len(s)) for s in sequences], device=device)
        ends = torch.tensor([len(s) for s in sequences], device=device)
        with torch.no_grad():
            _, aux = target(ids)
        chains = chain_acceptance(draft, target.embed_tokens, ids, aux, ends, depth)
        accepted = chains.accepted.tolist()
        percent = (100 * chains.first_probability).round().int().tolist()
        for row, index in enumerate(part):
            prompt, answer = answered[index].prompt, answered[index].answer
            length = min(len(answer), max_new)
            # A round at output position t drafts token t first: row prompt + t - 2 of the chains.
            first, last = len(prompt.ids) - 1, len(prompt.ids) + length - 2
            yield (
                index,
                {
                    "id": prompt.id,
                    "domain": prompt.domain,
                    "prompt_len": len(prompt.ids),
                    "gen_len": length,
                    "acc": [1, *(1 + n for n in accepted[row][first:last])],
                    "p1": [0, *percent[row][first:last]],
                },
            )


def _model(folder: Path) -> dict[str, str]:
    """What tells a model from others: its folder's name and the hash of its weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(bytes.fromhex(_sha256(path)))
    return {"name": folder.resolve().name, "sha256": digest.hexdigest()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version() -> str:
    try:
        return version("draftdial")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "unknown"
