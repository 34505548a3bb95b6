"""What is done to a server's policy while it serves: each kind of change, and what must come of it."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from swinging_load import post, status_of

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.policy_export import rule_file
from draftdial.controller.policy_file import PolicyFile
from draftdial.controller.rules import Threshold
from draftdial.engine_patch.control_keys import FORCE_K_KEY, MODE_KEY, NO_FORCED_K, policy_key

FAULT_KEY, GOLDEN_KEY, DIVERGE_KEY = "probe_fault", "probe_golden", "probe_diverge"
"""Control keys of the tests' plugin, `engine_probe`."""
FAULTS = (1, 2, 3)


class WrongOutcome(AssertionError):
    """A change was granted that must be refused, or refused that must be granted, or left a trace."""


class PolicyChanges:
    """Changes drawn at random, one at a time."""

    def __init__(
        self,
        url: str,
        files: Sequence[PolicyFile],
        misfits: Sequence[PolicyFile],
        *,
        num_faulty_ranks: int,
        hang_s: float,
    ) -> None:
        """
        Args:
            url: Of the server.
            files: Policies that it takes.
            misfits: Sound policies that it must refuse.
            num_faulty_ranks: Ranks to inject faults on, from the first; 0 where the test's plugin is missing.
            hang_s: So long without an answer, or without a fault showing that was injected, is a hang.
        """
        self.url = url
        self.files, self.misfits = files, misfits
        self.num_faulty_ranks, self.hang_s = num_faulty_ranks, hang_s
        self.made = {"deploy": 0, "mode": 0, "force_k": 0, "broken policy": 0}
        self.num_faults = 0
        self._weights = [5.0, 3.0, 2.0, 1.0]
        self._makers: list[Callable[[random.Random], None]] = [
            self._deploy,
            self._set_mode,
            self._force_k,
            self._offer_broken,
        ]
        if num_faulty_ranks:
            self.made |= {"golden vectors fail on one rank": 0, "exception on all ranks": 0}
            self._weights += [0.5, 0.5]
            self._makers += [self._fail_on_one_rank, self._fail_on_all_ranks]
        self._not_yet = list(range(len(self._makers)))

    def make(self, rng: random.Random) -> None:
        """One change; the first ones are one of each kind.

        Raises:
            WrongOutcome: it did not come out as it must.
        """
        if self._not_yet:
            chosen = self._not_yet.pop()
        else:
            [chosen] = rng.choices(range(len(self._makers)), self._weights)
        self._makers[chosen](rng)
        self.made[list(self.made)[chosen]] += 1

    def settle(self) -> None:
        """Leave the server steering by a sound policy, the first one."""
        self._granted({policy_key(self.files[0].data): 1})
        self._granted({MODE_KEY: 0})
        self.force_k(NO_FORCED_K)

    def force_k(self, k: int) -> None:
        """Force a tier, or none."""
        self._granted({FORCE_K_KEY: k})

    def diverge(self) -> None:
        """Let rank 1 differ from now on: the status must show it and no change be granted any more.

        Raises:
            WrongOutcome: nobody noticed.
        """
        self._send({DIVERGE_KEY: 1})
        if self._status()["ranks_agree"] != 0 or self._send({FORCE_K_KEY: NO_FORCED_K}):
            raise WrongOutcome("a rank that had decided otherwise was not noticed")

    def _deploy(self, rng: random.Random) -> None:
        self._granted({policy_key(rng.choice(self.files).data): 1})

    def _set_mode(self, rng: random.Random) -> None:
        """Most of the time the policy steers."""
        self._granted({MODE_KEY: rng.choices((0, 1, 2), (10, 1, 1))[0]})

    def _force_k(self, rng: random.Random) -> None:
        tiers = [int(k) for k in self._status()["tiers"].split(",")]
        self.force_k(rng.choice(tiers) if rng.random() < 0.2 else NO_FORCED_K)

    def _offer_broken(self, rng: random.Random) -> None:
        whole = rng.choice(self.files).data
        flipped = bytearray(whole)
        flipped[-rng.randrange(1, 200)] ^= 0xFF
        self._refused(
            rng.choice(
                [
                    {policy_key(whole[: -rng.randrange(1, 500)]): 1},
                    {policy_key(bytes(flipped)): 1},
                    {policy_key(whole)[:-40]: 1},
                    {MODE_KEY: 9},
                    {FORCE_K_KEY: 250},
                    *({policy_key(misfit.data): 1} for misfit in self.misfits),
                ]
            )
        )

    def _fail_on_one_rank(self, rng: random.Random) -> None:
        """All ranks must keep the old policy, and say which of them would not have the new one."""
        rank = rng.randrange(self.num_faulty_ranks)
        self._granted({GOLDEN_KEY: rank})
        learned = [file for file in self.files if "golden.k" in file.tensors]
        try:
            reason = self._refused({policy_key(rng.choice(learned).data): 1})
        finally:
            self._granted({GOLDEN_KEY: -1})
        if not reason.startswith(f"rank {rank} of {self.num_faulty_ranks} refused") or "golden" not in reason:
            raise WrongOutcome(f"golden vectors fail on rank {rank}: {reason}")

    def _fail_on_all_ranks(self, rng: random.Random) -> None:
        """The policy's next decision fails on every rank; a threshold rule decides until the next deploy."""
        self._granted({policy_key(rng.choice(self.files).data): 1})  # one that is still asked
        self._granted({FAULT_KEY: rng.choice(FAULTS)})
        deadline = time.monotonic() + self.hang_s
        while not self._status()["fallback"]:
            if time.monotonic() > deadline:
                raise WrongOutcome("an injected fault led to no fallback")
            time.sleep(0.05)
        self.num_faults += 1
        time.sleep(rng.random())
        self._deploy(rng)
        if fallback := self._status()["fallback"]:
            raise WrongOutcome(f"a deploy left the fallback: {fallback}")

    def _granted(self, values: dict[str, int]) -> None:
        if not self._send(values):
            raise WrongOutcome(f"{_named(values)}: refused: {self._status()['last_control']}")

    def _refused(self, values: dict[str, int]) -> str:
        """The server's reason."""
        before = self._status()
        if self._send(values):
            raise WrongOutcome(f"{_named(values)}: granted")
        after = self._status()
        for name in ("policy_sha256", "mode", "forced_k", "deploys"):
            if before[name] != after[name]:
                raise WrongOutcome(
                    f"{_named(values)}: refused, yet {name} went from {before[name]} to {after[name]}"
                )
        reason: str = after["last_control"]
        return reason

    def _send(self, values: dict[str, int]) -> bool:
        answer = post(f"{self.url}/set_internal_state", {"server_args": values}, self.hang_s)
        return all(answer if isinstance(answer, list) else [answer["updated"]])

    def _status(self) -> dict[str, Any]:
        return status_of(self.url, self.hang_s)


def misfit(served: PolicyFile) -> PolicyFile:
    """A sound rule that a server built for `served` must refuse: its largest tier is one more."""
    document = copy.deepcopy(served.profile().document)
    largest = max(tier["k"] for tier in document["tiers"])
    names = {f"k={largest}": f"k={largest + 1}"}
    for tier in document["tiers"]:
        if tier["k"] == largest:
            tier |= {"k": largest + 1, "draft_tokens": largest + 2}
    for row in document["rows"]:
        row["row"] = names.get(row["row"], row["row"])
    for source in document["provenance"]:
        source["covers"] = [names.get(name, name) for name in source["covers"]]
    profile = CostProfile.from_document(document, "misfit")
    rule = Threshold(profile.tiers, k=largest + 1, batch=8)
    return rule_file(rule, profile, "warm", name="misfit", fallback=rule)


def _named(values: dict[str, int]) -> str:
    return ", ".join(f"{key[:80]} {value}" for key, value in values.items())
