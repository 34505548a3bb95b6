"""What every decode round ran, written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import torch


class Rounds:
    """The hooks' target; see `engine_probe.plugin` for what it writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file: TextIO | None = None

    def scheduler_ready(self, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        rank = torch.distributed.get_rank(scheduler.tp_cpu_group)
        self.file = (self.folder / f"rounds-{rank}.txt").open("w", buffering=1)

    def decided(self, _result: Any, controller: Any, batch_size: int, *_args: Any, **_kwargs: Any) -> None:
        if self.file is not None:
            self.file.write(f"{batch_size} {controller.worker.speculative_num_steps}\n")
