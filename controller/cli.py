"""The `draftdial` command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from draftdial.controller.errors import UserError

MODULES = {
    "train": "draftdial.controller.train",
    "compare": "draftdial.controller.compare",
    "tune": "draftdial.controller.tune",
    "inspect": "draftdial.controller.inspect_policy",
    "export-rule": "draftdial.controller.export_rule",
    "bench-sim": "draftdial.controller.bench_sim",
    "demo": "draftdial.controller.demo",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it did what was asked, 2 with one line when the input was wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="draftdial", description="A learned dial for speculative decoding.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        for command in [called] if called in MODULES else MODULES:
            importlib.import_module(MODULES[command]).add_parser(subparsers)
        args = parser.parse_args(arguments)
        status: int = args.run(args)
        return status
    except UserError as error:
        print(f"draftdial: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("draftdial"):
            raise
        print(f"draftdial: {called} needs {error.name}: pip install 'draftdial[train]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(message)


if __name__ == "__main__":
    sys.exit(main())
