"""`draftdial record-acceptance`: how many drafts are accepted at every output position of many answers."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from draftdial.controller.acceptance_file import FORMAT
from draftdial.controller.errors import UserError
from draftdial.controller.files import atomic_write

UNKNOWN_TO_A_LOG = {
    "target": "the model served",
    "draft": "its draft model",
    "sampling": "how answers were sampled, such as temperature=0",
    "prompts": "where the prompts come from",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `record-acceptance` to the commands."""
    parser = subparsers.add_parser("record-acceptance", help="record acceptance at every output position")
    parser.add_argument(
        "log", type=Path, nargs="?", help="decision log of a server, best one forced to its largest tier"
    )
    parser.add_argument(
        "--teacher-forced",
        nargs=3,
        type=Path,
        metavar=("TARGET", "DRAFT", "PROMPTS"),
        help="instead of a log: folders of a Llama and its EAGLE-3 draft, and a JSONL file of prompts",
    )
    for name, what in UNKNOWN_TO_A_LOG.items():
        parser.add_argument(f"--{name}", help=f"with a log, which does not know it: {what}")
    parser.add_argument("--temperature", type=float, default=0.0, help="of teacher-forced answers (0)")
    parser.add_argument("--max-new", type=int, default=256, help="positions of an answer (256)")
    parser.add_argument("--seed", type=int, default=0, help="of sampled answers (0)")
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write: .jsonl or .jsonl.gz; missing folders are made"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the file and say what is in it; 0, or a `UserError`."""
    if (args.log is None) == (args.teacher_forced is None):
        raise UserError("record-acceptance: allowed: either a decision log or --teacher-forced")
    if not 0 <= args.temperature <= 10:
        raise UserError(f"--temperature: found {args.temperature}, allowed: 0 to 10")
    if not 2 <= args.max_new <= 65536:
        raise UserError(f"--max-new: found {args.max_new}, allowed: 2 to 65536")
    header, lines = _teacher_forced(args) if args.log is None else _logged(args)
    text = "".join(
        json.dumps(line, separators=(",", ":")) + "\n" for line in ({"format": FORMAT, **header}, *lines)
    )
    content = text.encode()
    atomic_write(args.out, gzip.compress(content, mtime=0) if args.out.suffix == ".gz" else content)
    print(f"{args.out}: {len(lines)} requests, {sum(len(line['acc']) for line in lines)} positions")
    return 0


def _teacher_forced(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from draftdial.controller.teacher_forced import record

    for name in UNKNOWN_TO_A_LOG:
        if getattr(args, name) is not None:
            raise UserError(f"--{name}: allowed: only with a decision log")
    target, draft, prompts = args.teacher_forced
    return record(target, draft, prompts, args.temperature, args.max_new, args.seed)


def _logged(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from draftdial.engine_patch.logged_acceptance import record_log

    told = {name: getattr(args, name) for name in UNKNOWN_TO_A_LOG}
    missing = [f"--{name}" for name, value in told.items() if not value]
    if missing:
        raise UserError(f"record-acceptance: a decision log needs {', '.join(missing)} beside it")
    header, lines = record_log(args.log)
    return {**header, **told}, lines
