"""A decode queue small enough to solve exactly: what a learner is measured against.

A semi-Markov decision process. Its state is (requests in the system, whether the last round
speculated, phase of the arrivals); every request in the system runs, a round of `k` drafts costs
time that grows with the batch, and the first speculative round after an off one pays a restart.
Every acceptance, every departure and every arrival is a draw that forgets, so the chain is exactly
Markov and its tables are exact up to the cap on the number in the system.
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
REWARD_PER_REQUEST_S = 0.05
"""Brings the values that a learner has to fit to the order of 1."""


@dataclass(frozen=True)
class Arrivals:
    """Poisson arrivals at one rate, or switching between two, each held for an exponential time.

    Attributes:
        rates_per_s: one rate or two, requests per second.
        dwell_s: mean time in a phase, seconds; without meaning for one rate.
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
        start: the empty system, not yet switched off.
    """

    def __init__(self, arrivals: Arrivals, with_restart: bool) -> None:
        num_phases = len(arrivals.rates_per_s)
        shape = (MAX_IN_SYSTEM + 1, 2, num_phases)
        self.in_system, self.speculating, self.phase = (axis.ravel() for axis in np.indices(shape))
        self.start = num_phases
        self.round_s = np.zeros((*shape, len(TIERS)))
        self.step_s = np.zeros_like(self.round_s)
        self.request_s = np.zeros_like(self.round_s)
        self.next_state = np.zeros((*shape, len(TIERS), *shape))
        self._fill_empty(arrivals)
        counting = _ArrivalCounts(arrivals)
        batch = np.arange(1, MAX_IN_SYSTEM + 1)
        for tier, k in enumerate(TIERS):
            for speculating in (0, 1):
                pays = with_restart and k > 0 and not speculating
                step_s = round_s(batch, k) + (restart_s(batch) if pays else 0.0)
                self.round_s[1:, speculating, :, tier] = round_s(batch, k)[:, None]
                self.step_s[1:, speculating, :, tier] = step_s[:, None]
                self._fill_rounds(counting, step_s, tier, speculating)
        num_states = self.in_system.size
        self.round_s = self.round_s.reshape(num_states, -1)
        self.step_s = self.step_s.reshape(num_states, -1)
        self.request_s = self.request_s.reshape(num_states, -1)
        self.next_state = self.next_state.reshape(num_states, len(TIERS), num_states)

    def _fill_empty(self, arrivals: Arrivals) -> None:
        """An empty system waits for an arrival or a change of phase, and stays as it was switched."""
        for phase, rate in enumerate(arrivals.rates_per_s):
            event_rate = rate + 1.0 / arrivals.dwell_s
            self.round_s[0, :, phase] = self.step_s[0, :, phase] = 1.0 / event_rate
            for speculating in (0, 1):
                row = self.next_state[0, speculating, phase]
                row[:, 1, speculating, phase] = rate / event_rate
                row[:, 0, speculating, phase - 1] += 1.0 - rate / event_rate

    def _fill_rounds(self, counts: _ArrivalCounts, step_s: FloatArray, tier: int, speculating: int) -> None:
        """Rounds of one tier at every batch: departures at their end, arrivals throughout."""
        arrived, presence_s = counts.over(step_s)
        num_phases, num_counts = arrived.shape[1], arrived.shape[2]
        leaves = departure_probability(TIERS[tier])
        for batch in range(1, MAX_IN_SYSTEM + 1):
            held = np.minimum(batch + np.arange(num_counts), MAX_IN_SYSTEM)
            self.request_s[batch, speculating, :, tier] = presence_s[batch - 1] @ held
            staying = stats.binom.pmf(np.arange(batch + 1), batch, 1.0 - leaves)
            for phase, next_phase in np.ndindex(num_phases, num_phases):
                row = self.next_state[batch, speculating, phase, tier, :, int(tier > 0), next_phase]
                total = np.convolve(staying, arrived[batch - 1, phase, :, next_phase])
                row[: total.size] = total[: row.size]
                row[-1] += total[row.size :].sum()


def round_s(batch: IntArray, k: int) -> FloatArray:
    """Duration of a round that drafts `k` tokens per request, seconds: draft, verify, extend the draft."""
    verify_ms = np.maximum(7.0, 3.0 + 0.032 * batch * (k + 1)) + 0.008 * batch
    draft_ms = k * (0.55 + 0.0025 * batch) + 0.7 + 0.004 * batch if k else 0.0
    return (verify_ms + draft_ms) / 1e3


def restart_s(batch: IntArray) -> FloatArray:
    """Time to bring the draft's cache up to date after rounds without speculation, seconds."""
    return (8.0 + 1.1 * batch) / 1e3


