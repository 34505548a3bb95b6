"""The arguments of SGLang's server that a policy needs, next to those the user gave.

What the user gave wins where it is compatible and is a problem, with its remedy, where it is not.
Nothing here needs SGLang: `sglang_arguments.py` reads the arguments, `examination.py` brings both together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch.adaptive_config import STOCK_TIERS

GRAPH_FIELDS = (
    "cuda_graph_config",
    "cuda_graph_backend_decode",
    "cuda_graph_max_bs_decode",
    "cuda_graph_bs_decode",
    "disable_cuda_graph",
    "disable_decode_cuda_graph",
)
"""Fields of SGLang's arguments that say which batches have CUDA graphs; any of them is the user's choice."""

_ADAPTIVE_FLAGS = ("--speculative-adaptive", "--speculative-adaptive-config")
_DRAFT_FLAGS = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")


@dataclass(frozen=True)
class Finding:
    """One thing looked at before a server starts."""

    level: Literal["ok", "warning", "problem"]
    subject: str
    text: str
    """What was found and, unless all is well, what to do about it."""
    tolerable: bool = False
    """For a problem: `serve --warn` starts the server all the same, not steered."""


@dataclass(frozen=True)
class Given:
    """The user's arguments as SGLang's parser reads them."""

    arguments: tuple[str, ...]
    """The command line, with a `--config` file merged in."""
    values: Mapping[str, Any]
    """Value of every field that the user set, by its name in SGLang; defaults are not in it."""


@dataclass(frozen=True)
class Needs:
    """What a policy asks of the server; without a readable one, what SGLang's own rule does."""

    tiers: tuple[int, ...] = STOCK_TIERS
    off_mode: str = ""
    """`warm` or `skip`; empty where it does not matter."""
    max_running: int | None = None
    """The most running requests its cost profile knows."""
    captured: int = 0
    """The largest batch for which its cost profile has CUDA graphs."""
    fallback_k: int = 0
    fallback_batch: int = 0

    @classmethod
    def of(cls, file: PolicyFile) -> Self:
        """The needs of the policy in `file`."""
        profile = file.profile()
        return cls(
            tiers=tuple(file.card["tiers"]),
            off_mode=file.card["off_mode"],
            max_running=profile.max_running,
            captured=int(profile.captured_batches[-1]),
            fallback_k=file.card["fallback"]["k"],
            fallback_batch=file.card["fallback"]["batch"],
        )

    def without_zero(self) -> Self:
        """The needs on a server that cannot run k = 0."""
        return replace(self, tiers=tuple(k for k in self.tiers if k > 0))


def flag_problems(given: Given, tiers: Sequence[int], built: Sequence[int]) -> Iterator[Finding]:
    """What the user set that a server with the policy's `tiers` cannot have; `built` are those it builds."""

    def problem(flag: str, text: str) -> Finding:
        return Finding("problem", "flags", f"{flag} {text}")

    values, largest = given.values, max(built)
    if largest == 0:
        yield Finding("problem", "flags", "the policy has no tier above 0: there is nothing to steer")
        return
    missing = sorted(set(tiers) - set(built))
    if missing:
        yield problem(
            f"--speculative-adaptive-config {values['speculative_adaptive_config']}:",
            f"builds k = {_listed(built)}, not {_listed(missing)}, which the policy uses: "
            "add them to a slot's candidate_steps, or leave the flag out",
        )
    if 0 in built and 0 not in tiers and values.get("speculative_use_rejection_sampling"):
        yield problem(
            f"--speculative-adaptive-config {values['speculative_adaptive_config']}:",
            "builds k = 0, which stops a server with rejection sampling: take 0 out of its candidate_steps",
        )
    for dest, flag, wanted, why in (
        ("speculative_eagle_topk", "--speculative-eagle-topk", 1, "steering needs chains"),
        (
            "speculative_num_steps",
            "--speculative-num-steps",
            largest,
            "a server starts at its largest tier",
        ),
        (
            "speculative_num_draft_tokens",
            "--speculative-num-draft-tokens",
            largest + 1,
            f"the largest tier, {largest}, verifies one token more",
        ),
    ):
        if values.get(dest) not in (None, wanted):
            yield problem(f"{flag} {values[dest]}:", f"{why}: leave it out, or give {wanted}")


