"""A benchmark that was served, and the same lists of requests in simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from draftdial.controller.bench_adjust import adjusted
from draftdial.controller.bench_loads import Load
from draftdial.controller.bench_report import ADJUSTED, read_document
from draftdial.controller.bench_work import Work, fingerprint
from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.controller.errors import UserError
from draftdial.controller.host_time import HostTime
from draftdial.controller.policy import Policy
from draftdial.controller.policy_file import PolicyFile, load_policy
from draftdial.controller.rules import FixedK
from draftdial.controller.sglang_rule import SglangRule
from draftdial.controller.validate_sim_acceptance import GivenAcceptance
from draftdial.controller.validate_sim_report import FIGURES, WASTED
from draftdial.envs.evaluate import evaluate
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine
from draftdial.envs.workload import RequestList

TURNS_PER_SLOT = 24
"""A load that does not end is simulated by so many requests for each in the system: filling and draining,
which turns do not see, then hardly count."""

Figures = dict[str, float]
Run = dict[str, Any]
Place = tuple[str, float | None]
"""Workload and load."""
Host = Literal["quiet", "own", "shared"]
"""That of the profile; as busy as in the very run, or in all turns of its arm; or as in all runs under that
load, whatever the arm."""
UNKNOWN = HostTime(None, None, None)


@dataclass(frozen=True)
class ServedBench:
    """A `bench.json` of closed loops on a server that replays recorded acceptance."""

    source: str
    """Opens every complaint: a path, or the server's URL."""
    document: dict[str, Any]
    work: Work
    runs: tuple[Run, ...]
    """Those in which no request failed: the others are void."""

    @classmethod
    def read(cls, path: Path) -> ServedBench:
        """The one in a file, which need not be finished.

        Raises:
            UserError: not a `bench.json`, or see `of`.
        """
        document = read_document(path, "neither a decision log nor a bench.json")
        try:
            return cls.of(document, str(path))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UserError(f"{path}: not as `draftdial bench` writes it here: {error!r}") from None

    @classmethod
    def of(cls, document: dict[str, Any], source: str) -> ServedBench:
        """The one of a document.

        Raises:
            UserError: its requests cannot be drawn again as they were served, or none was served.
        """
        options = document["options"]
        if "closed" not in options or "policies" not in document or "idle_request" not in document["server"]:
            raise UserError(
                f"{source}: an older draftdial wrote it, without what its requests were drawn from"
            )
        if options["rates"] or options["trace"]:
            raise UserError(f"{source}: has open loops, allowed: a bench of --closed and --swing")
        if not options["domains"]:
            raise UserError(
                f"{source}: has no --domains, allowed: a bench with those that its server replays"
            )
        if options["stop_at_eos"]:
            raise UserError(f"{source}: --stop-at-eos, allowed: a bench whose answers have the drawn lengths")
        try:
            work = Work.of(options)
        except UserError as error:
            raise UserError(f"{source}: its requests cannot be drawn again in this folder: {error}") from None
        runs = tuple(run for run in document["runs"] if not run["failed"])
        if options.get("switchback"):
            runs = tuple(run | {"output_tok_s": run[ADJUSTED]} for run in adjusted(runs))
        if not runs:
            raise UserError(f"{source}: {len(document['runs'])} runs, none of them without failed requests")
        bench = cls(source, document, work, runs)
        bench._check_shape()
        bench._check_lists()
        return bench

    @property
    def kind(self) -> str:
        """What its acceptance is: the domains, and after how many requests they change."""
        span = self.work.options["domain_span"]
        return ",".join(self.work.options["domains"]) + (f" {span[0]}:{span[1]}" if span else "")

    @property
    def status(self) -> dict[str, Any]:
        """The server's, before the first run."""
        status: dict[str, Any] = self.document["server"]["status"]
        return status

    @property
    def off_mode(self) -> OffMode:
        """Without its parts, kv-only is warm."""
        mode: OffMode = "warm" if self.status.get("kv_only_fallback") else self.status["off_mode"]
        return mode

    def turnaround_s(self, profile: CostProfile) -> float:
        """What a request takes beside prefill and decoding: client, HTTP, the way to the scheduler and back.

        That is, what one took that found the server idle, less the prefill that the profile has for it.
        """
        idle = self.document["server"]["idle_request"]
        prefill_s = float(profile.prefill_s(idle["prompt_tokens"], self.off_mode))
        return max(0.0, float(idle["e2e_s"]) - prefill_s)

    @property
    def num_void(self) -> int:
        return len(self.document["runs"]) - len(self.runs)

    def policy_sha256(self, arm: str) -> str:
        """Of the file whose policy decided in an arm, in `steer` the server's own; empty where none did."""
        known = self.document["policies"] | {"steer": self.status.get("policy_sha256")}
        return str(known.get(arm) or "")

    def check(self, profile: CostProfile, acceptance: GivenAcceptance) -> None:
        """UserError unless the simulation can mean the same server and the same arrays."""
        check_server(self.status, self.source, profile, acceptance, self.work.options["domains"])

    def simulated(
        self,
        arm: str,
        profile: CostProfile,
        acceptance: GivenAcceptance,
        policies: Mapping[str, PolicyFile],
        host: Host = "quiet",
    ) -> list[tuple[Run, Figures]] | None:
        """Every run of an arm with its figures in simulation; None: the arm cannot be simulated.

        `policies` are files by their sha256. Where it is not known how busy the host was, as without overlap
        scheduling, runs are left out unless it is `quiet`.
        """
        policy = self._policy(arm, profile, policies)
        if policy is None:
            return None
        runs = [run for run in self.runs if run["arm"] == arm]
        if host != "quiet":
            known = self._shared_hosts()
            runs = [run for run in runs if _place(run) in known]
        return self._simulated(policy, runs, profile, acceptance, host) if runs else []

    def _simulated(
        self,
        policy: Policy,
        runs: Sequence[Run],
        profile: CostProfile,
        acceptance: GivenAcceptance,
        host: Host,
    ) -> list[tuple[Run, Figures]]:
        lists, places = self._lists(runs)
        quiet = ServerOptions(
            off_mode=self.off_mode,
            lag=1 if self.document["server"]["disable_overlap_schedule"] else 2,
            turnaround_s=self.turnaround_s(profile),
        )
        options = [quiet] * len(lists)
        if host != "quiet":
            options = [_on_host(quiet, each, profile) for each in self._hosts(runs, places, host)]
        bank = acceptance.bank(self.work.options["domains"])
        metrics = evaluate(policy, SimulatedEngine(lists, bank, profile, options))
        columns = {name: getattr(metrics, name).tolist() for name in (*FIGURES, WASTED)}
        for name in ("e2e_mean_s", "ttft_mean_s"):  # as the client sees them
            columns[name] = [seconds + quiet.turnaround_s for seconds in columns[name]]
        figures = [{name: column[place] for name, column in columns.items()} for place in places]
        known = [{name: value for name, value in row.items() if math.isfinite(value)} for row in figures]
        return list(zip(runs, known, strict=True))

    def _hosts(self, runs: Sequence[Run], places: Sequence[int], host: Host) -> list[HostTime]:
        """Of each list; what its own runs do not say, all runs under that load do."""
        by_list: dict[int, list[Run]] = {}
        for run, place in zip(runs, places, strict=True):
            by_list.setdefault(place, []).append(run)
        shared = self._shared_hosts()
        found = []
        for _, mine in sorted(by_list.items()):
            theirs = shared[_place(mine[0])]
            found.append(HostTime.of(mine).or_else(theirs) if host == "own" else theirs)
        return found

    def _shared_hosts(self) -> dict[Place, HostTime]:
        """Of all runs under each load, whatever the arm; a load of which none says anything is left out."""
        served: dict[Place, list[Run]] = {}
        for run in self.runs:
            served.setdefault(_place(run), []).append(run)
        hosts = {place: HostTime.of(runs) for place, runs in served.items()}
        return {place: host for place, host in hosts.items() if host != UNKNOWN}

    def _lists(self, runs: Sequence[Run]) -> tuple[list[RequestList], list[int]]:
        """What is to be simulated, and which of it each run is: all turns of a load are one long list."""
        work, seeds = self.work, [run["seed"] for run in runs]
        if work.options.get("switchback"):
            work = Work.of(work.options | {"per_slot": max(TURNS_PER_SLOT, work.options["per_slot"] or 0)})
            seeds = [work.options["seed"]] * len(runs)
        loads = _loads_of(work)
        served = [(run["workload"], run["load"], seed) for run, seed in zip(runs, seeds, strict=True)]
        once = {place: i for i, place in enumerate(dict.fromkeys(served))}
        lists = [work.requests(loads[workload, load], seed) for workload, load, seed in once]
        return lists, [once[place] for place in served]

    def _policy(self, arm: str, profile: CostProfile, policies: Mapping[str, PolicyFile]) -> Policy | None:
        """A policy from a file prices by its own card, as it does on the server."""
        if arm == "off":
            return FixedK(profile.tiers, 0)
        if arm.startswith("fixed-"):
            return FixedK(profile.tiers, int(arm.removeprefix("fixed-")))
        if arm == "sglang-adaptive":
            return SglangRule(profile.tiers)
        file = policies.get(self.policy_sha256(arm))
        return None if file is None else load_policy(file)

    def _load(self, run: Run) -> Load:
        return _loads_of(self.work)[run["workload"], run["load"]]

    def _check_shape(self) -> None:
        """Touch all that is read later, so that what is missing or of another type is found now."""
        server, status = self.document["server"], self.status
        [int(k) for k in status["tiers"].split(",")]
        _ = status["off_mode"], server["disable_overlap_schedule"], self.document["policies"].keys()
        [float(server["idle_request"][name]) for name in ("e2e_s", "prompt_tokens")]
        [int(arm.removeprefix("fixed-")) for arm in self.document["arms"] if arm.startswith("fixed-")]
        HostTime.of(self.runs)
        turns = self.document["options"].get("switchback")
        [float(run[name]) for run in self.runs for name in (FIGURES[:1] if turns else FIGURES)]

    def _check_lists(self) -> None:
        """UserError unless the lists are those that were served: a file of lengths may have changed."""
        served = {(run["workload"], run["load"], run["seed"]): run for run in self.runs}
        for run in served.values():
            load = self._load(run)
            found = fingerprint(self.work.requests(load, run["seed"]))
            if found != run["list"]:
                raise UserError(
                    f"{self.source}: {load.label}, seed {run['seed']}: found list {found}, allowed: "
                    f"{run['list']}, which was served: have its files changed?"
                )


