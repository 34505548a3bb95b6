"""The wheel holds what the tree holds, and serving needs no more than the core installation."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("controller", "envs", "engine_patch", "conf")
HEAVY = {
    "torch",
    "gymnasium",
    "numba",
    "stable_baselines3",
    "hydra",
    "omegaconf",
    "matplotlib",
    "rich",
    "scipy",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in the wheel, built from a copy: building leaves folders behind."""
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    target = source / "dist"
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "absent from the `packages`" not in done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return set(zipfile.ZipFile(built).namelist())


def test_the_wheel_holds_every_module_and_every_data_file(wheel: set[str]) -> None:
    suffixes = {".py", ".yaml", ".json", ".gz", ".typed"}
    expected = {
        f"draftdial/{path.relative_to(ROOT).as_posix()}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    }
    assert {"draftdial/controller/cli.py", "draftdial/envs/profiles/h200-llama3-8b.json"} <= expected
    assert {"draftdial/conf/experiment/smoke.yaml", "draftdial/engine_patch/__init__.py"} <= expected
    assert {name for name in wheel if not name.split("/")[0].endswith(".dist-info")} == expected


def test_the_wheel_carries_its_licence_and_the_command(wheel: set[str]) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    assert any(name.endswith("entry_points.txt") for name in wheel)


def imported_by(statement: str) -> set[str]:
    """Top-level modules that `statement` brings in, in a fresh interpreter."""
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["policy_file", "learned", "features", "greedy", "rules", "sglang_rule", "bandit", "cost_profile", "cli"],
)
def test_the_serving_path_imports_numpy_and_safetensors_alone(module: str) -> None:
    assert not imported_by(f"import draftdial.controller.{module}") & HEAVY


def test_a_policy_runs_without_the_training_software(tmp_path: Path) -> None:
    file = tmp_path / "rule.safetensors"
    statement = (
        "from draftdial.controller.cli import main\n"
        f"assert main(['export-rule', 'greedy', '--out', {str(file)!r}]) == 0\n"
        "import numpy as np\n"
        "from draftdial.controller.policy_file import load_policy\n"
        "from draftdial.controller.signals import RoundSignals\n"
        f"policy = load_policy({str(file)!r})\n"
        "policy.reset(1)\n"
        "signals = RoundSignals.zeros(1)\n"
        "signals.num_running[:] = signals.max_running[:] = 4\n"
        "assert policy.decide(signals).shape == (1,)"
    )
    code = f"import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()):\n    exec({statement!r})"
    assert not imported_by(code) & HEAVY
