"""Which recorded acceptance each request of a server walks: the same as the simulator would give it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draftdial.controller.acceptance_file import AcceptedDrafts, read_requests

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_DOMAIN_TAG = re.compile(r"#acceptance=([^#:]+):([0-9a-f]{16})$")
_ROW_TAG = re.compile(r"#row=(\d{1,9})$")
_BEHIND_DOMAINS = " (sha256 "


def tagged_rid(name: str, domain: str, request_hash: int) -> str:
    """A request id that makes a server walk the arrays of the simulated request of this domain and hash."""
    return f"{name}#acceptance={domain}:{request_hash:016x}"


class Walk(NamedTuple):
    """Where a request finds its arrays."""

    domain: str
    request_hash: int
    first_row: int
    """Of the arrays of all domains, counted in their order."""


class AcceptanceArrays:
    """Recorded requests by domain. Every rank of a server reads the same files, so all agree.

    A request is known by its id alone:

    - `...#acceptance=DOMAIN:HASH`, HASH the 16 hexadecimal digits of a simulated request's `request_hash`:
      array by array the walk of `envs.kernels`;
    - `...#row=17`: array 17 of all domains first, counted in their order, then others of its domain;
    - any other: by a hash of the id. So is one whose tag names a domain or a row that is not there.
    """

    def __init__(self, domains: dict[str, list[AcceptedDrafts]]) -> None:
        self._domains = domains
        self._owners = [name for name, arrays in domains.items() for _ in arrays]
        self._arrays = [array for arrays in domains.values() for array in arrays]
        self._first_rows = {name: self._owners.index(name) for name in domains}
        digest = hashlib.sha256(repr([(name, len(arrays)) for name, arrays in domains.items()]).encode())
        for array in self._arrays:
            digest.update(len(array).to_bytes(8, "little") + array.tobytes())
        self.sha256 = digest.hexdigest()
        """Of all that decides what is accepted."""

    @classmethod
    def read(cls, files: Iterable[tuple[str, Path]]) -> AcceptanceArrays:
        """The recorded requests of every (domain, file).

        Raises:
            UserError: a file is missing, malformed, or has fewer than two usable requests.
        """
        return cls({name: read_requests(path) for name, path in files})

    def __str__(self) -> str:
        named = ", ".join(f"{len(arrays)} of {name}" for name, arrays in self._domains.items())
        return f"{named}{_BEHIND_DOMAINS}{self.sha256[:12]})"

    def is_misnamed(self, rid: str) -> bool:
        """Does the id end in a tag that names nothing here?"""
        return bool(_DOMAIN_TAG.search(rid) or _ROW_TAG.search(rid)) and self._tagged(rid) is None

    def walk(self, rid: str) -> Walk:
        """The arrays of the request with this id."""
        tagged = self._tagged(rid)
        if tagged is not None:
            return tagged
        request_hash = _hash_of(rid)
        row = mix(request_hash) % len(self._arrays)
        return Walk(self._owners[row], request_hash, row)

    def accepted(self, rid: str, num_positions: int) -> AcceptedDrafts:
        """Shape `(num_positions,)`: drafts accepted, uncapped, by a round after 1, 2, ... output tokens.

        Where an array ends the next one of the same domain begins, as in the simulator.
        """
        walk = self.walk(rid)
        parts = [self._arrays[walk.first_row]]
        known = len(parts[0])
        while known < num_positions:
            row = self._row(walk.domain, walk.request_hash, len(parts))
            parts.append(self._arrays[row])
            known += len(parts[-1])
        return np.concatenate(parts)[:num_positions]

    def _tagged(self, rid: str) -> Walk | None:
        named = _DOMAIN_TAG.search(rid)
        if named is not None and named[1] in self._domains:
            request_hash = int(named[2], 16)
            return Walk(named[1], request_hash, self._row(named[1], request_hash, 0))
        numbered = _ROW_TAG.search(rid)
        if numbered is not None and int(numbered[1]) < len(self._arrays):
            row = int(numbered[1])
            return Walk(self._owners[row], _hash_of(rid), row)
        return None

    def _row(self, domain: str, request_hash: int, hop: int) -> int:
        """The hop-th array of a request: `envs.kernels._array_of`."""
        place = mix(request_hash + hop * _GOLDEN) % len(self._domains[domain])
        return self._first_rows[domain] + place


def replayed_domains(description: str) -> tuple[str, ...]:
    """The domains that a server's `acceptance_replay` names; none where that text is empty or was cut."""
    named, is_whole, _ = description.partition(_BEHIND_DOMAINS)
    return tuple(part.partition(" of ")[2] for part in named.split(", ")) if is_whole else ()


def mix(x: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood 2014), as in `envs.kernels`, on Python's integers."""
    x = (x + _GOLDEN) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def _hash_of(rid: str) -> int:
    """64 bits that are the same in every process, unlike Python's own hash of a text."""
    return int.from_bytes(hashlib.sha256(rid.encode()).digest()[:8], "little")
