"""Gives each SGLang scheduler the quietest core there is, and everything else the rest of them.

    python3 tests/gpu/quiet_cores.py --out FILE.jsonl    # appends how slow each core was, and who has which

On a shared host some cores run slower than others, since somebody else's work shares them, and a scheduler's
main thread sets the pace of every round. A core's speed is the best of some short loops, as a ratio to the
fastest core's. What shares a physical core with a scheduler stays empty; where the machine does not say what
does, that is taken to be the neighbour by number.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

LOOPS, STEPS = 5, 20_000
SCHEDULER = "sglang::schedul"
"""How Linux cuts the name of its process."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cores = sorted(range(os.cpu_count() or 1))
    seconds = {core: seconds_on(core) for core in cores}
    os.sched_setaffinity(0, cores)
    schedulers = [process for process in processes() if name_of(process).startswith(SCHEDULER)]
    quietest: list[int] = []
    rest = set(cores)
    for core in sorted(cores, key=lambda core: seconds[core]):
        if len(quietest) < len(schedulers) and core in rest:
            quietest.append(core)
            rest -= sharing(core)
    if not rest:
        schedulers = []  # no core would be left for anything else: they stay where they are
    else:
        for process in processes():
            for thread in threads_of(process):
                is_main = process in schedulers and thread == process
                pin(thread, {quietest[schedulers.index(process)]} if is_main else rest)
    fastest = min(seconds.values())
    found = {
        "at_s": round(time.time()),
        "fastest_ms": round(1e3 * fastest, 4),
        "slowness": {core: round(seconds[core] / fastest, 3) for core in cores},
        "schedulers": dict(zip(schedulers, quietest, strict=False)),
    }
    with args.out.open("a") as file:
        file.write(json.dumps(found) + "\n")
    print(found)


def seconds_on(core: int) -> float:
    """What the loop takes there at best."""
    os.sched_setaffinity(0, {core})
    best = float("inf")
    for _ in range(LOOPS):
        begun = time.perf_counter()
        total = 0
        for step in range(STEPS):
            total += step & 7
        best = min(best, time.perf_counter() - begun)
    return best


def sharing(core: int) -> set[int]:
    """The hardware threads of its physical core, itself among them."""
    first, _, last = (
        Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        .read_text()
        .strip()
        .partition("-")
    )
    siblings = {int(each) for each in f"{first},{last or first}".split(",")}
    return siblings | {core} if len(siblings) > 1 else {core, core ^ 1}


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def threads_of(process: int) -> list[int]:
    try:
        return [int(path.name) for path in Path(f"/proc/{process}/task").iterdir()]
    except OSError:
        return []  # it has ended


def name_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def pin(thread: int, cores: set[int]) -> None:
    try:
        os.sched_setaffinity(thread, cores)
    except OSError:
        pass  # it has ended, or is the kernel's own


if __name__ == "__main__":
    main()
