"""The dial: the object in SGLang's adaptive controller that says how many draft tokens a round uses."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from draftdial.controller import policy_file
from draftdial.controller.errors import UserError
from draftdial.controller.policy import Policy
from draftdial.controller.policy_file import PolicyFile
from draftdial.controller.signals import RoundOutcome, RoundSignals
from draftdial.engine_patch import lockstep, round_timer
from draftdial.engine_patch.counters import Counters
from draftdial.engine_patch.decision_log import DecisionLog
from draftdial.engine_patch.kv_only import KvOnly
from draftdial.engine_patch.launch_checks import SKIP
from draftdial.engine_patch.launch_clock import LaunchClock
from draftdial.engine_patch.metrics import Metrics
from draftdial.engine_patch.scheduler_signals import SchedulerSignals
from draftdial.engine_patch.server_tiers import Refused, ServerTiers, off_mode_of
from draftdial.engine_patch.settings import MODES, OFF_MODE, Mode, fits
from draftdial.engine_patch.shadow_report import ShadowReport
from draftdial.engine_patch.telemetry import Telemetry

logger = logging.getLogger(__name__)

_HASH_FACTOR, _HASH_MASK = 0x100000001B3, (1 << 53) - 1  # FNV-1a's prime; exact in a JSON number


class StockPolicy(Protocol):
    """What SGLang puts in `AdaptiveController.params` itself, and what a `Dial` must look like."""

    @property
    def candidate_steps(self) -> list[int]: ...

    def get_steps_for_batch(self, batch_size: int) -> int: ...

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None: ...

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None: ...

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None: ...


@dataclass(frozen=True)
class Loaded:
    """A policy that has been checked against this server."""

    file: PolicyFile
    policy: Policy


@dataclass(slots=True)
class _Last:
    """The newest decision."""

    round_id: int = -1
    wanted_k: int = -1
    k: int = -1
    is_new: bool = False


_current: Dial | None = None
_inactive_reason = ""


def current() -> Dial | None:
    """The dial of this process; None where nothing is steered."""
    return _current


def install(dial: Dial | None, inactive_reason: str = "") -> None:
    """Make `dial` the one of this process, or none of them because of `inactive_reason`."""
    global _current, _inactive_reason
    _current, _inactive_reason = dial, inactive_reason


def inactive_reason() -> str:
    """Why this process has no dial; empty where it has one or was never asked to."""
    return _inactive_reason


class Dial:
    """SGLang's `AdaptiveSpecPolicy`, by duck type. One per scheduler process, the same on every rank.

    Which k runs: that of a measurement in the rounds it counts; else the forced one; else 0 in mode `off`,
    SGLang's own rule in `shadow`, and in `steer` the policy, or an environment in lockstep. A dial that was
    never bound to a scheduler leaves everything to SGLang's own rule. The policy is asked every round in
    every mode, so that it is never behind when it takes over.

    An error of the policy, or a k that this server has not built, latches `fallback`: from then on the
    file's threshold rule stands in for the policy, until another one is deployed. Ranks see the same
    history, so they fall back in the same round.
    """

    def __init__(self, inner: StockPolicy, worker: Any, *, without_zero: bool = False) -> None:
        self.inner = inner
        """SGLang's own rule."""
        self._worker = worker
        self._tiers = ServerTiers(inner.candidate_steps, without_zero)
        # Once: a measurement sets the variable in the rounds that it counts.
        self.off_mode = off_mode_of(os.environ)
        """What a round at k = 0 is asked to be."""
        self.kv_only: KvOnly | None = None
        """What makes it `kv-only`, where that was asked for."""
        self.mode: Mode = "steer"
        self.forced_k: int | None = None
        built = self._tiers.built
        self.counters = Counters(dict.fromkeys(built, 0), dict.fromkeys(built, 0.0))
        self.clock = LaunchClock(self.counters)
        self.fallback: str | None = None
        self.last_error = ""
        self.last_control = ""
        self.decision_hash = 0
        self.signals: SchedulerSignals | None = None
        self.telemetry = Telemetry()
        self._last = _Last()
        self._outcome = RoundOutcome(
            np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros((1, built[-1] + 1), np.int64)
        )

    @property
    def tiers(self) -> tuple[int, ...]:
        """The values of k that may run here."""
        return self._tiers.usable

    @property
    def built(self) -> tuple[int, ...]:
        """Those that SGLang has built: k = 0 is one of them that may not run with rejection sampling."""
        return self._tiers.built

    # What SGLang asks.

    @property
    def candidate_steps(self) -> list[int]:
        return self.inner.candidate_steps

    def set_cuda_graph_bs(self, *args: Any, **kwargs: Any) -> None:
        self.inner.set_cuda_graph_bs(*args, **kwargs)

    def cuda_graph_bs_for_step(self, *args: Any, **kwargs: Any) -> list[int] | None:
        """None, so that every tier has graphs for every batch: SGLang's rule would not use them all."""
        return None

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> int | None:
        """None, so that nothing switches here; what SGLang's rule says where it acts."""
        is_shadow = self.mode == "shadow" and self.forced_k is None and not round_timer.is_planned()
        if is_shadow or self.signals is None:
            return self.inner.on_verify_complete(num_correct_drafts_per_req, batch_size, *args, **kwargs)
        return None

    def get_steps_for_batch(self, batch_size: int, *args: Any, **kwargs: Any) -> int:
        """k for the decode round that is being launched. Rounds of nothing but health checks keep k."""
        signals = self.signals
        if signals is None:
            return self._tiers.at_most(self.inner.get_steps_for_batch(batch_size))
        if signals.is_probe_round(batch_size):
            steps: int = self._worker.speculative_num_steps
            return steps if self.kv_only is None else self.kv_only.decide(steps)
        wanted = self._wanted(signals, batch_size)
        k = wanted
        planned = round_timer.planned_k()
        if planned is not None:
            k = planned
        elif self.forced_k is not None:
            k = self.forced_k
        elif self.mode == "off":
            k = 0
        elif self.mode == "shadow":
            k = self._tiers.at_most(self.inner.get_steps_for_batch(batch_size))
        elif (followed := lockstep.current()) is not None:
            k = followed.k_of(signals.values, wanted)
        if self.kv_only is not None:
            if planned is None:
                k = self.kv_only.decide(k)
            else:
                self.kv_only.restart.measure(k, round_timer.planned_off_mode())
        counters, last = self.counters, self._last
        counters.decisions += 1
        counters.rounds_at_k[k] += 1
        counters.switches += k != last.k and last.k >= 0
        last.round_id, last.wanted_k, last.k, last.is_new = signals.round_id, wanted, k, True
        stamp = signals.round_id << 16 | wanted << 8 | k
        self.decision_hash = (self.decision_hash ^ stamp) * _HASH_FACTOR & _HASH_MASK
        return k

    # What happens to a round after its decision.

    def launched(self) -> int | None:
        """Record the decision of the round just launched; its id, or None if it had no decision."""
        last, signals = self._last, self.signals
        is_decided = last.is_new and signals is not None
        self.clock.launched(
            last.k if is_decided else None,
            is_prefill=signals is not None and signals.is_prefill,
            has_waited=signals is not None and signals.has_grammar and not signals.is_prefill,
        )
        if signals is None or not is_decided:
            return None
        last.is_new = False
        asked = -1 if self.fallback is not None else last.wanted_k
        self.telemetry.decided(signals.values, asked, last.wanted_k, last.k, MODES.index(self.mode))
        return last.round_id

    def observe(self, round_id: int, k: int, accepted: list[int]) -> None:
        """A round has finished: `accepted` drafts, 0..k each, of the requests that were still running."""
        outcome = self._outcome
        outcome.round_id[0] = round_id
        outcome.k[0] = k
        counts = outcome.accept_counts[0]
        counts[:] = 0
        for n in range(k + 1):
            counts[n] = accepted.count(n)
        counters = self.counters
        counters.observed += 1
        counters.drafted += k * len(accepted)
        counters.wasted += k * len(accepted) - sum(accepted)
        self.telemetry.observed(outcome)
        if self.fallback is None:
            try:
                self._loaded.policy.observe(outcome)
            except Exception as error:
                self.fail("observe", error)

    def settled(self) -> None:
        """Housekeeping after a result has been processed."""
        self.telemetry.settled(self)

    def fail(self, where: str, error: Exception) -> None:
        """What decisions rest on failed, on all ranks alike: the threshold rule takes over."""
        self.counters.errors += 1
        self.last_error = f"{where}: {type(error).__name__}: {error}"
        if self.fallback is None:
            self.fallback = self.last_error
            self.counters.fallbacks += 1
            logger.error("draftdial: the threshold rule of %s takes over: %s", self.policy_id, self.fallback)
            self.telemetry.event("fallback", {"reason": self.fallback})
            self.telemetry.flush(self)

    # Policies.

    def load(self, source: bytes | str | Path) -> Loaded:
        """The policy in a file, checked against this server; changes nothing.

        Raises:
            UserError: not a policy file, or one that cannot run here.
        """
        file = policy_file.read(source)
        policy = policy_file.load_policy(file)
        self._tiers.check_policy(policy, file.source)
        has_zero = 0 in policy.tiers and 0 in self.tiers
        wanted = file.card["off_mode"]
        if has_zero and not fits(wanted, self.off_mode):
            name = OFF_MODE if "kv-only" in (wanted, self.off_mode) else SKIP
            value = os.environ.get(name)
            started = f"with {name}={value}" if value else f"without {name}"
            raise UserError(
                f"{file.source}: off_mode: found {wanted}, allowed: {self.off_mode}: "
                f"this server was started {started}"
            )
        return Loaded(file, policy)

    def activate(self, loaded: Loaded) -> None:
        """Let `loaded` decide from the next round on, with an empty memory."""
        is_deploy = hasattr(self, "_loaded")
        loaded.policy.reset(1)
        self._loaded = loaded
        self.fallback = None
        self._begin_anew()
        if is_deploy:
            self.counters.deploys += 1
            self.telemetry.event("deploy", {"policy": loaded.file.data, "name": self.policy_name})

    @property
    def policy(self) -> Policy:
        return self._loaded.policy

    @property
    def file(self) -> PolicyFile:
        return self._loaded.file

    @property
    def policy_id(self) -> str:
        return self._loaded.file.policy_id

    @property
    def policy_name(self) -> str:
        name: str = self._loaded.file.card["name"]
        return name

    @property
    def log(self) -> DecisionLog | None:
        """The decision log, on the first rank if one was asked for."""
        return self.telemetry.log

    @property
    def shadow(self) -> ShadowReport | None:
        """The report of the present stretch of shadowing."""
        return self.telemetry.shadow

    @property
    def last_k(self) -> int:
        """k of the newest round, -1 before the first."""
        return self._last.k

    @property
    def last_wanted_k(self) -> int:
        """What the policy wanted for it."""
        return self._last.wanted_k

    @property
    def last_signals(self) -> RoundSignals | None:
        """What the policy saw before it."""
        return self.signals.values if self.signals is not None else None

    # Changes from outside, the same on every rank in the same iteration.

    def set_mode(self, mode: Mode) -> None:
        """Who decides from the next round on.

        Raises:
            Refused: no such mode, or `off` on a server without k = 0.
        """
        self.check_mode(mode)
        if mode != self.mode:
            self.mode = mode
            self._begin_anew()
            self.telemetry.event("mode", {"mode": mode})

    def force_k(self, k: int | None) -> None:
        """Run every round at `k`; None: as the mode says.

        Raises:
            Refused: `k` is not a tier that may run here.
        """
        self.check_force_k(k)
        if k != self.forced_k:
            self.forced_k = k
            self._begin_anew()
            self.telemetry.event("force_k", {"k": k})

    def check_mode(self, mode: Mode) -> None:
        """Raise what `set_mode` would, and change nothing: ranks agree before any of them changes."""
        if mode not in MODES:
            raise Refused(f"mode: found {mode!r}, allowed: {', '.join(MODES)}")
        if mode == "off":
            self._tiers.check("mode off needs k", 0)

    def check_force_k(self, k: int | None) -> None:
        """Raise what `force_k` would, and change nothing."""
        if k is not None:
            self._tiers.check("k", k)

    def record_control(self, name: str, reason: str) -> None:
        """Keep what came of a request from outside; `reason` is empty where it was granted."""
        self.last_control = reason
        self.telemetry.event("control", {"request": name, "refused": reason})

    def bind(self, signals: SchedulerSignals, log: DecisionLog | None, metrics: Metrics | None) -> None:
        """Start deciding by `signals`; `log` and `metrics` on rank 0 only."""
        self.signals = signals
        self.telemetry.log, self.telemetry.metrics = log, metrics
        self.telemetry.event("start", {"policy": self.file.data, "name": self.policy_name, "mode": self.mode})

    # Inside.

    def _wanted(self, signals: SchedulerSignals, batch_size: int) -> int:
        """The policy's k, one of `tiers`; the threshold rule's once it has failed."""
        try:
            row = signals.row(batch_size)
            if self.fallback is None:
                return self._tiers.run_as(int(self._loaded.policy.decide(row)[0]))
        except Exception as error:
            self.fail("decide", error)
        rule = self._loaded.file.card["fallback"]
        return self._tiers.at_most(rule["k"] if batch_size <= rule["batch"] else 0)

    def _begin_anew(self) -> None:
        """Somebody else decides. A shadow report covers one policy in one stretch of shadowing."""
        if self.kv_only is not None:
            self.kv_only.restart.forget()
        self.telemetry.shadow = None
        if self.mode == "shadow" and self.forced_k is None:
            self.telemetry.shadow = ShadowReport(
                self.file.profile(), self.file.card["off_mode"], self.built[-1]
            )
