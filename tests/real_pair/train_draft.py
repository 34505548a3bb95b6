"""Train an EAGLE-3 draft of one layer for a target on its own answers, and write it as SGLang reads it.

    python train_draft.py TARGET ANSWERS.npz WORK [--seconds 240]

Training-time test: the loss is summed over the 7 guesses of a chain, each of which reads the draft's own
hidden state of the one before (Li et al. 2025). WORK/checkpoint.pt is written now and then, and training
resumes from it; WORK/draft is the EAGLE-3 directory; WORK/curve.csv has losses and accept length on
held-out prompts.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from training_data import Answers

from draftdial.controller.eagle3 import Eagle3, chain_acceptance
from draftdial.controller.llama import Llama
from draftdial.controller.model_folder import read_config

DEPTH = 7
LEARNING_RATE = 1e-3
WARMUP = 100
DEPTH_WEIGHT = 0.8
"""Weight of a guess's loss relative to that of the guess before."""
CLIP = 1.0
LOOK_S = 20.0
"""Seconds of training between looks at held-out answers, each with a checkpoint."""
VALIDATION = 64
"""Held-out answers looked at, per domain."""
SHARD_BYTES = 12_500_000
"""Files of the exported draft hold about this much."""


class Trainer:
    """The draft, its optimiser, and how far it has come."""

    def __init__(
        self, target: Llama, target_config: dict[str, Any], answers: Answers, seconds: float
    ) -> None:
        self.target, self.target_config, self.answers, self.seconds = target, target_config, answers, seconds
        self.device = target.lm_head.weight.device
        torch.manual_seed(0)
        self.draft = new_draft(target, answers.draft_vocabulary()).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.draft.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01,
            fused=self.device.type == "cuda",
        )  # fmt: skip
        self.teacher = target.lm_head.weight[self.draft.token_ids]
        self.train = torch.nonzero(~answers.held_out)[:, 0]
        held_out = torch.nonzero(answers.held_out & ~answers.sampled)[:, 0]
        of_domain = [
            held_out[answers.domain[held_out] == i][:VALIDATION] for i in range(len(answers.domains))
        ]
        self.validation = torch.cat(of_domain)
        self.elapsed, self.iteration, self.tokens, self.epoch = 0.0, 0, 0, 0
        self.curve: list[dict[str, float]] = []
        self.scale = self._channel_scale()

    @torch.no_grad()
    def _channel_scale(self) -> Tensor:
        """Root mean square of every channel of the target's hidden states, over answers.

        Channels differ a thousandfold; `fc` learns on channels of equal size, and the scale is folded into
        its weight in the end.
        """
        which = next(self.answers.batches(self.train, torch.Generator().manual_seed(0)))
        ids = self.answers.padded(which)
        _, aux = self.target(ids)
        place = torch.arange(ids.shape[1], device=ids.device)
        answer = (place >= self.answers.prompt_len[which, None]) & (place < self.answers.length[which, None])
        return aux[answer].float().pow(2).mean(0).sqrt().clamp(min=1e-6)

    def state(self) -> dict[str, Any]:
        return {
            "draft": self.draft.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scale": self.scale,
            "progress": (self.elapsed, self.iteration, self.tokens, self.epoch),
            "curve": self.curve,
        }

    def resume(self, state: dict[str, Any]) -> None:
        self.draft.load_state_dict(state["draft"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scale, self.curve = state["scale"], state["curve"]
        self.elapsed, self.iteration, self.tokens, self.epoch = state["progress"]
        self.teacher = self.target.lm_head.weight[self.draft.token_ids]

    def run(self, work: Path) -> None:
        """Train until the seconds are spent, those before a resumption included."""
        losses: list[Tensor] = []
        last_look = self.elapsed
        while self.elapsed < self.seconds:
            shuffle = torch.Generator().manual_seed(self.epoch)
            for which in self.answers.batches(self.train, shuffle):
                began = time.monotonic()
                losses.append(self._step(which))
                if self.iteration % 10 == 0 and self.device.type == "cuda":
                    torch.cuda.synchronize()
                self.elapsed += time.monotonic() - began
                if self.elapsed - last_look >= LOOK_S or self.elapsed >= self.seconds:
                    self._look(torch.stack(losses).mean(0), work)
                    losses, last_look = [], self.elapsed
                if self.elapsed >= self.seconds:
                    break
            self.epoch += 1

    def _step(self, which: Tensor) -> Tensor:
        """One step of the optimiser; the mean loss of every guess of the chains, shape `(DEPTH,)`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        ids = self.answers.padded(which)
        losses = self._losses(ids, self.answers.prompt_len[which], self.answers.length[which])
        weights = DEPTH_WEIGHT ** torch.arange(DEPTH, device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        (losses * weights).sum().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.draft.parameters(), CLIP)
        self.optimizer.step()
        self.iteration += 1
        self.tokens += ids.numel()
        return losses.detach()

    def _learning_rate(self) -> float:
        progress = min(1.0, self.elapsed / self.seconds)
        decay = 0.5 * (1 + math.cos(math.pi * progress))
        return LEARNING_RATE * min(1.0, (self.iteration + 1) / WARMUP) * max(decay, 0.01)

    def _losses(self, ids: Tensor, prompt_len: Tensor, length: Tensor) -> Tensor:
        """Cross entropy between target and draft within the draft vocabulary, for every guess of a chain."""
        with torch.no_grad():
            final, aux = self.target(ids)
            aux = (aux / self.scale).to(aux.dtype)
            place = torch.arange(ids.shape[1], device=ids.device)
            guessed = (place >= prompt_len[:, None]) & (place < length[:, None]) & self.draft.t2d[ids]
        losses = []
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            for step, hidden in enumerate(self.draft.chain(self.target.embed_tokens, ids, aux, DEPTH)):
                ahead = 2 + step
                wanted = guessed[:, ahead:]
                with torch.no_grad():
                    teacher = functional.linear(final[:, ahead - 1 : -1][wanted], self.teacher)
                    teacher = teacher.float().softmax(-1)
                logits = self.draft.lm_head(hidden[:, :-ahead][wanted])
                losses.append(functional.cross_entropy(logits.float(), teacher))
        return torch.stack(losses)

    def _look(self, losses: Tensor, work: Path) -> None:
        """A row of the curve from held-out answers, a checkpoint, and the draft as it is."""
        row = {
            "seconds": round(self.elapsed, 1),
            "iteration": self.iteration,
            "epoch": self.epoch,
            "tokens": self.tokens,
            **{f"loss_{d}": round(float(loss), 4) for d, loss in enumerate(losses)},
            **self.accept_lengths(),
        }
        self.curve.append(row)
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        work.mkdir(parents=True, exist_ok=True)
        torch.save(self.state(), work / "checkpoint.tmp")
        (work / "checkpoint.tmp").replace(work / "checkpoint.pt")
        with (work / "curve.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.curve[-1]))
            writer.writeheader()
            writer.writerows(self.curve)
        self.export(work / "draft")

    @torch.no_grad()
    def accept_lengths(self) -> dict[str, float]:
        """Tokens per round on held-out greedy answers, by k and domain."""
        walked: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for which in self.answers.batches(self.validation, None):
            ids, length = self.answers.padded(which), self.answers.length[which]
            _, aux = self.target(ids)
            aux = (aux / self.scale).to(aux.dtype)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                accepted = chain_acceptance(
                    self.draft, self.target.embed_tokens, ids, aux, length, DEPTH
                ).accepted
            prompts, lengths = self.answers.prompt_len[which].tolist(), length.tolist()
            for index, array in enumerate(accepted.tolist()):
                domain = int(self.answers.domain[which[index]])
                for k in (1, 3, 7):
                    walk = walk_of(array[prompts[index] - 1 : lengths[index] - 2], k)
                    walked.setdefault((k, domain), []).append(walk)
        return {
            f"al{k}_{self.answers.domains[domain]}": round(
                sum(t for t, _ in walks) / sum(r for _, r in walks), 3
            )
            for (k, domain), walks in sorted(walked.items())
            if sum(rounds for _, rounds in walks)
        }

    def export(self, folder: Path) -> None:
        """Write the draft as a directory that SGLang reads."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu() for name, tensor in self.draft.state_dict().items()}
        tensors["fc.weight"] = tensors["fc.weight"] / self.scale.cpu()
        tensors = {
            name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
            for name, tensor in tensors.items()
        }
        shards: list[dict[str, Tensor]] = [{}]
        size = 0
        for name, tensor in tensors.items():
            if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
                shards.append({})
                size = 0
            shards[-1][name] = tensor
            size += tensor.nbytes
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        for name, shard in zip(names, shards, strict=True):
            save_file(shard, folder / name, metadata={"format": "pt"})
        index = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.nbytes for tensor in tensors.values())
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
        )
        shape = self.draft.shape
        config = {
            **self.target_config,
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "num_key_value_heads": shape.kv_heads,
            "tie_word_embeddings": False,
            "draft_vocab_size": len(self.draft.d2t),
            "torch_dtype": "bfloat16",
        }
        _write_json(folder / "config.json", config)


