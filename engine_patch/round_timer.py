"""Times decode rounds and prefills in the scheduler, while a measurement asks for it; otherwise not there.

A round's *period* is the time from the end of the batch before it to its own end, on the GPU by CUDA events
on the stream that runs the forward passes. Events are read when they have passed, so nothing ever waits.
The host's time to *launch* the batch from the decision of its k on, and how long the GPU stood *idle* before,
tell rounds whose length the GPU set from those that the host set. On a CPU all come from the host's clock.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from draftdial.controller.cost_profile import OffMode
from draftdial.engine_patch import compat
from draftdial.engine_patch.launch_checks import SKIP
from draftdial.engine_patch.measurement_plan import MeasurementPlan, Phase, PlanProgress

logger = logging.getLogger(__name__)

MAX_PREFILLS = 1024
"""Prefills that are kept; later ones are not."""
MAX_ROWS = 10_000
"""Rounds that are kept: each is about 60 bytes of every `/server_info`. One more ends the timing."""

_timer: RoundTimer | None = None


def current() -> RoundTimer | None:
    """The timer of this process; None while nothing is measured."""
    return _timer


def start(plan: MeasurementPlan, scheduler: Any) -> None:
    """Measure by `plan` from the next batch on, in place of any measurement before it."""
    global _timer
    stop()
    _timer = RoundTimer(plan, scheduler)


def stop() -> None:
    """Measure nothing any more."""
    global _timer
    if _timer is not None:
        _timer.close()
    _timer = None


def planned_k() -> int | None:
    """The k that the present measurement runs, asked where a round's k is decided; None: the policy's."""
    return None if _timer is None else _timer.decide()


def planned_off_mode() -> OffMode:
    """What a round at k = 0 does for the draft, where the present measurement runs it."""
    phase = None if _timer is None else _timer.current_phase
    return "warm" if phase is None else phase.off_mode


def is_planned() -> bool:
    """Does the present measurement count the newest decode round, and so decide its k?"""
    return _timer is not None and _timer.slot is not None


def description() -> str:
    """The measurement that may decide k in rounds to come; empty where there is none."""
    return "" if _timer is None or _timer.progress.is_done else str(_timer.progress)


def around_run_batch(
    run_batch: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `Scheduler.run_batch` on a server that is not steered."""
    if _timer is None:
        return run_batch(scheduler, batch, *args, **kwargs)
    return _timer.run(run_batch, scheduler, batch, *args, **kwargs)


class Launched(NamedTuple):
    """A batch that was launched; marks are a clock's."""

    slot: tuple[int, int] | None
    """Phase and place in it; None for a prefill and for rounds that do not count."""
    attempt: int
    num_tokens: int
    """Prefill: tokens. Decode: summed context of the requests, for a round that counts."""
    num_requests: int
    is_decode: bool
    begin: Any
    end: Any
    launch_ms: float


