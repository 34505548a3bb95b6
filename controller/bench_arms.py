"""The arms of a benchmark: ways in which one running server is steered, and a server without speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from draftdial.controller.errors import UserError
from draftdial.controller.files import sha256_of, short_names
from draftdial.controller.policy_file import PolicyFile, load_policy, read
from draftdial.engine_patch.client import Server, ServerRefused
from draftdial.engine_patch.control_keys import FORCE_K_KEY, MODE_KEY, NO_FORCED_K, policy_key
from draftdial.engine_patch.settings import MODES, Mode

NO_SPEC = "no-spec"
_POLICY = "policy:"
ALLOWED = "steer, off, sglang-adaptive, fixed-K or policy:FILE"


@dataclass(frozen=True)
class Arm:
    """One way to steer."""

    name: str
    mode: Mode = "steer"
    forced_k: int = NO_FORCED_K
    policy: PolicyFile | None = None
    """None: the one that the server had."""

    @property
    def is_policy(self) -> bool:
        """Does a policy decide, and not SGLang's rule or a fixed k?"""
        return self.mode == "steer" and self.forced_k == NO_FORCED_K

    @classmethod
    def parse(cls, text: str) -> Self:
        """The arm that a user named.

        Raises:
            UserError: there is none of that name, or its policy file cannot be read.
        """
        if text.startswith(_POLICY):
            file = read(Path(text.removeprefix(_POLICY)))
            load_policy(file)
            return cls(f"{_POLICY}{Path(file.source).stem}", policy=file)
        if text.startswith("fixed-") and text.removeprefix("fixed-").isdecimal():
            return cls(text, forced_k=int(text.removeprefix("fixed-")))
        modes: dict[str, Mode] = {"steer": "steer", "off": "off", "sglang-adaptive": "shadow"}
        if text not in modes:
            raise UserError(f"--arms: found {text}, allowed: {ALLOWED}")
        return cls(text, mode=modes[text])

    @classmethod
    def parse_all(cls, texts: Sequence[str]) -> list[Self]:
        """Arms of different names: those of policy files are as short as tells the files apart.

        Raises:
            UserError: an arm is named twice, or see `parse`.
        """
        arms = [cls.parse(text) for text in texts]
        paths = [Path(arm.policy.source) for arm in arms if arm.policy is not None]
        names = iter(short_names(paths))
        arms = [arm if arm.policy is None else replace(arm, name=f"{_POLICY}{next(names)}") for arm in arms]
        if len({arm.name for arm in arms}) < len(arms):
            raise UserError(f"arms: found {' '.join(texts)}, allowed: each once")
        return arms


class SteeredArms:
    """Sets a server to one arm after the other and, in the end, back to how it was."""

    def __init__(self, server: Server, arms: Sequence[Arm], deployed: Path | None) -> None:
        """`deployed` is the policy that the server has: needed to give it back after `policy:FILE`.

        Raises:
            UserError: an arm cannot run there, or the server could not be restored.
        """
        self.server = server
        replicas = server.replicas()
        if len(replicas) > 1:
            raise UserError(f"{server.url}: has {len(replicas)} data-parallel replicas, allowed: one")
        self._before = replicas[0]
        if self._before["mode"] == "inactive":
            raise UserError(f"{server.url}: it is not steered: {self._before.get('reason', '')}")
        # The first change of each kind is made even where nothing differs: it ends a measurement left behind.
        self._now = _setting(self._before) | {"mode": None, "forced_k": None}
        tiers = [int(k) for k in self._before["tiers"].split(",")]
        for arm in arms:
            k = 0 if arm.mode == "off" else arm.forced_k
            if k != NO_FORCED_K and k not in tiers:
                raise UserError(f"--arms: {arm.name}: k = {k}, allowed: {', '.join(map(str, tiers))}")
        self._own = self._own_policy(arms, deployed)

    def set(self, arm: Arm, *, keeps_memory: bool = False) -> None:
        """Let `arm` steer; the server is asked only for what is not so yet.

        A policy is deployed even where it is there, so that every run begins with an empty memory, unless
        `keeps_memory`. Fixed k, off and SGLang's rule depend on no policy, so whichever is there may stay.

        Raises:
            ServerRefused: the server did not do it.
        """
        self._switch(arm.mode, arm.forced_k)
        file = arm.policy or self._own
        if arm.is_policy and file is not None:
            is_there = self._now["policy_sha256"] == sha256_of(file.data)
            if not (keeps_memory and is_there):
                self._deploy(file)

    def status(self) -> dict[str, Any]:
        return self.server.replicas()[0]

    def status_of(self, arm: Arm) -> dict[str, Any]:
        """The status of a server that is to run `arm`.

        Raises:
            ServerRefused: it does not.
        """
        status = self.status()
        if "status_error" in status:
            raise ServerRefused(f"its status cannot be read: {status['status_error']}")
        for name, wanted in self._now.items():
            if status.get(name) != wanted:
                found = f"{name} is {status.get(name)} and was set to {wanted}"
                raise ServerRefused(f"somebody else steers it: {found}")
        if arm.is_policy and status["fallback"]:
            raise ServerRefused(f"its policy has failed: {status['fallback']}")
        return status

    def restore(self) -> None:
        """Give the server its policy, mode and forced k back."""
        self._now = _setting(self.status())
        if self._now["policy_sha256"] != self._before["policy_sha256"] and self._own is not None:
            self._deploy(self._own)
        self._switch(self._before["mode"], self._before["forced_k"])

    def _own_policy(self, arms: Sequence[Arm], deployed: Path | None) -> PolicyFile | None:
        files = [arm.policy for arm in arms if arm.policy is not None]
        if not files and deployed is None:
            return None
        files += [read(deployed)] if deployed is not None else []
        wanted = self._before["policy_sha256"]
        own = next((file for file in files if sha256_of(file.data) == wanted), None)
        if own is None:
            raise UserError(
                f"{self.server.url}: runs policy {self._before['policy_id']}, none of the files given: "
                "name its file with --deployed, to be put back"
            )
        return own

    def _deploy(self, file: PolicyFile) -> None:
        self._change(policy_key(file.data), 1)
        self._now["policy_sha256"] = sha256_of(file.data)

    def _switch(self, mode: Mode, forced_k: int) -> None:
        if self._now["mode"] != mode:
            self._change(MODE_KEY, MODES.index(mode))
            self._now["mode"] = mode
        if self._now["forced_k"] != forced_k:
            self._change(FORCE_K_KEY, forced_k)
            self._now["forced_k"] = forced_k

    def _change(self, key: str, value: int) -> None:
        if not all(self.server.change(key, value)):
            raise ServerRefused(
                self.status().get("last_control") or "it refused a change and does not say why"
            )


def _setting(status: dict[str, Any]) -> dict[str, Any]:
    """What a change changes."""
    return {name: status[name] for name in ("policy_sha256", "mode", "forced_k")}
