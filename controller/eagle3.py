"""An EAGLE-3 draft in plain torch: its chain of guesses at every position of known sequences at once.

One layer reads, side by side, the embedding of a token and a hidden state: that of the target before the
token, or its own where a chain has gone on past what the target has seen (Li et al. 2025). Names of weights
and the meaning of rows follow SGLang's LlamaForCausalLMEagle3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftdial.controller.errors import UserError
from draftdial.controller.llama import MLP, Attention, RMSNorm, rotations
from draftdial.controller.model_folder import LlamaShape, read_config, read_weights


def captured_layers(folder: Path) -> tuple[int, ...] | None:
    """Target layers whose inputs a draft reads, by its config.json; None for SGLang's default choice.

    The configuration numbers the layers whose *outputs* are read.
    """
    chosen = (read_config(folder).get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(layer + 1 for layer in chosen) if chosen else None


class DraftLayer(nn.Module):
    """The one layer; its projections read [embedding, hidden state], twice as wide as a Llama's."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = MLP(shape)


class Eagle3(nn.Module):
    """The draft. It has no embedding of its own: it is given the target's."""

    d2t: Tensor
    """Shape `(draft vocabulary,)`: what to add to a draft token to get the target's."""
    t2d: Tensor
    """Shape `(vocabulary,)`: whether the draft knows a token of the target."""

    def __init__(self, shape: LlamaShape, draft_vocab: int, num_aux: int = 3) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(num_aux * shape.hidden, shape.hidden, bias=False)
        self.midlayer = DraftLayer(shape)
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(shape.vocab, dtype=torch.bool))

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> Eagle3:
        """Read an SGLang EAGLE-3 directory, frozen; raises UserError where names or shapes do not fit."""
        config = read_config(folder)
        shape = LlamaShape.load(folder)
        draft = cls(shape, config.get("draft_vocab_size") or shape.vocab)
        names = {"layers.0.": "midlayer.", "model.": ""}
        tensors = {}
        for name, tensor in read_weights(folder).items():
            for old, new in names.items():
                name = name.replace(old, new)
            if not name.startswith("embed_tokens"):
                tensors[name] = tensor
        missing = {"d2t": draft.d2t, "t2d": draft.t2d} if len(draft.d2t) == shape.vocab else {}
        try:
            draft.load_state_dict({**missing, **tensors}, strict=True)
        except RuntimeError as error:
            raise UserError(f"{folder}: not the weights of such an EAGLE-3 draft ({error})") from None
        return draft.to(device, dtype).requires_grad_(False).eval()

    @property
    def token_ids(self) -> Tensor:
        """Shape `(draft vocabulary,)`: the target's id of every draft token."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def chain(self, embedding: nn.Embedding, ids: Tensor, aux: Tensor, depth: int) -> Iterator[Tensor]:
        """Yield what `lm_head` reads for every guess of chains that start at every row, `depth` times.

        Row s holds the target's hidden state of token s (`aux`, `(batch, time, 3 * hidden)`) and the
        embedding of token s + 1. Guess d (0, 1, ..) of the chain started there is of token s + 2 + d, and
        reads tokens up to s + 1 + d of `ids` `(batch, time)`: those that were guessed before, as long as all
        were right. Attention sees rows up to s with the target's hidden states, and the chain's own d after
        them. Shape of each `(batch, time, hidden)`; what reads tokens past the end means nothing.
        """
        layer = self.midlayer
        time = ids.shape[1]
        hidden = self.fc(aux)
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        for step in range(depth):
            tokens = functional.pad(ids[:, 1 + step :], (0, min(1 + step, time)))
            positions = torch.arange(step, time + step, device=ids.device)[None]
            x = torch.cat([layer.input_layernorm(embedding(tokens)), layer.hidden_norm(hidden)], -1)
            q, k, v = layer.self_attn.project(x, rotations(self.shape, positions))
            q, k, v = q.transpose(1, 2), self._spread(k), self._spread(v)
            if step == 0:
                keys, values = k, v
            else:
                own_keys.append(k)
                own_values.append(v)
            mixed = _attend(q, keys, values, own_keys, own_values).transpose(1, 2)
            hidden = hidden + layer.self_attn.o_proj(mixed.flatten(-2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            yield self.norm(hidden)

    def _spread(self, x: Tensor) -> Tensor:
        """Keys or values, one for every query head: `(batch, heads, time, head)`."""
        return x.transpose(1, 2).repeat_interleave(self.shape.heads // self.shape.kv_heads, 1)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, own_keys: list[Tensor], own_values: list[Tensor]
) -> Tensor:
    """Attention of row s to rows up to s and entry s of every own key; all `(batch, heads, time, head)`."""
    time = q.shape[2]
    scale = float(q.shape[-1] ** -0.5)
    future = torch.ones(time, time, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ keys.transpose(2, 3) * scale).masked_fill(future, float("-inf"))
    own = [(q * key).sum(-1, keepdim=True) * scale for key in own_keys]
    weights = torch.cat([scores, *own], -1).float().softmax(-1).to(values.dtype)
    mixed = weights[..., :time] @ values
    for index, value in enumerate(own_values):
        mixed = mixed + weights[..., time + index, None] * value
    return mixed


@dataclass(frozen=True)
class ChainAcceptance:
    """What a chain started at every row would have got right."""

    accepted: Tensor
    """Shape `(batch, time)`: leading guesses of the chain at row s that equal tokens s + 2, s + 3, .."""
    first_probability: Tensor
    """Shape `(batch, time)`: the draft's probability of its first guess, within the draft vocabulary."""


@torch.no_grad()
def chain_acceptance(
    draft: Eagle3, embedding: nn.Embedding, ids: Tensor, aux: Tensor, ends: Tensor, depth: int
) -> ChainAcceptance:
    """Walk chains of `depth` greedy guesses at every row of known sequences.

    A guess is the draft's most likely token, as SGLang's chains take it at any temperature. Guesses of tokens
    from `ends` `(batch,)` on count as wrong. Exact, though every chain reads known tokens instead of its own
    guesses: they are the same up to the first wrong guess, and what follows that does not count.
    """
    time = ids.shape[1]
    going = torch.ones_like(ids, dtype=torch.bool)
    accepted = torch.zeros_like(ids)
    first_probability = torch.zeros(ids.shape, device=ids.device)
    token = torch.arange(time, device=ids.device)
    for step, hidden in enumerate(draft.chain(embedding, ids, aux, depth)):
        logits = draft.lm_head(hidden)
        best = logits.argmax(-1)
        if step == 0:
            first_probability = logits.float().softmax(-1).amax(-1)
        truth = functional.pad(ids[:, 2 + step :], (0, min(2 + step, time)), value=-1)
        going &= (draft.token_ids[best] == truth) & (token + 2 + step < ends[:, None])
        accepted += going
    return ChainAcceptance(accepted, first_probability)
