"""Defects of SGLang that a steered server runs into, one function each, and what differs by release."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

ADAPTIVE_LOGGER = "sglang.srt.speculative.eagle_worker_v2"

OLDEST, TRIED = (0, 5, 14), (0, 5, 23)
"""The releases that the plugin was checked against, by `make test-releases`."""

_NEWEST = (999, 0, 0)

Release = tuple[int, int, int]


class Hook(NamedTuple):
    """A function of SGLang and what is done to it."""

    target: str
    kind: Literal["before", "after", "around"]
    hook: Callable[..., Any]


def release() -> str:
    """SGLang's version."""
    return importlib.metadata.version("sglang")


def version(text: str) -> Release:
    """The three numbers of a version; what follows them (`.post1`, `rc2`) does not matter here."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return (0, 0, 0) if numbers is None else (int(numbers[1]), int(numbers[2]), int(numbers[3]))


def is_supported(text: str) -> bool:
    """Is this a release that the plugin was tried with?"""
    return OLDEST <= version(text) <= TRIED


def hooks(text: str) -> list[Hook]:
    """The shims that release `text` needs."""
    return [hook for oldest, newest, hook in SHIMS if oldest <= version(text) <= newest]


def has_consensus_checker() -> bool:
    """Does SGLang check here that all ranks do the same? 0.5.19 and later can, if asked to by a variable."""
    from sglang.srt.environ import envs

    switch = getattr(envs, "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", None)
    return switch is not None and bool(switch.get())


def quieten() -> None:
    """Keep SGLang from logging every switch of tiers."""
    logging.getLogger(ADAPTIVE_LOGGER).addFilter(is_not_a_switch)


# Defects.


def shared_logits_30549(rows: int, runner: Any, *args: Any, **kwargs: Any) -> int:
    """#30549, a tier wider than the initial one ends the server at start (0.5.15 to 0.5.18).

    The logits buffer that all CUDA graphs share is sized for the width of the *initial* tier, so a wider
    one fails an assertion. Fixed by #35275 in 0.5.19. AFTER `ModelRunner.max_decode_logits_rows`: rows for
    the widest tier. Goes when 0.5.19 is the oldest release supported.
    """
    widest = runner.server_args.max_speculative_num_draft_tokens
    if widest is None:
        return rows
    width_of = getattr(runner, "decode_num_tokens_per_req", None) or runner.decode_num_tokens_per_bs  # 0.5.15
    initial_width: int = width_of()
    widest_width: int = width_of(num_draft_tokens=widest)
    return rows * widest_width // initial_width


def draft_extend_width(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Draft-extend graphs of all tiers but the initial one never run (0.5.17, no public report).

    The width of the draft-extend graphs is read from the arguments the server was started with, no longer
    those of the tier being captured, so the graphs of every tier but the initial one never run: each of
    their rounds extends the draft eagerly. AROUND `resolve_num_tokens_per_req`: the width in the config
    namespace, as 0.5.18 reads it. Goes when 0.5.18 is the oldest release supported.
    """
    if kwargs.get("phase") != "draft_extend":
        return original(*args, **kwargs)
    from sglang.srt.runtime_context import get_spec

    width: int = get_spec().speculative_num_draft_tokens
    return width


def growing_overrides_log(result: Any, context: Any, *args: Any, **kwargs: Any) -> None:
    """Every switch of tiers makes `/server_info` slower (0.5.17 and later, no public report).

    Every switch of tiers appends to `RuntimeContext._overrides_log`, and each `/server_info` folds all of
    it inside the scheduler's loop: 200,000 switches take 50 MB and 26 ms a request. AFTER `override`: what
    the newest entry repeats is dropped, which changes no fold of the log. Goes when SGLang bounds the log.
    """
    _drop_repeated(getattr(context, "_overrides_log", []))


