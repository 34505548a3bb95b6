"""Statistics of recorded acceptance, as the tables of docs/acceptance.md.

    python acceptance_table.py [RECORDED.jsonl.gz ...]

Without a file it reads what the package ships.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ship import DATA, NAMES

from draftdial.controller.acceptance_file import MIN_POSITIONS, AcceptedDrafts
from draftdial.envs.acceptance import walk_rounds, walk_statistics
from draftdial.envs.replayed_acceptance import bank_of_arrays

KS = (1, 2, 3, 5, 7)
SPREAD_AND_MEMORY = (
    "sd of depth-1 rate, k=3",
    "accept length p5 / p50 / p95, k=3",
    "autocorrelation lag 1 / 5 / 20, k=3",
    "all 3 accepted after all / after none",
    "R² of a moving average, k=5",
    "R² of the draft's probability, k=5",
)


def main() -> None:
    for path in map(Path, sys.argv[1:] or [DATA / f"{name}.jsonl.gz" for name in NAMES.values()]):
        _, *lines = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
        long = [line for line in lines if len(line["acc"]) > MIN_POSITIONS]
        domains = {name: [line for line in long if line["domain"] == name] for name in domains_of(long)}
        print(f"{path.name}: {len(lines)} requests, {len(long)} of more than {MIN_POSITIONS} positions\n")
        print_table(domains)


def domains_of(lines: list[dict[str, Any]]) -> list[str]:
    """Their names, in the order of the file."""
    return list(dict.fromkeys(line["domain"] for line in lines))


def print_table(domains: dict[str, list[dict[str, Any]]]) -> None:
    """Accept lengths and conditional acceptance; then how requests differ and what can be foreseen."""
    bank = bank_of_arrays(
        {name: [np.array(line["acc"][1:], np.uint8) - 1 for line in lines] for name, lines in domains.items()}
    )
    print(f"| | requests | {' | '.join(f'k={k}' for k in KS)} | conditional acceptance by depth, k = 7 |")
    print("|---" * (len(KS) + 3) + "|")
    for index, (name, lines) in enumerate(domains.items()):
        lengths = [f"{walk_statistics(bank, index, k).accept_length:.3f}" for k in KS]
        conditional = " ".join(short(p, 3) for p in walk_statistics(bank, index, 7).conditional)
        print(f"| `{name}` | {len(lines)} | {' | '.join(lengths)} | {conditional} |")
    print("\n| | " + " | ".join(SPREAD_AND_MEMORY) + " |")
    print("|---" * (len(SPREAD_AND_MEMORY) + 1) + "|")
    for index, (name, lines) in enumerate(domains.items()):
        three, five = walk_statistics(bank, index, 3), walk_statistics(bank, index, 5)
        spread = " / ".join(f"{x:.2f}" for x in np.percentile(three.request_accept_length, [5, 50, 95]))
        memory = " / ".join(short(three.autocorrelation[lag - 1], 2) for lag in (1, 5, 20))
        repeated = " / ".join(short(p, 2) for p in repeats(lines))
        values = [short(three.first_depth_sd, 3), spread, memory, repeated, short(five.predictability, 3)]
        print(f"| `{name}` | {' | '.join(values)} | {short(foreseen(lines), 3)} |")
    print()


def repeats(lines: list[dict[str, Any]]) -> tuple[float, float]:
    """P(a round of 3 drafts accepts all | the one before accepted all), and P(... | it accepted none)."""
    pairs = np.concatenate([np.stack([rounds[:-1], rounds[1:]]) for _, rounds in walks(lines, 3)], axis=1)
    after_all, after_none = (float(np.mean(pairs[1][pairs[0] == before] == 3)) for before in (3, 0))
    return after_all, after_none


def foreseen(lines: list[dict[str, Any]]) -> float:
    """Squared correlation of what a round of 5 accepts with the draft's probability of its first guess."""
    probability, rounds = [], []
    for line, accepted in walks(lines, 5):
        starts = np.cumsum(accepted.astype(int) + 1) - accepted - 1
        probability.append(np.array(line["p1"][1:])[starts])
        rounds.append(accepted)
    return float(np.corrcoef(np.concatenate(probability), np.concatenate(rounds))[0, 1] ** 2)


def walks(lines: list[dict[str, Any]], k: int) -> list[tuple[dict[str, Any], AcceptedDrafts]]:
    """Every request with the drafts that the rounds of its walk accept."""
    arrays = [np.array(line["acc"][1:], np.uint8) - np.uint8(1) for line in lines]
    return [
        (line, walk_rounds(array, np.zeros(1, np.int64), np.array([len(array)], np.int32), k)[0])
        for line, array in zip(lines, arrays, strict=True)
    ]


def short(value: float, digits: int) -> str:
    """Without the zero before the point."""
    return f"{value:.{digits}f}".replace("0.", ".", 1)


if __name__ == "__main__":
    main()
