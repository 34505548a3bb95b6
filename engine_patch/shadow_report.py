"""What steering would have gained while the stock rule decided: a running estimate with its interval."""

from __future__ import annotations

import math

import numpy as np

from draftdial.controller.belief import PRIOR_SAMPLES, AcceptanceBelief
from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.controller.features import HALF_LIVES_SAMPLES
from draftdial.controller.signals import FloatArray, RoundOutcome, RoundSignals

LONGEST = -1
"""The belief's memory that fills in depths which the stock rule did not try."""
MIN_BLOCKS = 16
MAX_BLOCKS = 32
FIRST_BLOCK_ROUNDS = 64

_PENDING = 64
_NORMAL_97_5 = 1.959963984540054


class ShadowReport:
    """Compares, round by round, the tokens per second of the k that acted and of the k the policy wanted.

    A round that ran with k draft tokens tells exactly what any smaller k would have committed there, and
    that part is counted, not predicted: an estimate that judged the policy by the belief it decided with
    would flatter it. Deeper drafts are filled in from a belief of the report's own. Rounds cost what the
    profile says. The gain is the mean of the policy's tokens per second over the time of the server, divided
    by that of the rule which acted:

        sum of tokens(wanted) * seconds(acted) / seconds(wanted)  /  sum of tokens(acted)  -  1

    Its 95 % interval has two parts, added as independent. The noise of rounds: batch means (Law and Kelton),
    that is, sums over 16 to 32 equal blocks of consecutive rounds, a ratio estimator, Student's t. And the
    depths never tried: the standard deviation of the belief's Beta posterior, taken to err the same way at
    every depth and in every round.

    It does not cover a wrong profile, states that only the policy would have reached, traffic that drifts
    over more than a block, or that rounds of a larger k start at harder positions (a few per cent).

    Constant memory, O(1) per round, a pure function of the rounds.
    """

    def __init__(self, profile: CostProfile, off_mode: OffMode, max_k: int) -> None:
        """`max_k` is the largest tier the server has built; its outcomes have that many depths."""
        self._profile, self._off_mode = profile, off_mode
        self._tier_of = {k: tier for tier, k in enumerate(profile.tiers)}
        self._belief = AcceptanceBelief(max_k, HALF_LIVES_SAMPLES)
        # Rounds in flight, by round_id modulo _PENDING: id, wanted, acted, running, context, two switches.
        self._pending = np.full((_PENDING, 7), -1, np.int64)
        self._last = (-1, -1)
        self.rounds = 0
        self.same_k = 0
        self.unpriced = 0
        self.rounds_at_k = dict.fromkeys(profile.tiers, 0)
        self._guessed = np.zeros(2)
        """Tokens from depths that were not tried, and the standard deviation of that."""
        self._total = np.zeros(2)
        self._block = np.zeros(2)
        self._rounds_in_block = 0
        self._block_rounds = FIRST_BLOCK_ROUNDS
        self._num_blocks = 0
        # Per whole block: tokens that acted, and tokens the policy would have made in the same time.
        self._blocks = np.zeros((MAX_BLOCKS, 2))

    def decided(self, signals: RoundSignals, wanted_k: int, acted_k: int) -> None:
        """Remember a round being launched; its outcome follows in `observe`."""
        round_id = int(signals.round_id[0])
        self._pending[round_id % _PENDING] = (
            round_id,
            wanted_k,
            acted_k,
            signals.num_running[0],
            signals.mean_context_tokens[0],
            wanted_k != self._last[0],
            acted_k != self._last[1],
        )
        self._last = (wanted_k, acted_k)

    def observe(self, outcome: RoundOutcome) -> None:
        """Judge a finished round; one that `decided` never saw only teaches the belief."""
        row = self._pending[int(outcome.round_id[0]) % _PENDING].tolist()
        round_id, wanted_k, acted_k, running, context, wanted_switch, acted_switch = row
        if round_id >= 0 and round_id == outcome.round_id[0] and acted_k == outcome.k[0]:
            wanted, acted = self._tier_of.get(wanted_k), self._tier_of.get(acted_k)
            if wanted is None or acted is None:
                self.unpriced += 1
            else:
                seconds = self._profile.round_s(np.array([running]), np.array([context]), self._off_mode)[0]
                wanted_s = float(seconds[wanted]) + wanted_switch * self._profile.switch_s
                acted_s = float(seconds[acted]) + acted_switch * self._profile.switch_s
                self._judge(outcome, wanted_k, acted_k, acted_s / wanted_s)
        self._belief.observe(outcome)

    def summary(self) -> dict[str, int | float]:
        """Plain numbers, names as in the status. Gains are shares: 0.05 is 5 % more tokens per second.

        `gain` is there once tokens were counted, its bounds once there are enough rounds for them.
        """
        summary: dict[str, int | float] = {
            "rounds": self.rounds,
            "same_k": self.same_k,
            "unpriced": self.unpriced,
            **{f"rounds_at_k.{k}": n for k, n in self.rounds_at_k.items()},
        }
        if self._total[0] > 0:
            summary["gain"] = float(self._total[1] / self._total[0] - 1)
            summary["guessed_share"] = float(self._guessed[0] / self._total[1])
        if self._num_blocks >= MIN_BLOCKS and self._total[0] > 0:
            reach = self._reach()
            summary["gain_low"] = summary["gain"] - reach
            summary["gain_high"] = summary["gain"] + reach
        return summary

    def _judge(self, outcome: RoundOutcome, wanted_k: int, acted_k: int, time_ratio: float) -> None:
        at_least = outcome.accept_counts[0][::-1].cumsum()[::-1].tolist()
        if not at_least[0]:
            return
        acted_tokens = float(sum(at_least[: acted_k + 1]))
        wanted_tokens = float(sum(at_least[: min(wanted_k, acted_k) + 1]))
        if wanted_k > acted_k:
            deeper = at_least[acted_k] * self._deeper(acted_k, wanted_k)
            self._guessed += deeper * time_ratio
            wanted_tokens += deeper[0]
        self.rounds += 1
        self.same_k += wanted_k == acted_k
        self.rounds_at_k[wanted_k] += 1
        sums = np.array([acted_tokens, wanted_tokens * time_ratio])
        self._total += sums
        self._block += sums
        self._rounds_in_block += 1
        if self._rounds_in_block == self._block_rounds:
            self._close_block()

    def _deeper(self, acted_k: int, wanted_k: int) -> FloatArray:
        """Drafts accepted beyond `acted_k` by a request that had all those accepted: mean and deviation."""
        depths = slice(acted_k, wanted_k)
        rates = self._belief.mean()[LONGEST, 0, depths]
        samples = self._belief.reached[LONGEST, 0, depths] + PRIOR_SAMPLES
        survival = np.cumprod(rates)
        deviation = survival * np.sqrt(np.cumsum((1 - rates) / (rates * (samples + 1))))
        return np.array([survival.sum(), deviation.sum()])

    def _close_block(self) -> None:
        self._blocks[self._num_blocks] = self._block
        self._num_blocks += 1
        self._block[:] = 0.0
        self._rounds_in_block = 0
        if self._num_blocks == MAX_BLOCKS:
            self._num_blocks //= 2
            self._blocks[: self._num_blocks] = self._blocks[0::2] + self._blocks[1::2]
            self._block_rounds *= 2

    def _reach(self) -> float:
        """Half the width of the 95 % interval of the gain."""
        blocks = self._blocks[: self._num_blocks]
        acted, wanted = blocks.sum(axis=0)
        residuals = blocks[:, 1] - wanted / acted * blocks[:, 0]
        variance = float(residuals @ residuals) * self._num_blocks / (self._num_blocks - 1)
        noise = _student_97_5(self._num_blocks - 1) * math.sqrt(variance) / float(acted)
        return math.hypot(noise, _NORMAL_97_5 * float(self._guessed[1] / self._total[0]))


def _student_97_5(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, within 0.001 from 8 degrees of freedom on.

    Cornish and Fisher's expansion (Abramowitz and Stegun 26.7.5): a server has no SciPy.
    """
    z = _NORMAL_97_5
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
