"""A verification of one token takes the schedule and the way of a decode; all others keep SGLang's.

The attention itself needs a GPU: tests/gpu/same_answers.py compares its answers there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftdial.engine_patch import one_token_verify
from draftdial.engine_patch.one_token_verify import after_decode_metadata, around_forward_extend

SCHEDULE = torch.arange(1, 14, dtype=torch.int32)  # a semaphore and four numbers for each of three requests


class Backend:
    """As much of SGLang's as is asked."""

    def __init__(self, **other: Any) -> None:
        self.speculative_num_draft_tokens = 1
        self.topk = 1
        self.fa_impl_ver = 3
        self.use_mla = self.has_swa = self.has_local_attention = self.is_prefill_aware_swa = False
        self.max_context_len = 1000
        self._sched_meta_buf = torch.full((33,), 7, dtype=torch.int32)
        self.forward_metadata = SimpleNamespace(
            cache_seqlens_int32=torch.tensor([5, 6, 7]),
            cu_seqlens_q=torch.arange(4),
            scheduler_metadata=None,
        )
        self.asked: list[Any] = []
        self.schedule: torch.Tensor | None = SCHEDULE
        self.__dict__ |= other

    def _compute_scheduler_metadata(self, *asked: Any) -> torch.Tensor | None:
        self.asked = list(asked)
        return self.schedule

    def forward_decode(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return ("decode", args, kwargs)


def forward_extend(_backend: Backend, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return ("extend", args, kwargs)


def batch(is_verify: bool = True, layout: Any = None) -> Any:
    mode = SimpleNamespace(is_target_verify=lambda: is_verify)
    return SimpleNamespace(
        forward_mode=mode, batch_size=3, spec_info=SimpleNamespace(ragged_verify_layout=layout)
    )


def test_one_token_is_scheduled_once_and_decoded() -> None:
    backend, one = Backend(), batch()
    after_decode_metadata(None, backend, one, True)
    kept = backend.forward_metadata.scheduler_metadata
    assert torch.equal(kept, SCHEDULE)
    assert kept.data_ptr() == backend._sched_meta_buf.data_ptr()  # the address that a graph has captured
    assert not backend._sched_meta_buf[len(SCHEDULE) :].any()
    assert backend.asked[:2] == [3, 1000]
    ran = around_forward_extend(forward_extend, backend, "q", "k", "v", "layer", one, save_kv_cache=True)
    assert ran == ("decode", ("q", "k", "v", "layer", one), {"save_kv_cache": True})


def test_a_replay_schedules_anew_and_lets_errors_out() -> None:
    """A graph reads the schedule from where it was: another round's would be wrong."""
    backend, one = Backend(), batch()
    after_decode_metadata(None, backend, one, True)
    backend.schedule = SCHEDULE + 1
    after_decode_metadata(None, backend, one, False)
    assert torch.equal(backend._sched_meta_buf[: len(SCHEDULE)], SCHEDULE + 1)
    backend.schedule = torch.zeros(99)  # does not fit
    with pytest.raises(RuntimeError):
        after_decode_metadata(None, backend, one, False)


def test_a_capture_that_cannot_be_scheduled_keeps_sglangs_way(caplog: pytest.LogCaptureFixture) -> None:
    backend, one = Backend(), batch()
    del backend.has_swa  # an SGLang that was changed
    after_decode_metadata(None, backend, one, True)
    assert "k = 0 attends as SGLang has it: AttributeError" in caplog.text
    for in_capture in (False, True):
        after_decode_metadata(None, backend, one, in_capture)
        assert around_forward_extend(forward_extend, backend, "q", "k", "v", "layer", one)[0] == "extend"


def test_graphs_are_counted() -> None:
    before = one_token_verify.num_graphs
    for backend in (Backend(), Backend(schedule=None), Backend(topk=4)):
        after_decode_metadata(None, backend, batch(), True)
    assert one_token_verify.num_graphs == before + 1


@pytest.mark.parametrize(
    ("backend", "of"),
    [
        (Backend(), batch(is_verify=False)),
        (Backend(), batch(layout=object())),
        (Backend(speculative_num_draft_tokens=4), batch()),
        (Backend(topk=4), batch()),
        (Backend(fa_impl_ver=4), batch()),
        (Backend(use_mla=True), batch()),
        (Backend(has_swa=True), batch()),
        (Backend(has_local_attention=True), batch()),
        (Backend(is_prefill_aware_swa=True), batch()),
        (Backend(schedule=None), batch()),
    ],
)
def test_the_rest_is_left_alone(backend: Backend, of: Any) -> None:
    after_decode_metadata(None, backend, of, True)
    assert backend.forward_metadata.scheduler_metadata is None
    assert (backend._sched_meta_buf == 7).all()
    assert around_forward_extend(forward_extend, backend, "q", "k", "v", "layer", of)[0] == "extend"


def test_a_round_without_a_graph_keeps_sglangs_way() -> None:
    """It makes metadata of its own, without a schedule."""
    backend, one = Backend(), batch()
    after_decode_metadata(None, backend, one, True)
    backend.forward_metadata = SimpleNamespace(scheduler_metadata=None)
    assert around_forward_extend(forward_extend, backend, "q", "k", "v", "layer", one)[0] == "extend"
