"""The answers that `answers.py` wrote, in batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BATCH_TOKENS = 16384
"""Tokens of a batch, padding included."""
LENGTH_MIX = 24
"""Tokens by which the lengths of sequences of one batch may differ, so that batches differ between epochs."""
DRAFT_VOCAB = 8192


@dataclass
class Answers:
    """Sequences of prompt and answer, end to end."""

    tokens: Tensor
    start: Tensor
    prompt_len: Tensor
    length: Tensor
    """Of prompt and answer together."""
    domain: Tensor
    domains: list[str]
    sampled: Tensor
    held_out: Tensor

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Answers:
        with np.load(path) as data:
            on = {
                name: torch.from_numpy(data[name].astype(np.int64)).to(device)
                for name in data
                if name != "domains"
            }
            return cls(
                tokens=on["tokens"],
                start=on["start"],
                prompt_len=on["prompt_len"],
                length=on["prompt_len"] + on["answer_len"],
                domain=on["domain"],
                domains=data["domains"].tolist(),
                sampled=on["sampled"].bool(),
                held_out=on["held_out"].bool(),
            )

    def padded(self, which: Tensor) -> Tensor:
        """Token ids `(batch, longest)` of some sequences, 0 after their ends."""
        time_ = torch.arange(int(self.length[which].max()), device=which.device)
        inside = time_ < self.length[which, None]
        return torch.where(inside, self.tokens[(self.start[which, None] + time_) * inside], 0)

    def batches(self, which: Tensor, shuffle: torch.Generator | None) -> Iterator[Tensor]:
        """Sequences of like length together, BATCH_TOKENS with padding; shuffled, or from short to long."""
        lengths = self.length[which].tolist()
        order = torch.tensor(lengths, dtype=torch.float32)
        if shuffle is not None:
            order += LENGTH_MIX * torch.rand(len(order), generator=shuffle)
        parts: list[list[int]] = [[]]
        longest = 0
        for index in order.argsort().tolist():
            longest = max(longest, lengths[index])
            if parts[-1] and (len(parts[-1]) + 1) * longest > BATCH_TOKENS:
                parts.append([])
                longest = lengths[index]
            parts[-1].append(index)
        sequence = torch.randperm(len(parts), generator=shuffle).tolist() if shuffle else range(len(parts))
        for part in sequence:
            yield which[torch.tensor(parts[part], device=which.device)]

    def draft_vocabulary(self) -> Tensor:
        """The target's ids of the most frequent tokens of answers not held out, ascending."""
        counts = torch.zeros(int(self.tokens.max()) + 1, device=self.tokens.device)
        for which in self.batches(torch.nonzero(~self.held_out)[:, 0], None):
            ids = self.padded(which)
            place = torch.arange(ids.shape[1], device=ids.device)
            answer = (place >= self.prompt_len[which, None]) & (place < self.length[which, None])
            counts += torch.bincount(ids[answer], minlength=len(counts))
        best = counts.argsort(descending=True)[:DRAFT_VOCAB].sort().values
        print(
            f"draft vocabulary covers {float(counts[best].sum() / counts.sum()):.4f} of answers", flush=True
        )
        return best
