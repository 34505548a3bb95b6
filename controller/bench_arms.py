"""The arms of a benchmark: ways in which one running server is steered, and a server without speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftdial.controller.errors import UserError
from draftdial.controller.files import sha256_of
from draftdial.controller.policy_file import PolicyFile, load_policy, read
from draftdial.engine_patch.client import Server, ServerRefused, change_everywhere
from draftdial.engine_patch.control_keys import FORCE_K_KEY, MODE_KEY, NO_FORCED_K, policy_key
from draftdial.engine_patch.settings import MODES, Mode

NO_SPEC = "no-spec"
ALLOWED = "steer, off, sglang-adaptive, fixed-K or policy:FILE"


@dataclass(frozen=True)
class Arm:
    """One way to steer."""

    name: str
    mode: Mode = "steer"
    forced_k: int = NO_FORCED_K
    policy: PolicyFile | None = None
    """None: the one that the server had."""

    @classmethod
    def parse(cls, text: str) -> Arm:
        """The arm that a user named.

        Raises:
            UserError: there is none of that name, or its policy file cannot be read.
        """
        if text.startswith("policy:"):
            file = read(Path(text.removeprefix("policy:")))
            load_policy(file)
            return cls(f"policy:{Path(file.source).stem}", policy=file)
        if text.startswith("fixed-") and text.removeprefix("fixed-").isdecimal():
            return cls(text, forced_k=int(text.removeprefix("fixed-")))
        modes: dict[str, Mode] = {"steer": "steer", "off": "off", "sglang-adaptive": "shadow"}
        if text not in modes:
            raise UserError(f"--arms: found {text}, allowed: {ALLOWED}")
        return cls(text, mode=modes[text])


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
        tiers = [int(k) for k in self._before["tiers"].split(",")]
        for arm in arms:
            k = 0 if arm.mode == "off" else arm.forced_k
            if k != NO_FORCED_K and k not in tiers:
                raise UserError(f"--arms: {arm.name}: k = {k}, allowed: {', '.join(map(str, tiers))}")
        self._own = self._own_policy(arms, deployed)

    def set(self, arm: Arm) -> None:
        """Let `arm` steer. A policy that is deployed starts with an empty memory.

        Raises:
            ServerRefused: the server did not do it.
        """
        self._deploy(arm.policy or self._own)
        self._change(MODE_KEY, MODES.index(arm.mode))
        self._change(FORCE_K_KEY, arm.forced_k)

    def status(self) -> dict[str, Any]:
        return self.server.replicas()[0]

    def restore(self) -> None:
        """Give the server its policy, mode and forced k back."""
        if self.status()["policy_sha256"] != self._before["policy_sha256"]:
            self._deploy(self._own)
        self._change(MODE_KEY, MODES.index(self._before["mode"]))
        self._change(FORCE_K_KEY, self._before["forced_k"])

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

    def _deploy(self, file: PolicyFile | None) -> None:
        if file is not None:
            self._change(policy_key(file.data), 1)

    def _change(self, key: str, value: int) -> None:
        status = change_everywhere(self.server, key, value)[0]
        if status.get("fallback"):
            raise ServerRefused(f"its policy has failed: {status['fallback']}")
