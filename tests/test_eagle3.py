"""The plain-torch EAGLE-3 draft against chains drafted one token at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from draftdial.controller.eagle3 import Eagle3, chain_acceptance
from draftdial.controller.errors import UserError
from draftdial.controller.llama import Llama, rotations
from draftdial.controller.model_folder import LlamaShape

SHAPE = LlamaShape(
    hidden=32, mlp=48, layers=8, heads=4, kv_heads=2, head=8, vocab=40, norm_eps=1e-5,
    rope={"rope_type": "default", "rope_theta": 10000.0}, tied=False,
)  # fmt: skip
DEPTH = 4


@pytest.fixture
def pair() -> tuple[Llama, Eagle3]:
    torch.manual_seed(3)
    target = Llama(SHAPE).requires_grad_(False)
    draft = Eagle3(SHAPE, draft_vocab=SHAPE.vocab // 2).requires_grad_(False)
    draft.d2t.copy_(torch.arange(SHAPE.vocab // 2))  # draft token i is the target's 2 i
    return target, draft


def draft_one_at_a_time(draft: Eagle3, target: Llama, ids: Tensor, aux: Tensor, start: int) -> list[int]:
    """Guesses of a server whose target has seen tokens 0..start and chosen token start + 1.

    `ids` `(time,)`. Rows of keys and values grow by one a guess; the draft reads its own guesses.
    """
    layer, keys, values, guesses = draft.midlayer, [], [], []
    state = torch.empty(0)
    hidden = draft.fc(aux)
    for row in range(start + DEPTH):
        token = ids[row + 1] if row <= start else torch.tensor(guesses[row - start - 1])
        state = hidden[row] if row <= start else state
        x = torch.cat([layer.input_layernorm(target.embed_tokens(token)), layer.hidden_norm(state)])
        q, k, v = layer.self_attn.project(x[None], rotations(SHAPE, torch.tensor([row])))
        keys.append(k[0].repeat_interleave(2, 0))
        values.append(v[0].repeat_interleave(2, 0))
        weights = torch.einsum("hd,thd->ht", q[0], torch.stack(keys)).div(SHAPE.head**0.5).softmax(-1)
        state = state + layer.self_attn.o_proj(
            torch.einsum("ht,thd->hd", weights, torch.stack(values)).flatten()
        )
        state = state + layer.mlp(layer.post_attention_layernorm(state))
        if row >= start:
            guesses.append(int(draft.token_ids[draft.lm_head(draft.norm(state)).argmax()]))
    return guesses


def test_chains_at_all_rows_equal_chains_drafted_one_token_at_a_time(pair: tuple[Llama, Eagle3]) -> None:
    target, draft = pair
    rng = np.random.default_rng(5)
    ids = torch.from_numpy(rng.integers(0, SHAPE.vocab, 12))
    _, aux = target(ids[None])
    # Make parts of the text what the draft guesses, so that chains of every length occur.
    for start in (2, 5):
        guesses = draft_one_at_a_time(draft, target, ids, aux[0], start)
        ids[start + 2 : start + 2 + start - 1] = torch.tensor(guesses[: start - 1])
        _, aux = target(ids[None])
    chains = chain_acceptance(draft, target.embed_tokens, ids[None], aux, torch.tensor([len(ids)]), DEPTH)
    expected = []
    for start in range(len(ids)):
        truth = ids[start + 2 : start + 2 + DEPTH].tolist()
        guesses = draft_one_at_a_time(draft, target, ids, aux[0], start) if start + 1 < len(ids) else []
        right = [guess == token for guess, token in zip(guesses, truth, strict=False)]
        expected.append(([*right, False]).index(False))
    assert chains.accepted[0].tolist() == expected
    assert max(expected) >= 3 and 0 in expected


def test_padding_and_neighbours_change_nothing(pair: tuple[Llama, Eagle3]) -> None:
    target, draft = pair
    rng = np.random.default_rng(6)
    ids = torch.from_numpy(rng.integers(0, SHAPE.vocab, (2, 10)))
    ends = torch.tensor([10, 6])
    _, aux = target(ids)
    both = chain_acceptance(draft, target.embed_tokens, ids, aux, ends, DEPTH)
    alone_ids = ids[1:, :6]
    _, aux = target(alone_ids)
    alone = chain_acceptance(draft, target.embed_tokens, alone_ids, aux, torch.tensor([6]), DEPTH)
    assert both.accepted[1, :6].tolist() == alone.accepted[0].tolist()
    torch.testing.assert_close(both.first_probability[1, :5], alone.first_probability[0, :5])
    assert not both.accepted[1, 4:].any(), "tokens past the end count as wrong"


def test_cached_steps_equal_the_whole_pass(pair: tuple[Llama, Eagle3]) -> None:
    from draftdial.controller.llama import KeyValues

    target, _ = pair
    ids = torch.randint(0, SHAPE.vocab, (2, 9))
    whole, _ = target(ids)
    cache = KeyValues(SHAPE, 2, 16, target.lm_head.weight)
    positions = torch.arange(9).expand_as(ids)
    first = target.extend(ids[:, :6], positions[:, :6], cache, 6)
    rest = [target.extend(ids[:, i : i + 1], positions[:, i : i + 1], cache, 12) for i in range(6, 9)]
    torch.testing.assert_close(torch.cat([first, *rest], 1), whole)


def test_llama3_rope_slows_only_slow_rotations() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    scaled = LlamaShape(**{**vars(SHAPE), "rope": rope})
    angle = torch.atan2(*reversed(rotations(scaled, torch.tensor([1]))))[0, 0]
    plain = torch.atan2(*reversed(rotations(SHAPE, torch.tensor([1]))))[0, 0]
    assert angle[0] == plain[0] and torch.isclose(angle[3], plain[3] / 8)


def test_a_draft_of_another_shape_is_refused(tmp_path: Path, pair: tuple[Llama, Eagle3]) -> None:
    import json

    from safetensors.torch import save_file

    _, draft = pair
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "rms_norm_eps": 1e-5,
              "draft_vocab_size": 20}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: t.contiguous() for name, t in draft.state_dict().items()}, tmp_path / "model.safetensors"
    )
    loaded = Eagle3.load(tmp_path, torch.float32, torch.device("cpu"))
    assert all(
        torch.equal(a, b)
        for a, b in zip(loaded.state_dict().values(), draft.state_dict().values(), strict=True)
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(UserError, match="not the weights"):
        Eagle3.load(tmp_path, torch.float32, torch.device("cpu"))
