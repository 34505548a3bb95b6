"""The JSON document of a cost profile: every field checked, each complaint naming the field.

`docs/profiles.md` describes the fields. Nothing is computed here; `CostProfile` does that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from draftdial.controller.errors import UserError

SCHEMA = "draftdial.profile/1"
OFF_ROWS = ("nospec", "off-warm", "off-skip", "off-kv-only")
KV_ONLY_ROW = OFF_ROWS[-1]
"""Where it was measured: a profile may lack it."""
PREFILLS = ("nospec", "speculative")
KV_ONLY_PREFILL = "kv-only"
"""Prefills that leave out the draft: a profile with `KV_ONLY_ROW` may have their times, too."""
UNITS = {"time": "ms", "context": "tokens"}

_TOO_LARGE = 1e12
_MOST_RUNNING = 65_536  # the round table has a row for each
_TEXTS = ("name", "description", "hardware", "model", "draft", "engine", "engine_version", "date")
_COUNTS = ("max_running", "kv_pool_tokens", "chunked_prefill_tokens")
_KEYS = (
    "schema",
    *_TEXTS,
    "units",
    "provenance",
    "tiers",
    "captured_batches",
    "rows",
    "eager",
    "prefill",
    "switch_ms",
    *_COUNTS,
)
_NEEDS_PROVENANCE = ("captured_batches", "eager", "prefill", "switch_ms", *_COUNTS)


def row_names(tiers: Iterable[int], *, has_kv_only: bool) -> tuple[str, ...]:
    """The rows a profile with these values of k has, in order: the ways to be off, then each k > 0."""
    off_rows = OFF_ROWS if has_kv_only else OFF_ROWS[:-1]
    return (*off_rows, *(f"k={k}" for k in tiers if k > 0))


def parse_document(text: str, source: str) -> dict[str, Any]:
    """The checked document in `text`; `source` (a path, or what held the text) opens every complaint."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{source}: line {error.lineno}, column {error.colno}: not JSON ({error.msg})"
        ) from None
    except (ValueError, RecursionError):
        raise UserError(f"{source}: not JSON that can be read: a number too long or lists too deep") from None
    check_document(document, source)
    checked: dict[str, Any] = document
    return checked


def check_document(document: object, source: str) -> None:
    """Raise `UserError` at the first field that is missing, unknown or out of range."""
    _DocumentCheck(source).document(document)


