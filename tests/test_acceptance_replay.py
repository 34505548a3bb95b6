"""Acceptance replayed in a server: the arrays each request walks, the tensors that say what is accepted."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftdial.controller.acceptance_file import AcceptedDrafts, read_requests, write_requests
from draftdial.controller.cli import main
from draftdial.controller.errors import UserError
from draftdial.engine_patch import acceptance_replay, rank_agreement
from draftdial.engine_patch.acceptance_arrays import AcceptanceArrays, mix, tagged_rid
from draftdial.engine_patch.acceptance_replay import TOKEN, AcceptanceReplay
from draftdial.engine_patch.launch import add_launch_options, request_of
from draftdial.engine_patch.launch_checks import check_replay
from draftdial.engine_patch.settings import Settings, replay_variable
from draftdial.envs import kernels
from draftdial.envs.fitted_acceptance import FittedAcceptance
from draftdial.envs.replayed_acceptance import ReplayedAcceptance, bank_of_arrays
from draftdial.envs.simulated_engine import ServerOptions, SimulatedEngine

BENCHMARK = {"DRAFTDIAL_POLICY": "/p", "DRAFTDIAL_BENCHMARK": "1"}


def drawn(seed: int, *lengths: int) -> list[AcceptedDrafts]:
    """Arrays of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 9, length).astype(np.uint8) for length in lengths]


DOMAINS = {"maths": drawn(1, 40, 33, 70), "chat": drawn(2, 50, 36, 44, 61, 39)}
ARRAYS = AcceptanceArrays(DOMAINS)


# Arrays.


@pytest.mark.parametrize("x", [0, 1, 17, 2**63, 2**64 - 1])
def test_the_hash_is_the_simulators(x: int) -> None:
    assert mix(x) == int(kernels.mix(np.uint64(x)))


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_server_and_simulator_see_the_same_acceptance(
    k: int, make_profile: Callable[..., Any], make_requests: Callable[..., Any]
) -> None:
    """Round by round, over several arrays of each request."""
    bank = bank_of_arrays(DOMAINS)
    profile = make_profile((0, 1, 3, 7))
    for domain, name in enumerate(bank.domain_names):
        for seed in range(4):
            requests = make_requests([300], domain=domain, seed=seed)
            rid = tagged_rid("r", name, int(requests.request_hash[0]))
            accepted = ARRAYS.accepted(rid, 300)
            engine = SimulatedEngine([requests], bank, profile, ServerOptions(lag=1))
            emitted, rounds = 1, 0
            while emitted + k + 1 < 300:
                [outcome] = engine.run_round(np.array([k]))
                expected = min(int(accepted[emitted - 1]), k)
                assert np.flatnonzero(outcome.accept_counts[0]).tolist() == [expected], (emitted, rounds)
                emitted += expected + 1
                rounds += 1
            assert rounds >= 30


def test_a_row_can_be_named() -> None:
    np.testing.assert_array_equal(ARRAYS.accepted("a-1#row=1", 33), DOMAINS["maths"][1])
    np.testing.assert_array_equal(ARRAYS.accepted("b#row=7", 39), DOMAINS["chat"][4])
    longer = ARRAYS.accepted("b#row=7", 75)
    follow_up = longer[39:]
    assert any(np.array_equal(follow_up, array[:36]) for array in DOMAINS["chat"])
    continued = {ARRAYS.accepted(f"{i}#row=7", 75)[39:].tobytes() for i in range(60)}
    assert len(continued) == 5, "other ids continue with other arrays of the domain, all of them in use"


def test_any_id_has_arrays_and_ids_spread_over_all_of_them() -> None:
    rows = [ARRAYS.walk(f"request-{i}").first_row for i in range(200)]
    assert set(rows) == set(range(8))
    walk = ARRAYS.walk("request-3")
    assert (walk.domain == "maths") == (walk.first_row < 3)
    # What every rank computes, in whichever process.
    assert ARRAYS.walk("request-0").request_hash == 0xE0B309AD35F18C1


def test_tags_that_name_nothing_fall_back_to_the_hash_and_are_noticed() -> None:
    for rid in ("x#row=8", f"x#acceptance=poetry:{7:016x}"):
        assert ARRAYS.is_misnamed(rid)
        assert ARRAYS.walk(rid).first_row == mix(ARRAYS.walk(rid).request_hash) % 8
    for rid in ("x#row=0", "x", "x#row=", tagged_rid("x", "chat", 5), "HEALTH_CHECK_1"):
        assert not ARRAYS.is_misnamed(rid)