def steering_arguments(given: Given, built: Sequence[int], needs: Needs, config: str) -> tuple[str, ...]:
    """The command line for a server that can be steered.

    Args:
        given: The user's arguments, without `flag_problems`.
        built: The tiers in `config`. The server starts at the largest: before 0.5.19 it must (#30549).
        needs: What the policy needs.
        config: Path of the adaptive configuration.
    """
    wanted = {
        "speculative_adaptive": ("--speculative-adaptive",),
        "speculative_adaptive_config": ("--speculative-adaptive-config", config),
        "speculative_eagle_topk": ("--speculative-eagle-topk", "1"),
        "speculative_num_steps": ("--speculative-num-steps", str(max(built))),
        "speculative_num_draft_tokens": ("--speculative-num-draft-tokens", str(max(built) + 1)),
    }
    added = [word for dest, words in wanted.items() if dest not in given.values for word in words]
    return (*given.arguments, *added, *_capacity(given, needs))


def static_arguments(given: Given, needs: Needs) -> tuple[str, ...]:
    """The command line for a server that cannot be steered: one k in every round, or no speculation.

    Another algorithm than EAGLE stays as the user set it up: the policy knows nothing of it.
    """
    algorithm = given.values.get("speculative_algorithm")
    if algorithm not in ("EAGLE", "EAGLE3", "NEXTN"):
        return _without(given.arguments, _ADAPTIVE_FLAGS)
    k = static_k(given, needs)
    if k == 0:
        return _without(given.arguments, prefix="--speculative-")
    kept = _without(given.arguments, (*_ADAPTIVE_FLAGS, *_DRAFT_FLAGS))
    words = zip(_DRAFT_FLAGS, (str(k), "1", str(k + 1)), strict=True)
    return (*kept, *(word for pair in words for word in pair), *_capacity(given, needs))


def static_k(given: Given, needs: Needs) -> int:
    """The k for a server that cannot be steered: the fallback rule's if it speculates at every load, else 0.

    The fallback is the best threshold rule known for the profile. If it stops below the most that may
    run, no single k is right under load. Nor is the largest tier, which loses most there.
    """
    always = needs.fallback_batch >= (planned_max_running(given, needs) or 0)
    return needs.fallback_k if always and needs.fallback_k < max(needs.tiers) else 0


def planned_max_running(given: Given, needs: Needs) -> int | None:
    """The user's `--max-running-requests`, or as many as the profile knows and graphs are captured for."""
    values = given.values
    if "max_running_requests" in values or needs.max_running is None:
        chosen: int | None = values.get("max_running_requests")
        return chosen
    captured = values.get("cuda_graph_max_bs_decode") or max(values.get("cuda_graph_bs_decode") or [0])
    return min(needs.max_running, captured or needs.captured)


def _capacity(given: Given, needs: Needs) -> Iterator[str]:
    """Both limits, where the user did not set them.

    SGLang allows 48 running requests under speculation unless told otherwise. Graphs go up to the
    largest batch that has one in the profile, since every tier pays for them in memory.
    """
    running = planned_max_running(given, needs)
    if running is None or needs.max_running is None:
        return
    if "max_running_requests" not in given.values:
        yield from ("--max-running-requests", str(running))
    if not set(GRAPH_FIELDS) & set(given.values):
        yield from ("--cuda-graph-max-bs-decode", str(min(running, needs.captured)))


def _without(
    arguments: Sequence[str], flags: Collection[str] = (), prefix: str | None = None
) -> tuple[str, ...]:
    """`arguments` without these flags, or those that begin with `prefix`, and their values.

    SGLang has no positional arguments, and all its flags begin with two dashes.
    """
    kept: list[str] = []
    dropping = False
    for word in arguments:
        if word.startswith("--"):
            flag = word.split("=", 1)[0]
            dropping = flag in flags or (prefix is not None and flag.startswith(prefix))
        if not dropping:
            kept.append(word)
    return tuple(kept)


def _listed(tiers: Sequence[int]) -> str:
    return ", ".join(map(str, tiers))
