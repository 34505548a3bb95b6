"""What loading the plugin does to a process, and how hooks behave around a dial."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftdial.controller.errors import UserError
from draftdial.controller.policy_file import PolicyFile
from draftdial.engine_patch import compat, dial, plugin, rank_agreement, steering
from draftdial.engine_patch.dial import Dial
from draftdial.engine_patch.round_outcomes import ROUND_ATTRIBUTE
from draftdial.engine_patch.settings import Settings

LAUNCH = "from draftdial.engine_patch.plugin import register; register(); print('loaded')"


def launched(**environment: str) -> subprocess.CompletedProcess[str]:
    """`register` in a process of its own, as in the one that launches a server."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTDIAL_")}
    return subprocess.run(
        [sys.executable, "-c", LAUNCH],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_settings_nothing_heavier_than_the_standard_library_is_imported() -> None:
    heavy = "[name for name in ('numpy', 'safetensors', 'sglang') if name in sys.modules]"
    code = f"import sys; {LAUNCH}; print(*{heavy})"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTDIAL_")}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["loaded"]


def test_a_good_policy_lets_the_launch_go_on(
    make_policy_file: Callable[..., PolicyFile], tmp_path: Path
) -> None:
    path = tmp_path / "p.safetensors"
    path.write_bytes(make_policy_file().data)
    done = launched(DRAFTDIAL_POLICY=str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "loaded\n", "")


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"DRAFTDIAL_MODE": "on"}, "draftdial: DRAFTDIAL_MODE: found 'on', allowed: steer, shadow, off\n"),
        ({}, "draftdial: /no/such/file: cannot read the policy file: No such file or directory\n"),
    ],
)
def test_a_mistake_ends_the_launch_in_one_line(environment: dict[str, str], complaint: str) -> None:
    done = launched(DRAFTDIAL_POLICY="/no/such/file", **environment)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", complaint)


def test_a_lenient_start_leaves_the_file_to_the_scheduler() -> None:
    done = launched(DRAFTDIAL_POLICY="/no/such/file", DRAFTDIAL_START="warn")
    assert (done.returncode, done.stdout) == (0, "loaded\n")


def test_a_process_without_a_scheduler_gets_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTDIAL_POLICY", "/no/such/file")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the launcher")
    registered: list[Any] = []
    monkeypatch.setattr(plugin, "_register_hooks", registered.append)
    plugin.register()
    assert registered == []
    monkeypatch.setitem(sys.modules, plugin.SCHEDULER, SimpleNamespace())  # type: ignore[arg-type]
    plugin.register()
    assert len(registered) == 1


