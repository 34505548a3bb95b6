"""What an episode is rewarded for. docs/learning.md says why each is shaped the way it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from draftdial.controller.policy import Policy
from draftdial.controller.signals import FloatArray, IntArray
from draftdial.envs.simulated_engine import SimulatedEngine

ObjectiveName = Literal["throughput", "latency", "slo"]
VIOLATION_S = 0.1
"""What a request outside its limits costs, in seconds of the server's time; it only sets a scale."""


class Objective(Protocol):
    """Turns what a step did into a reward; higher is better."""

    def begin(self, engine: SimulatedEngine, rows: IntArray) -> None:
        """New episodes start on `rows` of `engine`, whose requests are in place."""

    def exhausted(self, engine: SimulatedEngine) -> NDArray[np.bool_]:
        """Shape `(num_servers,)`: rows whose episodes must be cut, as nothing is known to reward them by."""

    def reward(self, engine: SimulatedEngine, gain_s: FloatArray) -> FloatArray:
        """Shape `(num_servers,)`, for the round just run.

        `gain_s`, of that shape, is the worth of the tokens the round was expected to commit minus the
        time it took.
        """


class Throughput:
    """`worth - time`: seconds gained on the par of the tokens that the round is expected to commit.

    A token's par depends on its request alone, so over a fixed list of requests the rewards add up to a
    constant minus the time. That is decode time and what prefills cost beyond the price of their tokens;
    the price of the tokens is the same for every policy and is left out. Taking the
    expectation over the coming flips, which the simulator knows and the policy never sees, removes most
    of the noise.
    """

    def begin(self, engine: SimulatedEngine, rows: IntArray) -> None:
        pass

    def reward(self, engine: SimulatedEngine, gain_s: FloatArray) -> FloatArray:
        return gain_s

    def exhausted(self, engine: SimulatedEngine) -> NDArray[np.bool_]:
        return np.zeros(engine.num_servers, np.bool_)


class Latency:
    """`-integral of (N - N_ref) dt`, N the requests in the system: mean E2E latency by Little's law.

    N_ref is what goodput-greedy has in the system at the same time in a twin of the episode's world,
    so it depends on nothing the policy does and only takes out what load alone explains. In units of
    the twin's mean N: a reward of -0.01 per second is one per cent more latency.
    """

    def __init__(
        self,
        make_twin: Callable[[IntArray], SimulatedEngine],
        reference: Policy,
        num_servers: int,
        num_rounds: int,
    ) -> None:
        """`make_twin(rows)` builds servers like those rows, requests included; `num_rounds` of it are run."""
        self._make_twin = make_twin
        self._reference = reference
        self._clock_s = np.zeros((num_servers, num_rounds + 1))
        self._in_system_s = np.zeros((num_servers, num_rounds + 1))
        self._reached_s = np.zeros(num_servers)
        self._mean_in_system = np.ones(num_servers)

    def begin(self, engine: SimulatedEngine, rows: IntArray) -> None:
        twin = self._make_twin(rows)
        self._reference.reset(twin.num_servers)
        clock_s = np.empty((len(rows), self._clock_s.shape[1]))
        in_system_s = np.zeros_like(clock_s)
        clock_s[:, 0] = twin.servers["clock_s"]
        for i in range(1, clock_s.shape[1]):
            for outcome in twin.run_round(self._reference.decide(twin.signals())):
                self._reference.observe(outcome)
            clock_s[:, i] = twin.servers["clock_s"]
            in_system_s[:, i] = twin.servers["step_in_system_s"]
        self._clock_s[rows] = clock_s
        self._in_system_s[rows] = in_system_s.cumsum(axis=1)
        self._mean_in_system[rows] = in_system_s.sum(axis=1) / (clock_s[:, -1] - clock_s[:, 0])
        self._reached_s[rows] = [self._until(row, engine.servers["clock_s"][row]) for row in rows]

    def reward(self, engine: SimulatedEngine, gain_s: FloatArray) -> FloatArray:
        servers = engine.servers
        reached = np.array([self._until(row, clock_s) for row, clock_s in enumerate(servers["clock_s"])])
        reference = reached - self._reached_s
        self._reached_s = reached
        excess: FloatArray = servers["step_in_system_s"] - reference
        return -excess / self._mean_in_system

    def exhausted(self, engine: SimulatedEngine) -> NDArray[np.bool_]:
        """Past the end of the twin's run nothing says what greedy would have in the system."""
        return np.asarray(engine.servers["clock_s"] >= self._clock_s[:, -1])

    def _until(self, row: int, clock_s: float) -> float:
        return float(np.interp(clock_s, self._clock_s[row], self._in_system_s[row]))


class ServiceLevel:
    """Minus `VIOLATION_S` for each request whose TTFT or TPOT limit passes, when it passes.

    Charged at the finish, a late request would be cheaper the later it finished.
    """

    def begin(self, engine: SimulatedEngine, rows: IntArray) -> None:
        pass

    def reward(self, engine: SimulatedEngine, gain_s: FloatArray) -> FloatArray:
        return -VIOLATION_S * engine.violations().astype(np.float64)

    def exhausted(self, engine: SimulatedEngine) -> NDArray[np.bool_]:
        return np.zeros(engine.num_servers, np.bool_)
