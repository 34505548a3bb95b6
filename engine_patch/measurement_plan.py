"""What a measurement runs: how many rounds at which k while one batch decodes, for both ends of the channel.

A plan travels inside its key of `/set_internal_state`, as a policy file does, and moves by counting rounds:
so every rank is at the same place in it, and no request comes between two tiers that are compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from draftdial.controller.cost_profile import OffMode
from draftdial.controller.errors import UserError

MEASURE_KEY = "draftdial_measure"
"""Alone, with value 0: measure nothing from now on. With a plan behind it, value 1: begin that plan."""
MAX_ROUNDS = 100_000
"""Of a plan."""

_PHASE = re.compile(r"(-|\d{1,3}|0[sk])x([1-9]\d{0,5})")
_SUFFIXES: dict[OffMode, str] = {"warm": "", "skip": "s", "kv-only": "k"}
_KEY = re.compile(rf"{MEASURE_KEY}:(\d{{1,15}}):(\d{{1,5}}):(.*)")


@dataclass(frozen=True)
class Phase:
    """Consecutive rounds of one kind."""

    k: int | None
    """None on a server without speculation."""
    num_rounds: int
    off_mode: OffMode = "warm"
    """For k = 0: what is done for the draft."""

    def __str__(self) -> str:
        name = "-" if self.k is None else f"{self.k}{_SUFFIXES[self.off_mode]}"
        return f"{name}x{self.num_rounds}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The phase that `str` gave.

        Raises:
            UserError: it is none.
        """
        match = _PHASE.fullmatch(text)
        if match is None:
            raise UserError(
                f"measurement: phase: found {text[:40]!r}, allowed: such as 3x40, 0x40, 0sx40, 0kx40, -x40"
            )
        off_mode = next(mode for mode, suffix in reversed(_SUFFIXES.items()) if match[1].endswith(suffix))
        return cls(None if match[1] == "-" else int(match[1].rstrip("sk")), int(match[2]), off_mode)


@dataclass(frozen=True)
class MeasurementPlan:
    """Phases, run one after the other while exactly `batch` requests decode and none waits."""

    number: int
    """Tells this plan's results from those of another."""
    batch: int
    phases: tuple[Phase, ...]
    """None: only describe the server and time prefills."""

    @property
    def num_rounds(self) -> int:
        return sum(phase.num_rounds for phase in self.phases)

    def key(self) -> str:
        """The key that carries it."""
        return f"{MEASURE_KEY}:{self.number}:{self.batch}:{','.join(map(str, self.phases))}"

    @classmethod
    def from_key(cls, key: str) -> Self:
        """The plan in a key.

        Raises:
            UserError: there is none in it, or it is too long.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            raise UserError(f"measurement: found {key[:80]!r}, allowed: {MEASURE_KEY}:NUMBER:BATCH:PHASE,...")
        phases = tuple(Phase.parse(text) for text in match[3].split(",") if text)
        plan = cls(int(match[1]), int(match[2]), phases)
        if plan.num_rounds > MAX_ROUNDS:
            raise UserError(f"measurement: found {plan.num_rounds} rounds, allowed: up to {MAX_ROUNDS}")
        return plan


class PlanProgress:
    """Where a plan is. Moved before every decode round by facts that all ranks share."""

    def __init__(self, plan: MeasurementPlan) -> None:
        self.plan = plan
        self.phase = 0
        self.attempt = 0
        """Grows whenever the present phase starts over because the batch was not what it must be."""
        self._done_rounds = 0

    def __str__(self) -> str:
        plan = self.plan
        return f"plan {plan.number} at batch {plan.batch}, phase {self.phase + 1} of {len(plan.phases)}"

    @property
    def current(self) -> Phase | None:
        """The present phase; None when all are through."""
        return self.plan.phases[self.phase] if self.phase < len(self.plan.phases) else None

    @property
    def is_done(self) -> bool:
        """Has the last round of the last phase been launched?"""
        last = len(self.plan.phases) - 1
        return self.phase > last or (
            self.phase == last and self._done_rounds >= self.plan.phases[last].num_rounds
        )

    def advance(self, batch_size: int, is_alone: bool) -> tuple[int, int] | None:
        """Phase and place in it of the decode round that comes; None if it does not count.

        Args:
            batch_size: Requests in the round.
            is_alone: No request waits to be admitted.
        """
        while (phase := self.current) is not None and self._done_rounds >= phase.num_rounds:
            self.phase += 1
            self._done_rounds = 0
        if phase is None:
            return None
        if batch_size != self.plan.batch or not is_alone:
            self.interrupt()
            return None
        self._done_rounds += 1
        return self.phase, self._done_rounds - 1

    def interrupt(self) -> None:
        """A phase must be contiguous: start the present one over, unless its last round has been launched."""
        phase = self.current
        if phase is not None and 0 < self._done_rounds < phase.num_rounds:
            self._done_rounds = 0
            self.attempt += 1
