"""What the documents say of the runs in docs/results: the commands that they name, run again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from draftdial.controller.cli import main

ROOT = Path(__file__).parent.parent
RESULTS, SCRIPTS = ROOT / "docs" / "results", ROOT / "tests" / "gpu"
QUIET, LOADS, SLOW, TURNS = (
    f"h200-{run}-2026-11-30" for run in ("quiet-host", "all-loads", "one-gpu", "turns")
)
PARTS = {
    QUIET: ("good-mid", "mixed-mid", "mixed-mid-256"),
    LOADS: ("good-low", "good-high", "mixed-low", "mixed-high"),
    SLOW: ("good-low", "good-mid", "mixed-low", "mixed-mid"),
    TURNS: ("good", "mixed-low", "mixed-high"),
}
POLICIES = {QUIET: (*PARTS[QUIET], "start"), LOADS: (), SLOW: PARTS[SLOW], TURNS: ()}


def ran(folder: Path, *words: str | Path) -> str:
    """What a Python script or module prints."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def ratios(file: str, *words: str) -> list[list[str]]:
    """The lines of the table of `ratios.py`, cell by cell."""
    header, _, *lines = ran(ROOT, SCRIPTS / "ratios.py", RESULTS / f"{file}.json", *words).splitlines()
    assert {line.count("|") for line in lines} == {header.count("|")}
    return [cells_of(line) for line in lines]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]


def section(page: str, title: str) -> list[list[str]]:
    """The lines of a section's table with an interval in them, cell by cell."""
    text = (ROOT / "docs" / page).read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    return [cells_of(line) for line in text.splitlines() if " to " in line and line.startswith("|")]


def without_count(cell: str) -> str:
    """`1.01 (0.98 to 1.04; 7)` as the documents have it."""
    return f"{cell.split(';')[0].rstrip(')')})" if cell else ""


def in_words(arms: str) -> str:
    """`fixed-7 (fixed-5)` as the documents have it."""
    return re.sub(r"fixed-", "", re.sub(r"^fixed-", "k = ", arms))


def unpacked(folder: Path, file: str) -> list[str]:
    """A file of docs/results in `folder`, as tests/gpu/README.md has it; the words of a command on it."""
    domains = ("finance", "maths", "chat", "code", "reasoning", "poor")
    seeded = ("--seed", "20261130", "--arrays", "256")
    assert main(["export-acceptance", *domains, *seeded, "--out", str(folder)]) == 0
    ran(folder, SCRIPTS / "short_requests.py", ".")
    ran(folder, SCRIPTS / "unpack.py", RESULTS / f"{file}.json", "raw")
    words = [f"raw/{part}/bench.json" for part in PARTS[file]]
    words += [f"--acceptance={domain}.jsonl" for domain in sorted(domains)]
    return words + [f"--policy={RESULTS}/{file}/{name}.safetensors" for name in POLICIES[file]]


def in_percent(fraction: float | None, digits: int = 1) -> str:
    return "" if fraction is None else f"{100 * fraction:.{digits}f} %"


@pytest.mark.parametrize("file", PARTS)
def test_the_simulator_is_as_far_off_as_is_said(tmp_path: Path, file: str) -> None:
    command = ["-m", "draftdial.controller.cli", "validate-sim", *unpacked(tmp_path, file), "--json"]
    summary = json.loads(ran(tmp_path, *command, "--profile", "h200-llama3-8b"))["summary"]
    text = (ROOT / "docs" / "fidelity.md").read_text()
    [said] = (cells_of(line) for line in text.splitlines() if line.startswith(f"| `{file}"))
    assert said[3:-1] == [
        str(summary["num_cells"]),
        in_percent(summary["throughput_error_mean"]),
        in_percent(summary["throughput_error_mean_fixed_k"]),
        in_percent(summary["throughput_error_max"]),
        in_percent(summary["throughput_error_mean_on_its_host"]),
        *(in_percent(summary[f"{same}_best_k_share"], 0) for same in ("same", "same_or_tied")),
        *(in_percent(summary[f"best_k_loss_{of}"]) for of in ("mean", "max")),
    ]


def test_hosts_as_busy_as_each_other_give_what_is_said(tmp_path: Path) -> None:
    printed = ran(tmp_path, SCRIPTS / "equal_host.py", *unpacked(tmp_path, SLOW)).splitlines()[2:]
    assert len(printed) == 14
    said = (ROOT / "docs" / "results.md").read_text()
    for row in map(cells_of, printed[:12]):
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*map(float, re.findall(r"[\d.]+", row[6])))
        assert f"| k = {row[5][-1]}: {ratio} |" in said, row


def test_the_table_of_all_loads_is_what_its_command_prints() -> None:
    printed = [row for row in ratios(LOADS) if row[2] not in ("", "all 1")]
    shown = section("results.md", "Against every fixed k")
    assert len(shown) == len(printed) == 23
    for line, row in zip(shown, printed, strict=True):
        assert line[2:-1] == [row[2], row[4], in_words(row[5]), *map(without_count, row[6:8])], row


def test_the_table_of_two_policies_is_what_its_commands_print() -> None:
    only = ("--only", *("mixed-mid", "mixed-mid-256", "good-mid"))
    steer, start = ratios(QUIET, *only), ratios(QUIET, *only, "--arm", "policy:start")
    shown = section("results.md", "On a quiet host")
    assert len(shown) == len(steer) == len(start) == 8
    for line, repriced, trained in zip(shown, steer, start, strict=True):
        beside = [without_count(cell.removeprefix("policy:start ")) for cell in (repriced[6], repriced[8])]
        assert line[2:5] == [repriced[2], repriced[4], in_words(repriced[5])]
        assert line[5:8] == [*beside, without_count(trained[6])]


def test_turns_in_a_row_count_as_one_pair() -> None:
    """What the results say of no speculation on the same GPU; the mean stays, the interval is wider."""
    single, block = (ratios(SLOW, "--only", "poor-high:256", *more)[0] for more in ([], ["--block", "4"]))
    assert (single[7], block[7]) == ("0.98 (0.95 to 1.01; 24)", "0.98 (0.92 to 1.04; 6)")
    assert without_count(block[7]) in (ROOT / "docs" / "results.md").read_text()


@pytest.mark.parametrize(
    ("file", "words", "complaint"),
    [
        (f"{SLOW}.json", ["--only", "host", "mixed"], "--only: found mixed, allowed: poor-high:256,"),
        (f"{SLOW}.json", ["--arm", "start"], "--arm: found start, allowed: an arm that answered"),
        (f"{SLOW}.json", ["--block", "0"], "--block: found 0, allowed: 1 or more"),
        ("h200-steer-2026-11-29.json", [], "found no bench of closed loops, allowed: one, or"),
        ("smollm2-draft-curve.csv", [], "not a file of JSON"),
    ],
)
def test_what_makes_no_table_is_said(file: str, words: Sequence[str], complaint: str) -> None:
    command = [sys.executable, SCRIPTS / "ratios.py", RESULTS / file, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and not done.stdout
    assert complaint in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
