"""The card of a policy file: a JSON object that says what the policy is and needs, every field checked.

`docs/policy-file.md` describes the fields. A complaint names the field, what was found and what is allowed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from draftdial.controller.belief import PRIOR_ACCEPTANCE, PRIOR_SAMPLES
from draftdial.controller.cost_profile import SPECULATIVE_OFF_MODES
from draftdial.controller.errors import UserError
from draftdial.controller.features import HALF_LIVES_SAMPLES, feature_table
from draftdial.controller.files import sha256_of
from draftdial.controller.golden import NUM_ROUNDS, NUM_SERVERS
from draftdial.controller.rule_cards import FIELDS as RULE_FIELDS

FORMAT = {"major": 1, "minor": 0}
KINDS = ("learned", *RULE_FIELDS)

Card = dict[str, Any]

_MAX_K = 255  # far beyond any draft; a card must not make the reader build tables without end


@dataclass(frozen=True)
class Training:
    """Where a policy comes from, enough to make it again."""

    config: str
    """The resolved configuration, as text."""
    command: str
    seed: int
    hashes: Mapping[str, str]
    """SHA-256 of each input: profile, traces, acceptance."""
    versions: Mapping[str, str]
    """Version of each package that took part."""

    def card(self) -> Card:
        return {**asdict(self), "config_sha256": sha256_of(self.config.encode())}


def belief_constants() -> Card:
    """What the belief of this version is built with; a policy trained on another is refused."""
    return {
        "half_lives_samples": list(HALF_LIVES_SAMPLES),
        "prior_acceptance": PRIOR_ACCEPTANCE,
        "prior_samples": PRIOR_SAMPLES,
    }


def canonical(value: object) -> str:
    """The one JSON text of a value: hashes are taken over it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def plain(value: object) -> Any:
    """`value` in JSON's own types: NumPy scalars and arrays unpacked, what is not finite as null."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def shown(value: object) -> str:
    """`value` on one line, short enough for an error message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def refuse(source: str, field: str, found: object, allowed: str) -> NoReturn:
    """The one error of a policy file."""
    raise UserError(f"{source}: {field}: found {shown(found)}, allowed: {allowed}")


def check_format(card: Card, source: str) -> None:
    """Refuse a file of another major version; a newer minor one only says more."""
    check = _CardCheck(card, source)
    version = check.object("format")
    for part in FORMAT:
        value = version.get(part)
        if type(value) is not int or value < 0:
            refuse(source, f"format.{part}", value, "a whole number of 0 or more")
    if version["major"] != FORMAT["major"]:
        which = "newer" if version["major"] > FORMAT["major"] else "older"
        refuse(source, "format.major", version["major"], f"{FORMAT['major']} (made for a {which} draftdial)")


def check_card(card: Card, source: str) -> None:
    """Refuse the first field that is missing or wrong. The profile and the rule check themselves."""
    check = _CardCheck(card, source)
    check.one_of("kind", KINDS)
    check.matching("name", r"[A-Za-z0-9][A-Za-z0-9._:+=-]{0,63}", "1 to 64 letters, digits and ._:+=-")
    check.one_of("off_mode", SPECULATIVE_OFF_MODES)
    check.tiers()
    profile = check.object("cost_profile")
    document = profile.get("document")
    if not isinstance(document, dict):
        refuse(source, "cost_profile.document", document, "an object")
    if profile.get("sha256") != sha256_of(canonical(document).encode()):
        refuse(source, "cost_profile.sha256", profile.get("sha256"), "the hash of cost_profile.document")
    check.fallback()
    check.object("evaluation")
    if card["kind"] == "learned":
        check.training()
        check.limits()
        check.belief()
        check.features()
    else:
        if card.get("training") is not None:
            check.training()
        check.rule()
        check.answers()