def new_draft(target: Llama, vocabulary: Tensor) -> Eagle3:
    """A draft of one layer of the target's shape; head and last norm begin as the target's."""
    draft = Eagle3(target.shape, len(vocabulary))
    for parameter in draft.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    with torch.no_grad():
        for projection in (draft.midlayer.self_attn.o_proj, draft.midlayer.mlp.down_proj):
            projection.weight.mul_(0.1)
        draft.lm_head.weight.copy_(target.lm_head.weight[vocabulary])
        draft.norm.weight.copy_(target.norm.weight)
        draft.d2t.copy_(vocabulary.cpu() - torch.arange(len(vocabulary)))
        draft.t2d.zero_()[vocabulary.cpu()] = True
    return draft


def walk_of(accepted: list[int], k: int) -> tuple[int, int]:
    """(tokens, rounds) of rounds of k drafts over one answer's positions after the first."""
    tokens = rounds = position = 0
    while position < len(accepted):
        made = min(accepted[position], k) + 1
        tokens, rounds, position = tokens + made, rounds + 1, position + made
    return tokens, rounds


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Llama.load(args.target, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    trainer = Trainer(target, read_config(args.target), Answers.load(args.answers, device), args.seconds)
    checkpoint = args.work / "checkpoint.pt"
    if checkpoint.exists():
        trainer.resume(torch.load(checkpoint, map_location=device, weights_only=True))
        print(f"resumed after {trainer.elapsed:.0f} s, iteration {trainer.iteration}", flush=True)
    trainer.run(args.work)


if __name__ == "__main__":
    main()
