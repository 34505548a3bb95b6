"""What the plugin is told through the environment, which SGLang's processes inherit.

No variable `DRAFTDIAL_POLICY`: no settings, and the plugin does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from draftdial.controller.errors import UserError
from draftdial.engine_patch.live_channel import MAX_PATH

Mode = Literal["steer", "shadow", "off"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""`steer`: the policy decides. `shadow`: it decides and is recorded, SGLang's rule acts. `off`: k = 0."""

POLICY = "DRAFTDIAL_POLICY"
MODE = "DRAFTDIAL_MODE"
START = "DRAFTDIAL_START"
FORCE_K = "DRAFTDIAL_FORCE_K"
LOG = "DRAFTDIAL_LOG"
LOG_MB = "DRAFTDIAL_LOG_MB"
INACTIVE = "DRAFTDIAL_INACTIVE"
REPLAY = "DRAFTDIAL_REPLAY_ACCEPTANCE"
BENCHMARK = "DRAFTDIAL_BENCHMARK"
LIVE = "DRAFTDIAL_LIVE"
OFF_MODE = "DRAFTDIAL_OFF_MODE"
"""`kv-only`, or unset: what SGLang itself does at k = 0, see `launch_checks.SKIP`."""

SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
"""SGLang's own way to make acceptance up."""

STARTS = ("strict", "warn")

DEFAULT_LOG_MB = 64
MIN_LOG_MB = 4
"""Half of it holds what fills all buffers of the log, with room for a policy file."""
MAX_LOG_MB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """How the plugin was configured."""

    policy: Path
    """The policy file, an absolute path: SGLang's processes may run elsewhere."""
    mode: Mode = "steer"
    strict: bool = True
    """Abort the server at start when it cannot be steered; otherwise serve with SGLang's own rule."""
    force_k: int | None = None
    log: Path | None = None
    log_bytes: int = DEFAULT_LOG_MB << 20
    """The most the decision log takes on disk."""
    inactive: str = ""
    """Why `draftdial serve --warn` gave up steering before the server started; shown in `/server_info`."""
    replay: tuple[tuple[str, Path], ...] = ()
    """Domains and files of recorded acceptance to accept by, which makes the answers meaningless."""
    live: Path | None = None
    """Socket at which an environment may come and decide k, see `lockstep`; None: none may."""
    kv_only: bool = False
    """Keep the draft's KV at k = 0 without running the draft, where that can be."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings | None:
        """The settings in `environment`; None where `DRAFTDIAL_POLICY` is not set.

        Raises:
            UserError: a variable holds what it may not.
        """
        if not environment.get(POLICY):
            return None
        policy = Path(environment[POLICY])
        if not policy.is_absolute():
            raise UserError(f"{POLICY}: found {str(policy)!r}, allowed: an absolute path")
        log = environment.get(LOG)
        force_k = environment.get(FORCE_K)
        return cls(
            policy=policy,
            mode=cast(Mode, one_of(environment, MODE, MODES)),
            strict=one_of(environment, START, STARTS) == "strict",
            force_k=_whole_number(FORCE_K, force_k, 0, 255) if force_k else None,
            log=Path(log) if log else None,
            log_bytes=_whole_number(
                LOG_MB, environment.get(LOG_MB) or str(DEFAULT_LOG_MB), MIN_LOG_MB, MAX_LOG_MB
            )
            << 20,
            inactive=environment.get(INACTIVE, ""),
            replay=_replay(environment),
            live=_socket(environment.get(LIVE)),
            kv_only=is_kv_only(environment),
        )


def replay_variable(files: Sequence[str]) -> str:
    """The value of `DRAFTDIAL_REPLAY_ACCEPTANCE` for `files`, each `FILE` or `DOMAIN=FILE`.

    Raises:
        UserError: a file's path or domain cannot be part of a variable.
    """
    named = [_named_file(text) for text in files]
    joined = os.pathsep.join(f"{domain}={os.path.abspath(path)}" for domain, path in named)
    if joined.count(os.pathsep) >= len(named):
        raise UserError(f"{REPLAY}: found {' '.join(files)}, allowed: paths without {os.pathsep!r}")
    return joined


def _replay(environment: Mapping[str, str]) -> tuple[tuple[str, Path], ...]:
    """Domains and files, where nobody could take the answers for real ones."""
    value = environment.get(REPLAY)
    if not value:
        return ()
    if environment.get(BENCHMARK) != "1":
        raise UserError(
            f"{REPLAY}: makes all answers meaningless; allowed: where {BENCHMARK}=1 says it is a benchmark"
        )
    if environment.get(SIMULATED):
        raise UserError(f"{SIMULATED}: found {environment[SIMULATED]!r}, allowed with {REPLAY}: unset")
    if environment.get(START) == "warn":
        raise UserError(f"{START}: found 'warn', allowed with {REPLAY}: strict")
    files = tuple(_named_file(text) for text in value.split(os.pathsep))
    if not all(path.is_absolute() for _, path in files):
        raise UserError(f"{REPLAY}: found {value!r}, allowed: absolute paths")
    if len(dict(files)) < len(files):
        raise UserError(f"{REPLAY}: found {value!r}, allowed: each domain once")
    return files


def _socket(path: str | None) -> Path | None:
    """Where to listen for an environment."""
    if not path:
        return None
    if not os.path.isabs(path) or len(path.encode()) > MAX_PATH or not os.path.isdir(os.path.dirname(path)):
        allowed = f"an absolute path of up to {MAX_PATH} bytes, in a folder that is there"
        raise UserError(f"{LIVE}: found {path!r}, allowed: {allowed}")
    return Path(path)


def _named_file(text: str) -> tuple[str, Path]:
    """The domain and the path in `DOMAIN=FILE`; a plain path is called by its stem."""
    domain, equals, path = text.partition("=")
    return (domain, Path(path)) if equals else (Path(text).stem, Path(text))


def is_kv_only(environment: Mapping[str, str]) -> bool:
    """Whether the off mode is `kv-only`.

    Raises:
        UserError: the variable that says so holds something else.
    """
    value = environment.get(OFF_MODE)
    if value and value != "kv-only":
        raise UserError(f"{OFF_MODE}: found {value!r}, allowed: kv-only, or unset")
    return bool(value)


def fits(policy_off_mode: str, server_off_mode: str) -> bool:
    """May a policy made for one off mode run on a server with the other?

    Under `kv-only` k = 0 costs no more than a policy for `warm` reckons with, and loses nothing either.
    """
    return policy_off_mode == server_off_mode or (policy_off_mode, server_off_mode) == ("warm", "kv-only")


def one_of(environment: Mapping[str, str], name: str, allowed: Sequence[str]) -> str:
    """The value of variable `name`; the first of `allowed` where it is not set.

    Raises:
        UserError: it is set to something else.
    """
    value = environment.get(name) or allowed[0]
    if value not in allowed:
        raise UserError(f"{name}: found {value!r}, allowed: {', '.join(allowed)}")
    return value


def _whole_number(name: str, text: str, least: int, most: int) -> int:
    # So few digits that converting them cannot fail.
    if not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise UserError(f"{name}: found {shown!r}, allowed: a whole number from {least} to {most}")
    return int(text)
