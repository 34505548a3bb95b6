"""What a prefill owes the draft's KV while off, and the draft input that it leaves.

SGLang runs the whole draft over a prompt as well (`EagleDraftWorker._draft_extend_for_prefill`). While k = 0
decodes without the draft, nothing of that is wanted but keys and values: a warm round comes before the next
draft, and gives every request its hidden state and first token.
"""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

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
        lengths, begins = batch.extend_lens, batch.prefix_lens
        self.proves = max(lengths) >= PROOF_TOKENS
        places = [np.arange(begin, begin + n) for begin, n in zip(begins, lengths, strict=True)]
        last = np.fromiter(accumulate(lengths), np.int64) - 1
        sent = torch.from_numpy(np.concatenate([*places, last]))
        if hidden.device.type != "cpu":  # from other memory the copy would be waited for
            sent = sent.pin_memory().to(hidden.device, non_blocking=True)
        positions, self._last = sent[: -len(last)], sent[-len(last) :]
        token_ids = torch.roll(batch.input_ids, -1)
        token_ids[self._last] = self._module._eagle_prefill_tail_tokens(batch, next_token_ids)
        self.owed = Owed(hidden, token_ids, positions, batch.out_cache_loc)

    def draft_input(self, width: int) -> Any:
        """SGLang's `EagleDraftInput` for the next round, which must run the draft before it is drafted from.

        Args:
            width: Of the draft's hidden state.
        """
        import torch

        index = torch.zeros((len(self._last), 1), dtype=torch.int64, device=self._last.device)
        return self._module.EagleDraftInput(
            topk_p=torch.ones_like(index, dtype=torch.float32),
            topk_index=index,
            hidden_states=self.owed.hidden[self._last, :width],
            bonus_tokens=self._next_token_ids,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
        )


def is_plain(batch: Any, embeds: Any) -> bool:
    """Can `Prefill` stand in for the draft? Not where prompts are more than tokens, nor beside decoding."""
    given = (embeds, getattr(batch, "input_embeds", None), getattr(batch, "replace_embeds", None))
    return all(each is None for each in given) and batch.forward_mode.name == "EXTEND"
