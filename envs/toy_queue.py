"""A decode queue small enough to solve exactly: what a learner is measured against.

A semi-Markov decision process. Its state is (requests in the system, whether the last round
speculated, phase of the arrivals). Every request in the system runs; a round of `k` drafts takes
longer the larger the batch; the first speculative round after an off one pays a restart. Acceptance,
departures and arrivals have no memory, so the chain is exactly Markov, and its tables are exact up to
the cap on the number in the system.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from scipy import stats
from stable_baselines3.common.vec_env import VecEnv

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

TIERS = (0, 1, 2, 3, 5, 7)
ACCEPTANCE = 0.5
"""Probability that a draft is accepted, given that the ones before it were."""
OUTPUT_TOKENS = 200
"""Mean length of an answer. Lengths are geometric: every token is the last with probability 1/200."""
MAX_IN_SYSTEM = 140
"""A request that arrives when this many are in the system is lost."""


def round_s(batch: FloatArray, k: int) -> FloatArray:
    """Duration of a round that drafts `k` tokens per request, seconds: draft, verify, extend the draft."""
    duration_ms: FloatArray = np.maximum(7.0, 3.0 + 0.032 * batch * (k + 1)) + 0.008 * batch
    if k:
        duration_ms += k * (0.55 + 0.0025 * batch) + 0.7 + 0.004 * batch
    return duration_ms / 1e3


def restart_s(batch: FloatArray) -> FloatArray:
    """Time to bring the draft's cache up to date after rounds without speculation, seconds."""
    duration_ms: FloatArray = 8.0 + 1.1 * batch
    return duration_ms / 1e3


def expected_tokens(k: int) -> float:
    """Mean tokens that a request gains in a round of `k` drafts, the bonus token included."""
    return float((1.0 - ACCEPTANCE ** (k + 1)) / (1.0 - ACCEPTANCE))


def departure_probability(k: int) -> float:
    """Probability that a round of `k` drafts contains a request's last token."""
    accepted = np.arange(k + 1)
    probability = ACCEPTANCE**accepted * np.where(accepted < k, 1.0 - ACCEPTANCE, 1.0)
    return float(1.0 - probability @ (1.0 - 1.0 / OUTPUT_TOKENS) ** (accepted + 1))


@dataclass(frozen=True)
class Arrivals:
    """Poisson arrivals at one rate, or switching between two that hold for exponential times.

    Attributes:
        rates_per_s: one rate or two, requests per second.
        dwell_s: mean time in a phase, seconds; infinite for one rate.
    """

    rates_per_s: tuple[float, ...]
    dwell_s: float = np.inf


