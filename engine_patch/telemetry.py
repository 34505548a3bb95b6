"""What a dial tells people: its decision log, its Prometheus series and its shadow report."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from draftdial.controller.signals import RoundOutcome, RoundSignals
from draftdial.engine_patch.decision_log import DecisionLog
from draftdial.engine_patch.metrics import Metrics
from draftdial.engine_patch.shadow_report import ShadowReport

if TYPE_CHECKING:
    from draftdial.engine_patch.dial import Dial

logger = logging.getLogger(__name__)

METRICS_ROUNDS = 40
"""Decided rounds between two updates of the Prometheus series: SGLang's own default interval."""


class Telemetry:
    """Log and series exist on the first rank alone, so nothing that happens here may reach a decision.

    An error of one part ends that part for good and goes no further.
    """

    def __init__(self) -> None:
        self.log: DecisionLog | None = None
        self.metrics: Metrics | None = None
        self.shadow: ShadowReport | None = None
        self.error = ""
        self._flushed = 0

    @property
    def has_failed(self) -> bool:
        """Has a part ended by an error?"""
        return bool(self.error) or (self.log is not None and bool(self.log.error))

    def decided(
        self, signals: RoundSignals, asked_k: int, wanted_k: int, acted_k: int, mode_code: int
    ) -> None:
        """A round was launched; `asked_k` is -1 where `wanted_k` is not the policy's own.

        The report judges the policy, so it leaves such rounds out.
        """
        if self.log is not None:
            self._try("log", self.log.round, signals, asked_k, acted_k, mode_code)
        if self.shadow is not None and asked_k >= 0:
            self._try("shadow", self.shadow.decided, signals, wanted_k, acted_k)

    def observed(self, outcome: RoundOutcome) -> None:
        """A round has finished."""
        if self.log is not None:
            self._try("log", self.log.outcome, outcome)
        if self.shadow is not None:
            self._try("shadow", self.shadow.observe, outcome)

    def settled(self, dial: Dial) -> None:
        """A result has been processed: time for what may take longer."""
        if self.log is not None:
            self._try("log", self.log.flush_if_due)
        if dial.counters.decisions - self._flushed >= METRICS_ROUNDS:
            self.flush(dial)

    def flush(self, dial: Dial) -> None:
        """Bring the series up to date at once."""
        self._flushed = dial.counters.decisions
        if self.metrics is not None:
            self._try("metrics", self.metrics.flush, dial)

    def event(self, kind: str, data: dict[str, Any]) -> None:
        """Something that is no round: see `DecisionLog.control`."""
        if self.log is not None:
            self._try("log", self.log.control, kind, data)

    def write(self, writer: Callable[..., None], *args: Any) -> None:
        """Let `writer(log, *args)` write to the log, where there is one."""
        if self.log is not None:
            self._try("log", writer, self.log, *args)

    def _try(self, part: str, call: Callable[..., None], *args: Any) -> None:
        """Let `part`, the name of an attribute, do something."""
        try:
            call(*args)
        except Exception as error:
            setattr(self, part, None)
            ended = f"{part}: {type(error).__name__}: {error}"
            self.error = f"{self.error}; {ended}" if self.error else ended
            logger.error("draftdial: part of the telemetry ends here: %s", ended)
