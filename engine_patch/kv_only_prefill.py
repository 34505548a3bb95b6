"""What a prefill owes the draft's KV while off, and the draft input that it leaves.

SGLang runs the whole draft over a prompt as well (`EagleDraftWorker._draft_extend_for_prefill`). While k = 0
decodes without the draft, nothing of that is wanted but keys and values: a warm round comes before the next
draft, and gives every request its hidden state and first token.
"""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from draftdial.engine_patch.kv_only_backlog import Owed

if TYPE_CHECKING:
    from torch import Tensor

PROOF_TOKENS = 8
"""Of one prompt, at least, for a prefill to prove anything: at position 0 nothing is rotated, and a single
token has none before it to be paired with. Health checks are that short."""


class Prefill:
    """A batch of prompts, or of chunks of them, that the target has just read."""

    def __init__(self, worker: Any, batch: Any, hidden: Tensor, next_token_ids: Tensor) -> None:
        """
        Args:
            worker: SGLang's `EagleDraftWorker`.
            batch: SGLang's, with `extend_lens` and `prefix_lens` for each request.
            hidden: `(tokens, num_layers * width)`, the target's.
            next_token_ids: `(requests,)`, what was sampled behind each.
        """
        import torch

        self._module = sys.modules[type(worker).__module__]
        self._next_token_ids = next_token_ids
        lengths = batch.extend_lens
        self.proves = max(lengths) >= PROOF_TOKENS
        self._ends = list(accumulate(lengths))
        # Slices and ranges rather than an index sent over: behind a prefill the GPU waits for the host.
        positions = [
            torch.arange(begin, begin + n, device=hidden.device)
            for begin, n in zip(batch.prefix_lens, lengths, strict=True)
        ]
        behind = self._module._eagle_prefill_tail_tokens(batch, next_token_ids)
        token_ids = [
            ids
            for row, (end, n) in enumerate(zip(self._ends, lengths, strict=True))
            for ids in (batch.input_ids[end - n + 1 : end], behind[row : row + 1])
        ]
        self.owed = Owed(hidden, torch.cat(token_ids), torch.cat(positions), batch.out_cache_loc)

    def draft_input(self, width: int) -> Any:
        """SGLang's `EagleDraftInput` for the next round, which must run the draft before it is drafted from.

        Args:
            width: Of the draft's hidden state.
        """
        import torch

        hidden = self.owed.hidden
        index = torch.zeros((len(self._ends), 1), dtype=torch.int64, device=hidden.device)
        return self._module.EagleDraftInput(
            topk_p=torch.ones_like(index, dtype=torch.float32),
            topk_index=index,
            hidden_states=torch.cat([hidden[end - 1 : end, :width] for end in self._ends]),
            bonus_tokens=self._next_token_ids,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
        )


def is_plain(batch: Any, embeds: Any) -> bool:
    """Can `Prefill` stand in for the draft? Not where prompts are more than tokens, nor beside decoding."""
    given = (embeds, getattr(batch, "input_embeds", None), getattr(batch, "replace_embeds", None))
    return all(each is None for each in given) and batch.forward_mode.name == "EXTEND"