class RoundTimer:
    """One measurement. `run` stands around every batch."""

    def __init__(self, plan: MeasurementPlan, scheduler: Any) -> None:
        self.progress = PlanProgress(plan)
        self.slot: tuple[int, int] | None = None
        """Phase and place in it of the newest decode round; None if that does not count."""
        self.error = ""
        """Why times are missing; k goes by the plan all the same, as on the other ranks."""
        self._clock: HostClock | CudaClock = HostClock()
        self._facts: dict[str, Any] = {}
        self._in_flight: deque[tuple[Launched, Launched]] = deque()
        """Batches whose marks may not have passed, each after the one before it."""
        self._previous: Launched | None = None
        self._decided: tuple[float, Any] | None = None
        """When the batch's k was decided, on the host and as a mark."""
        self._rounds: dict[int, list[list[float]]] = {}
        self._attempt_of: dict[int, int] = {}
        self._prefills: list[list[float]] = []
        self._skip_before = os.environ.get(SKIP)
        try:
            self._clock = clock_of(scheduler)
            self._facts = _facts(scheduler) | {"clock": self._clock.name}
        except Exception as error:
            self._fail(error)

    def run(
        self, run_batch: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `batch` by the plan, and time it."""
        is_decode = batch.forward_mode.is_decode()
        slot = None
        if is_decode:
            is_alone = not scheduler.waiting_queue and scheduler.chunked_req is None
            slot = self.slot = self.progress.advance(len(batch.reqs), is_alone)
            self._set_skip()
        else:
            self.progress.interrupt()
        self._decided = None
        before = (time.perf_counter(), self._mark())
        result = run_batch(scheduler, batch, *args, **kwargs)
        end = self._mark()
        # Before the decision SGLang may wait for the round before, which is not the host's doing.
        began, begin = self._decided or before
        launch_ms = 1e3 * (time.perf_counter() - began)
        try:
            # Summed off the launch: reading the lengths of many requests takes longer than a mark.
            tokens = _context(batch) if slot is not None else 0 if is_decode else batch.extend_num_tokens or 0
            launched = Launched(
                slot, self.progress.attempt, tokens, len(batch.reqs), is_decode, begin, end, launch_ms
            )
            self._launched(launched)
        except Exception as error:
            self._fail(error)
        return result

    def decide(self) -> int | None:
        """The plan's k for the round being launched, None if that does not count.

        From here on the host has only work to do.
        """
        self._decided = (time.perf_counter(), self._mark())
        phase = self.current_phase
        return None if phase is None else phase.k

    def report(self) -> dict[str, Any]:
        """What was measured so far, as JSON takes it.

        `rounds`: `[phase, place in it, period ms, launch ms, idle ms, mean context tokens]`; period and idle
        are -1 where the batch before was not part of the plan. `prefills`: `[tokens, requests, period ms,
        launch ms, idle ms, 1 if a decode round came before]`.
        """
        try:
            self._harvest()
        except Exception as error:
            self._fail(error)
        return {
            "plan": self.progress.plan.number,
            "phase": self.progress.phase,
            "done": int(self.progress.is_done and not any(late.slot for _, late in self._in_flight)),
            "error": self.error,
            **self._facts,
            "rounds": [row for phase in sorted(self._rounds) for row in self._rounds[phase]],
            "prefills": self._prefills,
        }

    def close(self) -> None:
        """Leave the process as it was."""
        if self._skip_before is None:
            os.environ.pop(SKIP, None)
        else:
            os.environ[SKIP] = self._skip_before

    def _set_skip(self) -> None:
        """SGLang reads the variable in every round at k = 0."""
        phase = self.current_phase
        if phase is None or phase.k != 0:
            self.close()
        else:
            os.environ[SKIP] = "1" if phase.off_mode == "skip" else "0"

    @property
    def current_phase(self) -> Phase | None:
        """The phase of the newest decode round; None if that does not count."""
        return None if self.slot is None else self.progress.plan.phases[self.slot[0]]

    def _mark(self) -> Any:
        try:
            return self._clock.mark()
        except Exception as error:
            self._fail(error)
            return None

    def _launched(self, launched: Launched) -> None:
        if self._previous is not None and not self.error:
            self._in_flight.append((self._previous, launched))
        self._previous = launched
        self._harvest()

    def _harvest(self) -> None:
        """Keep the times of batches that are over."""
        while self._in_flight and not self.error and self._clock.has_passed(self._in_flight[0][1].end):
            before, launched = self._in_flight.popleft()
            idle_ms = self._clock.elapsed_ms(before.end, launched.begin)
            period_ms = self._clock.elapsed_ms(before.end, launched.end)
            if launched.slot is not None:
                self._keep_round(before, launched, period_ms, idle_ms)
            elif not launched.is_decode and len(self._prefills) < MAX_PREFILLS:
                row = [launched.num_tokens, launched.num_requests, period_ms, launched.launch_ms, idle_ms]
                self._prefills.append([*row, int(before.is_decode)])

    def _keep_round(self, before: Launched, launched: Launched, period_ms: float, idle_ms: float) -> None:
        assert launched.slot is not None
        phase, place = launched.slot
        if self._attempt_of.get(phase) != launched.attempt:
            self._attempt_of[phase] = launched.attempt
            self._rounds[phase] = []
        is_contiguous = before.slot is not None
        context = launched.num_tokens / launched.num_requests
        times = [period_ms if is_contiguous else -1.0, launched.launch_ms, idle_ms if is_contiguous else -1.0]
        if sum(map(len, self._rounds.values())) >= MAX_ROWS:
            raise OverflowError(f"more than {MAX_ROWS} rounds in one measurement")
        self._rounds[phase].append([phase, place, *times, context])

    def _fail(self, error: Exception) -> None:
        self._in_flight.clear()
        if not self.error:
            self.error = f"{type(error).__name__}: {error}"
            logger.error("draftdial: the measurement has no times: %s", self.error)


class HostClock:
    """Marks are seconds of the host's clock. For engines that compute inside `run_batch`."""

    name = "host"

    def mark(self) -> float:
        return time.perf_counter()

    def has_passed(self, mark: float) -> bool:
        return True

    def elapsed_ms(self, begin: float, end: float) -> float:
        return 1e3 * (end - begin)


class CudaClock:
    """Marks are events in the stream of the forward passes, timed when the GPU gets to them."""

    name = "cuda"

    def __init__(self, scheduler: Any) -> None:
        import torch

        self._new_event: Any = torch.cuda.Event
        self._current_stream = torch.cuda.current_stream
        self._stream = scheduler.forward_stream if scheduler.enable_overlap else None

    def mark(self) -> Any:
        event = self._new_event(enable_timing=True)
        event.record(self._stream or self._current_stream())
        return event

    def has_passed(self, mark: Any) -> bool:
        passed: bool = mark.query()
        return passed

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        elapsed: float = begin.elapsed_time(end)
        return elapsed


def clock_of(scheduler: Any) -> HostClock | CudaClock:
    import torch

    is_cuda = torch.device(scheduler.device).type == "cuda"
    return CudaClock(scheduler) if is_cuda else HostClock()


def _context(batch: Any) -> int:
    return sum(len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs)


def _facts(scheduler: Any) -> dict[str, Any]:
    """What a profile says of its server."""
    import torch

    runner = scheduler.tp_worker.model_runner
    graphs = getattr(runner, "decode_cuda_graph_runner", None) or getattr(runner, "graph_runner", None)
    is_cuda = torch.device(scheduler.device).type == "cuda"
    return {
        "device": f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if is_cuda else "CPU",
        "captured_batches": [int(batch) for batch in getattr(graphs, "capture_bs", None) or ()],
        "max_running": int(scheduler.max_running_requests),
        "kv_pool_tokens": int(scheduler.max_total_num_tokens),
        "context_length": int(scheduler.model_config.context_len),
        "speculates": int(not scheduler.spec_algorithm.is_none()),
        "engine_version": compat.release(),
    }
