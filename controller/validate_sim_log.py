"""What a server recorded of its own traffic, and the same requests under the same policy in simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.policy import Policy
from draftdial.controller.policy_file import PolicyFile, load_policy
from draftdial.controller.rules import FixedK
from draftdial.controller.signals import FloatArray
from draftdial.controller.validate_sim_report import Cell, cell_of
from draftdial.engine_patch.log_format import RESTARTS
from draftdial.engine_patch.log_reader import RecordedLog, read_log
from draftdial.engine_patch.log_replay import policy_of
from draftdial.envs.evaluate import run
from draftdial.envs.logged_workload import LoggedAcceptance, LoggedTraffic, logged_requests
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine


def log_cells(path: Path, profile: CostProfile) -> list[Cell]:
    """The one cell of a decision log: an open loop, with the arrivals and the acceptance it recorded.

    Raises:
        UserError: no log of one policy in one mode that shows its acceptance and has the profile's tiers.
    """
    log = read_log(path)
    if log.tiers != profile.tiers:
        raise UserError(
            f"{path}: tiers: found {list(log.tiers)}, allowed: {list(profile.tiers)}, of {profile.name}"
        )
    traffic = LoggedTraffic.read(path)
    if not traffic.has_acceptance:
        raise UserError(f"{traffic.describe_acceptance()}; allowed: a log that shows more of it")
    name, policy, file = _policy(log)
    options = ServerOptions(
        off_mode=file.card["off_mode"], lag=log.header["lag"], max_running=log.header.get("max_running")
    )
    requests = logged_requests(traffic)
    engine = SimulatedEngine([requests], LoggedAcceptance(traffic).bank(0), profile, options)
    results = run(policy, engine)
    counted = results.counted[0]
    served = _figures(traffic.arrival_s, traffic.finish_s, traffic.output_tokens, counted)
    simulated = _figures(results.arrival_s[0], results.finish_s[0], results.output_tokens[0], counted)
    return [cell_of(name, f"log:{traffic.name}", None, served, simulated)]


def _policy(log: RecordedLog) -> tuple[str, Policy, PolicyFile]:
    """Who decided all the while."""
    restarts = [control for control in log.controls if control.kind in RESTARTS]
    if len(restarts) != 1:
        found = f"{len(restarts)} starts and deploys of a policy"
        raise UserError(f"{log.source}: found {found}, allowed: one, at its beginning")
    file = policy_of(log, restarts[0])
    policy = load_policy(file)
    ran = log.rounds["acted_k"]
    if (ran == log.rounds["policy_k"]).all():
        return str(file.card["name"]), policy, file
    if (ran == ran[0]).all():
        return f"fixed-{ran[0]}", FixedK(log.tiers, int(ran[0])), file
    raise UserError(
        f"{log.source}: mode or k was changed on the way, allowed: steered, or one k, all the while"
    )


def _figures(
    arrival_s: FloatArray, finish_s: FloatArray, output_tokens: NDArray[np.integer[Any]], counted: np.ndarray
) -> dict[str, float]:
    """Of the counted requests: a log knows no first tokens, so their tokens count whole."""
    arrival_s, finish_s = arrival_s[counted], finish_s[counted]
    window_s = float(finish_s.max() - arrival_s.min())
    return {
        "output_tok_s": float(output_tokens[counted].sum()) / window_s,
        "e2e_mean_s": float(np.mean(finish_s - arrival_s)),
    }
