"""The exported policy: one `.safetensors` file, its card as JSON in the header.

Nothing in it is executed, and loading proves that the policy computes here what it computed where it
was made. `docs/policy-file.md` describes the format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.features import Features
from draftdial.controller.files import atomic_write, sha256_of
from draftdial.controller.golden import replay_policy
from draftdial.controller.learned import LearnedPolicy
from draftdial.controller.policy import Policy
from draftdial.controller.policy_card import Card, canonical, check_card, check_format, refuse
from draftdial.controller.policy_weights import check_golden, check_tensors, network_of
from draftdial.controller.rule_cards import rule_from_card

MAX_HEADER_BYTES = 4 << 20
MAX_FILE_BYTES = 16 << 20

_METADATA_KEY = "draftdial"


@dataclass(frozen=True, eq=False)
class PolicyFile:
    """A policy file that has been read and checked."""

    card: Card
    tensors: dict[str, NDArray[Any]]
    """Weights of a learned policy (see `Network`) and its golden vectors; empty for a rule."""
    data: bytes
    """The file itself."""
    source: str
    """Opens every complaint: the path it was read from."""

    @property
    def policy_id(self) -> str:
        """The short name of the file's bytes, shown wherever the policy runs."""
        return sha256_of(self.data)[:12]

    def profile(self) -> CostProfile:
        """The costs the policy reckons with.

        Raises:
            UserError: they are not those of its off mode, or not whole.
        """
        profile = CostProfile.from_document(
            self.card["cost_profile"]["document"], f"{self.source}: cost_profile"
        )
        if self.card["off_mode"] not in profile.off_modes:
            known = ", ".join(mode for mode in profile.off_modes if mode != "nospec")
            refuse(self.source, "off_mode", self.card["off_mode"], f"{known}, those of its cost profile")
        return profile


def pack(card: Card, tensors: dict[str, NDArray[Any]]) -> bytes:
    """The file of this content; the same bytes for the same content."""
    card = {**card, "content_sha256": _content_sha256(card, tensors)}
    return save_tensors(tensors, {_METADATA_KEY: canonical(card)})


def write(path: str | Path, file: PolicyFile) -> None:
    """Write `file` whole or not at all."""
    atomic_write(path, file.data)


def read(path_or_bytes: str | Path | bytes) -> PolicyFile:
    """The policy file there, checked field by field.

    Raises:
        UserError: not a policy file, damaged, made for another version, or a field of it is wrong.
    """
    if isinstance(path_or_bytes, bytes):
        source, data = "policy file", path_or_bytes
    else:
        source, data = str(path_or_bytes), _file_bytes(Path(path_or_bytes))
    card = _card(data, source)
    check_format(card, source)
    try:
        tensors = load_tensors(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{source}: not a readable .safetensors file: {error}") from None
    stated = card.pop("content_sha256", None)
    if stated != _content_sha256(card, tensors):
        refuse(source, "content_sha256", stated, "the hash of the content, so the file is damaged")
    check_card(card, source)
    if card["kind"] == "learned":
        check_tensors(tensors, len(card["features"]), len(card["tiers"]), source)
    return PolicyFile(card, tensors, data, source)


def load_policy(policy: PolicyFile | str | Path | bytes) -> Policy:
    """The policy in a file, after it has given every golden answer.

    Raises:
        UserError: as `read`, or the policy does not compute what it did where it was made.
    """
    file = policy if isinstance(policy, PolicyFile) else read(policy)
    return _learned(file) if file.card["kind"] == "learned" else _rule(file)


def features_of(card: Card, profile: CostProfile) -> Features:
    """What the learned policy of a checked card sees, priced by `profile`."""
    limits = card["limits"]
    return Features(profile, card["off_mode"], ttft_limit_s=limits["ttft_s"], tpot_limit_s=limits["tpot_s"])


def _learned(file: PolicyFile) -> LearnedPolicy:
    card, profile = file.card, file.profile()
    if tuple(card["tiers"]) != profile.tiers:
        refuse(file.source, "tiers", card["tiers"], f"{list(profile.tiers)}, those of its cost profile")
    features = features_of(card, profile)
    column_of = {feature.name: column for column, feature in enumerate(features.table)}
    columns = [column_of[entry["name"]] for entry in card["features"]]
    check_golden(file.tensors, features, columns, file.source)
    features.reset(1)
    return LearnedPolicy(features, network_of(file.tensors, columns, len(features.table)))


def _rule(file: PolicyFile) -> Policy:
    card, profile = file.card, file.profile()
    if not set(card["tiers"]) <= set(profile.tiers):
        refuse(file.source, "tiers", card["tiers"], f"some of {list(profile.tiers)}, its cost profile's")
    try:
        rule = rule_from_card(card["rule"], card["tiers"], profile, card["off_mode"])
        answers = replay_policy(rule, profile.max_running, profile.tiers[-1]).tolist()
    except (UserError, OverflowError) as error:
        raise UserError(f"{file.source}: rule: {error}") from None
    for round_id, (here, stated) in enumerate(zip(answers, card["golden"]["k"], strict=True)):
        if here != stated:
            refuse(file.source, f"golden.k[{round_id}]", stated, f"{here}, what the rule gives here")
    rule.reset(1)
    return rule


def _content_sha256(card: Card, tensors: dict[str, NDArray[Any]]) -> str:
    """The hash of everything a file says but this hash."""
    parts = [canonical(card).encode()]
    for name in sorted(tensors):
        tensor = tensors[name]
        parts += [canonical([name, tensor.dtype.name, list(tensor.shape)]).encode(), tensor.tobytes()]
    return sha256_of(b"\n".join(parts))


def _file_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot read the policy file: {error.strerror}") from None


def _card(data: bytes, source: str) -> Card:
    """The card in the header: 8 bytes of length, then a JSON object."""
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{source}: file: found more than {MAX_FILE_BYTES} bytes, allowed: at most that")
    length = int.from_bytes(data[:8], "little")
    if len(data) >= 8 and length > MAX_HEADER_BYTES:
        refuse(source, "header length", length, f"at most {MAX_HEADER_BYTES}, so this is no policy file")
    if len(data) < 8 + length:
        refuse(source, "file length", len(data), f"{8 + length} or more bytes, so the file is cut short")
    metadata = _json_object(data[8 : 8 + length], f"{source}: header").get("__metadata__")
    text = metadata.get(_METADATA_KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{source}: header: no {_METADATA_KEY} metadata, so this is no policy file")
    return _json_object(text, f"{source}: card")


def _json_object(text: bytes | str, what: str) -> Card:
    try:
        value = json.loads(text)
        canonical(value)  # refuses what JSON has no word for, such as NaN
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what}: not JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(value, dict):
        raise UserError(f"{what}: found {type(value).__name__}, allowed: a JSON object")
    return value
