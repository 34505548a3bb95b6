"""Whoever competes: policies described so that a worker process can make them, for many cells at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.features import Features
from draftdial.controller.learned import LearnedPolicy
from draftdial.controller.oracle import Clairvoyant, Informed
from draftdial.controller.policy import Policy
from draftdial.controller.policy_file import PolicyFile, load_policy, read
from draftdial.controller.policy_weights import network_of
from draftdial.controller.rule_cards import rule_from_card
from draftdial.controller.rules import FixedK, Threshold
from draftdial.controller.sglang_rule import DEFAULT_CONFIG, SglangRule
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine
from draftdial.envs.suite import Cell

Card = Mapping[str, Any]


@dataclass(frozen=True)
class Server:
    """The server that everybody drives.

    Raises:
        UserError: the profile has no times of its off mode.
    """

    profile: CostProfile
    options: ServerOptions

    def __post_init__(self) -> None:
        self.profile.check_off_mode(self.options.off_mode)


class Contender(Protocol):
    """Something that chooses k, described so that a worker can make it."""

    @property
    def num_variants(self) -> int:
        """Policies that run side by side, each on a copy of the batch."""
        ...

    def options(self, options: ServerOptions) -> ServerOptions:
        """Of the server it drives."""
        ...

    def policy(self, engine: SimulatedEngine, server: Server, row_cells: Sequence[Cell]) -> Policy:
        """It, for the rows of every variant one after another; `row_cells` are those of one variant."""
        ...


@dataclass(frozen=True)
class Rules:
    """Rules by their cards: for each workload, a card for each variant. All of them have the same kind."""

    cards: Mapping[str, Sequence[Card]]

    @property
    def num_variants(self) -> int:
        return len(next(iter(self.cards.values())))

    def options(self, options: ServerOptions) -> ServerOptions:
        return options

    def policy(self, engine: SimulatedEngine, server: Server, row_cells: Sequence[Cell]) -> Policy:
        cards = [self.cards[cell.workload][v] for v in range(self.num_variants) for cell in row_cells]
        return _stacked(cards, server)


@dataclass(frozen=True)
class Reference:
    """A rule that sees what no server can see."""

    name: Literal["informed", "clairvoyant"]
    num_variants: int = 1

    def options(self, options: ServerOptions) -> ServerOptions:
        return options

    def policy(self, engine: SimulatedEngine, server: Server, row_cells: Sequence[Cell]) -> Policy:
        return Informed(engine) if self.name == "informed" else Clairvoyant(engine)


@dataclass(frozen=True)
class NoSpeculation:
    """A server built without a draft model."""

    num_variants: int = 1

    def options(self, options: ServerOptions) -> ServerOptions:
        return replace(options, off_mode="nospec")

    def policy(self, engine: SimulatedEngine, server: Server, row_cells: Sequence[Cell]) -> Policy:
        return FixedK(engine.tiers, 0)


@dataclass(frozen=True)
class Exported:
    """A policy file, as it would run on this server."""

    data: bytes
    num_variants: int = 1

    def options(self, options: ServerOptions) -> ServerOptions:
        return options

    def policy(self, engine: SimulatedEngine, server: Server, row_cells: Sequence[Cell]) -> Policy:
        return deployed(read(self.data), server)


def deployed(file: PolicyFile, server: Server) -> Policy:
    """The policy of a file, with the costs and the kind of k = 0 of `server` instead of those it names.

    It is what exporting the policy for this server would give; where they agree, it is the file's own. Raises
    UserError if the file is damaged.
    """
    load_policy(file)
    card, off_mode = file.card, server.options.off_mode
    if card["kind"] != "learned":
        return rule_from_card(card["rule"], card["tiers"], server.profile, off_mode)
    limits = card["limits"]
    features = Features(
        server.profile, off_mode, ttft_limit_s=limits["ttft_s"], tpot_limit_s=limits["tpot_s"]
    )
    column_of = {feature.name: column for column, feature in enumerate(features.table)}
    columns = [column_of[entry["name"]] for entry in card["features"]]
    return LearnedPolicy(features, network_of(file.tensors, columns, len(features.table)))


def _stacked(cards: Sequence[Card], server: Server) -> Policy:
    """One policy whose row i follows `cards[i]`."""
    tiers, profile, off_mode = server.profile.tiers, server.profile, server.options.off_mode
    if all(card == cards[0] for card in cards):
        return rule_from_card(cards[0], tiers, profile, off_mode)
    if cards[0]["kind"] == "sglang-adaptive":
        return SglangRule(tiers, [card.get("config") or DEFAULT_CONFIG for card in cards])
    if cards[0]["kind"] == "fixed":
        return Threshold(tiers, np.array([card["k"] for card in cards]), profile.max_running)
    fields_of_rows = {name: np.array([card[name] for card in cards]) for name in cards[0] if name != "kind"}
    return rule_from_card({"kind": cards[0]["kind"], **fields_of_rows}, tiers, profile, off_mode)
