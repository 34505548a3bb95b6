"""The tiers of one server: what it builds, what may run, and which policies fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from draftdial.controller.cost_profile import OffMode
from draftdial.controller.errors import UserError
from draftdial.controller.policy import Policy
from draftdial.engine_patch.launch_checks import SKIP
from draftdial.engine_patch.settings import OFF_MODE, is_kv_only

_NO_ZERO = "k = 0 cannot run with rejection sampling"


class Refused(ValueError):
    """A change that this server cannot make; the message says why."""


class ServerTiers:
    """Values of k. With rejection sampling k = 0 may not run: SGLang would end at the first such round."""

    def __init__(self, built: Iterable[int], without_zero: bool) -> None:
        self.built = tuple(sorted(set(built)))
        """Those that SGLang builds."""
        self.usable = tuple(k for k in self.built if k or not without_zero)
        """Those of them that may run."""
        self._without_zero = without_zero
        self._runs_as = {k: k for k in self.usable}
        if without_zero and self.usable:
            self._runs_as[0] = self.usable[0]

    def run_as(self, k: int) -> int:
        """What runs where a policy says `k`: k itself, the smallest tier where it says 0 and may not.

        Raises:
            ValueError: `k` is not built.
        """
        if k not in self._runs_as:
            raise ValueError(f"k = {k} is not one of {list(self.usable)}")
        return self._runs_as[k]

    def at_most(self, k: int) -> int:
        """The largest tier up to `k` that may run, or the smallest."""
        return max((tier for tier in self.usable if tier <= k), default=self.usable[0])

    def check(self, what: str, k: int) -> None:
        """Raise `Refused` unless `k` may run; `what` opens the complaint."""
        if k not in self.usable:
            why = f": {_NO_ZERO}" if k == 0 and self._without_zero else ""
            raise Refused(f"{what} = {k}, allowed: {list(self.usable)}{why}")

    def check_policy(self, policy: Policy, source: str) -> None:
        """Raise `UserError` unless everything that `policy` may say can run; `source` opens the complaint."""
        if any(k not in self.built and k not in self._runs_as for k in policy.tiers):
            allowed = f"some of {list(self.built)}, those that this server has built"
        elif not any(k in self.usable for k in policy.tiers):
            allowed = f"at least one of {list(self.usable)}, since {_NO_ZERO}"
        else:
            return
        raise UserError(f"{source}: tiers: found {list(policy.tiers)}, allowed: {allowed}")


def off_mode_of(environment: Mapping[str, str]) -> OffMode:
    """What a round at k = 0 does on a server with this environment, by SGLang's reading of its variable.

    Raises:
        UserError: it says both `skip` and `kv-only`.
    """
    skips = environment.get(SKIP, "").lower() in ("true", "1", "yes", "y")
    if not is_kv_only(environment):
        return "skip" if skips else "warm"
    if skips:
        raise UserError(f"{SKIP}: found {environment[SKIP]}, allowed with {OFF_MODE}=kv-only: unset")
    return "kv-only"