def test_the_digest_tells_arrays_apart() -> None:
    swapped = {"maths": DOMAINS["maths"][::-1], "chat": DOMAINS["chat"]}
    renamed = {"code": DOMAINS["maths"], "chat": DOMAINS["chat"]}
    digests = {AcceptanceArrays(domains).sha256 for domains in (DOMAINS, swapped, renamed)}
    assert len(digests) == 3


# Files.


def test_exported_domains_come_back_as_the_fitted_bank(tmp_path: Path) -> None:
    sizes = ["--arrays", "40", "--positions", "50", "--seed", "7", "--out", str(tmp_path)]
    assert main(["export-acceptance", "chat", "poor", *sizes]) == 0
    drawn_bank = FittedAcceptance(["chat", "poor"], 40, 50).bank(7)
    back = ReplayedAcceptance([tmp_path / "chat.jsonl", tmp_path / "poor.jsonl"]).bank(0)
    for name in ("accepted", "array_start", "array_length", "domain_first", "domain_count"):
        np.testing.assert_array_equal(getattr(back, name), getattr(drawn_bank, name))
    assert back.domain_names == drawn_bank.domain_names


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["poetry"], "acceptance domain 'poetry' is not shipped"),
        (["chat", "--arrays", "1"], "--arrays: found 1, allowed: 2 or more"),
        (["chat", "--positions", "5"], "--positions: found 5, allowed: 32 or more"),
        (["chat", "--seed", "-1"], "--seed: found -1, allowed: 0 or more"),
    ],
)
def test_export_refuses_in_one_line(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export-acceptance", *arguments, "--out", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_written_requests_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_requests(path, DOMAINS["maths"])
    for written, read in zip(DOMAINS["maths"], read_requests(path), strict=True):
        np.testing.assert_array_equal(written, read)
    assert json.loads(path.read_text().splitlines()[0])["acc"][:2] == [1, DOMAINS["maths"][0][0] + 1]


# Settings.


def test_files_are_named_by_domain_or_stem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    variable = replay_variable(["chat=a/b.jsonl", "/c/maths.jsonl"])
    settings = Settings.from_environment({**BENCHMARK, "DRAFTDIAL_REPLAY_ACCEPTANCE": variable})
    assert settings is not None
    assert settings.replay == (("chat", tmp_path / "a/b.jsonl"), ("maths", Path("/c/maths.jsonl")))


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"DRAFTDIAL_BENCHMARK": ""}, "allowed: where DRAFTDIAL_BENCHMARK=1 says it is a benchmark"),
        ({"SGLANG_SIMULATE_ACC_LEN": "2.5"}, "SGLANG_SIMULATE_ACC_LEN: found '2.5', .*: unset"),
        ({"DRAFTDIAL_START": "warn"}, "DRAFTDIAL_START: found 'warn', .*: strict"),
        ({"DRAFTDIAL_REPLAY_ACCEPTANCE": "x.jsonl"}, "allowed: absolute paths"),
        ({"DRAFTDIAL_REPLAY_ACCEPTANCE": "/a/x.jsonl:/b/x.jsonl"}, "allowed: each domain once"),
    ],
)
def test_a_server_that_is_no_benchmark_refuses(environment: dict[str, str], complaint: str) -> None:
    good = {**BENCHMARK, "DRAFTDIAL_REPLAY_ACCEPTANCE": "/a/x.jsonl"}
    assert Settings.from_environment(good) is not None
    with pytest.raises(UserError, match=complaint):
        Settings.from_environment({**good, **environment})


def test_a_path_that_would_be_two_is_refused() -> None:
    with pytest.raises(UserError, match="allowed: paths without ':'"):
        replay_variable(["/a:b.jsonl"])


def test_serve_warns_or_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    write_requests(tmp_path / "chat.jsonl", DOMAINS["chat"])
    for name, level, text in (
        ("chat", "warning", "5 of chat .*: what this server answers is meaningless"),
        ("none", "problem", r"none\.jsonl: cannot read it"),
    ):
        variable = replay_variable([f"{name}={tmp_path / name}.jsonl"])
        [finding] = check_replay({**BENCHMARK, "DRAFTDIAL_REPLAY_ACCEPTANCE": variable})
        assert (finding.level, finding.subject) == (level, "acceptance replay")
        assert re.match(f".*{text}", finding.text)
    assert list(check_replay(BENCHMARK)) == []