def _place(run: Run) -> Place:
    return run["workload"], run["load"]


def _on_host(options: ServerOptions, host: HostTime, profile: CostProfile) -> ServerOptions:
    """The same server on a host that is so busy."""
    return replace(
        options,
        host_round_s=tuple(1e-3 * host.round_ms(k) for k in profile.tiers),
        host_prefill_s=1e-3 * (host.prefill_ms or 0.0),
    )


def _loads_of(work: Work) -> dict[tuple[str, float | None], Load]:
    return {(load.workload, load.value): load for load in work.loads}


def check_server(
    status: Mapping[str, Any],
    source: str,
    profile: CostProfile,
    acceptance: GivenAcceptance,
    domains: Sequence[str],
) -> None:
    """UserError unless server, profile and files mean the same tiers and arrays; `domains` are served."""
    replayed = str(status.get("acceptance_replay", ""))
    if not replayed:
        raise UserError(
            f"{source}: replays no recorded acceptance: start it with `draftdial serve --replay-acceptance`"
        )
    acceptance.check(replayed, source, domains)
    tiers = [int(k) for k in status["tiers"].split(",")]
    if tiers != list(profile.tiers):
        raise UserError(f"{source}: tiers: found {tiers}, allowed: {list(profile.tiers)}, of {profile.name}")
