"""What the drafts of a real pair are worth right after a long time at k = 0, in every off mode.

    python off_restart.py PAIR PROMPTS.jsonl... [--requests 32] [--candidates 40] [--out FILE]

Real SGLang serves PAIR/target with PAIR/draft in float32 on this CPU, 16 requests at a time, greedily and
beyond the end of the answer. An environment in lockstep says k before every round, so that it is exact: 3
for a few rounds, 0 for 500 (--off-rounds), 3 again. The same requests at 3 throughout are what that is
compared with. Of the candidates those are taken whose text repeats itself least at its end: a small model
loops, and a loop is guessed by any draft.

Exits with 1 if `kv-only` is worse than never off by more than the noise; or if `skip` is not, as then nothing
was tested.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engine"))  # the modules there are no package

import policies  # noqa: E402
from cpu_server import CpuServer, draft_arguments, target_arguments  # noqa: E402
from restart_figures import REPEATS, ROUNDS, Walk, figures, repeated_share, table, verdict  # noqa: E402

from draftdial.controller.chat_prompts import ChatPrompt, read_prompts  # noqa: E402
from draftdial.controller.files import atomic_write  # noqa: E402
from draftdial.engine_patch.client import Server  # noqa: E402
from draftdial.envs.live_server import LiveServer  # noqa: E402

K = max(policies.TIERS)
BATCH = policies.MAX_RUNNING
SETTLE = 8
"""Rounds at K, all requests running, before the first at 0."""
SPARE = 12
"""Rounds more for which an answer is long enough: requests do not all start in the same round."""
MAX_PROMPT = 256
"""Tokens; 16 requests must fit in the KV pool."""

ANSWER_S = 3600.0
"""Minutes on an idle machine: only a hang must end."""

Prompt = tuple[int, ...]
Schedule = Callable[[int], int]
"""k by the number of rounds that all requests of a batch were running."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("pair", type=Path)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--candidates", type=int, default=40)
    parser.add_argument("--off-rounds", type=int, default=500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    prompts = spread(
        [p for path in args.prompts for p in read_prompts(path, args.pair / "target")], args.candidates
    )
    new_tokens = args.off_rounds + (K + 1) * (SETTLE + ROUNDS + SPARE)
    candidates = [prompt.ids for prompt in prompts]

    def after_off(off_rounds: int) -> Schedule:
        return lambda n: 0 if SETTLE <= n < SETTLE + off_rounds else K

    walks, statuses = dict[str, list[Walk]](), dict[str, dict[str, Any]]()
    with serving(args.pair, "warm") as server:
        never = served(server, candidates, new_tokens, lambda _: K, "never")
        chosen = sorted(
            sorted(range(len(never)), key=lambda i: repeated_share(never[i].tokens))[: args.requests]
        )
        taken = [candidates[i] for i in chosen]
        # `kv-only` puts one more round at 0 before the first that speculates: so all come back alike.
        walks["warm"] = served(server, taken, new_tokens, after_off(args.off_rounds + 1), "warm")
    for off_mode, decided in (("kv-only", args.off_rounds), ("skip", args.off_rounds + 1)):
        with serving(args.pair, off_mode) as server:
            walks[off_mode] = served(server, taken, new_tokens, after_off(decided), off_mode)
            statuses[off_mode] = server.status()
    walks["never"] = [never[i] for i in chosen]

    found = figures(walks, [prompts[i].domain for i in chosen])
    kv_only = statuses["kv-only"]
    document = {
        "measured": f"tests/real_pair/off_restart.py, SGLang {version('sglang')} on a CPU, float32, greedy",
        "k": K,
        "off_rounds": args.off_rounds,
        "batch": BATCH,
        "candidates": len(candidates),
        "candidates_that_loop": sum(repeated_share(walk.tokens) > REPEATS for walk in never),
        "kv_only": {
            name: kv_only[name] for name in ("kv_only_rounds", "kv_only_restarts", "kv_only_fallback")
        },
        "seconds": round(time.monotonic() - began),
        **found,
    }
    if args.out:
        atomic_write(args.out, json.dumps(document, indent=1) + "\n")
    print(table(document))
    failures = verdict(document)
    print("\n".join(failures) or "ok")
    return int(bool(failures))


def spread(prompts: list[ChatPrompt], count: int) -> list[ChatPrompt]:
    """`count` prompts that are not too long, from all over the list."""
    short = [prompt for prompt in prompts if len(prompt.ids) <= MAX_PROMPT]
    return short[:: max(1, len(short) // count)][:count]


@contextmanager
def serving(pair: Path, off_mode: str) -> Iterator[CpuServer]:
    """A server of the pair with this off mode, where an environment may decide k."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rule = policies.rule("fixed", "skip" if off_mode == "skip" else "warm", k=K)
        serve = [str(policies.saved(rule, folder / "rule.safetensors"))]
        if off_mode == "kv-only":
            serve += ["--off-mode", "kv-only"]
        with CpuServer(
            [*target_arguments(pair), *draft_arguments(pair)],
            folder / "server.log",
            serve=serve,
            environment={"DRAFTDIAL_LIVE": str(folder / "live.sock")},
        ) as server:
            yield server


def served(
    server: CpuServer, prompts: Sequence[Prompt], new_tokens: int, schedule: Schedule, name: str
) -> list[Walk]:
    """What became of `prompts`, a batch at a time.

    Slots of the KV pool are handed out in the same order to every batch: what is not written keeps the KV
    of the batch before, as in any server that has run for a while. Before the first batch it is zero.
    """
    walks = list[Walk]()
    for begin in range(0, len(prompts), BATCH):
        lap = time.monotonic()
        server.flush()
        walks += serve_batch(server.url, prompts[begin : begin + BATCH], new_tokens, schedule)
        print(f"{name}: {len(walks)} requests, {time.monotonic() - lap:.0f} s", file=sys.stderr, flush=True)
    return walks


def serve_batch(url: str, prompts: Sequence[Prompt], new_tokens: int, schedule: Schedule) -> list[Walk]:
    """All `prompts` at once, every round at the k of `schedule`."""
    server, environment = Server(url, timeout_s=ANSWER_S), LiveServer(url)
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    rounds: dict[str, list[tuple[int, int]]] = {f"restart-{i}": [] for i in range(len(prompts))}

    def ask(rid: str, prompt: Prompt) -> list[int]:
        body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling}
        tokens: list[int] = json.loads(server.post("/generate", body))["output_ids"]
        return tokens

    environment.claim()
    try:
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(ask, rid, prompt) for rid, prompt in zip(rounds, prompts, strict=True)]
            together = 0
            while not all(answer.done() for answer in answers):
                question = environment.question(0.1)
                if question is None:
                    continue
                assert question["missed"] == 0, "a round ran without being asked for"
                for outcome in question["outcomes"]:
                    for rid, accepted in zip(outcome["rids"], outcome["accepted"], strict=True):
                        rounds[rid].append((outcome["k"], accepted))
                environment.answer(question["round"], schedule(together))
                together += together > 0 or question["signals"]["num_running"] == len(prompts)
    finally:
        environment.close()
    return [Walk.of(answer.result(), made) for answer, made in zip(answers, rounds.values(), strict=True)]


if __name__ == "__main__":
    sys.exit(main())
