"""Acceptance recorded with a real pair by this project, which ships the arrays (docs/acceptance.md)."""

from __future__ import annotations

import gzip
import json
from importlib.resources import files

import numpy as np

from draftdial.controller.acceptance_file import MIN_POSITIONS, AcceptedDrafts
from draftdial.controller.files import sha256_of
from draftdial.envs.acceptance import AcceptanceBank
from draftdial.envs.replayed_acceptance import bank_of_arrays

SHIPPED_RECORDINGS = ("smollm2-135m-eagle3", "smollm2-135m-eagle3-t0.8")
"""SmolLM2-135M-Instruct with an EAGLE-3 draft, greedy and at temperature 0.8."""


class ShippedAcceptance:
    """One of `SHIPPED_RECORDINGS` by name: the same bank for every seed, as replayed files have."""

    def __init__(self, name: str) -> None:
        self.name = name
        data = files("draftdial.envs").joinpath("acceptance_data", f"{name}.jsonl.gz").read_bytes()
        self.sha256 = sha256_of(data)
        header, *lines = map(json.loads, gzip.decompress(data).splitlines())
        self.header = header
        """What was recorded, how, and with what."""
        requests: dict[str, list[AcceptedDrafts]] = {domain: [] for domain in header["domains"]}
        for line in lines:
            if len(line["acc"]) > MIN_POSITIONS:  # the first position is prefill's
                requests[line["domain"]].append(np.array(line["acc"][1:], np.uint8) - np.uint8(1))
        self.domains = tuple(requests)
        self._bank = bank_of_arrays(requests)

    def bank(self, seed: int) -> AcceptanceBank:
        """The recorded bank, the same for every seed: requests differ by the arrays their hashes pick."""
        return self._bank
