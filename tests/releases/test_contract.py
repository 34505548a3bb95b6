"""What the plugin relies on in one release of SGLang: read off its sources, and its light modules run.

`tests/releases/run.sh` runs this once for each release. Modules that need a GPU's libraries are parsed
instead of imported.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
from policies import TIERS, rule

from draftdial.controller.policy_file import write
from draftdial.engine_patch import (
    acceptance_replay,
    compat,
    dial,
    kv_lengths,
    kv_only,
    one_token_verify,
    plugin,
    steering,
)
from draftdial.engine_patch.scheduler_signals import (
    HEALTH_CHECK_NEW_TOKENS,
    HEALTH_CHECK_PREFIX,
    SchedulerSignals,
)
from draftdial.engine_patch.settings import POLICY

RELEASE = os.environ["SGLANG_RELEASE"]
ROOT = Path(sglang.__file__).parent.parent
HOOKS = [
    *plugin.hooks(),
    *plugin.clock_hooks(),
    *compat.hooks(RELEASE),
    *acceptance_replay.hooks(),
    *kv_only.hooks(),
    *one_token_verify.hooks(RELEASE),
]
SRT = "sglang.srt"

TAKES = {
    "AdaptiveController.__init__": ["self", "worker"],
    "Scheduler.run_event_loop": ["self"],
    "Scheduler.run_batch": ["self", "batch"],
    "Scheduler._add_request_to_queue": ["self", "req", "is_retracted"],
    "Scheduler.process_batch_result": ["self", "batch", "result"],
    "SchedulerBatchResultProcessor._resolve_spec_v2_tokens": ["self", "result", "batch"],
    "Scheduler.set_internal_state": ["self", "recv_req"],
    "Scheduler.get_internal_state": ["self", "recv_req"],
    "Scheduler.pause_generation": ["self", "recv_req"],
    "ModelRunner.max_decode_logits_rows": ["self"],
    "ServerArgs.override": ["self", "source"],
    "RuntimeContext.override": ["self", "source"],
    "resolvable_fields": ["cls"],
    "resolve_num_tokens_per_req": [],
    "EAGLEWorkerV2.forward_batch_generation": ["self", "batch"],
    "eagle_sample": ["verify_input", "batch"],
    "EagleDraftWorker._draft_extend_for_decode": ["self", "batch", "batch_result"],
    "EagleDraftWorker._draft_extend_for_prefill": [
        "self",
        "batch",
        "target_hidden_states",
        "next_token_ids",
    ],
    "FlashAttentionBackend._init_full_cg_decode_metadata": ["self", "forward_batch", "in_capture"],
    "FlashAttentionBackend.forward_extend": ["self", "q", "k", "v", "layer", "forward_batch"],
}
"""The positional parameters that the hooks name."""


def test_the_sources_are_those_of_the_release() -> None:
    assert compat.release() == RELEASE
    assert (ROOT / f"sglang-{RELEASE}.dist-info").is_dir()


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.removeprefix(f"{SRT}."))
def test_hooks_find_their_target(hook: compat.Hook) -> None:
    target = function(hook.target)
    name = hook.target[len(module_of(hook.target)) + 1 :]
    assert [argument.arg for argument in target.args.args][: len(TAKES[name])] == TAKES[name]
    decorators = {ast.unparse(decorator) for decorator in target.decorator_list}
    assert not decorators & {"property", "cached_property", "classmethod", "staticmethod"}


@pytest.mark.skipif(RELEASE not in one_token_verify.RELEASES, reason="SGLang's way is kept there")
def test_the_attention_backend_has_what_one_token_needs() -> None:
    backend = f"{SRT}.layers.attention.flashattention_backend.FlashAttentionBackend"
    extend, decode = (function(f"{backend}.{name}").args for name in ("forward_extend", "forward_decode"))
    assert [each.arg for each in extend.args] == [each.arg for each in decode.args]
    computed = [each.arg for each in function(f"{backend}._compute_scheduler_metadata").args.args]
    assert computed == ["self", "batch_size", "max_seq_len_k", "cache_seqlens", "cu_seqlens_q"]
    assigned = {
        node.attr
        for node in ast.walk(class_of(module_of(backend), "FlashAttentionBackend"))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert assigned >= {
        *("forward_metadata", "max_context_len", "_sched_meta_buf", "speculative_num_draft_tokens", "topk"),
        *("fa_impl_ver", "use_mla", "has_swa", "has_local_attention", "is_prefill_aware_swa"),
    }


def test_lengths_of_kv_are_read_one_by_one_where_they_are_made_a_list() -> None:
    module = f"{SRT}.mem_cache.allocation"
    body = tree(module).body if path_of(module).is_file() else []
    if not any(getattr(node, "name", "") == "alloc_for_spec_decode" for node in body):
        assert not kv_lengths.hooks(RELEASE)
        return
    allocates = function(f"{module}.alloc_for_spec_decode")
    read = [
        ast.unparse(node)
        for node in ast.walk(allocates)
        if isinstance(node, ast.Subscript | ast.Call) and "nxt_kv_lens_cpu" in ast.unparse(node)
    ]
    assert ("nxt_kv_lens_cpu[i]" in read) == bool(kv_lengths.hooks(RELEASE))
    if not kv_lengths.hooks(RELEASE):
        return
    # Beside the loop one call reads them, where pages are larger than a token.
    pages = next(node for node in ast.walk(allocates) if isinstance(node, ast.If) and node.orelse)
    assert ast.unparse(pages.test) == "tree_cache.token_to_kv_pool_allocator.page_size == 1"
    reads = [node for node in ast.walk(allocates) if getattr(node, "id", "") == "nxt_kv_lens_cpu"]
    of_larger = [node for part in pages.orelse for node in ast.walk(part)]
    assert len(reads) == 2 and sum(node in of_larger for node in reads) == 1
    assert any(
        isinstance(node, ast.ImportFrom) and "alloc_for_spec_decode" in [name.name for name in node.names]
        for node in tree(f"{SRT}.speculative.eagle_utils").body
    )
    assert allocates.args.args[0].arg == "tree_cache"
    assert "nxt_kv_lens_cpu" in [argument.arg for argument in allocates.args.kwonlyargs]


@pytest.mark.parametrize(
    "name",
    [
        "waiting_queue",
        "chunked_req",
        "running_batch",
        "max_running_requests",
        "max_total_num_tokens",
        "token_to_kv_pool_allocator",
        "tree_cache",
        "model_worker",
        "tp_cpu_group",
        "server_args",
        "enable_overlap",
        "metrics_reporter",
        "req_to_token_pool",
        "disaggregation_mode",
    ],
)
def test_the_scheduler_has_what_is_read(name: str) -> None:
    text = source(f"{SRT}.managers.scheduler")
    assert re.search(rf"\bself\.{name}\b(: [^=\n]+)? = |self\.{name},$|^ +self\.{name}$", text, re.MULTILINE)


def test_nothing_else_pauses_the_scheduler() -> None:
    paused = "self._engine_paused = True"
    assert source(plugin.SCHEDULER).count(paused) == 1
    assert paused in ast.unparse(function(f"{plugin.SCHEDULER}.Scheduler.pause_generation"))


def test_requests_have_what_is_read_and_take_an_attribute() -> None:
    request = class_of(f"{SRT}.managers.schedule_batch", "Req")
    assigned = names_assigned(request)
    for name in (
        "rid",
        "origin_input_ids",
        "output_ids",
        "finished_reason",
        "is_retracted",
        "sampling_params",
    ):
        assert name in assigned, name
    assert "seqlen" in {node.name for node in request.body if isinstance(node, ast.FunctionDef)}
    assert "__slots__" not in ast.unparse(request)
    assert {"extend_end", "extend_range"} & assigned or "extend_input_len" in assigned


def test_batches_have_what_is_read() -> None:
    fields = annotated(class_of(f"{SRT}.managers.schedule_batch", "ScheduleBatch"))
    assert {"reqs", "extend_num_tokens", "forward_mode", "has_grammar"} <= fields
    assert {"req_pool_indices", "seq_lens"} <= fields


def test_results_say_their_width_and_take_an_attribute() -> None:
    result = class_of(f"{SRT}.managers.utils", "GenerationBatchResult")
    assert {"num_correct_drafts_per_req_cpu", "speculative_num_draft_tokens"} <= annotated(result)
    assert [ast.unparse(decorator) for decorator in result.decorator_list] == ["dataclasses.dataclass"]


def test_feedback_arrives_where_outcomes_are_read() -> None:
    resolve = ast.unparse(
        function(f"{plugin.PROCESSOR}.SchedulerBatchResultProcessor._resolve_spec_v2_tokens")
    )
    assert resolve.index("result.num_correct_drafts_per_req_cpu = ") < resolve.index(
        "on_verify_complete_cpu("
    )
    assert "output_ids" not in resolve, "positions are read before this round's tokens are appended"
    assert "is_retracted" in resolve and "finished()" in resolve


def test_verification_puts_its_width_on_the_result() -> None:
    module = "eagle_worker_v2" if compat.version(RELEASE) < (0, 5, 16) else "eagle_worker_common"
    widths = [
        {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}.get(
            "speculative_num_draft_tokens"
        )
        for call in ast.walk(tree(f"{SRT}.speculative.{module}"))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "GenerationBatchResult"
    ]
    assert widths in (["num_draft_tokens"], ["self.speculative_num_draft_tokens"])


def test_every_decode_round_asks_once() -> None:
    forward = ast.unparse(
        function(f"{SRT}.speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation")
    )
    assert forward.count("self.activate_step_by_batch(") == 1
    worker = source(f"{SRT}.speculative.eagle_worker_v2")
    assert re.search(r"self\.adaptive_controller = AdaptiveController\(", worker)


def test_acceptance_is_sampled_by_the_hooked_function_and_returned_in_this_order() -> None:
    module = "eagle_worker_v2" if compat.version(RELEASE) < (0, 5, 16) else "eagle_worker_common"
    [call] = [
        node
        for node in ast.walk(tree(f"{SRT}.speculative.{module}"))
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("eagle_sample(")
    ]
    assert ast.unparse(call.targets[0]) == "(predict, accept_lens, accept_index)"
    assert "_patched" in source(f"{SRT}.plugins.hook_registry")


def test_probes_are_known_by_the_same_prefix_and_length() -> None:
    assert f'HEALTH_CHECK_RID_PREFIX = "{HEALTH_CHECK_PREFIX}"' in source(f"{SRT}.constants")
    _, probe = source(f"{SRT}.entrypoints.http_server").split("async def health_generate(")
    assert f'{{"max_new_tokens": {HEALTH_CHECK_NEW_TOKENS}, ' in probe.split("HEALTH_CHECK_RID_PREFIX")[0]


def test_rejection_sampling_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.runtime_context as context

    spec = SimpleNamespace(speculative_use_rejection_sampling=True)
    if hasattr(context, "get_spec"):
        monkeypatch.setattr(context, "get_spec", lambda: spec)
    assert compat.uses_rejection_sampling(SimpleNamespace(server_args=spec))


def test_a_refusal_has_a_reason() -> None:
    import sglang.srt.speculative.adaptive_spec_params as params

    names = params.adaptive_unsupported_reason.__code__.co_varnames
    assert names[: params.adaptive_unsupported_reason.__code__.co_argcount] == ("server_args",)


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's own controller over a worker that only counts steps, hooked by SGLang's own registry."""
    import sglang.srt.speculative.adaptive_runtime_state as runtime
    import sglang.srt.speculative.adaptive_spec_params as params
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    path = tmp_path / "policy.safetensors"
    write(path, rule("threshold", k=3, batch=4))
    config = tmp_path / "adaptive.json"
    config.write_text(json.dumps({"1": {"candidate_steps": list(TIERS)}}))
    monkeypatch.setenv(POLICY, str(path))
    monkeypatch.setattr(compat, "uses_rejection_sampling", lambda worker: False)
    monkeypatch.setattr(plugin, "dead_targets", lambda settings: [])  # one hook alone is put in place here
    original = runtime.AdaptiveController.__init__
    hook = plugin.hooks()[0]
    HookRegistry.register(hook.target, hook.hook, HookType(hook.kind))
    HookRegistry.apply_hooks()
    worker = Worker()
    if compat.version(RELEASE) < (0, 5, 20):
        made = runtime.AdaptiveController(worker, config_path=str(config))
    else:
        made = runtime.AdaptiveController(
            worker, params.AdaptiveSpeculativeParams(initial_steps=TIERS[-1], cfg_path=str(config))
        )
    made.init_states()
    yield made
    HookRegistry.reset()
    runtime.AdaptiveController.__init__ = original
    dial.install(None)


