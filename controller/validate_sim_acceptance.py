"""The recorded acceptance that a comparison is given, and whether a server replays just that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from draftdial.controller.acceptance_file import AcceptedDrafts, read_requests
from draftdial.controller.errors import UserError
from draftdial.engine_patch.acceptance_arrays import AcceptanceArrays, replayed_domains
from draftdial.envs.acceptance import AcceptanceBank
from draftdial.envs.replayed_acceptance import bank_of_arrays


class GivenAcceptance:
    """Files by domain."""

    def __init__(self, words: Sequence[str]) -> None:
        """`words` are `[DOMAIN=]FILE`, as `draftdial serve` reads them.

        Raises:
            UserError: there is none, or two of one domain.
        """
        if not words:
            raise UserError("--acceptance: none given, allowed: the files that the server replays")
        self._paths: dict[str, Path] = {}
        for word in words:
            domain, equals, path = word.partition("=")
            name, path = (domain, path) if equals else (Path(word).stem, word)
            if name in self._paths:
                raise UserError(f"--acceptance: found {name} twice, allowed: each domain once")
            self._paths[name] = Path(path)

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(self._paths)

    def check(self, replayed: str, source: str, domains: Sequence[str]) -> None:
        """UserError unless `source` replays, by its own word, what is here of each of its domains."""
        missing = [name for name in domains if name not in self._paths]
        if missing:
            raise UserError(
                f"--acceptance: found {', '.join(self.domains)}, allowed: {missing[0]}, too, of {source}"
            )
        own = [name for name in replayed_domains(replayed) if name in self._paths]
        sha256 = AcceptanceArrays(self._arrays_of(own)).sha256[:12]
        if sha256 not in replayed or not set(domains) <= set(own):
            raise UserError(
                f"--acceptance: found {', '.join(self.domains)}, of sha256 {sha256}, allowed: what {source} "
                f"replays: {replayed}"
            )

    def bank(self, domains: Sequence[str]) -> AcceptanceBank:
        """What the simulator walks; an index of a list is a place in `domains`."""
        return bank_of_arrays(self._arrays_of(domains))

    def _arrays_of(self, domains: Sequence[str]) -> dict[str, list[AcceptedDrafts]]:
        return {name: self._arrays[name] for name in domains}

    @cached_property
    def _arrays(self) -> dict[str, list[AcceptedDrafts]]:
        return {name: read_requests(path) for name, path in self._paths.items()}
