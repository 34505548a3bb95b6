"""The tensors of a learned policy's file: weights, and golden vectors that prove they are understood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.errors import UserError
from draftdial.controller.features import Features
from draftdial.controller.golden import NUM_ROUNDS, NUM_SERVERS, replay_features
from draftdial.controller.learned import Float32Array, Network
from draftdial.controller.policy_card import refuse
from draftdial.controller.signals import IntArray

WEIGHTS = (
    "hidden.0.weight",
    "hidden.0.bias",
    "hidden.1.weight",
    "hidden.1.bias",
    "logits.weight",
    "logits.bias",
)
TOLERANCE = 1e-5
"""Absolute and relative: how far a golden number may be off, since libraries round and sum differently."""

MAX_HIDDEN = 512
"""Units of a hidden layer. A decision takes some 20 µs with 64, 55 with 512, 130 with 1,024."""

_MIN_GOLDEN = 32
_MAX_GOLDEN = 64
_CLEAR_MARGIN = 1e-3  # a lead no rounding turns over

Tensors = Mapping[str, NDArray[Any]]


class SelectedNetwork(Network):
    """A network over some of the features, in an order of its own; its advice comes last there too."""

    def __init__(self, tensors: Mapping[str, Float32Array], columns: Sequence[int]) -> None:
        super().__init__(tensors)
        self.columns = np.array(columns, np.int64)
        """Shape `(F,)`: which features of the full table the network takes."""

    def logits(self, observation: Float32Array) -> Float32Array:
        """(num_servers, num_tiers) from observations of every feature."""
        return super().logits(observation.take(self.columns, axis=1))


def columns_of(network: Network, num_features: int) -> IntArray:
    """Which of the `num_features` features of the full table the network takes, in its order."""
    return network.columns if isinstance(network, SelectedNetwork) else np.arange(num_features)


def network_of(tensors: Tensors, columns: Sequence[int], num_features: int) -> Network:
    """The network in checked tensors, for observations of every one of `num_features` features."""
    weights = {name: tensors[name] for name in WEIGHTS}
    if list(columns) == list(range(num_features)):
        return Network(weights)
    return SelectedNetwork(weights, columns)


def golden_tensors(features: Features, network: Network) -> dict[str, NDArray[Any]]:
    """Observations of the golden history whose best tier is clear, with their logits and k.

    `golden.row` says which observations of `replay_features` they are. Resets `features`.
    """
    everything = replay_features(features)
    logits = _row_by_row(network, everything)
    runner_up, best = np.sort(logits, axis=1)[:, -2:].T
    rows = np.flatnonzero(best - runner_up > _CLEAR_MARGIN)
    if len(rows) < _MIN_GOLDEN:
        rows = np.sort(np.argsort(runner_up - best, kind="stable")[:_MIN_GOLDEN])
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), _MAX_GOLDEN)).astype(np.int64)]
    columns = columns_of(network, len(features.table))
    return {
        "golden.row": rows,
        "golden.observation": np.ascontiguousarray(everything[rows][:, columns]),
        "golden.logits": logits[rows],
        "golden.k": np.array(features.tiers, np.int64)[logits[rows].argmax(axis=1)],
    }


def check_golden(tensors: Tensors, features: Features, columns: Sequence[int], source: str) -> None:
    """Refuse unless the features, the network and its choice come out here as they did at export.

    Resets `features`.
    """
    observation = replay_features(features)[tensors["golden.row"]][:, columns]
    network = Network({name: tensors[name] for name in WEIGHTS})
    logits = _row_by_row(network, tensors["golden.observation"])
    names = [features.table[column].name for column in columns]
    tier_names = [f"k={k}" for k in features.tiers]
    for field, stated, here, column_names in (
        ("golden.observation", tensors["golden.observation"], observation, names),
        ("golden.logits", tensors["golden.logits"], logits, tier_names),
    ):
        wrong = ~np.isclose(here, stated, rtol=TOLERANCE, atol=TOLERANCE)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            found, computed = float(stated[row, column]), float(here[row, column])
            refuse(
                source,
                f"tensor {field}[{row}] {column_names[column]}",
                found,
                f"{computed:.6g} within {TOLERANCE}, what this version computes",
            )
    k = np.array(features.tiers, np.int64)[logits.argmax(axis=1)]
    wrong_k = np.flatnonzero(k != tensors["golden.k"])
    if wrong_k.size:
        row = wrong_k[0]
        refuse(
            source,
            f"tensor golden.k[{row}]",
            int(tensors["golden.k"][row]),
            f"{k[row]}, what the network gives here",
        )


def check_tensors(tensors: Tensors, num_features: int, num_tiers: int, source: str) -> None:
    """Refuse weights and golden vectors that are missing, misshapen or not finite."""
    check = _TensorCheck(tensors, source)
    num_hidden = check.array("hidden.0.bias", "float32", 1).size
    num_inputs = check.array("logits.weight", "float32", 2).shape[1]
    num_golden = check.array("golden.k", "int64", 1).size
    most_golden = NUM_ROUNDS * NUM_SERVERS
    if num_hidden > MAX_HIDDEN:
        allowed = f"[up to {MAX_HIDDEN}]: with more hidden units a decision takes too long for a server"
        refuse(source, "tensor hidden.0.bias: shape", [num_hidden], allowed)
    if not num_hidden <= num_inputs <= num_hidden + num_features:
        allowed = f"[{num_tiers}, {num_hidden} to {num_hidden + num_features}]"
        refuse(source, "tensor logits.weight: shape", list(tensors["logits.weight"].shape), allowed)
    if not _MIN_GOLDEN <= num_golden <= most_golden:
        refuse(source, "tensor golden.k: shape", [num_golden], f"[{_MIN_GOLDEN} to {most_golden}]")
    for name, dtype, shape in (
        ("hidden.0.weight", "float32", (num_hidden, num_features)),
        ("hidden.1.weight", "float32", (num_hidden, num_hidden)),
        ("hidden.1.bias", "float32", (num_hidden,)),
        ("logits.weight", "float32", (num_tiers, num_inputs)),
        ("logits.bias", "float32", (num_tiers,)),
        ("golden.row", "int64", (num_golden,)),
        ("golden.observation", "float32", (num_golden, num_features)),
        ("golden.logits", "float32", (num_golden, num_tiers)),
    ):
        found = check.array(name, dtype, len(shape)).shape
        if found != shape:
            refuse(source, f"tensor {name}: shape", list(found), str(list(shape)))
    rows = tensors["golden.row"]
    if rows.min() < 0 or rows.max() >= most_golden:
        refuse(source, "tensor golden.row", [int(rows.min()), int(rows.max())], f"0 to {most_golden - 1}")


def _row_by_row(network: Network, observations: Float32Array) -> Float32Array:
    """The logits as a server computes them; in one batch, they depend on the threads of the BLAS."""
    return np.concatenate([network.logits(observation) for observation in observations[:, None]])


class _TensorCheck:
    def __init__(self, tensors: Tensors, source: str) -> None:
        self.tensors = tensors
        self.source = source

    def array(self, name: str, dtype: str, num_dimensions: int) -> NDArray[Any]:
        """The tensor `name`, or a complaint."""
        if name not in self.tensors:
            found = ", ".join(sorted(self.tensors)) or "no tensors"
            raise UserError(f"{self.source}: tensor {name}: missing, found {found}")
        array = self.tensors[name]
        if array.dtype.name != dtype:
            refuse(self.source, f"tensor {name}: dtype", array.dtype.name, dtype)
        if array.ndim != num_dimensions:
            refuse(self.source, f"tensor {name}: shape", list(array.shape), f"{num_dimensions} dimensions")
        if not np.isfinite(array).all():
            row = int(np.argwhere(~np.isfinite(array))[0][0])
            refuse(self.source, f"tensor {name}", f"NaN or infinity in row {row}", "finite numbers")
        return array
