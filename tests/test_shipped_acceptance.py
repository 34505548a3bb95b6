"""The shipped recording: what it holds, that it holds no text, and where it can be named."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftdial.controller.cli import main
from draftdial.controller.files import sha256_of
from draftdial.envs.acceptance import MAX_K, walk_statistics
from draftdial.envs.replayed_acceptance import ReplayedAcceptance
from draftdial.envs.shipped_acceptance import SHIPPED_RECORDINGS, ShippedAcceptance
from draftdial.envs.suite import Acceptance

GREEDY, SAMPLED = SHIPPED_RECORDINGS
DOMAINS = ("summaries", "translation", "instruction", "chat", "qa", "code", "maths")
MAX_BYTES = 2_000_000


def file_of(name: str) -> bytes:
    return files("draftdial.envs").joinpath("acceptance_data", f"{name}.jsonl.gz").read_bytes()


def content(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the requests of the file."""
    header, *lines = map(json.loads, gzip.decompress(file_of(name)).splitlines())
    return header, lines


@pytest.mark.parametrize("name", SHIPPED_RECORDINGS)
def test_the_files_hold_counts_of_many_prompts_and_no_text(name: str) -> None:
    header, lines = content(name)
    assert len(lines) == header["prompts"]["count"] == 637
    assert len({line["id"] for line in lines}) == len(lines)
    assert Counter(line["domain"] for line in lines).keys() == set(header["domains"]) == set(DOMAINS)
    for line in lines:
        assert line.keys() == {"id", "domain", "prompt_len", "gen_len", "acc", "p1"}
        assert len(line["acc"]) == len(line["p1"]) == line["gen_len"] <= 256
        assert line["acc"][0] == 1 and all(1 <= tokens <= MAX_K + 1 for tokens in line["acc"])
        assert all(0 <= percent <= 100 for percent in line["p1"])


def test_the_files_are_small_and_say_what_they_are() -> None:
    assert sum(len(file_of(name)) for name in SHIPPED_RECORDINGS) < MAX_BYTES
    greedy, sampled = (content(name)[0] for name in SHIPPED_RECORDINGS)
    assert greedy["sampling"]["temperature"] == 0 and sampled["sampling"]["temperature"] == 0.8
    for header in (greedy, sampled):
        assert header["max_k"] == MAX_K and header["licence"] == "Apache-2.0"
        assert "or more" in header["exact"] and header["prompts"]["texts"] == "not included"
        assert len(header["target"]["sha256"]) == len(header["draft"]["sha256"]) == 64
    assert greedy["draft"] == sampled["draft"]


@pytest.mark.parametrize("name", SHIPPED_RECORDINGS)
def test_the_bank_is_what_the_file_says(name: str) -> None:
    source = ShippedAcceptance(name)
    bank = source.bank(0)
    usable = [line["acc"] for line in content(name)[1] if len(line["acc"]) > 32]
    assert source.domains == bank.domain_names == DOMAINS
    assert bank.domain_count.sum() == len(usable) >= 590 and bank.domain_count.min() >= 60
    assert np.array_equal(bank.accepted, np.concatenate([np.array(acc[1:]) - 1 for acc in usable]))
    assert source.bank(5) is bank


def test_accept_lengths_are_those_of_the_documentation() -> None:
    bank = ShippedAcceptance(GREEDY).bank(0)
    at_three = [walk_statistics(bank, domain, 3).accept_length for domain in range(len(DOMAINS))]
    assert np.round(at_three, 2).tolist() == [1.77, 1.97, 2.43, 2.4, 2.26, 2.45, 2.7]
    sampled = ShippedAcceptance(SAMPLED).bank(0)
    assert all(
        walk_statistics(sampled, domain, 3).accept_length < greedy for domain, greedy in enumerate(at_three)
    ), "temperature lowers acceptance"


def test_a_comparison_names_it_and_its_domains_stand_in() -> None:
    acceptance = Acceptance.parse([GREEDY])
    assert acceptance.is_asked_for and acceptance.identity(["chat"]) == {GREEDY: sha256_of(file_of(GREEDY))}
    for names, stand_ins in {
        ("finance", "maths", "chat", "code", "reasoning"): ["summaries", "maths", "chat", "code", "qa"],
        ("chat", "code", "reasoning"): ["chat", "code", "instruction"],
        ("poor",): ["summaries"],
    }.items():
        source, places = acceptance.source(names)
        assert [source.domains[place] for place in places] == stand_ins


def test_training_on_it_puts_its_hash_into_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    choices = ["experiment=smoke", f"acceptance={GREEDY}", f"acceptance.kind={SAMPLED}"]
    assert main(["train", *choices, "--json"]) == 0
    policy = json.loads(capsys.readouterr().out)["policy"]
    assert main(["inspect", policy, "--json"]) == 0
    assert sha256_of(file_of(SAMPLED)) in capsys.readouterr().out


def test_a_recording_is_read_as_any_other_file(tmp_path: Path) -> None:
    path = tmp_path / "everything.jsonl.gz"
    path.write_bytes(file_of(GREEDY))
    plain = tmp_path / "everything.jsonl"
    plain.write_bytes(gzip.decompress(file_of(GREEDY)))
    packed = ReplayedAcceptance({"everything": path}).bank(0)
    assert np.array_equal(packed.accepted, ReplayedAcceptance([plain]).bank(0).accepted)
    assert np.array_equal(packed.accepted, ShippedAcceptance(GREEDY).bank(0).accepted)
    assert Acceptance.parse([str(path)]).identity(["chat"]) == {"everything": sha256_of(path.read_bytes())}


def test_a_broken_archive_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(file_of(GREEDY)[:5000])
    assert main(["tune", "--acceptance", str(path), "--workload", "chat"]) == 2
    assert "cut.jsonl.gz: cannot read it" in capsys.readouterr().err
