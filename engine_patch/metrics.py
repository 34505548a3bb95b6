"""Prometheus series beside SGLang's own, under the server's `--enable-metrics`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from draftdial.engine_patch.prediction import Prediction
from draftdial.engine_patch.settings import MODES

if TYPE_CHECKING:
    from draftdial.engine_patch.dial import Dial

COUNTERS_BY_K = {
    "decisions": "Decode rounds decided, by the k that ran.",
    "decode_seconds": "Time between decode rounds that follow one another, by the k of the first.",
    "steady_seconds": "That of rounds between two of the same k, where it is known what the host waits for.",
    "steady_wait_seconds": "That part of it in which the host waited for the GPU.",
}
COUNTERS = {
    "switches": "Rounds whose k differs from that of the round before.",
    "draft_tokens": "Draft tokens that requests verified.",
    "wasted_draft_tokens": "Draft tokens that were verified and rejected.",
    "fallbacks": "Times the policy was replaced by its file's threshold rule.",
    "errors": "Failures inside draftdial that the server survived.",
    "deploys": "Policies put in place since the server started.",
}
GAUGES = {
    "k": "Draft tokens of the last round.",
    "forced_k": "The k forced by an operator, -1 for none.",
    "mode": f"{', '.join(f'{code} {mode}' for code, mode in enumerate(MODES))}.",
    "fallback": "1 while the fallback rule decides, else 0.",
    "telemetry_error": "1 once the decision log or the shadow report has ended by an error, else 0.",
    "acceptance": "The policy's belief: P(the first draft token is accepted). NaN where it has none.",
    "predicted_speedup": "Its belief: tokens per second at this k ÷ those at k = 0. NaN where it has none.",
}


class Metrics:
    """The series of one scheduler. They carry SGLang's labels, so that both join in one query.

    `flush` costs tens of microseconds and belongs in result processing, not on the launch path: between two
    flushes nothing but plain integers of the dial is counted.
    """

    def __init__(self, labels: dict[str, Any]) -> None:
        # Not at the top: it must come after SGLang has set PROMETHEUS_MULTIPROC_DIR, and may be absent.
        from prometheus_client import Counter, Gauge

        names = list(labels)
        self._labels = labels
        self._flushed: dict[tuple[str, int | None], float] = {}
        self._by_k = {
            name: Counter(f"draftdial:{name}", text, [*names, "k"]) for name, text in COUNTERS_BY_K.items()
        }
        self._counters = {
            name: Counter(f"draftdial:{name}", text, names).labels(**labels)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"draftdial:{name}", text, names, multiprocess_mode="mostrecent").labels(**labels)
            for name, text in GAUGES.items()
        }

    @classmethod
    def create(cls, scheduler: Any, dial: Dial) -> Metrics | None:
        """The series of `scheduler`, or None where SGLang keeps none of its own: once per process."""
        reporter = scheduler.metrics_reporter
        if not reporter.current_scheduler_metrics_enabled:
            return None
        metrics = cls(dict(reporter.metrics_collector.labels))
        metrics.flush(dial)
        return metrics

    def flush(self, dial: Dial) -> None:
        """Bring the series up to date."""
        counters = dial.counters
        for name, count_at_k in (
            ("decisions", counters.rounds_at_k),
            ("decode_seconds", counters.seconds_at_k),
            ("steady_seconds", {k: steady.seconds for k, steady in counters.steady_at_k.items()}),
            ("steady_wait_seconds", {k: steady.waited_s for k, steady in counters.steady_at_k.items()}),
        ):
            for k, count in count_at_k.items():
                self._by_k[name].labels(**self._labels, k=str(k)).inc(self._grown(name, k, count))
        for name, count in (
            ("switches", counters.switches),
            ("draft_tokens", counters.drafted),
            ("wasted_draft_tokens", counters.wasted),
            ("fallbacks", counters.fallbacks),
            ("errors", counters.errors),
            ("deploys", counters.deploys),
        ):
            self._counters[name].inc(self._grown(name, None, count))
        prediction = Prediction.of(dial.policy, dial.last_k)
        for name, value in (
            ("k", dial.last_k),
            ("forced_k", -1 if dial.forced_k is None else dial.forced_k),
            ("mode", MODES.index(dial.mode)),
            ("fallback", dial.fallback is not None),
            ("telemetry_error", dial.telemetry.has_failed),
            ("acceptance", prediction.acceptance if prediction else math.nan),
            ("predicted_speedup", prediction.speedup if prediction else math.nan),
        ):
            self._gauges[name].set(value)

    def _grown(self, name: str, k: int | None, count: float) -> float:
        """How much a count has grown since the last flush; a counter takes increments only."""
        grown = count - self._flushed.get((name, k), 0)
        self._flushed[name, k] = count
        return grown