def test_the_dial_drives_the_real_controller(controller: Any) -> None:
    steered = dial.current()
    assert steered is not None and controller.params is steered
    assert controller.worker.built == [k for k in TIERS if k != TIERS[-1]] or controller.worker.built == list(
        TIERS
    )

    controller.activate_step_by_batch(1)
    assert controller.worker.speculative_num_steps == TIERS[-1], "nothing is steered before the loop begins"

    steered.bind(SchedulerSignals(idle_scheduler()), None, None)
    seen = []
    for batch_size in (1, 4, 5, 16, 2):
        controller.activate_step_by_batch(batch_size)
        seen.append(controller.worker.speculative_num_steps)
        controller.on_verify_complete([0] * batch_size, batch_size=batch_size)
        assert controller.worker.speculative_num_steps == seen[-1], "feedback switches nothing"
    assert seen == [3, 3, 0, 0, 3]
    steered.force_k(1)
    controller.activate_step_by_batch(16)
    assert controller.worker.speculative_num_steps == 1


def test_in_shadow_the_stock_rule_acts(controller: Any) -> None:
    steered = dial.current()
    assert steered is not None
    steered.bind(SchedulerSignals(idle_scheduler()), None, None)
    steered.set_mode("shadow")
    for _ in range(60):  # SGLang's warm-up and several updates at an acceptance of nothing
        controller.activate_step_by_batch(2)
        k = controller.worker.speculative_num_steps
        controller.on_verify_complete([0, 0], batch_size=2)
    assert steered.last_wanted_k == 3 and steered.last_k == k < 3


