"""Servers drawn around a measured one, so that a policy learns to read a profile, not to know one."""

from __future__ import annotations

import numpy as np

from draftdial.controller.cost_profile import CostProfile


def random_profile(base: CostProfile, rng: np.random.Generator) -> CostProfile:
    """`base` with other times: overall speed, price of drafting, and how both grow with the batch.

    Each factor is smooth in k and log batch, but for 2 % of noise per cell (measured repeats differ by
    1 to 5 %). A round never gets cheaper than the off round at its batch.
    """
    rows = len(base.rows)
    is_speculative = np.array([row.startswith("k=") for row in base.rows])
    k = np.array([int(row[2:]) if row.startswith("k=") else 0 for row in base.rows]) / base.tiers[-1]
    load = np.log2(base.captured_batches) / np.log2(max(2, base.captured_batches[-1]))
    speed = rng.normal(0.0, 0.3)
    crowding = rng.normal(0.0, 0.2)
    drafting = rng.normal(0.0, 0.1)
    verifying = rng.normal(0.0, 0.35)
    log_factor = speed + crowding * load[None, :] + rng.normal(0.0, 0.02, (rows, len(load)))
    log_factor += is_speculative[:, None] * (drafting + verifying * load[None, :]) * (0.3 + 0.7 * k[:, None])
    factor = np.exp(log_factor)
    off = factor[[row.startswith("off-") for row in base.rows]].max(axis=0)
    factor[is_speculative] = np.maximum(factor[is_speculative], 0.98 * off)
    return base.scaled(f"{base.name}-random", factor, float(np.exp(rng.normal(speed, 0.2))))
