"""The cells of a comparison: a workload at one load, served on many seeds (docs/comparing.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from omegaconf import OmegaConf

from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.controller.errors import UserError
from draftdial.controller.files import sha256_of
from draftdial.controller.rules import Threshold
from draftdial.controller.signals import FloatArray, IntArray
from draftdial.envs.acceptance import AcceptanceBank, AcceptanceSource, concatenate
from draftdial.envs.closed_loop import ClosedLoop, ConstantLoad
from draftdial.envs.domains import DomainMix, as_domains
from draftdial.envs.evaluate import run
from draftdial.envs.fitted_acceptance import FittedAcceptance
from draftdial.envs.lengths import LengthModel, as_lengths
from draftdial.envs.logged_workload import LoggedAcceptance, LoggedTraffic, LoggedWorkload
from draftdial.envs.replayed_acceptance import ReplayedAcceptance
from draftdial.envs.scenario import domain_tokens
from draftdial.envs.shipped_acceptance import SHIPPED_RECORDINGS, ShippedAcceptance
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine
from draftdial.envs.workload import RequestList, Workload, make_workload

Purpose = Literal["tuning", "checkpoint", "reporting"]
FIRST_SEED: dict[Purpose, int] = {"tuning": 1_000_000, "checkpoint": 2_000_000, "reporting": 3_000_000}
"""Rules are tuned, checkpoints chosen and results reported on seeds that share nothing."""
SEEDS_PER_CELL = 500
CELLS_PER_BLOCK = 20
FIRST_TRACE_BLOCK = 50
CAPACITY_SEED = 1_999_999

SATURATED = (128, 192, 256)
"""Concurrencies at which capacity is looked for; beyond them throughput no longer grows."""
LOW_CONCURRENCY = 4
"""Rounds are short and noisy up to here, so cells get more of them."""
NEARLY_BEST = 0.95
"""A tier this fast compared with the best may be what a good policy uses; deeper ones need fewer rounds."""
RESERVE = 1.05
"""A policy that adapts within a domain needs still fewer rounds."""
TRACE = "trace:"
LOG = "log:"


@dataclass(frozen=True)
class Extent:
    """How much of a cell is run."""

    seeds: int
    low_rounds: int
    """Decode rounds of a seed in closed loops up to `LOW_CONCURRENCY`, for the best policy."""
    high_rounds: int
    """The same above it."""
    switch_requests: int
    """Requests at least where the domain switches, lest a seed meet one domain only."""
    open_requests: int
    drift_share: float
    """Share of the full length in workloads that have one of their own (drift5)."""


@dataclass(frozen=True)
class Suite:
    """Which cells a comparison runs, and how long."""

    name: str
    workloads: tuple[str, ...]
    max_seeds: int
    report: Extent
    tune: Extent

    @classmethod
    def load(cls, name: Literal["demo", "full"]) -> Self:
        """The suite `conf/suite/NAME.yaml`."""
        content = _yaml(_conf_text("suite", name))
        report, tune = (Extent(**content[part]) for part in ("report", "tune"))
        return cls(name, tuple(content["workloads"]), content["max_seeds"], report, tune)


@dataclass(frozen=True)
class Acceptance:
    """Where the domains of every workload get their acceptance: the fitted model, or recorded arrays."""

    recorded: ReplayedAcceptance | ShippedAcceptance | None = None
    hashes: Mapping[str, str] | None = None
    """SHA-256 of the recorded files by domain, or of the shipped one by name."""
    is_asked_for: bool = False
    """Is it what the user asked for? Else a decision log brings its own, if it shows enough of it."""

    @classmethod
    def parse(cls, specs: Sequence[str] | None) -> Self:
        """`fitted`, a shipped recording, or JSONL paths: `PATH`, called by its stem, or `NAME=PATH`."""
        if specs is None:
            return cls()
        if list(specs) == ["fitted"]:
            return cls(is_asked_for=True)
        if len(specs) == 1 and specs[0] in SHIPPED_RECORDINGS:
            shipped = ShippedAcceptance(specs[0])
            return cls(shipped, {shipped.name: shipped.sha256}, is_asked_for=True)
        named = [spec.partition("=") if "=" in spec else (_stem(spec), "=", spec) for spec in specs]
        paths = {name: path for name, _, path in named}
        if len(paths) < len(specs):
            allowed = f"{', '.join(('fitted', *SHIPPED_RECORDINGS))}, or one file per domain"
            raise UserError(f"acceptance: found {' '.join(specs)}; allowed: {allowed}")
        replayed = ReplayedAcceptance(paths)
        hashes = {name: sha256_of(Path(path).read_bytes()) for name, path in paths.items()}
        return cls(replayed, hashes, is_asked_for=True)

    def identity(self, workloads: Sequence[str]) -> Mapping[str, str] | str:
        """What it is in a comparison on these workloads, for the record."""
        has_logs = any(name.startswith(LOG) for name in workloads)
        return self.hashes or ("fitted; logs their own" if has_logs and not self.is_asked_for else "fitted")

    def source(self, names: Sequence[str]) -> tuple[AcceptanceSource, IntArray]:
        """A source, and which of its domains stands for each of `names`.

        A recorded domain stands for the one of the same name; the other names take the recorded ones in turn.
        """
        if self.recorded is None:
            return FittedAcceptance(names), np.arange(len(names))
        domains = self.recorded.domains
        places = [domains.index(n) if n in domains else i % len(domains) for i, n in enumerate(names)]
        return self.recorded, np.array(places)


@dataclass(frozen=True, eq=False)
class Cell:
    """One workload at one load; a seed of it is one list of requests and one draw of acceptance."""

    workload: str
    load: float | None
    """Closed loop: concurrency. Open loop: utilisation. None where the workload has no single load."""
    mode: Literal["open", "closed"]
    requests: Workload
    acceptance: AcceptanceSource
    domains: IntArray
    """Which domain of `acceptance` stands for each domain of `requests`."""
    place: int
    """Where this cell's seeds begin in every range."""
    num_requests: int
    """Of a typical seed."""
    warmup: int | None
    """Requests left out at either end; None leaves it to the workload."""

    @property
    def is_constant(self) -> bool:
        """Is the number in the system always the same? Then a threshold on it is a fixed k, or off."""
        return self.mode == "closed" and self.load is not None

    def seeds(self, purpose: Purpose, count: int, skipped: int = 0) -> tuple[int, ...]:
        """`count` seeds of the cell for this purpose, after the first `skipped`."""
        assert skipped + count <= SEEDS_PER_CELL
        first = FIRST_SEED[purpose] + self.place + skipped
        return tuple(range(first, first + count))