def test_steering_hooks_take_more_arguments() -> None:
    hooked = [hook.hook for hook in HOOKS]
    assert all(hook.__code__.co_flags & 0x04 and hook.__code__.co_flags & 0x08 for hook in hooked)
    assert steering.around_run_batch(lambda *args: args, "scheduler", "batch", "proxy") == (
        "scheduler",
        "batch",
        "proxy",
    )


class Worker:
    """The part of EAGLEWorkerV2 that the controller uses."""

    speculative_num_steps = TIERS[-1]
    speculative_num_draft_tokens = TIERS[-1] + 1

    def __init__(self) -> None:
        self.built: list[int] = []

    def build_adaptive_runtime_state(
        self, speculative_num_steps: int, speculative_num_draft_tokens: int, cuda_graph_bs: Any = None
    ) -> SimpleNamespace:
        self.built.append(speculative_num_steps)
        return SimpleNamespace(speculative_num_steps=speculative_num_steps)

    def apply_runtime_state(self, state: SimpleNamespace) -> None:
        self.speculative_num_steps = state.speculative_num_steps


def idle_scheduler() -> SimpleNamespace:
    return SimpleNamespace(
        waiting_queue=[],
        chunked_req=None,
        running_batch=SimpleNamespace(reqs=[]),
        max_running_requests=16,
        max_total_num_tokens=1000,
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 1000),
        tree_cache=SimpleNamespace(evictable_size=lambda: 0),
    )