class ToyQueue:
    """Exact tables of the decode queue; states and tiers are numbered from 0.

    Attributes:
        in_system, speculating, phase: (num_states,) what a state's number stands for.
        round_s: (num_states, num_tiers) duration of a round without its restart, seconds; of an
            empty system the mean time to the next event.
        step_s: (num_states, num_tiers) mean time to the next decision, restart included, seconds.
        request_s: (num_states, num_tiers) mean integral of the number in the system over that time.
        next_state: (num_states, num_tiers, num_states) transition probabilities.
        start: the empty system, speculating.
    """

    def __init__(self, arrivals: Arrivals, with_restart: bool) -> None:
        num_phases = len(arrivals.rates_per_s)
        shape = (MAX_IN_SYSTEM + 1, 2, num_phases)
        numbers: list[IntArray] = [axis.ravel() for axis in np.indices(shape)]
        self.in_system, self.speculating, self.phase = numbers
        self.start = num_phases
        self.round_s = np.zeros((*shape, len(TIERS)))
        self.step_s = np.zeros_like(self.round_s)
        self.request_s = np.zeros_like(self.round_s)
        self.next_state: FloatArray = np.zeros((*shape, len(TIERS), *shape))
        self._arrivals = arrivals
        self._fill_empty()
        counts = _ArrivalCounts(arrivals)
        batch = np.arange(1.0, MAX_IN_SYSTEM + 1)
        for tier, k in enumerate(TIERS):
            for speculating in (0, 1):
                pays = with_restart and k > 0 and not speculating
                step_s = round_s(batch, k) + (restart_s(batch) if pays else 0.0)
                self.round_s[1:, speculating, :, tier] = round_s(batch, k)[:, None]
                self.step_s[1:, speculating, :, tier] = step_s[:, None]
                self._fill_rounds(counts, step_s, tier, speculating)
        by_tier = (self.in_system.size, len(TIERS))
        self.round_s = self.round_s.reshape(by_tier)
        self.step_s = self.step_s.reshape(by_tier)
        self.request_s = self.request_s.reshape(by_tier)
        self.next_state = self.next_state.reshape(*by_tier, -1)

    def _fill_empty(self) -> None:
        """An empty system waits for an arrival or a change of phase, and stays as it was switched."""
        for phase, rate in enumerate(self._arrivals.rates_per_s):
            event_rate = rate + 1.0 / self._arrivals.dwell_s
            self.round_s[0, :, phase] = self.step_s[0, :, phase] = 1.0 / event_rate
            for speculating in (0, 1):
                row = self.next_state[0, speculating, phase]
                row[:, 1, speculating, phase] = rate / event_rate
                row[:, 0, speculating, phase - 1] = 1.0 - rate / event_rate

    def _fill_rounds(self, counts: _ArrivalCounts, step_s: FloatArray, tier: int, speculating: int) -> None:
        """Rounds of one tier at every batch: departures at their end, arrivals throughout."""
        arrived, seconds = counts.within(step_s)
        _, num_phases, num_counts, _ = arrived.shape
        leaves = departure_probability(TIERS[tier])
        for batch in range(1, MAX_IN_SYSTEM + 1):
            present = np.minimum(batch + np.arange(num_counts), MAX_IN_SYSTEM)
            self.request_s[batch, speculating, :, tier] = seconds[batch - 1] @ present
            staying = stats.binom.pmf(np.arange(batch + 1), batch, 1.0 - leaves)
            for phase, next_phase in np.ndindex(num_phases, num_phases):
                total = np.convolve(staying, arrived[batch - 1, phase, :, next_phase])
                row = self.next_state[batch, speculating, phase, tier, :, int(tier > 0), next_phase]
                row[: total.size] = total[: row.size]
                row[-1] += total[row.size :].sum()

    def surplus(self, tau_s: float) -> FloatArray:
        """(num_states,) requests that the phase will bring beyond the mean, discounted over `tau_s`."""
        rates = np.array(self._arrivals.rates_per_s)
        fades_per_s = 1.0 / tau_s + 2.0 / self._arrivals.dwell_s
        of_phase: FloatArray = (rates - rates.mean()) / fades_per_s
        return of_phase[self.phase]

    def observations(self) -> NDArray[np.float32]:
        """(num_states, 3): what a learner sees of a state, all between -3 and 4."""
        columns = [self.in_system / 20.0 - 3.0, self.speculating, self.phase]
        return np.stack(columns, axis=1).astype(np.float32)