def expected_tokens(k: int) -> float:
    """Mean tokens that a request gains in a round of `k` drafts, the bonus token included."""
    return float((1.0 - ACCEPTANCE ** (k + 1)) / (1.0 - ACCEPTANCE))


def departure_probability(k: int) -> float:
    """Probability that a round of `k` drafts contains a request's last token."""
    accepted = np.arange(k + 1)
    probability = ACCEPTANCE**accepted * np.where(accepted < k, 1.0 - ACCEPTANCE, 1.0)
    return float(1.0 - probability @ (1.0 - 1.0 / OUTPUT_TOKENS) ** (accepted + 1))


class _ArrivalCounts:
    """How many requests arrive within a time, and in which phase that leaves the arrivals.

    By uniformisation: events come at one constant rate, and each is an arrival, a change of phase or
    nothing. A. Jensen, "Markoff chains as an aid in the study of Markoff processes" (1953).
    """

    LONGEST_S = 0.25

    def __init__(self, arrivals: Arrivals) -> None:
        rates = np.array(arrivals.rates_per_s)
        change = 1.0 / arrivals.dwell_s
        self.event_rate = float(rates.max()) + change
        num_events = int(stats.poisson.isf(1e-15, self.event_rate * self.LONGEST_S)) + 1
        # (events, first phase, arrivals, last phase)
        self.after_events = np.zeros((num_events + 1, rates.size, num_events + 1, rates.size))
        self.after_events[0, :, 0] = np.eye(rates.size)
        arrives, changes = rates / self.event_rate, change / self.event_rate
        for now, then in zip(self.after_events, self.after_events[1:], strict=False):
            then[:, 1:] = now[:, :-1] * arrives
            then += now * (1.0 - arrives - changes) + now[:, :, ::-1] * changes

    def over(self, times_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """For every time: P(arrivals, last phase | first phase), and seconds spent at each count.

        Returns:
            (num_times, phases, counts, phases) and (num_times, phases, counts).
        """
        assert times_s.max() <= self.LONGEST_S
        events = np.arange(len(self.after_events))
        mean = self.event_rate * times_s[:, None]
        arrived = np.tensordot(stats.poisson.pmf(events, mean), self.after_events, 1)
        seconds = stats.poisson.sf(events, mean) / self.event_rate
        return arrived, np.tensordot(seconds, self.after_events.sum(3), 1)


def mean_in_system(queue: ToyQueue, choice: IntArray) -> float:
    """Long-run mean number in the system of a stationary policy, from the tables; by Little's law the
    mean latency times the arrival rate.

    Args:
        choice: (num_states,) tier number chosen in each state.
    """
    states = np.arange(choice.size)
    follows = queue.next_state[states, choice]
    # Only what can be reached from the start counts; a class that never mixes with it would make
    # the equations singular.
    reached = states == queue.start
    while True:
        grown = reached | (follows[reached] > 0).any(axis=0)
        if (grown == reached).all():
            break
        reached = grown
    kept = np.flatnonzero(reached)
    rows = np.ix_(kept, kept)
    return _evaluate(follows[rows], queue.step_s[kept, choice[kept]], queue.request_s[kept, choice[kept]])[0]


def _evaluate(follows: FloatArray, step_s: FloatArray, request_s: FloatArray) -> tuple[float, FloatArray]:
    """Solve h = cost - g step_s + P h with h = 0 in the first state: (g, h)."""
    equations = np.eye(len(step_s)) - follows
    equations[:, 0] = step_s
    solution = np.linalg.solve(equations, request_s)
    return float(solution[0]), np.concatenate([[0.0], solution[1:]])


def optimum(queue: ToyQueue, first: IntArray) -> tuple[float, IntArray, FloatArray]:
    """The smallest long-run mean number in the system, by Howard's policy iteration from `first`.

    R. A. Howard, "Semi-Markovian decision processes" (1963).

    Returns:
        The mean; the policy (num_states,) that attains it; the cost (num_states, num_tiers) of every
        tier when the policy goes on from there, request-seconds relative to the first state.
    """
    states = np.arange(first.size)
    choice = first
    while True:
        mean, relative = _evaluate(
            queue.next_state[states, choice], queue.step_s[states, choice], queue.request_s[states, choice]
        )
        costs = queue.request_s - mean * queue.step_s + queue.next_state @ relative
        best = costs.argmin(axis=1)
        better = costs[states, best] < costs[states, choice] - 1e-9
        if not better.any():
            return mean, choice, costs
        choice = np.where(better, best, choice)


class ToyQueueEnv(VecEnv):
    """Many queues at once for Stable-Baselines3; its dynamics are the tables.

    Reward: minus the request-seconds of a step beyond `reference` requests in the system all the
    time, so that a policy's own effect on the number never hides in the baseline. A queue is cut
    after `NUM_ROUNDS` (the value of its last state still counts) and restarts anywhere, so that rare
    heavy load is seen. `elapsed_s` and `raw_reward` are those of the last step.
    """

    NUM_ROUNDS = 512

    def __init__(self, queue: ToyQueue, num_envs: int, reference: float) -> None:
        self.observations = observations(queue)
        num_columns = self.observations.shape[1]
        observation_space = spaces.Box(-np.inf, np.inf, (num_columns,), np.float32)
        super().__init__(num_envs, observation_space, spaces.Discrete(len(TIERS)))
        self._step_s = queue.step_s
        self._reward = (-REWARD_PER_REQUEST_S * (queue.request_s - reference * queue.step_s)).astype(
            np.float32
        )
        self._cumulative = queue.next_state.cumsum(axis=2)
        self.elapsed_s = np.zeros(num_envs)
        self.raw_reward = np.zeros(num_envs, np.float32)

    def reset(self) -> NDArray[np.float32]:
        self._random = np.random.default_rng(self._seeds[0])
        self._reset_seeds()
        self._state = self._random.integers(len(self.observations), size=self.num_envs)
        # Staggered, so that the queues do not all restart together.
        self._rounds_left = self._random.integers(1, self.NUM_ROUNDS + 1, self.num_envs)
        return self.observations[self._state]

    def step_async(self, actions: IntArray) -> None:
        self._actions = actions

    def step_wait(
        self,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        self.elapsed_s = self._step_s[self._state, self._actions]
        self.raw_reward = self._reward[self._state, self._actions]
        chance = self._random.random((self.num_envs, 1))
        self._state = (self._cumulative[self._state, self._actions, :-1] <= chance).sum(axis=1)
        self._rounds_left -= 1
        cut = self._rounds_left == 0
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for row in np.flatnonzero(cut):
            infos[row] = {
                "terminal_observation": self.observations[self._state[row]],
                "TimeLimit.truncated": True,
            }
        self._state[cut] = self._random.integers(len(self.observations), size=int(cut.sum()))
        self._rounds_left[cut] = self.NUM_ROUNDS
        return self.observations[self._state], self.raw_reward.copy(), cut, infos

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


def observations(queue: ToyQueue) -> NDArray[np.float32]:
    """(num_states, 3): what a learner sees of a state, each about -1 to 1."""
    columns = [queue.in_system / (MAX_IN_SYSTEM / 2) - 1.0, queue.speculating, queue.phase]
    return np.stack(columns, axis=1).astype(np.float32)
