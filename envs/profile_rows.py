"""One cost profile per server, priced as if it were one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from draftdial.controller.cost_profile import CostProfile, OffMode
from draftdial.controller.signals import FloatArray, IntArray


class ProfileRows:
    """Stands in for a `CostProfile` where row s of every array belongs to `profiles[s]`.

    The profiles have the same tiers and captured batches; rows are priced group by group, so few
    distinct profiles are cheap.
    """

    def __init__(self, profiles: Sequence[CostProfile]) -> None:
        first = profiles[0]
        self.tiers = first.tiers
        self.captured_batches = first.captured_batches
        self.bucket_of_batch = first.bucket_of_batch
        self.max_running = first.max_running
        distinct = {id(profile): profile for profile in profiles}
        ids = np.array([id(profile) for profile in profiles])
        self._groups = [(profile, np.flatnonzero(ids == key)) for key, profile in distinct.items()]

    def round_s(self, num_running: IntArray, mean_context_tokens: IntArray, off_mode: OffMode) -> FloatArray:
        """As `CostProfile.round_s`."""
        seconds = np.empty((len(self.tiers), len(num_running)))
        for profile, rows in self._groups:
            seconds[:, rows] = profile.round_s(num_running[rows], mean_context_tokens[rows], off_mode).T
        return seconds.T

    def prefill_s(self, num_tokens: ArrayLike, off_mode: OffMode) -> FloatArray:
        """As `CostProfile.prefill_s`, for `num_tokens` of shape `(num_servers,)`."""
        tokens = np.asarray(num_tokens)
        seconds = np.empty(len(tokens))
        for profile, rows in self._groups:
            seconds[rows] = profile.prefill_s(tokens[rows], off_mode)
        return seconds