class _DocumentCheck:
    """Walks one document; the methods are named for what they check and take the field's path."""

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, path: str, found: object, allowed: str) -> NoReturn:
        shown = json.dumps(found, default=str)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise UserError(f"{self.source}: {path}: found {shown}, allowed: {allowed}")

    def document(self, document: object) -> None:
        fields = self.fields(document, "document", _KEYS)
        if fields["schema"] != SCHEMA:
            self.fail("schema", fields["schema"], f'"{SCHEMA}"')
        for key in _TEXTS:
            self.text(fields[key], key)
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"]):
            self.fail("name", fields["name"], "lower-case letters and digits in words joined by -")
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", fields["date"]):
            self.fail("date", fields["date"], "YYYY-MM-DD")
        if fields["units"] != UNITS:
            self.fail("units", fields["units"], json.dumps(UNITS))
        for key in _COUNTS:
            self.count(fields[key], key)
        if fields["max_running"] > _MOST_RUNNING:
            self.fail("max_running", fields["max_running"], f"at most {_MOST_RUNNING}")
        rows = fields["rows"] if isinstance(fields["rows"], list) else []
        has_kv_only = any(isinstance(row, dict) and row.get("row") == KV_ONLY_ROW for row in rows)
        names = row_names(self.tiers(fields["tiers"]), has_kv_only=has_kv_only)
        batches = self.items(fields["captured_batches"], "captured_batches", at_least=1)
        for i, batch in enumerate(batches):
            self.count(batch, f"captured_batches[{i}]")
        self.ascending(batches, "captured_batches")
        self.rows(fields["rows"], names, batches)
        eager = self.fields(fields["eager"], "eager", ("factor_per_batch", "extra_ms"))
        for key in ("factor_per_batch", "extra_ms"):
            self.number(eager[key], f"eager.{key}", zero_allowed=True)
        optional = (KV_ONLY_PREFILL,) if has_kv_only else ()
        for kind, knots in self.fields(fields["prefill"], "prefill", PREFILLS, optional).items():
            self.prefill(knots, f"prefill.{kind}")
        self.number(fields["switch_ms"], "switch_ms", zero_allowed=True)
        self.provenance(fields["provenance"], (*names, *_NEEDS_PROVENANCE))

    def tiers(self, value: object) -> list[int]:
        ks = []
        for i, item in enumerate(self.items(value, "tiers", at_least=2)):
            path = f"tiers[{i}]"
            tier = self.fields(item, path, ("k", "label", "draft_tokens"))
            self.text(tier["label"], f"{path}.label")
            k = tier["k"]
            if i == 0 and (isinstance(k, bool) or k != 0):
                self.fail(f"{path}.k", k, "0, since the first tier is off")
            if i > 0:
                self.count(k, f"{path}.k")
            self.count(tier["draft_tokens"], f"{path}.draft_tokens")
            if tier["draft_tokens"] <= k:
                self.fail(
                    f"{path}.draft_tokens", tier["draft_tokens"], f"{k + 1} or more (k + 1 for a chain)"
                )
            ks.append(k)
        self.ascending(ks, "tiers[].k")
        return ks

    def rows(self, value: object, names: Sequence[str], batches: Sequence[int]) -> None:
        rows = self.items(value, "rows", at_least=1)
        found = [row.get("row") if isinstance(row, dict) else row for row in rows]
        if found != list(names):
            self.fail("rows[].row", found, f"exactly {', '.join(names)} in this order")
        for i, (row, name) in enumerate(zip(rows, names, strict=True)):
            self.fields(row, f"rows[{i}]", ("row", "cells"))
            path = f"rows[{i}] ({name}).cells"
            cells = self.items(row["cells"], path, at_least=1)
            if len(cells) != len(batches):
                self.fail(path, f"{len(cells)} cells", f"{len(batches)}, one for each captured batch")
            for j, (cell, batch) in enumerate(zip(cells, batches, strict=True)):
                self.cell(cell, f"{path}[{j}]", batch)

    def cell(self, value: object, path: str, batch: int) -> None:
        cell = self.fields(value, path, ("batch", "context_tokens", "round_ms"), ("inferred", "note"))
        if cell["batch"] != batch:
            self.fail(f"{path}.batch", cell["batch"], f"{batch}, the captured batch at this place")
        contexts = self.items(cell["context_tokens"], f"{path}.context_tokens", at_least=2)
        times = self.items(cell["round_ms"], f"{path}.round_ms", at_least=2)
        if len(times) != len(contexts):
            self.fail(f"{path}.round_ms", times, f"{len(contexts)} numbers, one for each of context_tokens")
        for i, context in enumerate(contexts):
            self.number(context, f"{path}.context_tokens[{i}]", zero_allowed=True)
        for i, time in enumerate(times):
            self.number(time, f"{path}.round_ms[{i}]")
        self.ascending(contexts, f"{path}.context_tokens")
        if not isinstance(cell.get("inferred", False), bool):
            self.fail(f"{path}.inferred", cell["inferred"], "true or false")
        self.text(cell.get("note", "none"), f"{path}.note")

    def prefill(self, value: object, path: str) -> None:
        knots = self.items(value, path, at_least=2)
        for i, knot in enumerate(knots):
            pair = self.items(knot, f"{path}[{i}]", at_least=2)
            if len(pair) != 2:
                self.fail(f"{path}[{i}]", pair, "a pair [tokens, ms]")
            self.number(pair[0], f"{path}[{i}][0]")
            self.number(pair[1], f"{path}[{i}][1]")
        self.ascending([knot[0] for knot in knots], f"{path}[][0]")
        if knots[-1][1] < knots[-2][1]:
            self.fail(f"{path}[{len(knots) - 1}][1]", knots[-1][1], f"{knots[-2][1]} or more: more tokens")

    def provenance(self, value: object, needed: Sequence[str]) -> None:
        covered: set[str] = set()
        for i, item in enumerate(self.items(value, "provenance", at_least=1)):
            path = f"provenance[{i}]"
            entry = self.fields(item, path, ("covers", "source", "measured", "inferred"))
            for key in ("source", "measured", "inferred"):
                self.text(entry[key], f"{path}.{key}")
            for name in self.items(entry["covers"], f"{path}.covers", at_least=1):
                if name not in needed:
                    self.fail(f"{path}.covers", name, f"any of {', '.join(needed)}")
                covered.add(name)
        for name in needed:
            if name not in covered:
                self.fail("provenance", sorted(covered), f"an entry that covers {name} too")

    def fields(
        self, value: object, path: str, required: Sequence[str], optional: Sequence[str] = ()
    ) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(path, value, f"an object with {', '.join(required)}")
        for key in required:
            if key not in value:
                where = key if path == "document" else f"{path}.{key}"
                raise UserError(f"{self.source}: {where}: missing, needed: {', '.join(required)}")
        for key in value:
            if key not in required and key not in optional:
                self.fail(path, f"unknown field {key}", ", ".join((*required, *optional)))
        return value

    def items(self, value: object, path: str, at_least: int) -> list[Any]:
        if not isinstance(value, list) or len(value) < at_least:
            self.fail(path, value, f"a list of {at_least} or more")
        return value

    def text(self, value: object, path: str) -> None:
        if not isinstance(value, str) or not value.strip():
            self.fail(path, value, "text that is not empty")

    def count(self, value: object, path: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < _TOO_LARGE:
            self.fail(path, value, "a whole number above 0, below 1e12")

    def number(self, value: object, path: str, zero_allowed: bool = False) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and (0 < value < _TOO_LARGE or (zero_allowed and value == 0))):  # type: ignore[operator]
            self.fail(path, value, f"a number {'of 0 or more' if zero_allowed else 'above 0'}, below 1e12")

    def ascending(self, values: Sequence[float], path: str) -> None:
        if any(right <= left for left, right in pairwise(values)):
            self.fail(path, list(values), "ascending values, none twice")
