"""Writes FOLDER/even.csv, long.csv and swing.csv, traces of made-up requests.

python3 tests/gpu/short_requests.py FOLDER

Prompts are log-normal around 128 tokens, sigma 0.5, within 16 and 512. In `long.csv`, 4,000 requests for
`--lengths trace:`, answers are so around 640 tokens, within 128 and 1,024: a server decodes most of the time.
In `even.csv` all answers are of 320, so that few slots begin and end together.
In `swing.csv`, 12 s of Poisson arrivals for `--trace`, 3 s at 12 requests a second, 3 s at 80, and again,
they are around 128, within 32 and 384.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

SEED = 20261130
MEDIAN, EVEN, LONG_MEDIAN, SIGMA = 128, 320, 640, 0.5
RATES, DWELL_S, SWING_S = (12, 80), 3.0, 12.0
START = datetime(2026, 11, 30)


def tokens(rng: np.random.Generator, count: int, low: int, high: int, median: int = MEDIAN) -> list[int]:
    drawn = median * np.exp(SIGMA * rng.standard_normal(count))
    return np.clip(np.rint(drawn), low, high).astype(int).tolist()


def write(
    path: Path, arrivals_s: Sequence[float], rng: np.random.Generator, low: int, high: int, median: int
) -> None:
    """A trace in the format of the Azure traces, whose answers have these limits and this median."""
    num = len(arrivals_s)
    prompts = tokens(rng, num, 16, 512)
    answers = tokens(rng, num, low, high, median)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for at_s, prompt, answer in zip(arrivals_s, prompts, answers, strict=True):
            at = START + timedelta(seconds=float(at_s))
            writer.writerow([at.strftime("%Y-%m-%d %H:%M:%S.%f"), prompt, answer])


def swing(rng: np.random.Generator) -> list[float]:
    arrivals_s, now_s = [], 0.0
    while True:
        now_s += rng.exponential(1 / RATES[int(now_s / DWELL_S) % len(RATES)])
        if now_s >= SWING_S:
            return arrivals_s
        arrivals_s.append(now_s)


if __name__ == "__main__":
    folder, rng = Path(sys.argv[1]), np.random.default_rng(SEED)
    often = [0.01 * i for i in range(4000)]
    write(folder / "swing.csv", swing(rng), rng, 32, 384, MEDIAN)
    write(folder / "long.csv", often, rng, 128, 1024, LONG_MEDIAN)
    write(folder / "even.csv", often, rng, EVEN, EVEN, EVEN)
