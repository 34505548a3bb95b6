"""Runs draftdial's training side beside a server: in `make test`'s venv, as SGLang's has no Gymnasium."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[2] / ".venv" / "bin" / "python"
TIMEOUT_S = 900.0


def trainer(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in `folder`; skips the test where there is no such venv."""
    with started(*arguments, folder=folder) as process:
        try:
            out, error = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def started(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    """The same, under way."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there: `make test` makes it")
    return subprocess.Popen(
        [str(PYTHON), *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("DRAFTDIAL_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def without_progress(stderr: str) -> str:
    """What a trainer said besides how far it is."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("draftdial train: "))
