"""Readers of trace files, and what is replayed from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftdial.controller.errors import UserError
from draftdial.envs.domains import DomainMix
from draftdial.envs.lengths import as_lengths
from draftdial.envs.open_loop import OpenLoop
from draftdial.envs.trace_workload import TraceLengths, TraceWorkload, trace
from draftdial.envs.traces import Trace, read_rate_profile, read_trace
from draftdial.envs.workload import make_workload

RECORDED = Path(__file__).parents[2] / "shared" / "traces" / "arrivals"

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,0,55
"""
AZURE_WITH_ZONE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 00:00:00.003948+00:00,374,44
2024-05-12 00:00:04.318527+00:00,396,109
2024-05-12 00:01:00.003948+00:00,0,55
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,374,44,418,Conversation log
45,ChatGPT,396,109,505,Conversation log
46,GPT-4,700,0,700,API log
118.0,GPT-4,0,55,55,Conversation log
"""
SESSION_HEADER = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)
BURSTGPT_WITH_SESSION = f"""{SESSION_HEADER}\
5,a1,3,ChatGPT,374,44,418,Conversation log
118,b2,3,GPT-4,0,55,55,Conversation log
45,a1,2.5,ChatGPT,396,109,505,API log
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 374, "output_length": 44, "hash_ids": [0, 1]}
{"timestamp": 6000, "input_length": 396, "output_length": 109, "hash_ids": [0, 2]}

