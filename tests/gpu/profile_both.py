"""`draftdial profile URL --no-spec URL2 ...` where the two servers have GPUs of their own: both at once.

The command itself measures one after the other, since on one GPU they would disturb each other. It runs in
the end, finds everything measured, and writes the profile.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from draftdial.controller import profile_server
from draftdial.controller.cli import main
from draftdial.controller.measured_server import MeasuredServer
from draftdial.controller.profile_measurements import Measurements, Repeat, Task
from draftdial.controller.profile_sweep import Sweep
from draftdial.engine_patch.client import Server


class SharedMeasurements(Measurements):
    """Two threads add to it."""

    def __init__(self, path: Any, document: dict[str, Any]) -> None:
        super().__init__(path, document)
        self._lock = Lock()

    def add(self, task: Task, repeat: Repeat) -> None:
        with self._lock:
            super().add(task, repeat)


def measure(sweep: Sweep, measurements: Measurements) -> None:
    """Everything of one server that is not there yet."""
    try:
        for tasks in sweep.passes(measurements):
            for task in tasks:
                measurements.add(task, sweep.run(task))
    finally:
        sweep.server.close()
    print(f"{sweep.side}: measured", flush=True)


def both(args: argparse.Namespace) -> None:
    """Measure the two servers that the command was given."""
    servers = [
        MeasuredServer(Server(url), Server(url, timeout_s=profile_server.PATIENT_S), args.seed)
        for url in (args.url, args.no_spec)
    ]
    grid = profile_server._grid(args, servers[0])
    path = profile_server._measurements_path(args.out)
    measurements = SharedMeasurements.open(path, grid, servers[0].facts_that_last)
    sides = ("speculative", "nospec")
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(measure, Sweep(server, grid, side), measurements)
            for server, side in zip(servers, sides, strict=True)
        ]
        for run in runs:
            run.result()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    profile_server.add_parser(parser.add_subparsers())
    both(parser.parse_args(["profile", *sys.argv[1:]]))
    sys.argv.insert(1, "profile")  # the profile says by which command it was made
    sys.exit(main(sys.argv[1:]))
