"""What the installed SGLang says: its release, its plugins, its reading of arguments, its reasons.

The only module of `serve` and `doctor` that imports SGLang. Importing it takes seconds; the server that
`serve` becomes does it again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from draftdial.controller.errors import UserError
from draftdial.engine_patch.launch_arguments import Given
from draftdial.engine_patch.settings import POLICY

PLUGIN_GROUP = "sglang.srt.plugins"


@dataclass(frozen=True)
class Resolved:
    """What SGLang makes of a command line."""

    unsupported: str | None
    """Why it would not switch tiers, in its own words; None if it would."""
    max_running: int | None
    captured: int
    """The largest batch whose decode rounds have a CUDA graph; 0 without graphs."""
    rejection_sampling: bool
    device: str
    attention_backend: str


class Sglang(Protocol):
    """An SGLang installation."""

    def version(self) -> str | None:
        """Its release; None where SGLang is not installed."""

    def plugins(self) -> dict[str, str]:
        """Name and target of every entry point in its plugin group."""

    def parse(self, arguments: Sequence[str]) -> Given:
        """The user's arguments. Raises UserError where the parser refuses them."""

    def resolve(self, arguments: Sequence[str]) -> Resolved:
        """What becomes of `arguments`. Raises UserError where SGLang would not start with them."""


class InstalledSglang:
    """The SGLang of this Python, 0.5.14 to 0.5.23."""

    def version(self) -> str | None:
        try:
            return importlib.metadata.version("sglang")
        except importlib.metadata.PackageNotFoundError:
            return None

    def plugins(self) -> dict[str, str]:
        return {entry.name: entry.value for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP)}

    def parse(self, arguments: Sequence[str]) -> Given:
        with _quietly():
            try:
                from sglang.srt.server_args import ServerArgs
            except ImportError as error:
                raise UserError(f"SGLang cannot be imported: {error}") from None
            parser = _Parser(prog="sglang serve")
            ServerArgs.add_cli_args(parser)
            try:
                merged = _merge_config(parser, list(arguments))
            except ValueError as error:
                raise UserError(f"SGLang: --config: {error}") from None
            for action in parser._actions:
                action.default = argparse.SUPPRESS  # so that only what the user set is in the result
            try:
                values = vars(parser.parse_args(merged))
            except UserError:
                raise
            except Exception as error:  # actions of its own for some flags raise what they like
                raise _refusal(error) from None
            return Given(tuple(merged), values)

    def resolve(self, arguments: Sequence[str]) -> Resolved:
        with _quietly():
            from sglang.srt.plugins import load_plugins
            from sglang.srt.server_args import prepare_server_args
            from sglang.srt.speculative.adaptive_spec_params import adaptive_unsupported_reason

            os.environ.pop(POLICY, None)  # draftdial's own plugin is not asked here
            load_plugins()  # others may bring platforms and algorithms
            try:
                server_args = prepare_server_args(list(arguments))
                if hasattr(server_args, "resolve_once"):  # 0.5.20 and later resolve on demand
                    server_args.resolve_once()
                unsupported = adaptive_unsupported_reason(server_args)
                server_args.check_server_args()
            except Exception as error:
                raise _refusal(error) from None  # of any kind: it ends the server's start in the same way
            view = _resolved_view(server_args)
            graphs = view.cuda_graph_config.decode
            return Resolved(
                unsupported=unsupported,
                max_running=view.max_running_requests,
                captured=0 if graphs.backend == "disabled" else max(graphs.bs or [graphs.max_bs or 0]),
                rejection_sampling=bool(view.speculative_use_rejection_sampling),
                device=str(view.device),
                attention_backend=str(view.attention_backend),
            )


class _Parser(argparse.ArgumentParser):
    """Complains in one line, where argparse would print the usage of some hundred flags."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"SGLang: {message}")


def _refusal(error: Exception) -> UserError:
    """What SGLang raised about its arguments, as one line; without words of its own, what did not hold."""
    text = str(error).rstrip(".")
    if not text:
        [raised] = traceback.extract_tb(error.__traceback__, limit=-1)
        text = f"{type(error).__name__} at `{raised.line}`"
    return UserError(f"SGLang refuses these arguments: {text}")


def _merge_config(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """`arguments` with the `--config` file merged in by SGLang's own code."""
    if "--config" not in arguments:
        return arguments
    try:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
    except ModuleNotFoundError:  # its place before 0.5.20
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger
    merged: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(arguments)
    return merged


def _resolved_view(server_args: Any) -> Any:
    """The arguments with all that SGLang decided about them."""
    try:
        from sglang.srt.arg_groups.overrides import resolved_view
    except ModuleNotFoundError:  # the first releases write their decisions into the arguments
        return server_args
    return resolved_view(server_args)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without SGLang's own messages: the server repeats them, and standard output is the command's."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