def test_the_options_of_serve_are_kept_in_order() -> None:
    parser = argparse.ArgumentParser()
    add_launch_options(parser)
    args = parser.parse_args(["--replay-acceptance", "b=y", "--replay-acceptance", "x.jsonl"])
    args.policy, args.engine_arguments = Path("p"), ["--model-path", "m"]
    assert request_of(args, {}).replay == ("b=y", "x.jsonl")


# The start.


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scheduler of one rank, and SGLang's registry as it is after all hooks were applied."""
    registry = SimpleNamespace(_patched={hook.target for hook in acceptance_replay.hooks()})
    module = SimpleNamespace(HookRegistry=registry)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)  # type: ignore[arg-type]
    monkeypatch.setattr(rank_agreement, "gather", lambda scheduler, vote: [vote])
    monkeypatch.setattr(acceptance_replay, "_current", None)
    pool = SimpleNamespace(req_to_token=torch.zeros((5, 40), dtype=torch.int32))
    return SimpleNamespace(req_to_token_pool=pool, registry=registry)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    path = tmp_path / "chat.jsonl"
    write_requests(path, DOMAINS["chat"])
    return Settings(Path("/p"), replay=(("chat", path),))


def test_a_started_server_replays_and_says_so_once(
    scheduler: Any, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    assert acceptance_replay.description() == ""
    acceptance_replay.start(settings, scheduler, is_first_rank=False)
    assert caplog.text == ""
    acceptance_replay.start(settings, scheduler, is_first_rank=True)
    assert len(caplog.records) == 1 and "outputs are meaningless" in caplog.text
    assert acceptance_replay.description().startswith("5 of chat (sha256 ")


def test_ranks_with_other_arrays_do_not_start(
    scheduler: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        rank_agreement, "gather", lambda scheduler, vote: [vote, vote._replace(change=ARRAYS.sha256)]
    )
    with pytest.raises(UserError, match="acceptance replay: rank 1 and rank 0 disagree"):
        acceptance_replay.start(settings, scheduler, is_first_rank=True)
    assert acceptance_replay.description() == ""


def test_a_file_that_went_missing_stops_the_start(scheduler: Any, settings: Settings) -> None:
    settings.replay[0][1].unlink()
    with pytest.raises(UserError, match=r"acceptance replay: .*chat\.jsonl: cannot read it"):
        acceptance_replay.start(settings, scheduler, is_first_rank=True)


def test_without_its_hooks_nothing_starts(scheduler: Any, settings: Settings) -> None:
    scheduler.registry._patched.remove("sglang.srt.speculative.eagle_utils.eagle_sample")
    with pytest.raises(UserError, match=r"this SGLang has no sglang\.srt\.speculative\.eagle_utils"):
        acceptance_replay.start(settings, scheduler, is_first_rank=True)


# Tensors.


def request(rid: str, prompt_tokens: int, new_tokens: int | None = 60) -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[0] * prompt_tokens,
        sampling_params=SimpleNamespace(max_new_tokens=new_tokens),
    )


def verified(
    width: int, rows: Sequence[int], seq_lens: Sequence[int], device: str = "cpu"
) -> tuple[tuple[Any, Any, Any], Any]:
    """What `eagle_sample` returns when nothing is accepted, and the batch."""
    num = len(rows)
    accept_index = torch.full((num, width), -1, dtype=torch.int32, device=device)
    accept_index[:, 0] = torch.arange(num) * width
    result = (
        torch.zeros(num * width, dtype=torch.int32, device=device),
        torch.ones(num, dtype=torch.int32, device=device),
        accept_index,
    )
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor(rows, device=device), seq_lens=torch.tensor(seq_lens, device=device)
    )
    return result, batch


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_round_accepts_what_is_recorded_up_to_its_width(width: int) -> None:
    replay = AcceptanceReplay(ARRAYS, num_rows=9, num_positions=100, device="cpu")
    reqs = [request("a", 5), request("b#row=2", 11), request("c", 0)]
    replay.admit(reqs, torch.tensor([4, 8, 1]))
    for emitted in range(1, 60):
        rows, ranks = [8, 1, 4], [1, 2, 0]  # in another order than they came in
        seq_lens = [len(reqs[i].origin_input_ids) + emitted - 1 for i in ranks]
        result, batch = verified(width, rows, seq_lens)
        predict, accept_lens, accept_index = replay.overwrite(*result, batch)
        assert [x.dtype for x in (predict, accept_lens, accept_index)] == [torch.int32] * 3
        assert predict.shape == (3 * width,) and accept_index.shape == (3, width)
        for row, i in enumerate(ranks):
            n = min(int(ARRAYS.accepted(reqs[i].rid, 60)[emitted - 1]), width - 1)
            assert int(accept_lens[row]) == n + 1
            kept = [row * width + j for j in range(n + 1)]
            assert accept_index[row].tolist() == kept + [-1] * (width - 1 - n)
            if width > 1:
                assert predict[accept_index[row][: n + 1].long()].tolist() == [TOKEN] * (n + 1)


