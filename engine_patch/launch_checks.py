"""What is looked at before a server starts, besides the flags themselves: one finding for each subject."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from draftdial.controller.errors import UserError
from draftdial.engine_patch import compat, settings
from draftdial.engine_patch.acceptance_arrays import AcceptanceArrays
from draftdial.engine_patch.decision_log import obstacle
from draftdial.engine_patch.launch_arguments import Finding, Given, Needs
from draftdial.engine_patch.sglang_arguments import Resolved

PLUGIN = "draftdial"
"""Name of the plugin's entry point."""
WHITELIST = "SGLANG_PLUGINS"
SKIP = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"
"""SGLang's switch between the off modes: true leaves the draft's KV behind at k = 0."""


def check_release(version: str) -> Finding:
    """Whether the plugin knows this SGLang."""
    if compat.is_supported(version):
        return Finding("ok", "sglang", version)
    if compat.version(version) < compat.OLDEST:
        text = f"{version} cannot switch k by batch: install 0.5.14 or later"
        return Finding("problem", "sglang", text, tolerable=True)
    return Finding("warning", "sglang", f"{version} is newer than any release that was checked")


def known_defects(version: str) -> Iterator[Finding]:
    """What is wrong in this SGLang when k is switched, and what takes care of it."""
    for shim in compat.hooks(version):
        defect = (shim.hook.__doc__ or "").splitlines()[0].rstrip(".")
        yield Finding("ok", "known defect", f"{defect}; handled by compat.{shim.hook.__name__}")


def check_plugin(plugins: Mapping[str, str], environment: Mapping[str, str]) -> Finding:
    """Whether SGLang will find and load the plugin; SGLang itself is silent where it does not."""
    if PLUGIN not in plugins:
        text = "this Python has no such plugin for SGLang: install draftdial into SGLang's environment"
        return Finding("problem", "plugin", text, tolerable=True)
    allowed = [name.strip() for name in environment.get(WHITELIST, "").split(",") if name.strip()]
    if allowed and PLUGIN not in allowed:
        text = f"{WHITELIST}={','.join(allowed)} leaves it out: add {PLUGIN}, or unset the variable"
        return Finding("problem", "plugin", text, tolerable=True)
    return Finding("ok", "plugin", f"{PLUGIN} = {plugins[PLUGIN]}")


def check_off_mode(off_mode: str, needs: Needs, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the environment or the policy contradicts the off mode asked for, or else the policy's own."""
    if not off_mode or 0 not in needs.tiers:
        return
    value = environment.get(SKIP, "")
    if needs.off_mode and not settings.fits(needs.off_mode, off_mode):
        text = f"{off_mode}, but the policy was made for {needs.off_mode}"
        yield Finding("problem", "off mode", text)
    elif value and (value.lower() in ("true", "1", "yes", "y")) != (off_mode == "skip"):
        asked = "the policy was made for" if off_mode == needs.off_mode else "asked for is"
        text = f"{SKIP}={value}, but {asked} off mode {off_mode}: unset the variable"
        yield Finding("problem", "off mode", text)
    else:
        yield Finding("ok", "off mode", off_mode)


def check_tiers(mode: str, needs: Needs, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether what is to run at first can run."""
    tiers = ", ".join(map(str, needs.tiers))
    if mode == "off" and 0 not in needs.tiers:
        yield Finding("problem", "mode", f"off needs k = 0, which is none of the tiers {tiers}")
    forced = environment.get(settings.FORCE_K)
    if forced and int(forced) not in needs.tiers:
        yield Finding("problem", "mode", f"{settings.FORCE_K}={forced} is none of the tiers {tiers}")


def check_log(path: Path) -> Finding:
    """Whether the decision log can be written."""
    try:
        in_the_way = obstacle(path)
    except OSError as error:
        in_the_way = f"cannot be written: {error.strerror}"
    if in_the_way is None:
        folder = next(parent for parent in path.parents if parent.exists())  # others are made
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            in_the_way = "cannot be written: name a file in a folder that can be written"
    if in_the_way is not None:
        return Finding("problem", "log", f"{path}: {in_the_way}")
    return Finding("ok", "log", str(path))


def check_replay(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether recorded acceptance can be replayed, and a warning where it will be."""
    configured = settings.Settings.from_environment(environment)
    if configured is None or not configured.replay:
        return
    try:
        arrays = AcceptanceArrays.read(configured.replay)
    except UserError as error:
        yield Finding("problem", "acceptance replay", str(error))
    else:
        yield Finding("warning", "acceptance replay", f"{arrays}: what this server answers is meaningless")


def disaggregated(role: str) -> str | None:
    """Why this server is not steered, if its `--disaggregation-mode` is one half of the work alone."""
    if role == "null":
        return None
    return f"--disaggregation-mode {role}: prefill/decode disaggregation is not supported"


def stale_graphs(version: str, resolved: Resolved) -> str | None:
    """Why tiers must not be switched here, if so: sgl-project/sglang#35275, before 0.5.19, has no shim."""
    if compat.version(version) < (0, 5, 19) and "flashmla" in resolved.attention_backend:
        return (
            f"{resolved.attention_backend} reads freed memory when k switches (#35275 before SGLang 0.5.19)"
        )
    return None


def check_capacity(given: Given, needs: Needs, resolved: Resolved) -> Iterator[Finding]:
    """Whether the server admits what the policy expects, with CUDA graphs for all of it."""
    running, known = resolved.max_running, needs.max_running
    if "max_running_requests" not in given.values and known is None:
        text = f"SGLang allows {running} under speculation unless told otherwise: give --max-running-requests"
        yield Finding("warning", "max running", text)
    elif known is not None and running is not None and running > known:
        text = f"{running}, but the policy's profile ends at {known}: it decides as for {known} beyond"
        yield Finding("warning", "max running", text)
    else:
        yield Finding("ok", "max running", str(running))
    if resolved.device == "cpu" or running is None:
        return
    if resolved.captured < running:
        text = (
            f"up to batch {resolved.captured}, but {running} may run, and larger batches are much slower: "
            "raise --cuda-graph-max-bs-decode or lower --max-running-requests"
        )
        yield Finding("warning", "CUDA graphs", text)
    else:
        yield Finding("ok", "CUDA graphs", f"up to batch {resolved.captured}")
