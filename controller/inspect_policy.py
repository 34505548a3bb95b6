"""`draftdial inspect FILE`: a policy's card in words, and a picture of what it does."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftdial.controller.policy_card import Card
from draftdial.controller.policy_file import PolicyFile, load_policy, read
from draftdial.controller.steady_state import CONTEXT_TOKENS, settled_k

ACCEPTANCES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
QUEUES = (0, 1, 4, 16, 64, 256)
QUEUE_ACCEPTANCE = 0.7

_WIDTH = 100
_INDENT = 13


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `inspect` to the commands."""
    parser = subparsers.add_parser("inspect", help="print a policy file's card and a picture of its k")
    parser.add_argument("file", type=Path, help="a policy file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=inspect_command)


def inspect_command(args: argparse.Namespace) -> int:
    """Print what is in `args.file`; 0, or a `UserError` if it is not a sound policy file."""
    print(json.dumps(inspection(args.file)) if args.json else describe(args.file))
    return 0


def inspection(path: str | Path) -> dict[str, Any]:
    """Everything `describe` prints, as JSON's own types."""
    file = read(path)
    return {"policy_id": file.policy_id, "card": file.card, **pictures(file)}


def describe(path: str | Path) -> str:
    """The card in words, then the pictures."""
    file = read(path)
    drawn = pictures(file)
    by_acceptance, by_queue = drawn["k_by_batch_and_acceptance"], drawn["k_by_batch_and_queue"]
    return "\n".join(
        [
            *_card_lines(file),
            "",
            f"k by requests running (columns) and acceptance of each draft token (rows); no queue, "
            f"context {CONTEXT_TOKENS} tokens",
            *_picture_lines("acceptance", by_acceptance["batches"], ACCEPTANCES, by_acceptance["k"]),
            "",
            f"k by requests running (columns) and waiting (rows); acceptance {QUEUE_ACCEPTANCE}, "
            f"context {CONTEXT_TOKENS} tokens",
            *_picture_lines("waiting", by_queue["batches"], QUEUES, by_queue["k"]),
        ]
    )


def pictures(file: PolicyFile) -> dict[str, Any]:
    """The k the policy settles on, over captured batches and acceptance, and over batches and queue."""
    policy, profile = load_policy(file), file.profile()
    batches = [batch for batch in profile.captured_batches.tolist() if batch <= profile.max_running]

    def rows_of_k(states: Sequence[tuple[int, float]]) -> list[list[int]]:
        """A row for each (waiting, acceptance), a column for each batch."""
        cells = [(batch, waiting, acceptance) for waiting, acceptance in states for batch in batches]
        k = settled_k(policy, profile, *zip(*cells, strict=True))
        rows: list[list[int]] = k.reshape(len(states), len(batches)).tolist()
        return rows

    return {
        "k_by_batch_and_acceptance": {
            "batches": batches,
            "acceptances": list(ACCEPTANCES),
            "k": rows_of_k([(0, acceptance) for acceptance in ACCEPTANCES]),
        },
        "k_by_batch_and_queue": {
            "batches": batches,
            "num_waiting": list(QUEUES),
            "k": rows_of_k([(waiting, QUEUE_ACCEPTANCE) for waiting in QUEUES]),
        },
    }


def _picture_lines(
    title: str, batches: Sequence[int], labels: Sequence[float], k: Sequence[Sequence[int]]
) -> Iterator[str]:
    yield f"{title:>{_INDENT - 2}} |" + "".join(f"{batch:4d}" for batch in batches)
    for label, row in zip(labels, k, strict=True):
        yield f"{label:>{_INDENT - 2}} |" + "".join(f"{cell:4d}" for cell in row)


def _card_lines(file: PolicyFile) -> Iterator[str]:
    card = file.card
    version, fallback = card["format"], card["fallback"]
    document = card["cost_profile"]["document"]
    yield from _entry("policy", f"{card['name']} ({card['kind']}), id {file.policy_id}")
    yield from _entry("format", f"{version['major']}.{version['minor']}, {len(file.data):,} bytes")
    yield from _entry("tiers", f"k = {', '.join(map(str, card['tiers']))}; off mode {card['off_mode']}")
    yield from _entry("profile", f"{document['name']} ({document['model']} on {document['hardware']})")
    yield from _entry("", document["description"])
    yield from _entry("", f"sha256 {card['cost_profile']['sha256']}")
    yield from _entry(
        "fallback", f"k = {fallback['k']} while at most {fallback['batch']} run, else {card['tiers'][0]}"
    )
    if card["kind"] == "learned":
        yield from _learned_lines(file)
    else:
        yield from _entry("rule", json.dumps(card["rule"]))
        answers = card["golden"]["k"]
        yield from _entry("golden", f"{len(answers)} rounds of {len(answers[0])} servers, all answered alike")
    if card["training"] is not None:
        yield from _training_lines(card["training"])
    yield from _block("evaluation", json.dumps(card["evaluation"], indent=2))


def _learned_lines(file: PolicyFile) -> Iterator[str]:
    card, limits, belief = file.card, file.card["limits"], file.card["belief"]
    num_hidden, num_features = file.tensors["hidden.0.weight"].shape
    num_tiers, num_inputs = file.tensors["logits.weight"].shape
    num_direct = num_inputs - num_hidden
    yield from _entry(
        "network",
        f"{num_features} features, 2 x {num_hidden} tanh, {num_tiers} logits; "
        f"the last {num_direct} features also reach the logits directly",
    )
    yield from _entry("features", ", ".join(feature["name"] for feature in card["features"]))
    yield from _entry("limits", f"TTFT {limits['ttft_s']} s, TPOT {limits['tpot_s']} s")
    yield from _entry("belief", ", ".join(f"{key} {value}" for key, value in belief.items()))
    yield from _entry("golden", f"{len(file.tensors['golden.k'])} vectors, all answered alike")


def _training_lines(training: Card) -> Iterator[str]:
    yield from _entry("training", f"{training['command']}; seed {training['seed']}")
    for group in ("versions", "hashes"):
        yield from _entry(group, ", ".join(f"{name} {value}" for name, value in training[group].items()))
    yield from _block("config", training["config"])


def _entry(label: str, text: str) -> Iterator[str]:
    """A labelled paragraph."""
    lines = textwrap.wrap(_printable(text), _WIDTH - _INDENT, break_on_hyphens=False) or ["none"]
    for i, line in enumerate(lines):
        yield f"{label if i == 0 else '':<{_INDENT}}{line}"


def _block(label: str, text: str) -> Iterator[str]:
    """A label, then lines kept as they are."""
    yield label
    for line in text.splitlines():
        yield f"  {_printable(line)}"


def _printable(text: str) -> str:
    """Without control characters: a file from elsewhere must not drive the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
