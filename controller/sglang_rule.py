"""SGLang's adaptive speculation rule (`--speculative-adaptive`, releases 0.5.20 to 0.5.23).

Written from the behaviour of that release's `sglang/srt/speculative/adaptive_spec_params.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from draftdial.controller.errors import UserError
from draftdial.controller.rules import checked_tiers
from draftdial.controller.signals import IntArray, RoundOutcome, RoundSignals

Config = Mapping[str, Any]
"""The content of a `--speculative-adaptive-config` file."""

DEFAULT_CONFIG: dict[str, Any] = {
    "1": {"candidate_steps": [1, 3, 5, 7]},
    "8": {"candidate_steps": [0, 1, 3], "down_hysteresis": 0.0},
    "32": {"candidate_steps": [0, 1], "down_hysteresis": 0.0},
    "64": {"candidate_steps": [0], "down_hysteresis": 0.0},
}
"""What SGLang does without a config file."""

SLOT_DEFAULTS: dict[str, float] = {
    "ema_alpha": 0.2,
    "update_interval": 5,
    "warmup_batches": 10,
    "up_hysteresis": 0.0,
    "down_hysteresis": -0.25,
    "ceiling_coeff": 0.0,
}
"""SGLang's value of every slot setting that neither the slot nor the file's top level gives."""

UNREACHABLE = np.iinfo(np.int64).max
"""Padding: the first batch of a slot that is not there, a step above every threshold."""


class SglangRule:
    """One slot per range of batch sizes; each follows a moving average of accepted drafts.

    A slot serves the batch sizes from its key up to the next key. It averages the accepted drafts
    per request (EMA, started one below its first step) and, after a warm-up, moves every
    `update_interval` rounds to the step the average calls for. From step 0, where there is
    nothing to average, it always moves up to its smallest positive step.

    As in SGLang, an outcome is booked under the slot of the batch size of *its* round, but read in
    the light of that slot's *present* step, not of the k it ran with: a round without drafts that
    arrives after the slot moved up pulls the average down with zeros; a round with drafts that
    arrives after the slot moved to 0 is counted but not averaged.

    `config` is the content of SGLang's JSON file (None: its default), or a list of them for a
    batch of servers, where server i runs config `i % len(config)`. Candidate steps that are no
    tier are left out. A slot that has none left takes the smallest tier that is not below its
    smallest candidate, or else the largest tier: [1, 3, 5, 7] on a server with tiers (0, 16)
    meant "always speculate" and becomes [16].

    Left out: a start other than the server's default (`--speculative-num-steps` unset), the rounding
    of batch sizes that an explicit `--cuda-graph-bs-decode` adds to the choice of slot, and the tier
    switch when an outcome arrives, which the next decision repeats or undoes before any round runs.
    """

    def __init__(self, tiers: Sequence[int], config: Config | Sequence[Config] | None = None) -> None:
        self.tiers = checked_tiers(tiers)
        self._config = DEFAULT_CONFIG if config is None else config
        configs = [self._config] if isinstance(self._config, Mapping) else list(self._config)
        self._slots = _SlotTable([_read_config(each, self.tiers) for each in configs])

    def reset(self, num_servers: int) -> None:
        slots = self._slots
        if num_servers % slots.num_configs:
            raise UserError(f"{slots.num_configs} configs cannot be shared evenly by {num_servers} servers")
        copies = num_servers // slots.num_configs
        self._rows = np.arange(num_servers)
        # State of slot j of server i at position i * slots.per_config + j.
        self._choice = np.tile(slots.first_choice, copies)
        self._ema = np.tile(slots.first_ema, copies)
        self._num_rounds = np.zeros(len(self._choice), np.int64)

    def decide(self, signals: RoundSignals) -> IntArray:
        here, slot = self._route(self._rows, signals.num_running)
        k: IntArray = self._slots.steps[slot, self._choice[here]]
        return k

    def observe(self, outcome: RoundOutcome) -> None:
        num_requests = outcome.accept_counts.sum(axis=1)
        arrived = np.flatnonzero((outcome.round_id >= 0) & (num_requests > 0))
        counts, num_requests = outcome.accept_counts[arrived], num_requests[arrived]
        mean_accepted = counts @ np.arange(counts.shape[1]) / num_requests
        here, slot = self._route(arrived, num_requests)
        slots = self._slots

        averages = slots.steps[slot, self._choice[here]] > 0
        alpha = slots.ema_alpha[slot]
        ema = np.where(averages, (1 - alpha) * self._ema[here] + alpha * mean_accepted, self._ema[here])
        since_warmup = self._num_rounds[here] + 1 - slots.warmup_batches[slot]
        self._ema[here] = ema
        self._num_rounds[here] += 1
        due = np.flatnonzero((since_warmup > 0) & (since_warmup % slots.update_interval[slot] == 0))
        if due.size:
            self._move(here[due], slot[due])

    def card(self) -> dict[str, Any]:
        return {"kind": "sglang-adaptive", "config": self._config}

    def _route(self, rows: IntArray, batch: IntArray) -> tuple[IntArray, IntArray]:
        """State position and slot-table row of the slot that serves `batch` requests of `rows`."""
        slots = self._slots
        config = rows % slots.num_configs
        slot = (slots.first_batch[config] <= batch[:, None]).sum(axis=1) - 1
        # A batch below the first key belongs to the first slot.
        slot = np.maximum(slot, 0)
        return rows * slots.per_config + slot, config * slots.per_config + slot

    def _move(self, here: IntArray, slot: IntArray) -> None:
        """Move the slots to the step that their averages call for.

        The thresholds of a slot ascend, so the place where a walk down (or up) would stop is a
        count of the thresholds that the average exceeds.
        """
        slots, old, ema = self._slots, self._choice[here], self._ema[here]
        down = np.minimum(old, (ema[:, None] > slots.drop_at[slot]).sum(axis=1))
        up = np.maximum(old, (ema[:, None] > slots.rise_at[slot]).sum(axis=1))
        new = np.where(down < old, down, up)

        coeff = slots.ceiling_coeff[slot]
        ceiling = np.maximum(1, np.ceil(ema * coeff))
        capped = (slots.steps[slot] <= ceiling[:, None]).sum(axis=1) - 1
        new = np.where((coeff > 0) & (new <= old), np.minimum(new, np.maximum(capped, 0)), new)

        probe = np.minimum(old + 1, slots.num_steps[slot] - 1)
        self._choice[here] = np.where(slots.steps[slot, old] == 0, probe, new)


class _SlotTable:
    """The slots of all configs as arrays of one row a slot, `per_config` rows for each config."""

    def __init__(self, configs: Sequence[Sequence[_Slot]]) -> None:
        self.num_configs, self.per_config = len(configs), max(map(len, configs))
        padding = _Slot(UNREACHABLE, [0], 0, SLOT_DEFAULTS)
        rows = [slot for slots in configs for slot in [*slots, *[padding] * (self.per_config - len(slots))]]
        shape = (len(rows), max(len(slot.steps) for slot in rows))
        self.first_batch = np.array([slot.first_batch for slot in rows]).reshape(
            len(configs), self.per_config
        )
        self.first_choice = np.array([slot.first_choice for slot in rows])
        self.num_steps = np.array([len(slot.steps) for slot in rows])
        self.steps = np.full(shape, UNREACHABLE)
        self.drop_at, self.rise_at = np.full(shape, np.inf), np.full(shape, np.inf)
        for i, slot in enumerate(rows):
            below = np.array(slot.steps[:-1], np.int64)
            self.steps[i, : len(slot.steps)] = slot.steps
            # Dropping to 0 needs as little acceptance as dropping to 1 does.
            self.drop_at[i, 1 : len(slot.steps)] = (
                np.maximum(below - 0.5, 0.5) + slot.settings["down_hysteresis"]
            )
            self.rise_at[i, : len(below)] = below - 0.5 + slot.settings["up_hysteresis"]
        self.first_ema = self.steps[np.arange(len(rows)), self.first_choice] - 1.0
        self.ema_alpha = np.array([slot.settings["ema_alpha"] for slot in rows])
        self.update_interval = np.array([slot.settings["update_interval"] for slot in rows])
        self.warmup_batches = np.array([slot.settings["warmup_batches"] for slot in rows])
        self.ceiling_coeff = np.array([slot.settings["ceiling_coeff"] for slot in rows])


@dataclass
class _Slot:
    first_batch: int
    steps: list[int]
    first_choice: int
    settings: Mapping[str, float]


def _read_config(config: Config, tiers: tuple[int, ...]) -> list[_Slot]:
    """The slots of one config, ascending, with their steps limited to `tiers`."""
    keys = sorted((key for key in config if str(key).isdigit()), key=int)
    if not keys:
        raise UserError(
            f'sglang-adaptive config: needs a batch-size key such as "1", got {sorted(map(str, config))}'
        )
    steps = [_steps_of(config[key], f"sglang-adaptive config, slot {key}", tiers) for key in keys]
    # The server's default start: the middle of all steps it has built.
    built = sorted(set().union(*steps))
    start = built[len(built) // 2]
    return [
        _Slot(
            first_batch=int(key),
            steps=own,
            first_choice=own.index(start) if start in own else len(own) // 2,
            settings=_settings_of({**config, **config[key]}, key),
        )
        for key, own in zip(keys, steps, strict=True)
    ]


def _steps_of(slot: Any, where: str, tiers: tuple[int, ...]) -> list[int]:
    wanted = slot.get("candidate_steps") if isinstance(slot, Mapping) else None
    if not isinstance(wanted, list) or not wanted or not all(type(k) is int and k >= 0 for k in wanted):
        raise UserError(f"{where}: candidate_steps must be a list of integers from 0 up, got {wanted!r}")
    built = sorted(set(wanted) & set(tiers))
    return built or [next((tier for tier in tiers if tier >= min(wanted)), tiers[-1])]


def _settings_of(merged: Config, key: str) -> dict[str, float]:
    settings: dict[str, float] = {}
    for name, default in SLOT_DEFAULTS.items():
        value = merged.get(name, default)
        if type(value) not in (int, float) or (name == "update_interval" and value < 1):
            allowed = "a number, 1 or more" if name == "update_interval" else "a number"
            raise UserError(f"sglang-adaptive config, slot {key}: {name} must be {allowed}, got {value!r}")
        settings[name] = value
    return settings


def tuning_grid() -> list[dict[str, Any]]:
    """Configs worth trying when the rule is tuned to a server: the default's ladder of candidate
    steps and four that speculate at larger batches, each with three re-decision intervals and two
    hysteresis widths."""
    ladders = (
        {"1": [1, 3, 5, 7], "8": [0, 1, 3], "32": [0, 1], "64": [0]},
        {"1": [1, 3, 5, 7], "16": [0, 1, 3], "64": [0, 1], "128": [0]},
        {"1": [1, 3, 5, 7], "32": [1, 3], "64": [0, 1], "192": [0]},
        {"1": [1, 3, 5, 7], "16": [1, 2, 3], "64": [1, 2], "192": [0, 1]},
        {"1": [1, 3, 5, 7], "32": [1, 2, 3], "64": [1]},
    )
    return [
        {
            "update_interval": interval,
            "up_hysteresis": width,
            "down_hysteresis": -width,
            **{key: {"candidate_steps": steps} for key, steps in ladder.items()},
        }
        for ladder, interval, width in product(ladders, (5, 20, 80), (0.0, 0.25))
    ]