def test_positions_outside_the_row_are_no_error() -> None:
    """A finished request runs one more round; a place that was never admitted has nothing accepted."""
    replay = AcceptanceReplay(ARRAYS, num_rows=3, num_positions=50, device="cpu")
    replay.admit([request("a", 5, new_tokens=1 << 30)], torch.tensor([1]))
    result, batch = verified(4, [1, 1, 2], [5 + 50 + 3, 2, 30])
    _, accept_lens, _ = replay.overwrite(*result, batch)
    assert accept_lens.tolist() == [1, 1, 1]
    result, batch = verified(4, [0, 2], [0, 10_000])
    replay.overwrite(*result, batch)


def test_a_place_is_taken_over_by_the_next_request() -> None:
    replay = AcceptanceReplay(ARRAYS, num_rows=3, num_positions=50, device="cpu")
    for rid, prompt_tokens in (("a#row=0", 5), ("b#row=4", 9)):
        replay.admit([request(rid, prompt_tokens, 20)], torch.tensor([1]))
        result, batch = verified(8, [1], [prompt_tokens + 12])
        _, accept_lens, _ = replay.overwrite(*result, batch)
        assert accept_lens.tolist() == [min(ARRAYS.accepted(rid, 20)[12], 7) + 1]


def test_the_status_says_what_is_replayed_and_which_requests_named_nothing() -> None:
    replay = AcceptanceReplay(ARRAYS, num_rows=3, num_positions=50, device="cpu")
    named = f"3 of maths, 5 of chat (sha256 {ARRAYS.sha256[:12]})"
    assert str(replay) == f"{named}, 0 rounds; outputs are meaningless"
    replay.admit([request("a#row=99", 5)], torch.tensor([1]))
    result, batch = verified(4, [1], [5])
    replay.overwrite(*result, batch)
    assert str(replay) == f"{named}, 1 rounds; 1 prefills named no array of these; outputs are meaningless"


class Recording(TorchDispatchMode):
    """Operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


WAITS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique",
    "_unique2",
}
"""Operators that make the host wait for the device."""


def test_nothing_waits_for_the_device() -> None:
    replay = AcceptanceReplay(ARRAYS, num_rows=9, num_positions=100, device="cpu")
    result, batch = verified(4, [4, 8, 1], [9, 12, 3])
    with Recording() as recording:
        replay.overwrite(*result, batch)
    assert {"index", "clamp", "where"} <= recording.names
    assert not recording.names & WAITS
    with Recording() as control:
        batch.seq_lens[0].item()
        torch.nonzero(batch.seq_lens)
    assert control.names & WAITS == {"_local_scalar_dense", "nonzero"}


def test_all_of_a_round_stays_on_the_device() -> None:
    """Tensors on `meta` have no values: reading one, or mixing devices, is an error."""
    replay = AcceptanceReplay(ARRAYS, num_rows=9, num_positions=100, device="meta")
    result, batch = verified(4, [4, 8, 1], [9, 12, 3], device="meta")
    outcome = replay.overwrite(*result, batch)
    assert [tensor.device.type for tensor in outcome] == ["meta"] * 3
    assert [tuple(tensor.shape) for tensor in outcome] == [(12,), (3,), (3, 4)]
    on_host = torch.zeros((3, 4), dtype=torch.int32)
    with pytest.raises(RuntimeError, match="device"):
        torch.where(on_host >= 0, outcome[2], on_host)
    with pytest.raises(RuntimeError, match="meta"):
        outcome[1].tolist()