class _CardCheck:
    """The checks of one card; methods are named for what they check."""

    def __init__(self, card: Card, source: str) -> None:
        self.card = card
        self.source = source

    def value(self, field: str) -> Any:
        if field not in self.card:
            raise UserError(f"{self.source}: {field}: missing from the policy's card")
        return self.card[field]

    def object(self, field: str) -> Card:
        value = self.value(field)
        if not isinstance(value, dict):
            refuse(self.source, field, value, "an object")
        return value

    def one_of(self, field: str, allowed: Sequence[str]) -> None:
        if self.value(field) not in allowed:
            refuse(self.source, field, self.card[field], ", ".join(allowed))

    def matching(self, field: str, pattern: str, allowed: str) -> None:
        value = self.value(field)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            refuse(self.source, field, value, allowed)

    def tiers(self) -> None:
        tiers = self.value("tiers")
        numbers = isinstance(tiers, list) and all(_is_count(k) and k <= _MAX_K for k in tiers)
        if not numbers or not tiers or any(a >= b for a, b in pairwise(tiers)):
            refuse(self.source, "tiers", tiers, f"whole numbers from 0 to {_MAX_K}, ascending")

    def fallback(self) -> None:
        fallback = self.object("fallback")
        if type(fallback.get("k")) is not int or fallback["k"] not in self.card["tiers"]:
            refuse(self.source, "fallback.k", fallback.get("k"), f"one of {self.card['tiers']}")
        if not _is_count(fallback.get("batch")):
            refuse(self.source, "fallback.batch", fallback.get("batch"), "a whole number of 0 or more")

    def training(self) -> None:
        training = self.object("training")
        for key, kind, allowed in (
            ("config", str, "text"),
            ("command", str, "text"),
            ("seed", int, "a whole number"),
            ("hashes", dict, "an object"),
            ("versions", dict, "an object"),
        ):
            if type(training.get(key)) is not kind:
                refuse(self.source, f"training.{key}", training.get(key), allowed)
        if training.get("config_sha256") != sha256_of(training["config"].encode("utf-8", "replace")):
            refuse(self.source, "training.config_sha256", training.get("config_sha256"), "the hash of config")

    def limits(self) -> None:
        limits = self.object("limits")
        for key in ("ttft_s", "tpot_s"):
            value = limits.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
                refuse(self.source, f"limits.{key}", value, "seconds above 0, below 1e9")

    def belief(self) -> None:
        belief = self.object("belief")
        for key, allowed in belief_constants().items():
            if belief.get(key) != allowed:
                refuse(self.source, f"belief.{key}", belief.get(key), f"{allowed}, as this version has it")

    def features(self) -> None:
        entries = self.value("features")
        if not isinstance(entries, list) or not entries:
            refuse(self.source, "features", entries, "a list of one or more features")
        offered = {feature.name: asdict(feature) for feature in feature_table(self.card["tiers"])}
        names: set[str] = set()
        for i, entry in enumerate(entries):
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                refuse(self.source, f"features[{i}]", entry, "an object with name, unit, scale and transform")
            name = entry["name"]
            where = f"features[{i}] {shown(name)}"
            if name not in offered:
                refuse(self.source, f"{where}: name", name, _similar(name, offered))
            if name in names:
                refuse(self.source, f"{where}: name", name, "each feature once")
            names.add(name)
            for key in ("unit", "scale", "transform"):
                if entry.get(key) != offered[name][key]:
                    refuse(self.source, f"{where}: {key}", entry.get(key), shown(offered[name][key]))

    def rule(self) -> None:
        rule = self.object("rule")
        if rule.get("kind") != self.card["kind"]:
            refuse(self.source, "rule.kind", rule.get("kind"), f"{shown(self.card['kind'])}, the file's kind")
        for key, value in rule.items():
            if isinstance(value, list):
                refuse(self.source, f"rule.{key}", value, "one value, since a file holds one rule")

    def answers(self) -> None:
        answers = self.object("golden").get("k")
        rows = answers if isinstance(answers, list) else []
        whole = len(rows) == NUM_ROUNDS and all(
            isinstance(row, list) and len(row) == NUM_SERVERS and all(_is_count(k) for k in row)
            for row in rows
        )
        if not whole:
            refuse(self.source, "golden.k", answers, f"{NUM_ROUNDS} lists of {NUM_SERVERS} values of k")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _similar(name: str, offered: Mapping[str, Card]) -> str:
    """The members of the feature's own family, or else the families."""
    family = name.split("/")[0]
    same = [other for other in offered if other.split("/")[0] == family]
    return ", ".join(same or dict.fromkeys(other.split("/")[0] for other in offered))
