"""Answers of a Llama to many prompts at once, greedy or sampled, with a fixed cache and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from draftdial.controller.llama import KeyValues, Llama

Prompt = Sequence[int]

PREFILL_TOKENS = 65536
"""Tokens, padding included, that one forward pass over prompts takes at most."""
LENGTH_STEP = 128
"""Cache positions are looked at in multiples of this; each multiple has a CUDA graph of its own."""
FINISHED_CHECK = 16
"""Steps between looks at whether all sequences have ended, each of which waits for the GPU."""


def generate(
    target: Llama,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    eos: frozenset[int],
    max_new: int,
    batch: int,
    seed: int,
) -> Iterator[tuple[int, list[int]]]:
    """Yield (index of the prompt, its answer), in an order of its own.

    An answer ends with a token of `eos` or has `max_new` tokens.
    Temperature 0 is greedy. Sampling adds Gumbel noise to logits / temperature, so it depends on `seed` and
    on which prompts share a batch.
    """
    device = target.lm_head.weight.device
    torch.manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(order), batch):
        part = order[first : first + batch]
        # A smaller last batch is filled up, so that it has the shape of the others.
        rows = [part[min(i, len(part) - 1)] for i in range(min(batch, len(order)))]
        temperature = torch.tensor([temperatures[i] for i in rows], device=device)[:, None]
        answers = _Batch(target, [prompts[i] for i in rows], temperature, eos, max_new).run()
        yield from zip(part, answers, strict=False)


class _Batch:
    """Sequences that decode together."""

    def __init__(
        self, target: Llama, prompts: list[Prompt], temperature: Tensor, eos: frozenset[int], max_new: int
    ) -> None:
        self.target = target
        self.temperature = temperature
        self.prompts = prompts
        self.max_new = max_new
        device = temperature.device
        self.eos = torch.tensor(sorted(eos), device=device)
        longest = max(map(len, prompts))
        self.length = -(-(longest + max_new) // LENGTH_STEP) * LENGTH_STEP
        self.cache = KeyValues(target.shape, len(prompts), self.length, target.lm_head.weight)
        self.token = torch.zeros((len(prompts), 1), dtype=torch.int64, device=device)
        self.position = torch.tensor([len(prompt) for prompt in prompts], device=device)[:, None]
        self.made = torch.zeros((), dtype=torch.int64, device=device)
        self.answers = torch.zeros((len(prompts), max_new), dtype=torch.int64, device=device)
        self.ended = torch.zeros((len(prompts), 1), dtype=torch.bool, device=device)

    @torch.no_grad()
    def run(self) -> list[list[int]]:
        longest = max(map(len, self.prompts))
        self._prefill(longest)
        step: Callable[[], None] | None = None
        looked_at = 0
        for made in range(1, self.max_new):
            needed = min(self.length, -(-(longest + made) // LENGTH_STEP) * LENGTH_STEP)
            if step is None or needed > looked_at:
                looked_at = needed
                step = self._graph(looked_at)
            step()
            if made % FINISHED_CHECK == 0 and bool(self.ended.all()):
                break
        ends = (self.answers[..., None] == self.eos).any(-1).int()
        lengths = torch.where(ends.any(1), ends.argmax(1) + 1, int(self.made)).tolist()
        return [row[:length] for row, length in zip(self.answers.tolist(), lengths, strict=True)]

    def _prefill(self, longest: int) -> None:
        """Fill the cache with the prompts, some at a time, and choose every answer's first token."""
        device = self.token.device
        last = []
        rows = max(1, PREFILL_TOKENS // longest)
        for first in range(0, len(self.prompts), rows):
            part = self.prompts[first : first + rows]
            ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in part], device=device)
            positions = torch.arange(longest, device=device).expand_as(ids)
            hidden = self.target.extend(ids, positions, self._slice(first, len(part)), longest)
            ends = torch.tensor([len(prompt) - 1 for prompt in part], device=device)
            last.append(hidden[torch.arange(len(part), device=device), ends])
        self._choose(torch.cat(last)[:, None])

    def _slice(self, first: int, count: int) -> KeyValues:
        """A view of some sequences of the cache."""
        view = object.__new__(KeyValues)
        view.keys = self.cache.keys[:, first : first + count]
        view.values = self.cache.values[:, first : first + count]
        view.rows = self.cache.rows[:count]
        return view

    def _step(self, length: int) -> None:
        """Read the newest token of every sequence, choose the next."""
        hidden = self.target.extend(self.token, self.position, self.cache, length)
        self.position += 1
        self._choose(hidden)

    def _choose(self, hidden: Tensor) -> None:
        logits = self.target.lm_head(hidden)[:, 0].float()
        gumbel = -torch.empty_like(logits).exponential_().log_()
        self.token.copy_((logits + self.temperature * gumbel).argmax(-1, keepdim=True))
        self.answers.index_copy_(1, self.made[None], self.token)
        self.made += 1
        self.ended |= (self.token == self.eos).any(1, keepdim=True)

    def _graph(self, length: int) -> Callable[[], None]:
        """One step as a CUDA graph; elsewhere the step itself."""
        if self.token.device.type != "cuda":
            return lambda: self._step(length)
        state = [self.token, self.position, self.made, self.ended]
        saved = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(length)  # warm-up: libraries allocate their workspaces outside the capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(length)
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)
        return graph.replay