def build_world(rows: Sequence[tuple[Cell, int]]) -> tuple[list[RequestList], AcceptanceBank]:
    """The requests of every (cell, seed), and one bank that holds the acceptance of them all."""
    banks: list[AcceptanceBank] = []
    bank_of: dict[int, int] = {}
    lists, owners = [], []
    for cell, seed in rows:
        bank = cell.acceptance.bank(seed)
        if id(bank) not in bank_of:  # recorded banks are the same for every seed
            bank_of[id(bank)] = len(banks)
            banks.append(bank)
        owners.append(bank_of[id(bank)])
        requests = cell.requests.requests(seed)
        lists.append(requests if cell.warmup is None else replace(requests, warmup=cell.warmup))
    merged, offsets = concatenate(banks)
    for requests, owner, (cell, _) in zip(lists, owners, rows, strict=True):
        requests.domain = (cell.domains[requests.domain] + offsets[owner]).astype(np.int32)
    return lists, merged


def workload_sha256(name: str) -> str:
    """SHA-256 of the file behind a workload: its YAML, trace or log; UserError if there is none."""
    if not name.startswith((TRACE, LOG)):
        return sha256_of(_workload_text(name).encode())
    path = Path(name.partition(":")[2])
    try:
        return sha256_of(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def make_cells(
    workloads: Sequence[str], profile: CostProfile, off_mode: OffMode, acceptance: Acceptance, extent: Extent
) -> list[Cell]:
    """The cells of named workloads, or of files as `trace:PATH` or `log:PATH`, on a server with this profile.

    Closed loops are as long as the rounds of `extent` ask for, open loops arrive at their utilisation of the
    profile's capacity, the requests of decision logs when they came. Raises UserError for an unknown name,
    a file that cannot be read or a repetition.
    """
    labels = [_label(name) for name in workloads]
    if len(set(labels)) < len(labels):
        raise UserError(f"workload: found {' '.join(labels)}; allowed: each name once")
    cells = []
    for index, (name, label) in enumerate(zip(workloads, labels, strict=True)):
        content = _content(name, index)
        names = _domain_names(content["parameters"])
        if name.startswith(LOG):
            source, domains, made = _logged(name, names, acceptance, extent)
        else:
            source, domains = acceptance.source(names)
            made = _Maker(content, profile, off_mode, source, domains, extent).workloads()
        for place, (load, requests) in enumerate(made):
            sample = requests.requests(CAPACITY_SEED)
            cells.append(
                Cell(
                    workload=label,
                    load=load,
                    mode=sample.mode,
                    requests=requests,
                    acceptance=source,
                    domains=domains,
                    place=SEEDS_PER_CELL * (CELLS_PER_BLOCK * content["seed_block"] + place),
                    num_requests=sample.num_requests,
                    # Two batches, however short the cell: those behind the window must keep it loaded.
                    warmup=2 * int(load) if sample.mode == "closed" and load is not None else None,
                )
            )
    return cells


@dataclass(frozen=True)
class _Maker:
    """Turns the content of one workload file into workloads, one per load."""

    content: dict[str, Any]
    profile: CostProfile
    off_mode: OffMode
    source: AcceptanceSource
    domains: IntArray
    extent: Extent

    def workloads(self) -> list[tuple[float | None, Workload]]:
        process, parameters = self.content["process"], _indexed(self.content["parameters"])
        loads = self.content["loads"]
        if process in ("stationary", "switches"):
            sizes = self._closed_sizes(loads, as_lengths(parameters["lengths"]))
            if process == "switches":
                sizes = [max(size, self.extent.switch_requests) for size in sizes]
            return [
                (load, make_workload(process, concurrency=load, num_requests=size, **parameters))
                for load, size in zip(loads, sizes, strict=True)
            ]
        if process == "drift5":
            parameters["requests_at_one"] *= self.extent.drift_share
            return [(None, make_workload(process, **parameters))]
        if process == "trace":
            whole: Any = make_workload(process, **parameters)
            size = min(self.extent.open_requests, whole.num_requests)
            arriving: Any = replace(whole, num_requests=size)
        else:
            size = self.extent.open_requests
            arriving = make_workload(process, rate_per_s=1.0, num_requests=size, **parameters)
        capacity = capacity_per_s(self.profile, self.off_mode, self.source, self.domains, arriving.lengths)
        return [(load, arriving.at_rate(load * capacity)) for load in loads]

    def _closed_sizes(self, loads: Sequence[int], lengths: LengthModel) -> list[int]:
        """Requests that last for the rounds of the extent whichever of the good tiers a policy uses."""
        bank = self.source.bank(CAPACITY_SEED)
        tokens = domain_tokens(bank, self.profile.tiers)[self.domains]
        context = int(lengths.mean_prompt_tokens + lengths.mean_output_tokens / 2)
        round_s = self.profile.round_s(np.array(loads), np.full(len(loads), context), self.off_mode)
        sizes = []
        for load, seconds in zip(loads, round_s, strict=True):
            speed = tokens / seconds
            good = speed >= NEARLY_BEST * speed.max(axis=1, keepdims=True)
            tokens_per_round = 1 / np.mean(1 / np.where(good, tokens, 0.0).max(axis=1))
            low = load <= LOW_CONCURRENCY
            rounds = int(RESERVE * (self.extent.low_rounds if low else self.extent.high_rounds))
            counted = rounds * load * tokens_per_round / lengths.mean_output_tokens
            sizes.append(int(counted) + 4 * load + 1)
        return sizes


def capacity_per_s(
    profile: CostProfile,
    off_mode: OffMode,
    source: AcceptanceSource,
    domains: IntArray,
    lengths: LengthModel,
) -> float:
    """Requests a second that the server finishes at its best fixed k when there is always work.

    Measured in saturated closed loops with all domains mixed, prefill included, on a seed of its own.
    """
    levels = sorted({min(level, profile.max_running) for level in SATURATED})
    distinct, shares = np.unique(domains, return_counts=True)
    bank, mix = source.bank(CAPACITY_SEED), DomainMix(tuple(distinct.tolist()), tuple(shares.tolist()))
    loops = [ClosedLoop("capacity", ConstantLoad(level, 10 * level), mix, lengths) for level in levels]
    lists = [loop.requests(CAPACITY_SEED) for loop in loops for _ in profile.tiers]
    engine = SimulatedEngine(lists, bank, profile, ServerOptions(off_mode=off_mode, mid_flight=True))
    always = Threshold(profile.tiers, np.tile(profile.tiers, len(levels)), profile.max_running)
    results = run(always, engine)
    output_tokens = np.array([requests.output_tokens.mean() for requests in lists])
    finished: FloatArray = results.window_tokens / results.window_s / output_tokens
    return float(finished.max())


def notes(workloads: Sequence[str], acceptance: Acceptance) -> list[str]:
    """What a reader must know of the acceptance that logs among `workloads` bring, one line each."""
    logs = [] if acceptance.is_asked_for else [name for name in workloads if name.startswith(LOG)]
    return [LoggedTraffic.read(name.removeprefix(LOG)).describe_acceptance() for name in logs]


def workload_names() -> tuple[str, ...]:
    """Names of the workloads that come with the package."""
    folder = resources.files("draftdial.conf") / "workload"
    return tuple(sorted(file.name.removesuffix(".yaml") for file in folder.iterdir()))


def _workload_text(name: str) -> str:
    if name not in workload_names():
        raise UserError(
            f"workload: found {name}; allowed: {', '.join(workload_names())}, {TRACE}PATH or {LOG}PATH"
        )
    return _conf_text("workload", name)


def _conf_text(group: str, name: str) -> str:
    return (resources.files("draftdial.conf") / group / f"{name}.yaml").read_text(encoding="utf-8")


def _yaml(text: str) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(OmegaConf.create(text))
    return dict(content)


def _stem(path: str) -> str:
    return Path(path.removesuffix(".gz")).stem


def _label(name: str) -> str:
    """What tables call it: the name, or the kind and the stem of a file."""
    kind, colon, path = name.partition(":")
    return f"{kind}:{Path(path).stem}" if colon else name


def _content(name: str, index: int) -> dict[str, Any]:
    """What a workload file says; traces and logs are like the shipped open loop in what they do not say."""
    if not name.startswith((TRACE, LOG)):
        return _yaml(_workload_text(name))
    content = _yaml(_conf_text("workload", "poisson"))
    parameters = {"path": name.removeprefix(TRACE), "domains": content["parameters"]["domains"]}
    return {**content, "process": "trace", "seed_block": FIRST_TRACE_BLOCK + index, "parameters": parameters}


def _logged(
    name: str, names: Sequence[str], acceptance: Acceptance, extent: Extent
) -> tuple[AcceptanceSource, IntArray, list[tuple[float | None, Workload]]]:
    """Acceptance, domains and the one workload of a log: as recorded, with its own acceptance if it can."""
    traffic = LoggedTraffic.read(name.removeprefix(LOG))
    source, domains = acceptance.source(names)
    if traffic.has_acceptance and not acceptance.is_asked_for:
        source, domains = LoggedAcceptance(traffic), np.zeros(1, np.int64)
    size = min(extent.open_requests, traffic.num_requests)
    workload = LoggedWorkload(f"log-{traffic.name}", traffic, size, as_domains(range(len(domains))))
    return source, domains, [(None, workload)]


def _domain_names(parameters: Mapping[str, Any]) -> list[str]:
    domains = parameters["domains"]
    return list(domains["domains"] if isinstance(domains, Mapping) else domains)


def _indexed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with domains by number, in the order of their names."""
    domains: Any = tuple(range(len(_domain_names(parameters))))
    if isinstance(parameters["domains"], Mapping):
        domains = {**parameters["domains"], "domains": domains}
    return {**parameters, "domains": domains}
