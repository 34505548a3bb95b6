"""The `draftdial` command."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from itertools import pairwise

from draftdial.controller.errors import UserError
from draftdial.controller.interrupts import unmasked

COMMANDS = {
    "train": ("controller.train_command", "train a policy by PPO and export it"),
    "compare": ("controller.compare_command", "compare policy files with every rival, in simulation"),
    "tune": ("controller.tune_command", "tune the rivals on training seeds"),
    "inspect": ("controller.inspect_policy", "print a policy file's card and a picture of its choices"),
    "export-rule": ("controller.export_rule", "write a rule as a policy file"),
    "reprice": ("controller.reprice", "make a policy reckon with a busy host"),
    "profile": ("controller.profile_server", "measure a server and write its cost profile"),
    "bench": ("controller.bench", "drive a server and compare how it is steered"),
    "validate-sim": ("controller.validate_sim", "compare the simulator with a server, on one load"),
    "bench-sim": ("controller.bench_sim", "time the simulator"),
    "bench-decide": ("controller.bench_decide", "time a decision on a server's launch path"),
    "toy": ("controller.toy_command", "compare the learner with an exact dynamic programme"),
    "serve": ("engine_patch.serve", "start SGLang with a policy in its decode loop"),
    "doctor": ("engine_patch.doctor", "say whether a server would be steered, and if not, why"),
    "status": ("engine_patch.status_command", "ask a running server what its policy does"),
    "set": ("engine_patch.set_command", "change a running server's mode, or force k"),
    "deploy": ("engine_patch.deploy_command", "put a policy file into a running server"),
    "explain": ("engine_patch.explain_command", "read a decision log out in words"),
    "export-acceptance": ("controller.export_acceptance", "write fitted acceptance as recorded arrays"),
    "record-acceptance": ("controller.record_acceptance", "record acceptance at every output position"),
    "demo": ("controller.demo", "train, export and compare"),
}
"""Module and summary. A module adds its arguments with the core installation alone; what more a command needs
is imported when it runs."""

BROKEN_PIPE = 141
"""What a shell reports of a program that SIGPIPE ended."""

_FORWARDING = ("serve", "doctor", "profile")
"""Commands whose arguments after `--` are SGLang's."""

_FLAGS_ANYWHERE = ("train",)
"""Commands whose options take no value: these may stand between the others, which argparse would refuse."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it did what was asked, 2 with one line when the input was wrong.

    `BROKEN_PIPE`, without a line, when whoever read the output has gone, as `head` does.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        try:
            with unmasked():
                return _run(called, arguments)
        finally:
            print(end="", flush=True)  # what cannot be written fails here and not as the interpreter ends
    except UserError as error:
        print(f"draftdial: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except OSError as error:
        _discard_output()
        print(f"draftdial: {error.filename or called}: {error.strerror or error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("draftdial"):
            raise
        print(
            f"draftdial: {called} needs {error.name}: pip install '.[train]' in a checkout", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        return 130


def _run(called: str | None, arguments: list[str]) -> int:
    """Parse the arguments and run the command that is called among them."""
    parser = _Parser(prog="draftdial", description="A learned dial for speculative decoding.")
    parser.add_argument(
        "--version", action="version", version=f"draftdial {importlib.metadata.version('draftdial')}"
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if called in COMMANDS:
        importlib.import_module(f"draftdial.{COMMANDS[called][0]}").add_parser(subparsers)
    else:
        for command, (_, summary) in COMMANDS.items():
            subparsers.add_parser(command, help=summary)
    forwarded: list[str] = []
    if called in _FORWARDING and "--" in arguments:
        dashes = arguments.index("--")
        arguments, forwarded = arguments[:dashes], arguments[dashes + 1 :]
    if called in _FLAGS_ANYWHERE:
        behind = arguments.index(called) + 1
        arguments[behind:] = sorted(arguments[behind:], key=lambda argument: not argument.startswith("-"))
    args, unknown = parser.parse_known_args(arguments, argparse.Namespace(engine_arguments=forwarded))
    if unknown:
        _check_commas(subparsers.choices[args.command], arguments, unknown[0])
        hint = "; SGLang's own go behind --" if called in _FORWARDING else ""
        raise UserError(f"{called}: found {' '.join(unknown)}, allowed: what --help lists{hint}")
    status: int = args.run(args)
    return status


def _check_commas(parser: argparse.ArgumentParser, arguments: Sequence[str], unknown: str) -> None:
    """UserError where `unknown` stands behind an option whose value is a list with commas."""
    places = [place for place, argument in enumerate(arguments) if argument.startswith("-")]
    for start, end in pairwise([*places, len(arguments)]):
        option, _, first = arguments[start].partition("=")
        action = parser._option_string_actions.get(option)
        values = [*filter(None, [first]), *arguments[start + 1 : end]]
        if action is not None and "," in str(action.metavar) and unknown in values[1:]:
            command, found = parser.prog.split()[-1], " ".join(values)
            raise UserError(
                f"{command}: {option}: found {found}, "
                f"allowed: {action.metavar}, with commas and no blanks between"
            )


def _discard_output() -> None:
    """Drop what is left and cannot be written: the interpreter would complain of it as it ends."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed from the start
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        command = self.prog.partition(" ")[2]
        raise UserError(f"{command}: {message}" if command else message)


if __name__ == "__main__":
    sys.exit(main())