def growing_mutations_log(result: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Every switch of tiers takes memory for good (0.5.16, no public report).

    The same log as `growing_overrides_log` bounds, in `ServerArgs._runtime_mutations`. AFTER
    `ServerArgs.override`. Goes when 0.5.17 is the oldest release supported.
    """
    _drop_repeated(getattr(server_args, "_runtime_mutations", []))


def slow_override(original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    """Every switch of tiers takes milliseconds (0.5.16, no public report).

    Every switch of tiers resolves the annotations of all of SGLang's arguments anew, milliseconds inside
    the launch of a round. AROUND `resolvable_fields`: once for each class. Goes when 0.5.17 is the oldest
    release supported.
    """
    if cls not in _resolvable_fields:
        _resolvable_fields[cls] = original(cls, *args, **kwargs)
    return _resolvable_fields[cls]


def is_not_a_switch(record: logging.LogRecord) -> bool:
    """One INFO line for every switch of tiers, many a second (all releases). A filter that drops it.

    Switches are counted in `/server_info` and the metrics instead.
    """
    return not record.getMessage().startswith("Switch adaptive runtime state")


def _drop_repeated(log: list[tuple[str, dict[str, Any]]]) -> None:
    """Drop what has the source and fields of the newest entry: it comes later and says all they said."""
    if not log:
        return
    source, changed = log[-1]
    for index in range(len(log) - 2, -1, -1):
        if log[index][0] == source and log[index][1].keys() == changed.keys():
            del log[index]


_resolvable_fields: dict[type, Any] = {}

SHIMS: tuple[tuple[Release, Release, Hook], ...] = (
    (
        (0, 5, 15),
        (0, 5, 18),
        Hook(
            "sglang.srt.model_executor.model_runner.ModelRunner.max_decode_logits_rows",
            "after",
            shared_logits_30549,
        ),
    ),
    (
        (0, 5, 16),
        (0, 5, 16),
        Hook("sglang.srt.server_args.ServerArgs.override", "after", growing_mutations_log),
    ),
    (
        (0, 5, 16),
        (0, 5, 16),
        Hook("sglang.srt.arg_groups.arg_utils.resolvable_fields", "around", slow_override),
    ),
    (
        (0, 5, 17),
        (0, 5, 17),
        Hook("sglang.srt.speculative.spec_utils.resolve_num_tokens_per_req", "around", draft_extend_width),
    ),
    (
        (0, 5, 17),
        _NEWEST,
        Hook("sglang.srt.runtime_context.RuntimeContext.override", "after", growing_overrides_log),
    ),
)
"""First and last release that need it, and the shim."""


# What differs by release.


def uses_rejection_sampling(worker: Any) -> bool:
    """Does verification use rejection sampling? Then a round with k = 0 ends the server, on all releases."""
    try:
        from sglang.srt.runtime_context import get_spec
    except ImportError:  # before 0.5.17 the arguments themselves are the resolved configuration
        return bool(worker.server_args.speculative_use_rejection_sampling)
    return bool(get_spec().speculative_use_rejection_sampling)


def adaptive_refusal(server_args: Any) -> str:
    """Why this server has no adaptive controller."""
    from sglang.srt.speculative.adaptive_spec_params import adaptive_unsupported_reason

    reason = adaptive_unsupported_reason(server_args) or "it was not started with --speculative-adaptive"
    return f"this server cannot change its number of draft tokens: {reason}"


def waits_for_results_alone(scheduler: Any) -> bool:
    """Does the host wait for the GPU where it reads a result, and nowhere else in a round?

    Not without overlap scheduling, nor where the attention backend wants lengths that the host fetches first.
    """
    wants_lengths = getattr(getattr(scheduler, "future_map", None), "needs_cpu_seq_lens", True)
    return bool(getattr(scheduler, "enable_overlap", False)) and not wants_lengths


def is_first_rank(scheduler: Any) -> bool:
    """Is this the rank that reports for its tensor-parallel group?"""
    import torch.distributed as dist

    return bool(
        dist.get_rank(scheduler.tp_cpu_group) == dist.get_process_group_ranks(scheduler.tp_cpu_group)[0]
    )


def replica(scheduler: Any) -> int:
    """Which data-parallel replica of the server this scheduler is, from 0."""
    return next((rank for rank in _replica_ranks(scheduler) if rank is not None), 0)


def _replica_ranks(scheduler: Any) -> Iterable[int | None]:
    yield getattr(scheduler, "dp_rank", None)
    yield getattr(getattr(scheduler, "ps", None), "dp_rank", None)
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        return
    yield getattr(get_parallel(), "dp_rank", None)
