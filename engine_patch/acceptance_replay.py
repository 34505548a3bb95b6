"""Recorded acceptance in place of the draft's own, for benchmarks of models whose drafts mean nothing.

A model with random weights has every cost of a trained one and none of its acceptance. Here the verification
runs as it is, and then each request accepts what a recorded array says for its output position. What the
server answers is meaningless. docs/acceptance-replay.md says how to use it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from draftdial.controller.acceptance_file import AcceptedDrafts
from draftdial.controller.errors import UserError
from draftdial.engine_patch import rank_agreement, round_timer
from draftdial.engine_patch.acceptance_arrays import AcceptanceArrays
from draftdial.engine_patch.compat import Hook
from draftdial.engine_patch.rank_agreement import Vote
from draftdial.engine_patch.settings import Settings

logger = logging.getLogger(__name__)

TOKEN = 100
"""What every accepted token is, as in SGLang's own simulation of acceptance."""
GHOST_POSITIONS = 64
"""Behind each array: more than the tokens of a round, and a round's drafts are accepted nowhere there."""


class AcceptanceReplay:
    """What is accepted, on the device: a row for each place in SGLang's request pool.

    All work on the device is in stream order with the rounds it is for, and nothing waits for the device.
    """

    def __init__(self, arrays: AcceptanceArrays, num_rows: int, num_positions: int, device: Any) -> None:
        """`num_rows` places for requests of up to `num_positions` tokens."""
        import torch

        self.arrays = arrays
        self.num_rounds = 0
        self.num_misnamed = 0
        # A finished request runs one more round under overlap: its position may lie past its array.
        self._stride = num_positions + GHOST_POSITIONS
        self._accepted = torch.zeros(num_rows * self._stride, dtype=torch.uint8, device=device)
        """Drafts that a round accepts, by row and by output tokens before it less the one from prefill."""
        self._starts = torch.arange(num_rows, device=device) * self._stride
        """Where position 0 of each row is in `_accepted`, less the tokens of its prompt."""
        self._numbers = torch.arange(0, dtype=torch.int32, device=device)

    def admit(self, reqs: list[Any], rows: Any) -> None:
        """Give requests that are being prefilled their arrays.

        Args:
            reqs: SGLang's requests.
            rows: Tensor of shape `(len(reqs),)`: their places in the pool.
        """
        import torch

        most = self._stride - GHOST_POSITIONS
        lengths = [min(req.sampling_params.max_new_tokens or most, most) for req in reqs]
        block = np.zeros((len(reqs), max(lengths)), np.uint8)
        for row, req in enumerate(reqs):
            block[row, : lengths[row]] = self._accepted_by(req, lengths[row])
        rows = rows.long()
        prompt_lens = torch.tensor([len(req.origin_input_ids) for req in reqs])
        accepted = self._accepted.view(-1, self._stride)
        accepted[rows, : block.shape[1]] = _sent(torch.from_numpy(block), rows.device)
        self._starts[rows] = rows * self._stride - _sent(prompt_lens, rows.device)

    def overwrite(
        self, predict: Any, accept_lens: Any, accept_index: Any, batch: Any
    ) -> tuple[Any, Any, Any]:
        """The outcome of a verified chain, by the recorded arrays; of a chain without drafts, what it is.

        Args:
            predict: Shape `(batch * width,)`: the token after each draft.
            accept_lens: Shape `(batch,)`: accepted drafts and the bonus token.
            accept_index: Shape `(batch, width)`: the accepted places in `predict`, then -1.
            batch: SGLang's; `seq_lens` are the tokens in the KV pool before this round.
        """
        import torch

        self.num_rounds += 1
        num_rows, width = accept_index.shape
        if width == 1:
            return predict, accept_lens, accept_index
        # Few operations: the host of a small batch has hardly time for their launches.
        if num_rows * width > len(self._numbers):
            self._numbers = torch.arange(2 * num_rows * width, dtype=torch.int32, device=accept_index.device)
        place = self._numbers[: num_rows * width].view(num_rows, width)
        positions = self._starts[batch.req_pool_indices.long()] + batch.seq_lens
        accepted = self._accepted[positions.clamp(0, len(self._accepted) - 1)].int().clamp(max=width - 1)
        index = torch.where(self._numbers[:width] <= accepted[:, None], place, -1)
        return torch.full_like(predict, TOKEN), accepted + 1, index

    def __str__(self) -> str:
        misnamed = f"; {self.num_misnamed} prefills named no array of these" if self.num_misnamed else ""
        return f"{self.arrays}, {self.num_rounds} rounds{misnamed}; outputs are meaningless"

    def _accepted_by(self, req: Any, num_positions: int) -> AcceptedDrafts:
        if self.arrays.is_misnamed(req.rid):
            self.num_misnamed += 1
        return self.arrays.accepted(req.rid, num_positions)


_current: AcceptanceReplay | None = None


def description() -> str:
    """What is replayed in this process; empty if nothing is."""
    return "" if _current is None else str(_current)


def hooks() -> list[Hook]:
    """The functions of SGLang that are hooked for it."""
    return [
        Hook(
            "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation",
            "before",
            before_forward_batch_generation,
        ),
        Hook("sglang.srt.speculative.eagle_utils.eagle_sample", "around", around_eagle_sample),
    ]


def start(settings: Settings, scheduler: Any, is_first_rank: bool) -> None:
    """Begin, on every rank of a scheduler that is about to run.

    Raises:
        UserError: SGLang is not hooked, or the files are unusable or differ between ranks; on all alike.
    """
    global _current
    reason, arrays = "", None
    try:
        _check_hooked()
        arrays = AcceptanceArrays.read(settings.replay)
    except UserError as error:
        reason = str(error)
    vote = Vote(reason, arrays.sha256 if arrays else "", "")
    reason = rank_agreement.refusal(rank_agreement.gather(scheduler, vote))
    if reason or arrays is None:
        raise UserError(f"acceptance replay: {reason}")
    pool = scheduler.req_to_token_pool.req_to_token
    num_rows, num_positions = pool.shape
    _current = AcceptanceReplay(arrays, num_rows, num_positions, pool.device)
    if is_first_rank:
        logger.warning("draftdial: acceptance is replayed from %s", _current)


def before_forward_batch_generation(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE `EAGLEWorkerV2.forward_batch_generation`, which runs on the forward stream."""
    if _current is not None and batch.forward_mode.is_extend():
        _current.admit(batch.reqs, batch.req_pool_indices)


def around_eagle_sample(
    eagle_sample: Callable[..., Any], verify_input: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `eagle_sample`: outside the CUDA graphs, once a decode round; what it costs stays."""
    predict, accept_lens, accept_index = eagle_sample(verify_input, batch, *args, **kwargs)
    # A round that is timed takes what it takes without replay.
    if _current is None or batch.forward_mode.is_idle() or round_timer.is_planned():
        return predict, accept_lens, accept_index
    return _current.overwrite(predict, accept_lens, accept_index, batch)


def _check_hooked() -> None:
    """SGLang only logs it where a hook finds no target; the draft's own acceptance would be measured."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [hook.target for hook in hooks() if hook.target not in HookRegistry._patched]
    if missing:
        raise UserError(f"this SGLang has no {' and no '.join(missing)}")


def _sent(values: Any, device: Any) -> Any:
    """`values` on the device, without waiting for the copy; pinned, since other memory is waited for."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)
