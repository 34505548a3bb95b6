"""The file for `--speculative-adaptive-config`: which tiers SGLang builds and what its own rule does."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from draftdial.controller.errors import UserError
from draftdial.controller.files import atomic_write, sha256_of
from draftdial.controller.sglang_rule import DEFAULT_CONFIG

STOCK_TIERS = tuple(sorted({k for slot in DEFAULT_CONFIG.values() for k in slot["candidate_steps"]}))
"""What SGLang's rule chooses from where no file says otherwise."""

_NEVER_REACHED = "1000000"
"""A batch size that no server has: a slot for tiers to be built that SGLang's own rule does not use."""


def adaptive_config(tiers: Sequence[int]) -> str:
    """The JSON with which SGLang builds `tiers` and its own rule stays what it is by default.

    That rule acts in shadow mode and where the policy cannot be used. Its default slots keep those of
    their steps that are tiers, or the nearest tier. The tiers themselves stand in a slot of their own.
    """
    slots = {
        batch: {**slot, "candidate_steps": _restricted(slot["candidate_steps"], tiers)}
        for batch, slot in DEFAULT_CONFIG.items()
    }
    return json.dumps({**slots, _NEVER_REACHED: {"candidate_steps": list(tiers)}}, indent=1) + "\n"


def _restricted(steps: Sequence[int], tiers: Sequence[int]) -> list[int]:
    """As the simulator's `SglangRule` does it, so that it stands for this server's rule."""
    kept = [k for k in steps if k in tiers]
    return kept or [min((k for k in tiers if k >= min(steps)), default=max(tiers))]


def configured_tiers(path: str) -> tuple[int, ...]:
    """The tiers that the user's own adaptive configuration builds.

    Raises:
        UserError: it cannot be read, or SGLang would not accept it.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        steps = {k for key, slot in config.items() if key.isdigit() for k in slot["candidate_steps"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or "not an object of slots with candidate_steps"
        raise UserError(f"--speculative-adaptive-config {path}: {reason}") from None
    if not steps or not all(type(k) is int and k >= 0 for k in steps):
        raise UserError(
            f"--speculative-adaptive-config {path}: candidate_steps: found {sorted(steps, key=str)}, "
            "allowed: whole numbers from 0"
        )
    return tuple(sorted(steps))


def write_config(tiers: Sequence[int]) -> Path:
    """Write the configuration for `tiers` into the user's cache, named for its content.

    Every scheduler reads it at start, long after `serve` is gone. Servers with the same tiers share it, on
    each node of a group alike, so nothing is left to clean up.

    Raises:
        UserError: the cache cannot be written.
    """
    text = adaptive_config(tiers)
    remedy = "set XDG_CACHE_HOME to a folder that can be written"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "draftdial")
    except RuntimeError:
        raise UserError(f"adaptive configuration: this user has no home folder: {remedy}") from None
    path = cache / f"adaptive-{sha256_of(text.encode())[:12]}.json"
    try:
        atomic_write(path, text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: {remedy}") from None
    return path
