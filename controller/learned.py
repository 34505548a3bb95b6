"""The learned policy: a small network over the features, in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.features import Features
from draftdial.controller.probe import Probe
from draftdial.controller.signals import IntArray, RoundOutcome, RoundSignals

Float32Array = NDArray[np.float32]


class Network:
    """Two tanh layers, then one linear layer over them and the observation's advice columns.

    The advice skips the hidden layers: a network whose hidden part is silent is goodput-greedy on
    the belief, and what it learns is a correction to that.

    Tensors (float32): `hidden.0.weight (H, F)`, `hidden.0.bias (H,)`, `hidden.1.weight (H, H)`,
    `hidden.1.bias (H,)`, `logits.weight (T, H + A)`, `logits.bias (T,)` for F features, A of them
    advice (the last A), H hidden units and T tiers.
    """

    def __init__(self, tensors: Mapping[str, Float32Array]) -> None:
        self.tensors = {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}
        self._double, self._single = self._layers(np.float64), self._layers(np.float32)
        self._num_hidden = len(self.tensors["hidden.1.bias"])
        self._num_advice = self.tensors["logits.weight"].shape[1] - self._num_hidden

    def logits(self, observation: Float32Array) -> Float32Array:
        """(num_servers, num_tiers) from observations of shape (num_servers, num_features).

        One server's are worked out in double precision: libraries add up in different orders on different
        processors, and ranks of one server must round to the same logits all the same.
        """
        first, second, third = self._double if len(observation) == 1 else self._single
        hidden = np.dot(observation, first[0])
        hidden += first[1]
        np.tanh(hidden, out=hidden)
        last = np.empty((len(observation), self._num_hidden + self._num_advice), hidden.dtype)
        top = last[:, : self._num_hidden]
        np.add(np.dot(hidden, second[0]), second[1], out=top)
        np.tanh(top, out=top)
        last[:, self._num_hidden :] = observation[:, observation.shape[1] - self._num_advice :]
        logits: NDArray[Any] = np.dot(last, third[0])
        logits += third[1]
        return logits.astype(np.float32, copy=False)

    def _layers(self, dtype: type[np.floating[Any]]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Weights, transposed, and biases."""
        return [
            (
                np.ascontiguousarray(self.tensors[f"{name}.weight"].T, dtype),
                self.tensors[f"{name}.bias"].astype(dtype),
            )
            for name in ("hidden.0", "hidden.1", "logits")
        ]


class LearnedPolicy:
    """`Policy`: features, network, the tier of the largest logit (the smallest k among equals).

    Once in a while a round runs one tier deeper than that (see `Probe`).
    """

    def __init__(self, features: Features, network: Network) -> None:
        self.features = features
        self.network = network
        self.tiers = features.tiers
        self._k = np.array(self.tiers, np.int64)
        self._probe = Probe(len(self.tiers))

    def reset(self, num_servers: int) -> None:
        """Forget everything; `num_servers` rows follow."""
        self.features.reset(num_servers)
        self._probe.reset(num_servers)

    def decide(self, signals: RoundSignals) -> IntArray:
        """(num_servers,) k for the coming round.

        Raises:
            ArithmeticError: the network gave NaN, which has no largest logit.
        """
        logits = self.network.logits(self.features.compute(signals))
        if np.count_nonzero(logits != logits):
            raise ArithmeticError("the network gave NaN")
        tier = self._probe.applied(logits.argmax(axis=1), self.features.round_s)
        self.features.chose(tier)
        k: IntArray = self._k.take(tier)
        return k

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a finished round."""
        self.features.observe(outcome)
