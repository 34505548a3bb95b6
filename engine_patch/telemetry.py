"""What a dial tells people: its decision log, its Prometheus series and its shadow report."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from draftdial.controller.signals import RoundOutcome, RoundSignals
from draftdial.engine_patch.decision_log import DecisionLog
from draftdial.engine_patch.metrics import Metrics
from draftdial.engine_patch.shadow_report import ShadowReport

if TYPE_CHECKING:
    from draftdial.engine_patch.dial import Dial

logger = logging.getLogger(__name__)

METRICS_ROUNDS = 40
"""Decided rounds between two updates of the Prometheus series: SGLang's own default interval."""

_P = ParamSpec("_P")


def _harmless(
    method: Callable[Concatenate[Telemetry, _P], None],
) -> Callable[Concatenate[Telemetry, _P], None]:
    """An error of `method` ends the telemetry for good and goes no further."""

    @functools.wraps(method)
    def guarded(self: Telemetry, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.log = self.metrics = self.shadow = None
            self.error = f"telemetry: {type(error).__name__}: {error}"
            logger.error("draftdial: the log, metrics and report end here: %s", self.error)

    return guarded


class Telemetry:
    """Log and series exist on the first rank alone, so nothing that happens here may reach a decision."""

    def __init__(self) -> None:
        self.log: DecisionLog | None = None
        self.metrics: Metrics | None = None
        self.shadow: ShadowReport | None = None
        self.error = ""
        self._flushed = 0

    @_harmless
    def decided(
        self, signals: RoundSignals, asked_k: int, wanted_k: int, acted_k: int, mode_code: int
    ) -> None:
        """A round was launched; `asked_k` is -1 where `wanted_k` is not the policy's own.

        The report judges the policy, so it leaves such rounds out.
        """
        if self.log is not None:
            self.log.round(signals, asked_k, acted_k, mode_code)
        if self.shadow is not None and asked_k >= 0:
            self.shadow.decided(signals, wanted_k, acted_k)

    @_harmless
    def observed(self, outcome: RoundOutcome) -> None:
        """A round has finished."""
        if self.log is not None:
            self.log.outcome(outcome)
        if self.shadow is not None:
            self.shadow.observe(outcome)

    @_harmless
    def settled(self, dial: Dial) -> None:
        """A result has been processed: time for what may take longer."""
        if self.log is not None:
            self.log.flush_if_due()
        if dial.counters.decisions - self._flushed >= METRICS_ROUNDS:
            self.flush(dial)

    @_harmless
    def flush(self, dial: Dial) -> None:
        """Bring the series up to date at once."""
        self._flushed = dial.counters.decisions
        if self.metrics is not None:
            self.metrics.flush(dial)

    @_harmless
    def event(self, kind: str, data: dict[str, Any]) -> None:
        """Something that is no round: see `DecisionLog.control`."""
        if self.log is not None:
            self.log.control(kind, data)

    @_harmless
    def write(self, writer: Callable[..., None], *args: Any) -> None:
        """Let `writer(log, *args)` write to the log, where there is one."""
        if self.log is not None:
            writer(self.log, *args)