{"timestamp": 9000, "input_length": 0, "output_length": 55, "hash_ids": []}
"""
PLAIN = "arrival_s,input_tokens,output_tokens\n1.5,374,44\n\n2,396,109\n4.25,0,55\n"
PLAIN_MS = (
    "arrival_ms,input_tokens,output_tokens,seen_prefix_tokens\n0,374,44,0\n3000,396,109,0\n6001,0,55,9\n"
)


def written(tmp_path: Path, text: str, name: str = "recorded.txt") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "arrival_s", "grid_s"),
    [
        (AZURE, [0, 4.314579, 60], 0),
        (AZURE_WITH_ZONE, [0, 4.314579, 60], 0),
        ("\ufeff" + AZURE, [0, 4.314579, 60], 0),
        (AZURE.replace("\n", "\r\n"), [0, 4.314579, 60], 0),
        (BURSTGPT, [0, 40, 113], 1),
        (BURSTGPT_WITH_SESSION, [0, 40, 113], 1),
        (BURSTGPT.replace("45,", "5.25,"), [0, 0.25, 113], 0.25),
        (MOONCAKE, [0, 3, 6], 3),
        ("\ufeff" + MOONCAKE, [0, 3, 6], 3),
        (PLAIN, [0, 0.5, 2.75], 0),
        (PLAIN_MS, [0, 3, 6.001], 3),
    ],
)
def test_every_format_is_read(tmp_path: Path, text: str, arrival_s: list[float], grid_s: float) -> None:
    recorded = read_trace(written(tmp_path, text))
    assert recorded.arrival_s == pytest.approx(arrival_s, abs=1e-5)
    assert recorded.prompt_tokens.tolist() == [374, 396, 1]
    assert recorded.output_tokens.tolist() == [44, 109, 55]
    assert recorded.grid_s == pytest.approx(grid_s)
    assert recorded.period_s == pytest.approx(arrival_s[-1] + max(grid_s, arrival_s[-1] / 2), abs=1e-5)
    assert recorded.rate_per_s == pytest.approx(3 / recorded.period_s)


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (
            AZURE.replace("109", "many"),
            "line 3, column 'GeneratedTokens'",
            "is 'many'; allowed: a whole number",
        ),
        (AZURE.replace("109", "-1"), "line 3, column 'GeneratedTokens'", "is '-1'"),
        (AZURE.replace("109", "3e9"), "line 3, column 'GeneratedTokens'", "is '3e9'"),
        (AZURE.replace("109", "99999999999"), "line 3, column 'GeneratedTokens'", "to 2147483647"),
        (
            AZURE.replace("2023-11-16 18:15:50.9951690", "noon"),
            "line 3, column 'TIMESTAMP'",
            "a date and time",
        ),
        (AZURE.replace("396,109", "396"), "line 3, column 2", "allowed: 3 columns"),
        (AZURE.replace("396,109", "396,109,"), "line 3, column 4", "allowed: 3 columns"),
        (BURSTGPT.replace("118.0", "nan"), "line 5, column 'Timestamp'", "a finite number of seconds"),
        (BURSTGPT.replace("396", "39.6"), "line 3, column 'Request tokens'", "is '39.6'"),
        (MOONCAKE.replace('"timestamp": 6000, ', ""), "line 2, column 'timestamp'", "is missing"),
        (MOONCAKE.replace("109", '"x"'), "line 2, column 'output_length'", "is 'x'"),
        (MOONCAKE.replace("109", "[1]"), "line 2, column 'output_length'", r"is \[1\]"),
        (MOONCAKE.replace("396,", "396"), "line 2, column 41", "one JSON object a line"),
        (MOONCAKE + "[1]\n", "line 5, column 1", "one JSON object a line"),
        (PLAIN.replace("1.5", ""), "line 2, column 'arrival_s'", "is ''"),
        ("time,in,out\n1,2,3\n", "line 1", "columns are time, in, out; allowed: TIMESTAMP, ContextTokens"),
        ("", "line 1", "columns are nothing; allowed"),
    ],
)
def test_a_bad_cell_is_named_by_file_line_and_column(
    tmp_path: Path, text: str, where: str, what: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError, match=f"{where}.*{what}") as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.csv: cannot be read: No such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read_trace(tmp_path / "binary")
    with pytest.raises(UserError, match="at two different times"):
        read_trace(written(tmp_path, "arrival_s,input_tokens,output_tokens\n1,2,3\n1,2,3\n2,3,0\n"))


def made_trace(num_requests: int = 200, grid_s: float = 0.0) -> Trace:
    """A trace whose prompt tokens are 1 more than the row number."""
    arrival_s = np.cumsum(np.random.default_rng(0).exponential(0.5, num_requests))
    arrival_s -= arrival_s[0]
    if grid_s:
        arrival_s = np.floor(arrival_s / grid_s) * grid_s
    rows = np.arange(num_requests, dtype=np.int32)
    return Trace("made", arrival_s, rows + 1, rows % 7 + 1, grid_s)


def replay(
    recorded: Trace, num_requests: int, time_scale: float = 1.0, max_prompt_tokens: int = 10_000
) -> TraceWorkload:
    lengths = TraceLengths(recorded, max_prompt_tokens, 5)
    return TraceWorkload("made", lengths, num_requests, time_scale, DomainMix((0, 1)))


@given(seed=st.integers(0, 2**63 - 1), num_requests=st.integers(2, 200), time_scale=st.floats(0.01, 100))
def test_a_replay_is_a_window_of_the_trace(seed: int, num_requests: int, time_scale: float) -> None:
    recorded = made_trace()
    workload = replay(recorded, num_requests, time_scale)
    requests, again = workload.requests(seed), workload.requests(seed)
    for field, value in vars(requests).items():
        assert np.array_equal(value, getattr(again, field)), field
    rows = requests.prompt_tokens - 1
    assert (np.diff(rows) % 200 == 1).all()
    assert np.array_equal(requests.output_tokens, np.minimum(recorded.output_tokens[rows], 5))
    gaps = np.diff(requests.arrival_s) / time_scale
    inside = np.diff(rows) == 1
    assert gaps[inside] == pytest.approx(np.diff(recorded.arrival_s[rows])[inside], abs=1e-9)
    assert gaps[~inside] == pytest.approx(1 / recorded.rate_per_s)
    assert requests.arrival_s[0] == 0


def test_seeds_replay_different_windows() -> None:
    first = {int(replay(made_trace(), 50).requests(seed).prompt_tokens[0]) for seed in range(40)}
    assert len(first) > 20


@given(seed=st.integers(0, 2**63 - 1))
def test_arrivals_on_a_grid_are_spread_over_their_step(seed: int) -> None:
    recorded = made_trace(grid_s=3.0)
    requests = replay(recorded, 200).requests(seed)
    rows = requests.prompt_tokens - 1
    assert sorted(rows) == list(range(200))
    assert len(np.unique(requests.arrival_s)) == 200
    laps = np.cumsum(np.diff(rows, prepend=rows[0]) < -100)
    # Each row lies within its step; the time at which the window begins, unknown here, is common to all.
    shift = requests.arrival_s - recorded.arrival_s[rows] - laps * recorded.period_s
    assert shift.max() - shift.min() <= 3.0 + 1e-9


def test_the_spread_is_even() -> None:
    recorded = Trace("bulk", np.repeat([0.0, 3.0], 50_000), *np.ones((2, 100_000), np.int32), 3.0)
    gaps = np.diff(replay(recorded, 100_000).requests(1).arrival_s)
    # Over two full steps the mean rate is 100,000 in 6 s, and even spreading has Poisson gaps.
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.02)


def test_time_scales_to_a_rate() -> None:
    workload = replay(made_trace(), 200).at_rate(8.0)
    assert 200 / workload.requests(0).arrival_s[-1] == pytest.approx(8.0, rel=0.05)


def test_caps_cut_prompts_and_outputs() -> None:
    workload = replay(made_trace(), 200, max_prompt_tokens=10)
    requests = workload.requests(0)
    assert requests.prompt_tokens.max() == 10 and requests.output_tokens.max() == 5
    assert requests.prompt_tokens.mean() == pytest.approx(workload.lengths.mean_prompt_tokens)
    assert requests.output_tokens.mean() == pytest.approx(workload.lengths.mean_output_tokens)


def test_lengths_of_a_trace_are_drawn_by_whole_rows(tmp_path: Path) -> None:
    model = as_lengths(f"trace:{written(tmp_path, PLAIN)}")
    prompt, output = model.draw(np.random.default_rng(1), 3000)
    assert set(zip(prompt.tolist(), output.tolist(), strict=True)) == {(374, 44), (396, 109), (1, 55)}
    assert output.mean() == pytest.approx(model.mean_output_tokens, rel=0.05)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"num_requests": 4}, "num_requests is 4; allowed: 1 to 3"),
        ({"time_scale": 0.0}, r"time_scale is 0\.0"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
    ],
)
def test_bad_parameters_say_what_is_allowed(
    tmp_path: Path, parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_workload("trace", path=written(tmp_path, PLAIN), **parameters)


def test_minutes_that_the_file_leaves_out_had_no_traffic(tmp_path: Path) -> None:
    profile = read_rate_profile(written(tmp_path, "minute,tokens_per_s\n10,4.5\n11,2\n13,8\n"))
    assert profile.step_s == 60
    assert profile.rates.tolist() == [4.5, 2, 0, 8]


def test_a_servegen_pool_is_picked(tmp_path: Path) -> None:
    rows = "a,0,10\nb,0,7\na,600,20\na,1800,30\n"
    path = written(tmp_path, "pool,window_start_s,total_rate_rps\n" + rows)
    profile = read_rate_profile(path, "a")
    assert profile.step_s == 600
    assert profile.rates.tolist() == [10, 20, 0, 30]
    workload = make_workload("rate-profile", path=path, pool="a", rate_per_s=3.0, num_requests=40)
    assert workload.name == "rate-profile-a"
    assert workload.requests(0).num_requests == 40


@pytest.mark.parametrize(
    ("text", "pool", "message"),
    [
        ("pool,window_start_s,total_rate_rps\na,0,1\nb,0,2\n", None, "pool is None; allowed: a, b"),
        ("pool,window_start_s,total_rate_rps\na,0,-1\n", "a", "line 2, column 'total_rate_rps': is '-1'"),
        ("minute,tokens_per_s\n0,1\n", "a", "has no column 'pool'"),
        ("minute,tokens_per_s\n0,0\n", None, "not all 0"),
        ("minute,tokens_per_s\n", None, "holds no rows"),
        ("minute,tokens_per_s\n0,1\n2000000000,1\n", None, "spans 2000000001 windows"),
        ("minute,rate\n0,1\n", None, "allowed: minute, tokens_per_s"),
    ],
)
def test_a_bad_rate_profile_is_refused(tmp_path: Path, text: str, pool: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_rate_profile(written(tmp_path, text), pool)


def recorded_file(name: str) -> Path:
    path = RECORDED / name
    if not path.is_file():
        pytest.skip(f"{path} is not there: recorded traces are not part of the repository")
    return path


def test_azure_conversations_have_their_published_shape() -> None:
    recorded = read_trace(recorded_file("azure2023_conv.csv"))
    assert recorded.num_requests == 19_366
    assert recorded.rate_per_s == pytest.approx(5.53, abs=0.01)
    assert np.percentile(recorded.prompt_tokens, [50, 95]).tolist() == [1020, 4083]
    assert np.percentile(recorded.output_tokens, [50, 95, 99]).tolist() == [129, 451, 601]


def test_mooncake_arrivals_leave_their_grid() -> None:
    workload = trace(recorded_file("mooncake_conversation.csv"))
    assert workload.num_requests == 12_031
    gaps = np.diff(workload.requests(0).arrival_s)
    # As recorded the coefficient of variation is 3; spread out it is near that of a Poisson process.
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("name", "pool", "num_windows"),
    [("burstgpt_week1_minute_tps.csv", None, 10_000), ("servegen_rates.csv", "m-small", 2016)],
)
def test_recorded_load_curves_are_replayed(name: str, pool: str | None, num_windows: int) -> None:
    path = recorded_file(name)
    assert len(read_rate_profile(path, pool).rates) == pytest.approx(num_windows, rel=0.01)
    workload = make_workload("rate-profile", path=path, pool=pool, rate_per_s=50.0, num_requests=100_000)
    assert isinstance(workload, OpenLoop)
    assert workload.requests(0).num_requests == 100_000
