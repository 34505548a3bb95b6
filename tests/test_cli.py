"""The `draftdial` command: help, exit codes, and one line for whatever was wrong."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftdial.controller import cli
from draftdial.controller.errors import UserError
from draftdial.engine_patch.settings import BENCHMARK

SCRIPT = str(Path(sys.executable).with_name("draftdial"))


def test_the_console_script_helps() -> None:
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    for command in cli.COMMANDS:
        assert command in done.stdout


def test_help_needs_nothing_but_the_core_installation() -> None:
    heavy = (
        "torch",
        "stable_baselines3",
        "gymnasium",
        "numba",
        "hydra",
        "omegaconf",
        "matplotlib",
        "rich",
        "scipy",
        "tensorboard",
        "yaml",
    )
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({heavy}))\n"
        "from draftdial.controller.cli import COMMANDS, main\n"
        "for words in ([], *([command] for command in COMMANDS)):\n"
        "    try:\n"
        "        main([*words, '--help'])\n"
        "    except SystemExit as stopped:\n"
        "        assert not stopped.code"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    helped = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("usage: draftdial ")]
    assert helped == ["[-h]", *cli.COMMANDS]


def test_what_is_missing_is_named_with_the_line_that_installs_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from draftdial.controller.cli import main\n"
        "sys.exit(main(['train']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "draftdial: train needs torch: pip install '.[train]' in a checkout\n"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"draftdial {importlib.metadata.version('draftdial')}\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["bench"], "bench: the following arguments are required: URL"),
        (["train", "--fly"], "train: found --fly, allowed: what --help lists"),
        (
            ["bench", "http://a", "--domains", "chat", "code", "maths", "--closed", "1"],
            "bench: --domains: found chat code maths, allowed: A,B, with commas and no blanks between",
        ),
        (
            ["bench", "--requests", "4", "--closed=1", "4", "http://a", "8"],
            "bench: --closed: found 1 4 http://a 8, allowed: C,C, with commas and no blanks between",
        ),
        (
            ["validate-sim", "b.json", "--profile", "p", "--closed", "1", "8"],
            "validate-sim: --closed: found 1 8, allowed: C,C, with commas and no blanks between",
        ),
        (
            ["profile", "http://a", "--out", "p.json", "--batches", "1", "4", "8"],
            "profile: --batches: found 1 4 8, allowed: N,N, with commas and no blanks between",
        ),
        (["bench", "http://a", "--seed", "1", "2"], "bench: found 2, allowed: what --help lists"),
        (
            ["doctor", "a.safetensors", "--model-path", "m"],
            "doctor: found --model-path m, allowed: what --help lists; SGLang's own go behind --",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_its_command(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    assert capsys.readouterr().err == f"draftdial: {says}\n"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: draftdial {command}") and len(out.splitlines()) > 3


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_help_names_what_replaying_acceptance_takes(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    option = capsys.readouterr().out.split("--replay-acceptance [DOMAIN=]FILE\n")[1]
    assert f"{BENCHMARK}=1" in option.splitlines()[0]


def test_flags_may_stand_between_overrides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from draftdial.controller import train

    asked: list[tuple[list[str], bool]] = []

    def remember(overrides: list[str], as_json: bool) -> Path:
        asked.append((overrides, as_json))
        return Path("run")

    monkeypatch.setattr(train, "main", remember)
    assert cli.main(["train", "a=b", "--json", "~c", "+d=-1"]) == 0
    assert asked == [(["a=b", "~c", "+d=-1"], True)] and capsys.readouterr().out == ""


@pytest.mark.parametrize("argv", [["fly"], [], ["--fly"], ["train", "--fly"], ["bench-sim", "extra"]])
def test_a_wrong_command_line_is_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("draftdial: ") and err.count("\n") == 1
    if argv == ["fly"]:
        assert "fly" in err and all(command in err for command in cli.COMMANDS)


@pytest.mark.parametrize(
    ("raised", "status", "says"),
    [
        (UserError("x.json: k: 9; allowed: 0 to 7"), 2, "draftdial: x.json: k: 9; allowed: 0 to 7\n"),
        (
            ModuleNotFoundError(name="rich"),
            2,
            "draftdial: train needs rich: pip install '.[train]' in a checkout\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_codes(
    raised: BaseException,
    status: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> int:
        raise raised

    from draftdial.controller import train

    monkeypatch.setattr(train, "main", fail)
    assert cli.main(["train"]) == status
    assert capsys.readouterr().err == says


@pytest.mark.parametrize("words", [["--version"], ["export-rule", "fixed", "--k", "3"]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_no_mistake(words: list[str], unbuffered: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [SCRIPT, *words], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, env=environment
    )
    os.close(writer)
    argparse_hides_it = words == ["--version"] and unbuffered
    assert done.stderr == b"" and done.returncode == (0 if argparse_hides_it else cli.BROKEN_PIPE)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [SCRIPT, "export-rule", "fixed", "--k", "3"],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=environment,
        )
    assert done.stderr == b"draftdial: export-rule: No space left on device\n" and done.returncode == 2


def test_our_own_mistakes_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise ModuleNotFoundError(name="draftdial.controller.nothing")

    from draftdial.controller import train

    monkeypatch.setattr(train, "main", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["train"])


def test_demo_leaves_a_real_folder_in_its_place_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/demo").mkdir(parents=True)
    assert cli.main(["demo"]) == 2
    assert "found runs/demo, allowed: none or a link" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["demo"]
