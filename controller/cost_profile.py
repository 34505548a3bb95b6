"""What a decode round of one server costs: a measured table, looked up by batch, context and k.

Training reads it in the simulator, serving reads it to price the tiers before every round, so both
see the same numbers. `docs/profiles.md` describes the JSON files.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from draftdial.controller.errors import UserError
from draftdial.controller.profile_document import (
    KV_ONLY_PREFILL,
    KV_ONLY_ROW,
    check_document,
    parse_document,
)
from draftdial.controller.round_table import cell_knots, fold, no_less, prefill_knots
from draftdial.controller.signals import FloatArray, IntArray

OffMode = Literal["warm", "skip", "kv-only", "nospec"]
"""Whose time column 0 holds: off with the draft's KV kept, off without, off with its KV kept without running
the draft, or no speculation built in."""

SPECULATIVE_OFF_MODES: tuple[OffMode, ...] = ("warm", "skip", "kv-only")
"""Those of a server that can speculate."""
OFF_MODE_OF_ROW: dict[str, OffMode] = {
    "nospec": "nospec",
    "off-warm": "warm",
    "off-skip": "skip",
    KV_ONLY_ROW: "kv-only",
}


@dataclass(frozen=True, eq=False)
class CostProfile:
    """A checked profile. Arrays are read-only; times are seconds.

    Every cell of a row is a piecewise-linear function of context with `num_knots` knots; cells with
    fewer measured ones are continued along their last line.
    """

    name: str
    tiers: tuple[int, ...]
    """Values of k, ascending from 0."""
    labels: tuple[str, ...]
    """A name for each tier, for tables and plots."""
    draft_tokens: tuple[int, ...]
    """Tokens one request verifies in a round, per tier: k + 1 in a chain, more in a tree."""
    captured_batches: IntArray
    """Shape `(num_batches,)`, ascending: batch sizes that have CUDA graphs."""
    bucket_of_batch: IntArray
    """Shape `(max_running + 1,)`: which captured batch serves n requests (the largest one beyond it)."""
    rows: tuple[str, ...]
    """Row names: nospec, off-warm, off-skip, off-kv-only if known, then k=... for each tier above 0."""
    knot_context: FloatArray
    """Shape `(num_rows, num_batches, num_knots)`: mean context tokens per request, ascending."""
    knot_round_s: FloatArray
    """Shape `(num_rows, num_batches, num_knots)`: seconds of a round there."""
    eager_factor: float
    """Beyond the largest captured batch b, time grows by `1 + eager_factor * (n / b - 1)`, ..."""
    eager_extra_s: float
    """... plus this for launching without a graph."""
    switch_s: float
    """Time a round loses when its k differs from the one before."""
    max_running: int
    kv_pool_tokens: int
    chunked_prefill_tokens: int
    document: dict[str, Any]
    """The JSON as read. Treat as read-only; `to_document` copies it."""
    _round_tables: dict[str, FloatArray]
    _running_last: dict[str, FloatArray]
    """The same tables as `(num_pieces, num_tiers, max_running + 1)`."""
    _prefill_knots: dict[str, tuple[FloatArray, FloatArray]]

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """The profile shipped as `name_or_path`, or the one in the JSON file of that path.

        Raises:
            UserError: no such profile or file, or a field of it is wrong.
        """
        shipped = shipped_profiles()
        looks_like_path = (
            isinstance(name_or_path, Path) or "/" in name_or_path or name_or_path[-5:] == ".json"
        )
        path = Path(name_or_path) if looks_like_path else shipped.get(str(name_or_path))
        if path is None:
            raise UserError(
                f"profile: found {name_or_path}, allowed: {', '.join(shipped)} or a path ending in .json"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise UserError(f"{path}: cannot read the profile: {reason}") from None
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, source: str) -> Self:
        """The profile in `text`; `source` names it in error messages."""
        return cls._from_checked(parse_document(text, source))

    @classmethod
    def from_document(cls, document: dict[str, Any], source: str) -> Self:
        """The profile a document describes (one embedded in a policy file, say); it is copied."""
        check_document(document, source)
        return cls._from_checked(copy.deepcopy(document))

    @classmethod
    def _from_checked(cls, document: dict[str, Any]) -> Self:
        tiers = tuple(int(tier["k"]) for tier in document["tiers"])
        captured = np.array(document["captured_batches"], np.int64)
        running = np.arange(document["max_running"] + 1)
        bucket = np.minimum(np.searchsorted(captured, running), len(captured) - 1)
        knot_context, knot_round_s = cell_knots(document["rows"])
        profile = cls(
            name=document["name"],
            tiers=tiers,
            labels=tuple(tier["label"] for tier in document["tiers"]),
            draft_tokens=tuple(tier["draft_tokens"] for tier in document["tiers"]),
            captured_batches=captured,
            bucket_of_batch=bucket,
            rows=tuple(row["row"] for row in document["rows"]),
            knot_context=knot_context,
            knot_round_s=knot_round_s,
            eager_factor=float(document["eager"]["factor_per_batch"]),
            eager_extra_s=document["eager"]["extra_ms"] / 1e3,
            switch_s=document["switch_ms"] / 1e3,
            max_running=document["max_running"],
            kv_pool_tokens=document["kv_pool_tokens"],
            chunked_prefill_tokens=document["chunked_prefill_tokens"],
            document=document,
            _round_tables={},
            _running_last={},
            _prefill_knots={kind: prefill_knots(pairs) for kind, pairs in document["prefill"].items()},
        )
        table = fold(
            knot_context, knot_round_s, captured, bucket, profile.eager_factor, profile.eager_extra_s
        )
        for off_mode in profile.off_modes:
            by_running = np.ascontiguousarray(table[..., profile._columns(off_mode)])
            profile._round_tables[off_mode] = by_running
            profile._running_last[off_mode] = np.ascontiguousarray(by_running.transpose(1, 2, 0))
        tables = (*profile._round_tables.values(), *profile._running_last.values())
        arrays = (captured, bucket, knot_context, knot_round_s)
        for array in (
            *arrays,
            *tables,
            *(knots for pair in profile._prefill_knots.values() for knots in pair),
        ):
            array.setflags(write=False)
        return profile

    def round_s(
        self, num_running: IntArray | int, mean_context_tokens: IntArray | int, off_mode: OffMode
    ) -> FloatArray:
        """Seconds a decode round takes at every tier.

        A batch is padded to the next captured one. The padding costs what a request costs but
        reads no KV, so the table is read at the context `mean * running / captured`. Past the largest
        captured batch the round runs without a graph (see `eager_factor`).

        Args:
            num_running: Shape `(num_servers,)`, or one number; 0 taken as 1, more than `max_running` as that.
            mean_context_tokens: The same shape, 0 or more, integer or not.
            off_mode: Which row column 0 holds.

        Returns:
            Shape `(num_servers, num_tiers)`, laid out tier by tier; `(num_tiers,)` for one number.
        """
        if isinstance(num_running, int):  # on a server's critical path: one piece of memory, not many
            pieces = self._of(self._round_tables, off_mode)[max(0, min(num_running, self.max_running))]
        else:
            pieces = self._of(self._running_last, off_mode).take(num_running, axis=2, mode="clip")
        seconds: FloatArray = pieces[1] * mean_context_tokens
        seconds += pieces[0]
        for hinge in range(2, len(pieces) - 1, 2):
            beyond = mean_context_tokens - pieces[hinge]
            np.maximum(beyond, 0.0, out=beyond)
            beyond *= pieces[hinge + 1]
            seconds += beyond
        np.maximum(seconds, pieces[-1], out=seconds)
        return seconds.T

    def round_table(self, off_mode: OffMode) -> FloatArray:
        """The table behind `round_s`, for kernels; shape `(max_running + 1, num_pieces, num_tiers)`.

        With n running requests of mean context c, tier i takes, in seconds,

            max(T[n, -1, i], T[n, 0, i] + T[n, 1, i] * c + sum over hinges h of slope_h * max(c - at_h, 0))

        where hinge h has `at_h = T[n, 2 + 2h, i]`, `slope_h = T[n, 3 + 2h, i]` and there are
        `(num_pieces - 3) // 2` of them. Padding and the eager cliff are folded in.
        """
        return self._of(self._round_tables, off_mode)

    def prefill_s(
        self, num_tokens: ArrayLike, off_mode: OffMode, *, leaves_draft_out: bool = False
    ) -> FloatArray:
        """Seconds to prefill a batch of `num_tokens` prompt tokens in all (any shape); none cost nothing.

        Args:
            num_tokens: Of all prompts.
            off_mode: The server's.
            leaves_draft_out: As behind a round of `kv-only` that did. Where no such prefill was measured, and
                in any other off mode, it costs as much as one that runs the draft.
        """
        tokens = np.asarray(num_tokens)
        seconds = np.interp(tokens, *self.prefill_knots(off_mode, leaves_draft_out=leaves_draft_out))
        return np.asarray(seconds * (tokens > 0))

    def prefill_knots(
        self, off_mode: OffMode, *, leaves_draft_out: bool = False
    ) -> tuple[FloatArray, FloatArray]:
        """Tokens and seconds, each `(num_knots,)`, for `numpy.interp`: constant below the first knot.

        Arguments as of `prefill_s`.
        """
        if off_mode == "kv-only" and leaves_draft_out and KV_ONLY_PREFILL in self._prefill_knots:
            return self._prefill_knots[KV_ONLY_PREFILL]
        return self._prefill_knots["nospec" if off_mode == "nospec" else "speculative"]

    def scaled(self, name: str, row_factors: ArrayLike, prefill_factor: float) -> Self:
        """This profile with other times: a different server of the same make, for training on many.

        Args:
            name: The new profile's name.
            row_factors: Above 0, broadcast to `(num_rows, num_batches)`: multiply the round times.
            prefill_factor: Above 0: multiplies all prefill times.
        """
        factors = np.broadcast_to(np.asarray(row_factors, np.float64), self.knot_round_s.shape[:2])
        document = copy.deepcopy(self.document)
        document["name"] = name
        document["description"] = f"{self.name} with its times scaled. {self.document['description']}"
        for row, row_factor in zip(document["rows"], factors.tolist(), strict=True):
            for cell, factor in zip(row["cells"], row_factor, strict=True):
                cell["round_ms"] = [time * factor for time in cell["round_ms"]]
                cell["inferred"] = True
        for knots in document["prefill"].values():
            knots[:] = [[tokens, time * prefill_factor] for tokens, time in knots]
        check_document(document, name)
        return self._from_checked(document)

    def no_faster_than(self, host_ms: Mapping[int, float], off_mode: OffMode) -> Self:
        """This profile on a host that is busy for so long in each round, however soon the GPU is done.

        Args:
            host_ms: By k; what it has no k for stays as it is.
            off_mode: Which of the rows of k = 0 is meant.
        """
        least_ms = {f"off-{off_mode}" if k == 0 else f"k={k}": ms for k, ms in host_ms.items()}
        document = copy.deepcopy(self.document)
        told = ", ".join(f"{row} {ms:.2f} ms" for row, ms in least_ms.items())
        document["description"] = f"On a host that is busy in each round: {told}. {document['description']}"
        for row in document["rows"]:
            for cell in row["cells"] if row["row"] in least_ms else ():
                knots = no_less(cell["context_tokens"], cell["round_ms"], least_ms[row["row"]])
                cell["context_tokens"], cell["round_ms"] = knots
        return self._from_checked(document)

    def to_document(self) -> dict[str, Any]:
        """The JSON document; `from_document` gives exactly this profile again."""
        return copy.deepcopy(self.document)

    @property
    def off_modes(self) -> list[OffMode]:
        """Those whose times it has, in the order of their rows."""
        return [OFF_MODE_OF_ROW[row] for row in self.rows if row in OFF_MODE_OF_ROW]

    def check_off_mode(self, off_mode: OffMode) -> None:
        """UserError unless it has times of this off mode."""
        self._of(self._round_tables, off_mode)

    def _columns(self, off_mode: OffMode) -> IntArray:
        """Rows that make up the tiers in this off mode, shape `(num_tiers,)`."""
        return np.array([self.off_modes.index(off_mode), *range(len(self.off_modes), len(self.rows))])

    def _of(self, tables: dict[str, FloatArray], off_mode: OffMode) -> FloatArray:
        """The one of `tables` for this off mode.

        Raises:
            UserError: the profile has no times of it.
        """
        table = tables.get(off_mode)
        if table is None:
            raise UserError(
                f"profile {self.name}: found no row for off mode {off_mode}, needed: off-{off_mode}, as "
                f"`draftdial profile` measures it on a server with --off-mode {off_mode}"
            )
        return table


def shipped_profiles() -> dict[str, Path]:
    """Name and file of each profile that comes with the package."""
    # Found, not imported: importing draftdial.envs may pull in what only training has installed.
    spec = importlib.util.find_spec("draftdial.envs")
    folders = spec.submodule_search_locations if spec else None
    return {
        path.stem: path
        for folder in folders or ()
        for path in sorted(Path(folder, "profiles").glob("*.json"))
    }
