"""Prometheus series: what a scrape shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch.counters import Steady
from draftdial.engine_patch.decision_log import MIN_BYTES, DecisionLog
from draftdial.engine_patch.dial import Dial
from draftdial.engine_patch.metrics import COUNTERS, COUNTERS_BY_K, GAUGES, Metrics
from draftdial.engine_patch.telemetry import METRICS_ROUNDS

DOCS = Path(__file__).parents[1] / "docs"
LABELS = {"model_name": "tiny", "tp_rank": 0}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """One registry per test: series of a name can be created once."""
    prometheus_client = pytest.importorskip("prometheus_client", reason="comes with SGLang")
    registry = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge"):
        original = getattr(prometheus_client, kind)
        monkeypatch.setattr(
            prometheus_client,
            kind,
            lambda *args, _kind=original, **kwargs: _kind(*args, registry=registry, **kwargs),
        )
    yield registry


def scheduler(is_enabled: bool) -> SimpleNamespace:
    collector = SimpleNamespace(labels=LABELS)
    return SimpleNamespace(
        metrics_reporter=SimpleNamespace(
            current_scheduler_metrics_enabled=is_enabled, metrics_collector=collector
        )
    )


def scrape(registry: object) -> dict[str, str]:
    """Value by series name and k, after a check that all carry SGLang's labels."""
    import prometheus_client

    values = {}
    for line in prometheus_client.generate_latest(registry).decode().splitlines():
        if line.startswith("draftdial:") and "_created{" not in line:
            series, value = line.rsplit(" ", 1)
            assert 'model_name="tiny"' in series and 'tp_rank="0"' in series
            name = series.split("{")[0].removeprefix("draftdial:")
            k = series.split('k="')[1].split('"')[0] if '{k="' in series or ',k="' in series else ""
            values[f"{name} {k}".strip()] = value
    return values


def test_where_sglang_keeps_no_metrics_there_are_none(
    registry: object, make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    assert Metrics.create(scheduler(False), make_dial(make_policy_file(1))) is None
    assert scrape(registry) == {}


def test_counts_and_states(
    registry: object, make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file(1))
    metrics = Metrics.create(scheduler(True), dial)
    assert metrics is not None
    assert scrape(registry)["decisions_total 3"] == "0.0"
    counters = dial.counters
    counters.rounds_at_k[3], counters.seconds_at_k[3] = 7, 0.5
    counters.steady_at_k[3] = Steady(5, 0.375, 0.25)
    counters.switches, counters.drafted, counters.wasted, counters.deploys = 2, 21, 5, 1
    dial.set_mode("off")
    dial.fallback, counters.fallbacks = "it failed", 1
    metrics.flush(dial)
    counters.rounds_at_k[3] += 3
    metrics.flush(dial)
    metrics.flush(dial)
    shown = scrape(registry)
    assert shown["decisions_total 3"] == "10.0" and shown["decisions_total 0"] == "0.0"
    assert shown["decode_seconds_total 3"] == "0.5"
    assert (shown["steady_seconds_total 3"], shown["steady_wait_seconds_total 3"]) == ("0.375", "0.25")
    assert (shown["switches_total"], shown["deploys_total"]) == ("2.0", "1.0")
    assert (shown["draft_tokens_total"], shown["wasted_draft_tokens_total"]) == ("21.0", "5.0")
    assert (shown["fallbacks_total"], shown["fallback"], shown["errors_total"]) == ("1.0", "1.0", "0.0")
    assert (shown["mode"], shown["forced_k"], shown["k"]) == ("2.0", "-1.0", "-1.0")
    assert shown["acceptance"] == shown["predicted_speedup"] == "NaN"


def test_the_series_go_on_without_outcomes(
    registry: object, make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file(1))
    dial.telemetry.metrics = Metrics.create(scheduler(True), dial)
    dial.fail("outcome", RuntimeError("no counts"))
    assert scrape(registry)["fallback"] == "1.0"
    dial.counters.rounds_at_k[3] = dial.counters.decisions = METRICS_ROUNDS
    dial.settled()
    assert scrape(registry)["decisions_total 3"] == f"{METRICS_ROUNDS}.0"


def test_a_decision_log_that_ended_shows(
    registry: object,
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
    tmp_path: Path,
) -> None:
    dial = make_dial(make_policy_file(1))
    dial.telemetry.log = DecisionLog.open(tmp_path / "log", MIN_BYTES, {"tiers": [0, 1, 3]})
    dial.telemetry.metrics = Metrics.create(scheduler(True), dial)
    assert scrape(registry)["telemetry_error"] == "0.0"
    dial.telemetry.log.error = "No space left on device"
    dial.telemetry.flush(dial)
    assert scrape(registry)["telemetry_error"] == "1.0"


def test_a_learned_policy_shows_its_belief(
    registry: object, make_dial: Callable[..., Dial], make_policy_file: Callable[..., PolicyFile]
) -> None:
    dial = make_dial(make_policy_file())
    dial._last.k = 3
    metrics = Metrics.create(scheduler(True), dial)
    assert metrics is not None
    shown = scrape(registry)
    assert shown["acceptance"] == "0.7" and float(shown["predicted_speedup"]) > 0


def test_dashboard_and_manual_name_all_series_and_no_others() -> None:
    series = {f"draftdial:{name}" for name in GAUGES}
    series |= {f"draftdial:{name}_total" for name in (*COUNTERS, *COUNTERS_BY_K)}
    manual = (DOCS / "operations.md").read_text()
    assert set(re.findall(r"draftdial:\w+", manual)) == series
    panels = json.loads((DOCS / "grafana-dashboard.json").read_text())["panels"]
    drawn = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    in_one_panel = {"draftdial:k", "draftdial:fallbacks_total"}  # as shares by k, and as a state
    assert set(re.findall(r"draftdial:\w+", drawn)) == series - in_one_panel
