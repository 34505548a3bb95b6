"""Accept lengths after a time at k = 0, against those of the same requests that were never off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

ROUNDS = 20
"""Speculating rounds that are looked at."""
GRAM = 8
REPEATS = 0.5
"""A text loops if more of its end than this has been said before."""
MODES = ("warm", "kv-only", "skip")


@dataclass(frozen=True)
class Walk:
    """The rounds of one request."""

    tokens: list[int]
    """Its answer."""
    rounds: list[tuple[int, int, int]]
    """Output position that a round began at (1 right after prefill), its k, the drafts it accepted."""

    @classmethod
    def of(cls, tokens: list[int], made: Sequence[tuple[int, int]]) -> Self:
        """From k and accepted drafts of every round, in order."""
        position, rounds = 1, []
        for k, accepted in made:
            rounds.append((position, k, accepted))
            position += accepted + 1
        return cls(tokens, rounds)

    def restart(self) -> int:
        """The position of the first round behind the last at k = 0."""
        last = max(position for position, k, _ in self.rounds if k == 0)
        return last + 1

    def accepted_from(self, position: int) -> dict[int, int]:
        """Accepted drafts of the first rounds that begin at `position` or later, by where they begin.

        Raises:
            ValueError: there are too few of them.
        """
        rounds = {start: accepted for start, _, accepted in self.rounds if start >= position}
        if len(rounds) < ROUNDS:
            raise ValueError(f"{len(rounds)} rounds from position {position} on, allowed: at least {ROUNDS}")
        return dict(list(rounds.items())[:ROUNDS])


def repeated_share(tokens: Sequence[int]) -> float:
    """Of the last tokens, as many as these rounds can make: how many end a phrase that was said before."""
    said, is_repeated = set[tuple[int, ...]](), []
    for end in range(GRAM, len(tokens) + 1):
        phrase = tuple(tokens[end - GRAM : end])
        is_repeated.append(phrase in said)
        said.add(phrase)
    return float(np.mean(is_repeated[-4 * ROUNDS :]))


def figures(walks: dict[str, list[Walk]], domains: Sequence[str]) -> dict[str, Any]:
    """All figures of the requests whose answers are the same in every mode.

    `walks` holds a list for each of `MODES` and for "never", with the same requests in the same order.
    """
    requests = []
    for i, (never, domain) in enumerate(zip(walks["never"], domains, strict=True)):
        own = {mode: walks[mode][i] for mode in MODES}
        if any(walk.tokens != never.tokens for walk in own.values()):
            continue
        requests.append(
            {
                "domain": domain,
                "repeated_share": round(repeated_share(never.tokens), 3),
                **{mode: _request(walk, never) for mode, walk in own.items()},
            }
        )
    rows = []
    for text in ("all", "no loop"):
        some = [r for r in requests if text == "all" or r["repeated_share"] <= REPEATS]
        rows += [_row(text, mode, [r[mode] for r in some]) for mode in MODES if len(some) > 1]
    return {"requests": len(walks["never"]), "same_answers": len(requests), "rows": rows, "walks": requests}


def _request(walk: Walk, never: Walk) -> dict[str, Any]:
    """Accepted drafts of the first rounds after the restart, and of those never off from there on."""
    restart = walk.restart()
    mine, theirs = walk.accepted_from(restart), never.accepted_from(restart)
    known = {start: accepted for start, _, accepted in never.rounds}
    both = [start for start in mine if start in known]
    return {
        "restart": restart,
        "accepted": list(mine.values()),
        "never_off": list(theirs.values()),
        "shared": len(both),
        "same": sum(mine[start] == known[start] for start in both),
    }


def _row(text: str, mode: str, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    mine = 1 + np.array([request["accepted"] for request in requests])
    theirs = 1 + np.array([request["never_off"] for request in requests])
    difference = mine.mean(axis=1) - theirs.mean(axis=1)
    half = t_quantile(len(requests) - 1) * difference.std(ddof=1) / np.sqrt(len(requests))
    mean = difference.mean()
    return {
        "text": text,
        "off_mode": mode,
        "requests": len(requests),
        "accept_length": round(float(mine.mean()), 4),
        "never_off": round(float(theirs.mean()), 4),
        "difference": [round(float(x), 4) for x in (mean, mean - half, mean + half)],
        "accept_length_by_round": [round(float(x), 3) for x in mine.mean(axis=0)],
        "never_off_by_round": [round(float(x), 3) for x in theirs.mean(axis=0)],
        "shared_starts": sum(request["shared"] for request in requests),
        "same_at_shared": sum(request["same"] for request in requests),
    }


def t_quantile(freedom: int) -> float:
    """97.5 % of Student's t by Cornish and Fisher, within 0.001 from 8 degrees of freedom: no SciPy here."""
    return 1.95996 + 2.37227 / freedom + 2.8225 / freedom**2 + 2.5559 / freedom**3


def table(document: dict[str, Any]) -> str:
    """The rows in Markdown."""
    lines = [
        f"| text | off mode | requests | accept length, {ROUNDS} rounds | never off | difference [95 %] "
        "| round 1 | rounds 2 to 5 | rounds 6 to 20 | same drafts at shared starts |",
        "|" + "---|" * 10,
    ]
    for row in document["rows"]:
        mean, low, high = row["difference"]
        by_round = np.array(row["accept_length_by_round"])
        parts = " | ".join(f"{by_round[part].mean():.2f}" for part in np.split(np.arange(ROUNDS), [1, 5]))
        lines.append(
            f"| {row['text']} | `{row['off_mode']}` | {row['requests']} | {row['accept_length']:.3f} "
            f"| {row['never_off']:.3f} | {mean:+.3f} [{low:+.3f}, {high:+.3f}] | {parts} "
            f"| {row['same_at_shared']} of {row['shared_starts']} |"
        )
    return "\n".join(lines)


def verdict(document: dict[str, Any]) -> list[str]:
    """What must not be; empty where all is well."""
    failures = []
    if document["same_answers"] < 0.9 * document["requests"]:
        failures.append(f"only {document['same_answers']} of {document['requests']} answers are the same")
    if document["kv_only"]["kv_only_fallback"]:
        failures.append(f"kv-only was warm: {document['kv_only']['kv_only_fallback']}")
    for row in document["rows"]:
        where = f"{row['text']}: {row['off_mode']}"
        if row["off_mode"] == "kv-only" and row["difference"][2] < 0:
            failures.append(f"{where} is worse than never off")
        if row["off_mode"] == "skip" and not row["difference"][2] < 0:
            failures.append(f"{where} is no worse than never off: no power")
    return failures
