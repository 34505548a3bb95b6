"""Tensor-parallel ranks agreeing on something before any of them acts on it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Vote(NamedTuple):
    """What one rank says about a change, or its present state, when all are asked in the same iteration."""

    reason: str
    """Why this rank refuses; empty when it is ready."""
    change: str
    """The change as this rank understood it."""
    decisions: str
    """Its hash of all decisions so far; ranks that differ have already diverged."""


def gather(scheduler: Any, vote: Vote) -> list[Vote]:
    """The votes of all ranks of this scheduler's tensor-parallel group, in the order of ranks.

    A collective: every rank must call it, also one that failed, or the others wait for it.
    """
    import torch.distributed as dist

    group = scheduler.tp_cpu_group
    votes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(votes, tuple(vote), group=group)
    return [Vote(*each) for each in votes]


def refusal(votes: list[Vote]) -> str:
    """Why the ranks do not all go ahead with the same change; empty when they do.

    The same on every rank, since all of them see the same votes.
    """
    refused = [rank for rank, vote in enumerate(votes) if vote.reason]
    if refused:
        reason = votes[refused[0]].reason
        if len(refused) == len(votes):
            return reason
        return f"{_ranks(refused)} of {len(votes)} refused: {reason}"
    for what, values in (
        ("the change", [vote.change for vote in votes]),
        ("the decisions so far", [vote.decisions for vote in votes]),
    ):
        differing = [rank for rank, value in enumerate(values) if value != values[0]]
        if differing:
            return f"{_ranks(differing)} and rank 0 disagree about {what}"
    return ""


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