def test_a_one_layer_draft_computes_its_keys_as_kv_only_does() -> None:
    model = f"{SRT}.models.llama_eagle3"
    steps = ast.unparse(function(f"{model}.LlamaModel.forward"))
    norm = "self.input_norm(hidden_states)", "self.fc_norm is not None"
    fused = [*(norm if compat.version(RELEASE) >= (0, 5, 17) else norm[1:]), "self.fc(hidden_states)"]
    assert_in_order(steps, "self.embed_tokens(input_ids)", "spec_info.hidden_states", *fused, "layer(")
    assert ("self.input_norm" in steps) == (compat.version(RELEASE) >= (0, 5, 17))
    layer = ast.unparse(function(f"{model}.LlamaDecoderLayer.forward"))
    inputs = "self.hidden_norm(hidden_states)", "self.input_layernorm(embeds)", "[embeds, hidden_states]"
    assert_in_order(layer, *inputs, "self.self_attn(")
    attention = f"{SRT}.models.llama.LlamaAttention"
    prepared = ast.unparse(function(f"{attention}.forward_prepare_native"))
    assert_in_order(
        prepared, "self.qkv_proj(", "[self.q_size, self.kv_size, self.kv_size]", "self.rotary_emb("
    )
    assert {"q_size", "kv_size", "num_kv_heads", "head_dim"} <= names_assigned(
        class_of(*attention.rsplit(".", 1))
    )


