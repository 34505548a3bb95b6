"""What the profile of a measured server says about where its numbers come from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from draftdial.controller.cell_timings import HICCUP, WARM_UP_ROUNDS
from draftdial.controller.profile_document import KV_ONLY_PREFILL, KV_ONLY_ROW
from draftdial.controller.profile_measurements import APART


@dataclass(frozen=True)
class Provenance:
    """What `entries` tells of."""

    source: str
    """Command, date and versions."""
    grid: dict[str, Any]
    """That was asked for, as in the measurements file."""
    is_gpu: bool
    has_graphs: bool
    rows: Sequence[str]
    """All of the profile's."""
    measured: Sequence[int]
    """Batches."""
    captured: Sequence[int]
    apart: Collection[tuple[str, int]]
    """Row and batch whose repeats do not agree."""
    host_set: Collection[tuple[str, int]]
    """Row and batch whose time is the host's."""
    failures: Sequence[str]
    has_nospec: bool
    prefills: Collection[str]
    """Kinds that were measured."""

    def entries(self) -> list[dict[str, Any]]:
        """The document's `provenance`."""
        found = [
            self._rounds(),
            self._entry(
                ["captured_batches", "max_running", "kv_pool_tokens", "chunked_prefill_tokens"],
                "As the running server has them.",
                "Nothing."
                if self.has_graphs
                else "Captured batches: the server has no CUDA graphs, so the measured batches stand in.",
            ),
            self._entry(
                ["eager"],
                "Nothing: no round beyond the largest captured batch was run.",
                "Such a round grows in proportion to the batch, plus what the launch of the smallest prefill "
                "took the host.",
            ),
            self._prefill(),
            self._entry(
                ["switch_ms"],
                "Two tiers in turn, a round each, against both in steady state, of repeats the fastest.",
                "The value at the smallest batch holds for every batch; below 0 counts as 0.",
            ),
        ]
        if not self.has_nospec:
            missing = "no measurement: no server without speculation was given (--no-spec)"
            inferred = "All: the times of off-skip. A server without speculation is a bit faster."
            found.append(self._entry(["nospec"], "Nothing.", inferred) | {"source": missing})
        return found

    def _rounds(self) -> dict[str, Any]:
        clock = "GPU events" if self.is_gpu else "the host's clock (no GPU: says nothing of one)"
        missing = sorted(set(self.captured) - set(self.measured))
        apart, host_set = (
            ", ".join(f"{row} at batch {batch}" for row, batch in sorted(cells)) or "none"
            for cells in (self.apart, self.host_set)
        )
        return self._entry(
            [row for row in self.rows if row != "nospec" or self.has_nospec],
            f"Mean interval between the ends of consecutive decode rounds by {clock}, those above {HICCUP} "
            f"times the median left out; {self.grid['rounds']} rounds of each k on the same requests, in "
            f"random order, {WARM_UP_ROUNDS} dropped after each change; the batch alone and complete. "
            f"Repeats: {self.grid['repeats']}, each in another pass over all cells, and one more where they "
            f"were more than {APART - 1:.0%} apart, one failed, or the host set the time; the fastest "
            f"counts. Batches {_listed(self.measured)}. context_tokens is the mean over the rounds that were "
            "timed.",
            f"Captured batches without a measurement: {_listed(missing)}; they lie on the line between their "
            f"neighbours. Still apart, kept and noted: {apart}. "
            f"Set by the host, kept and noted: {host_set}. "
            f"Cells that failed: {'; '.join(self.failures) or 'none'}.",
        )

    def _prefill(self) -> dict[str, Any]:
        behind = " kv-only: behind a round that left the draft out, so that the prefill did, too."
        inferred = []
        if "nospec" not in self.prefills:
            inferred.append("nospec takes the speculative engine's times.")
        if KV_ONLY_ROW in self.rows and KV_ONLY_PREFILL not in self.prefills:
            inferred.append("Prefills that leave out the draft are priced as if they ran it.")
        return self._entry(
            ["prefill"],
            "Median interval from the end of a decode round to the end of the prefill behind it, so what "
            "a busy server's requests wait for. One prompt a prefill; of repeats the fastest."
            + (behind if KV_ONLY_PREFILL in self.prefills else ""),
            " ".join(inferred) or "Nothing.",
        )

    def _entry(self, covers: Sequence[str], measured: str, inferred: str) -> dict[str, Any]:
        return {"covers": list(covers), "source": self.source, "measured": measured, "inferred": inferred}


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) or "none"
