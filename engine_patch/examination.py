"""Looks at everything that decides whether a server will be steered, and prepares its start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from draftdial.controller.errors import UserError
from draftdial.controller.policy_file import load_policy, read
from draftdial.engine_patch import settings
from draftdial.engine_patch.adaptive_config import configured_tiers, write_config
from draftdial.engine_patch.launch import Launch, Request
from draftdial.engine_patch.launch_arguments import (
    Finding,
    Given,
    Needs,
    flag_problems,
    static_arguments,
    steering_arguments,
)
from draftdial.engine_patch.launch_checks import (
    SKIP,
    check_capacity,
    check_log,
    check_off_mode,
    check_plugin,
    check_release,
    check_replay,
    check_tiers,
    disaggregated,
    stale_graphs,
)
from draftdial.engine_patch.sglang_arguments import Resolved, Sglang

_NO_POLICY = "/POLICY"


def examine(
    request: Request, environment: Mapping[str, str], sglang: Sglang, ends_at_obstacle: bool = False
) -> Launch:
    """What is found about `request` on this SGLang, and the server to start.

    The adaptive configuration is written to the user's cache, so that the command can be used at once.

    Args:
        request: What the user asked for.
        environment: Of this process.
        sglang: The installation.
        ends_at_obstacle: Where what SGLang need not be asked about rules the start out, do not ask it: its
            import takes seconds.

    Raises:
        UserError: SGLang is missing, a setting is wrong, or SGLang would not start with the user's arguments.
    """
    version = sglang.version()
    if version is None:
        raise UserError("this Python has no sglang: install draftdial where sglang is, and run it there")
    examination = _Examination(request, environment, sglang, version)
    if not (ends_at_obstacle and examination.launch.obstacles(request.strict)):
        examination.ask_sglang()
    return examination.launch


class _Examination:
    """One look at one request; `launch` fills up on the way, first with all that needs no SGLang."""

    def __init__(
        self, request: Request, environment: Mapping[str, str], sglang: Sglang, version: str
    ) -> None:
        self.request = request
        self.environment = environment
        self.sglang = sglang
        self.version = version
        self.launch = Launch(variables=_variables(request, environment))
        self.release = check_release(version)
        self.found(self.release)
        self.found(check_plugin(sglang.plugins(), environment))
        self.needs = self.policy_needs()
        if settings.LOG in self.launch.variables:
            self.found(check_log(Path(self.launch.variables[settings.LOG])))
        self.found(*check_replay({**environment, **self.launch.variables}))

    def ask_sglang(self) -> None:
        """The rest, and the arguments that the server gets."""
        unsupported = self.release.text if self.release.level == "problem" else self.steered()
        if unsupported is not None and not self.request.strict:
            self.launch.arguments = static_arguments(self.given, self.needs)
            served = _described(self.launch.arguments)
            self.launch.variables[settings.INACTIVE] = f"{unsupported}; serving with {served}"

    @cached_property
    def given(self) -> Given:
        """The user's arguments as SGLang reads them."""
        return self.sglang.parse(self.request.arguments)

    def found(self, *findings: Finding) -> None:
        self.launch.findings += findings

    def policy_needs(self) -> Needs:
        """What the policy needs; where it cannot be read, what SGLang's own rule does."""
        path = self.request.policy
        if path is None:
            text = f"none given: looked at as for SGLang's own rule; {_NO_POLICY} stands for the file to give"
            self.found(Finding("warning", "policy", text))
            return Needs()
        try:
            file = read(path)
            load_policy(file)
        except UserError as error:
            self.found(Finding("problem", "policy", str(error), tolerable=True))
            return Needs()
        self.found(Finding("ok", "policy", f"{path}: {file.card['name']}, id {file.policy_id}"))
        return Needs.of(file)

    def steered(self) -> str | None:
        """Prepare the steered server. If SGLang would not switch its tiers: why."""
        resolved = self.resolved()
        if isinstance(resolved, Resolved) and resolved.rejection_sampling and 0 in self.needs.tiers:
            text = "k = 0 is left out of the tiers: it stops a server with rejection sampling"
            self.found(Finding("warning", "rejection sampling", text))
            self.needs = self.needs.without_zero()
            resolved = self.resolved()
        off_mode = "kv-only" if self.request.kv_only else self.needs.off_mode
        self.found(*check_off_mode(off_mode, self.needs, self.environment))
        self.found(*check_tiers(self.request.mode, self.needs, self.environment))
        if off_mode == "skip" and 0 in self.needs.tiers:
            self.launch.variables[SKIP] = "1"
        elif off_mode == "kv-only" and 0 in self.needs.tiers:
            self.launch.variables[settings.OFF_MODE] = off_mode
        if resolved is None:
            return None
        if isinstance(resolved, Resolved):
            self.found(*check_capacity(self.given, self.needs, resolved))
            unsupported = (
                resolved.unsupported
                or disaggregated(self.given.values.get("disaggregation_mode", "null"))
                or stale_graphs(self.version, resolved)
            )
        else:
            unsupported = resolved
        if unsupported is None:
            self.found(Finding("ok", "tiers", f"k = {', '.join(map(str, self.needs.tiers))}"))
        else:
            algorithm = "speculative_algorithm" in self.given.values
            remedy = "leave that out" if algorithm else "give --speculative-algorithm and a draft model"
            text = f"{unsupported}: {remedy}, or start with --warn, not steered"
            self.found(Finding("problem", "adaptive", text, tolerable=True))
        return unsupported

    def resolved(self) -> Resolved | str | None:
        """What SGLang makes of the arguments of the steered server, or why it does not start with them.

        None where the user's own arguments contradict the policy; the findings then say how.
        """
        self.launch.arguments = ()
        own = self.given.values.get("speculative_adaptive_config")
        try:
            built = configured_tiers(own) if own else self.needs.tiers
        except UserError as error:
            self.found(Finding("problem", "flags", str(error)))
            return None
        problems = list(flag_problems(self.given, self.needs.tiers, built))
        if problems:
            self.found(*problems)
            return None
        config = own or str(write_config(self.needs.tiers))
        self.launch.arguments = steering_arguments(self.given, built, self.needs, config)
        try:
            return self.sglang.resolve(self.launch.arguments)
        except UserError as error:
            # Where it is not steering that SGLang refuses, this raises too.
            self.sglang.resolve(static_arguments(self.given, self.needs))
            return str(error)


def _variables(request: Request, environment: Mapping[str, str]) -> dict[str, str]:
    """The plugin's settings, checked by the code that will read them."""
    variables = {
        settings.POLICY: os.path.abspath(request.policy or _NO_POLICY),
        settings.MODE: request.mode,
        settings.START: "strict" if request.strict else "warn",
    }
    if request.replay:
        variables[settings.REPLAY] = settings.replay_variable(request.replay)
    log = request.log or environment.get(settings.LOG)
    if log:
        variables[settings.LOG] = os.path.abspath(log)
    settings.Settings.from_environment({**environment, **variables})
    return variables


def _described(arguments: tuple[str, ...]) -> str:
    """What a server that is not steered does."""
    flags = dict(pairwise(arguments))
    if not any(word.startswith("--speculative-algo") for word in arguments):
        return "no speculation"
    if "--speculative-num-steps" not in flags:
        return "speculation as its arguments set it up"
    return f"k = {flags['--speculative-num-steps']} in every round"