class _ArrivalCounts:
    """How many requests arrive within a time, and in which phase that leaves the arrivals.

    By uniformisation: events come at one constant rate, and each is an arrival, a change of phase or
    nothing. A. Jensen, "Markoff chains as an aid in the study of Markoff processes" (1953).
    """

    LONGEST_S = 0.25

    def __init__(self, arrivals: Arrivals) -> None:
        rates = np.array(arrivals.rates_per_s)
        change = 1.0 / arrivals.dwell_s
        self._event_rate = float(rates.max()) + change
        self._events = np.arange(int(stats.poisson.isf(1e-15, self._event_rate * self.LONGEST_S)) + 2)
        # (events, first phase, arrivals, last phase)
        self._after = np.zeros((self._events.size, rates.size, self._events.size, rates.size))
        self._after[0, :, 0] = np.eye(rates.size)
        arrives, changes = rates / self._event_rate, change / self._event_rate
        for now, then in zip(self._after, self._after[1:], strict=False):
            then[:, 1:] = now[:, :-1] * arrives
            then += now * (1.0 - arrives - changes) + now[:, :, ::-1] * changes

    def within(self, times_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """For every time: P(arrivals, last phase | first phase), and the mean seconds at each count.

        Returns:
            (num_times, phases, counts, phases) and (num_times, phases, counts).
        """
        assert times_s.max() <= self.LONGEST_S
        mean = self._event_rate * times_s[:, None]
        arrived = np.tensordot(stats.poisson.pmf(self._events, mean), self._after, 1)
        seconds = stats.poisson.sf(self._events, mean) / self._event_rate
        return arrived, np.tensordot(seconds, self._after.sum(axis=3), 1)


def mean_in_system(queue: ToyQueue, choice: IntArray) -> float:
    """Long-run mean number in the system under a stationary policy, from the tables.

    By Little's law that is the arrival rate times the mean latency.

    Args:
        choice: (num_states,) number of the tier chosen in each state.
    """
    states = np.arange(choice.size)
    follows = queue.next_state[states, choice]
    # States that the start never leads to do not count, and would make the equations singular.
    reached = states == queue.start
    while (grown := reached | (follows[reached] > 0).any(axis=0)).sum() > reached.sum():
        reached = grown
    kept = np.flatnonzero(reached)
    tiers = choice[kept]
    return _evaluate(follows[np.ix_(kept, kept)], queue.step_s[kept, tiers], queue.request_s[kept, tiers])[0]


def _evaluate(follows: FloatArray, step_s: FloatArray, request_s: FloatArray) -> tuple[float, FloatArray]:
    """Solve h = request_s - mean * step_s + follows h, with h = 0 in the first state: (mean, h)."""
    equations = np.eye(len(step_s)) - follows
    equations[:, 0] = step_s
    solution = np.linalg.solve(equations, request_s)
    return float(solution[0]), np.concatenate([[0.0], solution[1:]])


def optimum(queue: ToyQueue, first: IntArray) -> tuple[float, IntArray]:
    """The smallest long-run mean number in the system, and a policy (num_states,) that attains it.

    Howard's policy iteration from the policy `first`: exact, in about ten linear solves. R. A. Howard,
    "Semi-Markovian decision processes" (1963).
    """
    states = np.arange(first.size)
    choice = first
    while True:
        mean, ahead = _evaluate(
            queue.next_state[states, choice], queue.step_s[states, choice], queue.request_s[states, choice]
        )
        cost = queue.request_s - mean * queue.step_s + queue.next_state @ ahead
        best = cost.argmin(axis=1)
        better = cost[states, best] < cost[states, choice] - 1e-9
        if not better.any():
            return mean, choice
        choice = np.where(better, best, choice)


class ToyQueueEnv(VecEnv):
    """Many queues at once for Stable-Baselines3; their dynamics are the tables.

    The reward of a step is minus its mean request-seconds beyond a constant `reference` number in the
    system, plus the mean difference of a potential: minus one second for every request in the system
    or forecast by the phase of the arrivals. The potential changes no policy's rank (Ng et al. 1999),
    and taking means leaves far less noise than the draws would.
    A queue is cut after `NUM_ROUNDS` (the value of its last state still counts) and restarts anywhere,
    so that rare heavy load is seen. `elapsed_s` and `raw_reward` are those of the last step.
    """

    NUM_ROUNDS = 32
    OWED_S = 1.0
    REWARD_SCALE = 0.1
    render_mode: str | None = None

    def __init__(self, queue: ToyQueue, num_envs: int, reference: float, tau_s: float) -> None:
        self.observations = queue.observations()
        shape = self.observations.shape[1:]
        super().__init__(num_envs, spaces.Box(-3.0, 4.0, shape), spaces.Discrete(len(TIERS)))
        self.potential = self.OWED_S * (reference - queue.in_system - queue.surplus(tau_s))
        ahead = np.exp(-queue.step_s / tau_s) * (queue.next_state @ self.potential)
        self.reward = reference * queue.step_s - queue.request_s + ahead - self.potential[:, None]
        self._step_s = queue.step_s
        self._cumulative = queue.next_state.cumsum(axis=2)[:, :, :-1]
        self.elapsed_s = np.zeros(num_envs)
        self.raw_reward = np.zeros(num_envs, np.float32)

    def reset(self) -> NDArray[np.float32]:
        self._random = np.random.default_rng(self._seeds[0])
        self._reset_seeds()
        self._state = self._anywhere(self.num_envs)
        # Staggered, so that the queues do not all restart together.
        self._rounds_left = self._random.integers(1, self.NUM_ROUNDS + 1, self.num_envs)
        return self.observations[self._state]

    def step_async(self, actions: IntArray) -> None:
        self._actions = actions

    def step_wait(
        self,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        self.elapsed_s = self._step_s[self._state, self._actions]
        self.raw_reward = (self.REWARD_SCALE * self.reward[self._state, self._actions]).astype(np.float32)
        draw = self._random.random((self.num_envs, 1))
        self._state = (self._cumulative[self._state, self._actions] <= draw).sum(axis=1)
        self._rounds_left -= 1
        cut = self._rounds_left == 0
        last = self.observations[self._state]
        infos: list[dict[str, Any]] = [
            {"terminal_observation": last[i], "TimeLimit.truncated": True} if cut[i] else {}
            for i in range(self.num_envs)
        ]
        self._state[cut] = self._anywhere(int(cut.sum()))
        self._rounds_left[cut] = self.NUM_ROUNDS
        return self.observations[self._state], self.raw_reward.copy(), cut, infos

    def _anywhere(self, count: int) -> IntArray:
        return self._random.integers(len(self.observations), size=count)

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("the queues share their attributes")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError("the queues share their methods")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))
