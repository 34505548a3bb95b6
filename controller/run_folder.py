"""What a training run keeps: its evaluations, the best policy so far, and a checkpoint to go on from."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from stable_baselines3 import PPO

from draftdial.controller.errors import UserError
from draftdial.controller.files import atomic_write
from draftdial.controller.learned import Network
from draftdial.controller.progress_lines import ProgressLines


@dataclass(frozen=True)
class Evaluation:
    """A policy on the way and its score on the validation episodes."""

    num_rounds: int
    score: float
    network: Network


class RunProgress:
    """Every evaluation of a run, beside the scores of the rules on the same episodes."""

    def __init__(self, reference: Mapping[str, float], evaluations: Sequence[Evaluation] = ()) -> None:
        self.reference = dict(reference)
        self.evaluations = list(evaluations)
        self._show: Callable[[], None] | None = None

    def add(self, num_rounds: int, score: float, network: Network) -> None:
        """A new evaluation."""
        self.evaluations.append(Evaluation(num_rounds, score, network))
        if self._show:
            self._show()

    @property
    def best(self) -> Evaluation:
        """The evaluation of the highest score; the untrained policy counts too."""
        return max(self.evaluations, key=lambda evaluation: evaluation.score)

    def record(self) -> dict[str, Any]:
        """Scores as JSON."""
        best = self.best
        return {
            "measure": "mean reward per second on validation episodes",
            "rules": self.reference,
            "evaluations": [[e.num_rounds, e.score] for e in self.evaluations],
            "best": {
                "num_rounds": best.num_rounds,
                "score": best.score,
                "worse_than_greedy": best.score < self.reference["greedy"],
            },
        }

    @contextmanager
    def bar(self, total_rounds: int) -> Iterator[Callable[[int], None]]:
        """A progress bar on standard error with time left and the current score; in a pipe, lines."""
        columns = (
            TextColumn("train"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[score]}"),
        )
        console = Console(file=sys.stderr)
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("train", total=total_rounds, score="")
            lines = ProgressLines("train")

            def move(num_rounds: int) -> None:
                progress.update(task, completed=num_rounds)
                lines.now_and_then(lambda: f"{num_rounds:,} of {total_rounds:,} rounds; {self._gains()}")

            self._show = lambda: progress.update(task, score=self._gains())
            self._show()
            yield move
            self._show = None

    def _gains(self) -> str:
        """The newest score beside those of the rules."""
        score = self.evaluations[-1].score
        return ", ".join(f"{100 * (score - of):+.1f} % vs {rule}" for rule, of in self.reference.items())


def save_checkpoint(folder: Path, model: PPO, progress: RunProgress) -> None:
    """Write `checkpoint.pt`: networks, optimiser, counters and evaluations."""
    buffer = io.BytesIO()
    state = {
        "policy": model.policy.state_dict(),
        "optimizer": model.policy.optimizer.state_dict(),
        "num_timesteps": model.num_timesteps,
        "evaluations": [
            (e.num_rounds, e.score, {name: torch.tensor(value) for name, value in e.network.tensors.items()})
            for e in progress.evaluations
        ],
    }
    torch.save(state, buffer)
    atomic_write(folder / "checkpoint.pt", buffer.getvalue())


def load_checkpoint(folder: Path, model: PPO) -> list[Evaluation]:
    """Put `model` where the run in `folder` stopped, and return the run's evaluations. Its random streams
    start anew, so it goes on from there but not bit for bit as it would have.

    Raises:
        UserError: the checkpoint is unreadable or of another configuration.
    """
    path = folder / "checkpoint.pt"
    try:
        state = torch.load(path, weights_only=True)
        model.policy.load_state_dict(state["policy"])
        model.policy.optimizer.load_state_dict(state["optimizer"])
        num_timesteps, evaluations = state["num_timesteps"], state["evaluations"]
    except Exception as error:
        raise UserError(
            f"{path}: not a checkpoint of this configuration: {str(error).splitlines()[0]}"
        ) from None
    model.num_timesteps = num_timesteps
    return [
        Evaluation(num_rounds, score, Network({name: np.asarray(value) for name, value in tensors.items()}))
        for num_rounds, score, tensors in evaluations
    ]