def test_an_error_of_the_plugin_does_not_reach_the_scheduler(
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make_dial(make_policy_file(1))
    made.signals = SimpleNamespace(is_prefill=False, has_grammar=False)  # type: ignore[assignment]
    monkeypatch.setattr(dial, "_current", made)
    result = SimpleNamespace()
    setattr(result, ROUND_ATTRIBUTE, 3)
    assert steering.around_run_batch(lambda scheduler, batch: "result", "scheduler", "batch") == "result"
    steering.after_resolve_spec_v2_tokens([], "processor", result, "batch")
    args = "scheduler", "batch", result
    assert steering.around_process_batch_result(lambda *given: given, *args) == args
    steering.after_add_request_to_queue(None, "scheduler", "request")
    assert made.counters.errors == 4 and made.counters.fallbacks == 1
    assert made.fallback is not None and made.fallback.startswith("launching: AttributeError")


def test_a_lenient_start_says_why_it_does_not_steer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_policy_file: Callable[..., PolicyFile]
) -> None:
    path = tmp_path / "p.safetensors"
    path.write_bytes(make_policy_file(1).data)
    monkeypatch.setenv("DRAFTDIAL_POLICY", str(path))
    monkeypatch.setenv("DRAFTDIAL_START", "warn")
    monkeypatch.setattr(compat, "uses_rejection_sampling", lambda worker: False)
    monkeypatch.setattr(plugin, "dead_targets", lambda settings: [])
    monkeypatch.setattr(dial, "_current", None)
    monkeypatch.setattr(dial, "_inactive_reason", "")
    stock = SimpleNamespace(candidate_steps=[0, 1])
    controller = SimpleNamespace(params=stock, worker=SimpleNamespace(tp_rank=0))
    steering.after_controller_init(None, controller)
    assert controller.params.candidate_steps is stock.candidate_steps and dial.current() is None
    # The other ranks may have a dial until all have voted, and capturing is collective.
    assert controller.params.cuda_graph_bs_for_step(1) is None
    assert dial.inactive_reason().endswith(
        "tiers: found [0, 1, 3], allowed: some of [0, 1], those that this server has built"
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_policy_set_by_hand_does_not_steer_a_disaggregated_server(
    role: str,
    monkeypatch: pytest.MonkeyPatch,
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
) -> None:
    made = make_dial(make_policy_file(1))
    controller = SimpleNamespace(params=made)
    monkeypatch.setattr(steering, "_controller", controller)
    monkeypatch.setattr(steering, "_settings", lambda: Settings(Path("/p"), strict=False))
    monkeypatch.setattr(compat, "is_first_rank", lambda scheduler: True)
    monkeypatch.setattr(rank_agreement, "gather", lambda scheduler, vote: [vote])
    monkeypatch.setattr(dial, "_current", made)
    monkeypatch.setattr(dial, "_inactive_reason", "")
    steering.before_run_event_loop(SimpleNamespace(disaggregation_mode=SimpleNamespace(value=role)))
    assert dial.current() is None and controller.params is made.inner
    assert dial.inactive_reason() == (
        f"--disaggregation-mode {role}: prefill/decode disaggregation is not supported"
    )


@pytest.mark.parametrize("is_nested", [False, True])
def test_data_parallel_replicas_write_logs_of_their_own(
    is_nested: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_dial: Callable[..., Dial],
    make_policy_file: Callable[..., PolicyFile],
) -> None:
    monkeypatch.setattr(compat, "release", lambda: "0.5.23")
    settings, made, logs = Settings(Path("/p"), log=tmp_path / "log"), make_dial(make_policy_file(1)), []
    for rank in (0, 1, 2):
        where = SimpleNamespace(dp_rank=rank)
        scheduler = SimpleNamespace(ps=where) if is_nested else where  # by release
        scheduler.max_running_requests = 16
        logs.append(steering._open_log(settings, made, scheduler))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.replica1", "log.replica2"]
    with pytest.raises(UserError, match=r"log\.replica2: another server writes it: name another file"):
        steering._open_log(settings, made, scheduler)
    for log in logs:
        assert log is not None
        log.close()


@pytest.mark.parametrize(
    ("release", "shims"),
    [
        ("0.5.14", []),
        ("0.5.15.post1", ["shared_logits_30549"]),
        ("0.5.16", ["shared_logits_30549", "growing_mutations_log", "slow_override"]),
        ("0.5.17", ["shared_logits_30549", "draft_extend_width", "growing_overrides_log"]),
        ("0.5.18", ["shared_logits_30549", "growing_overrides_log"]),
        ("0.5.19", ["growing_overrides_log"]),
        ("0.6.0.dev1", ["growing_overrides_log"]),
    ],
)
def test_each_release_gets_its_shims(release: str, shims: list[str]) -> None:
    assert [hook.hook.__name__ for hook in compat.hooks(release)] == shims
    assert compat.is_supported(release) == (release != "0.6.0.dev1")


def test_the_log_of_overrides_stays_small_and_says_the_same() -> None:
    context = SimpleNamespace(_overrides_log=[])
    everything: list[tuple[str, dict[str, int]]] = []
    for number in range(1000):
        entry = (
            ("user", {"other": number})
            if number % 97 == 0
            else ("adaptive", {"steps": number, "tokens": number})
        )
        everything.append(entry)
        context._overrides_log.append(entry)
        compat.growing_overrides_log(None, context)
    folded: list[dict[str, int]] = []
    for log in (everything, context._overrides_log):
        folded.append({})
        for _, fields in log:
            folded[-1].update(fields)
    assert folded[0] == folded[1] and len(context._overrides_log) == 2


def test_shared_logits_are_sized_for_the_widest_tier() -> None:
    def runner(name: str, widest: int | None) -> SimpleNamespace:
        def width(num_draft_tokens: int = 4) -> int:
            return num_draft_tokens

        return SimpleNamespace(
            server_args=SimpleNamespace(max_speculative_num_draft_tokens=widest), **{name: width}
        )

    assert compat.shared_logits_30549(64 * 4, runner("decode_num_tokens_per_req", 8)) == 64 * 8
    assert compat.shared_logits_30549(64 * 4, runner("decode_num_tokens_per_bs", 8)) == 64 * 8
    assert compat.shared_logits_30549(64, runner("decode_num_tokens_per_req", None)) == 64


def test_a_context_without_a_log_of_overrides_is_left_alone() -> None:
    context = SimpleNamespace()
    compat.growing_overrides_log(None, context)
    assert vars(context) == {}


@pytest.mark.parametrize("dead", ["run_batch", "_resolve_spec_v2_tokens", "run_event_loop", "__init__"])
def test_a_function_that_could_not_be_hooked_is_noticed(dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(Path("/p"), strict=False)
    monkeypatch.setattr(steering, "_settings", lambda: settings)
    monkeypatch.setattr(compat, "release", lambda: "0.5.23")
    monkeypatch.setattr(compat, "has_consensus_checker", lambda: False)
    monkeypatch.setattr(compat, "is_first_rank", lambda scheduler: True)
    monkeypatch.setattr(rank_agreement, "gather", lambda scheduler, vote: [vote])
    monkeypatch.setattr(dial, "_current", None)
    monkeypatch.setattr(dial, "_inactive_reason", "")
    live = {hook.target for hook in plugin.steering_hooks(settings)}
    registry = SimpleNamespace(_patched={target for target in live if not target.endswith(dead)})
    module = SimpleNamespace(HookRegistry=registry)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)  # type: ignore[arg-type]
    if dead != "__init__":
        controller = SimpleNamespace(params=SimpleNamespace(), worker=SimpleNamespace(tp_rank=0))
        steering.after_controller_init(None, controller)
    if dead != "run_event_loop":
        steering.before_run_event_loop(SimpleNamespace(server_args=None))
    assert dial.current() is None and dial.inactive_reason().endswith(f"{dead}, which must be hooked")
    del registry._patched
    assert plugin.dead_targets(settings) == []