def test_a_draft_extend_reads_and_leaves_what_kv_only_does() -> None:
    worker = ast.unparse(function(kv_only.TARGET))
    for name in ("logits_output.hidden_states", "next_token_ids", "topk_p", "topk_index", "hidden_states"):
        assert name in worker, name
    is_older = compat.version(RELEASE) < (0, 5, 16)
    place = "base_spec_worker.EagleDraftWorkerBase" if is_older else "eagle_worker_common"
    prepare = ast.unparse(function(f"{SRT}.speculative.{place}.prepare_for_draft_extend"))
    assert "batch.seq_lens" in prepare  # positions; slots are the batch's own unless the window is widened
    widens = prepare.count("batch.out_cache_loc = ")
    assert widens == prepare.count("batch.out_cache_loc = widened_") == (0 if is_older else 1)
    pool = class_of(f"{SRT}.mem_cache.memory_pool", "MHATokenToKVPool")
    writes = next(n for n in pool.body if isinstance(n, ast.FunctionDef) and n.name == "set_kv_buffer")
    assert [argument.arg for argument in writes.args.args][3:5] == ["cache_k", "cache_v"]


def assert_in_order(text: str, *parts: str) -> None:
    places = [text.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), list(zip(parts, places, strict=True))


def module_of(target: str) -> str:
    """The module that holds a dotted `target`."""
    parts = target.split(".")
    while not path_of(".".join(parts)).is_file():
        parts.pop()
        assert parts, f"no module of {target}"
    return ".".join(parts)


def path_of(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


@cache
def source(module: str) -> str:
    return path_of(module).read_text()


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(source(module))


def function(target: str) -> ast.FunctionDef:
    """The function or method that a dotted `target` names."""
    module = module_of(target)
    scope: Any = tree(module)
    for name in target[len(module) + 1 :].split("."):
        scope = next(
            (n for n in scope.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name), None
        )
        assert scope is not None, f"{target}: no {name}"
    return scope


def class_of(module: str, name: str) -> ast.ClassDef:
    return next(n for n in tree(module).body if isinstance(n, ast.ClassDef) and n.name == name)


def names_assigned(scope: ast.ClassDef) -> set[str]:
    """Attributes that methods of a class set on `self`."""
    return {
        node.attr
        for node in ast.walk(scope)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def annotated(scope: ast.ClassDef) -> set[str]:
    """Annotated fields of a class."""
    return {
        n.target.id for n in scope.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
