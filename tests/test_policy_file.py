"""The policy file: what goes in comes out, and everything else is refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from draftdial.controller.bandit import Bandit
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.features import Features
from draftdial.controller.files import sha256_of
from draftdial.controller.golden import NUM_SERVERS, replay_policy
from draftdial.controller.greedy import GoodputGreedy
from draftdial.controller.learned import LearnedPolicy, Network
from draftdial.controller.policy_card import Card, Training, canonical, plain
from draftdial.controller.policy_export import learned_file, rule_file
from draftdial.controller.policy_file import (
    MAX_FILE_BYTES,
    MAX_HEADER_BYTES,
    PolicyFile,
    load_policy,
    pack,
    read,
    write,
)
from draftdial.controller.policy_weights import SelectedNetwork
from draftdial.controller.probe import FIRST_WAIT_ROUNDS
from draftdial.controller.rule_cards import Rule, rule_from_card
from draftdial.controller.rules import FixedK, Threshold
from draftdial.controller.sglang_rule import SglangRule

PROFILE = CostProfile.load("h200-llama3-8b")
TIERS = PROFILE.tiers
FALLBACK = Threshold(TIERS, k=3, batch=48)
TRAINING = Training("seed: 7\n", "draftdial train seed=7", 7, {"profile": "0" * 64}, {"numpy": "2"})
NUM_FEATURES = len(Features(PROFILE, "warm").table)
NUM_ADVICE = 4 * (len(TIERS) - 1)

Tensors = dict[str, Any]
RULES: tuple[Rule, ...] = (
    FixedK(TIERS, 3),
    Threshold(TIERS, k=3, batch=48),
    SglangRule(TIERS),
    GoodputGreedy(TIERS, PROFILE),
    Bandit(TIERS, PROFILE, "warm"),
)


def random_weights(num_features: int = NUM_FEATURES, num_hidden: int = 32, seed: int = 0) -> Tensors:
    """Weights under which the answers differ from state to state."""
    rng = np.random.default_rng(seed)

    def weights(*shape: int) -> Any:
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    return {
        "hidden.0.weight": weights(num_hidden, num_features),
        "hidden.0.bias": weights(num_hidden),
        "hidden.1.weight": weights(num_hidden, num_hidden),
        "hidden.1.bias": weights(num_hidden),
        "logits.weight": 4 * weights(len(TIERS), num_hidden + NUM_ADVICE),
        "logits.bias": np.zeros(len(TIERS), np.float32),
    }


def exported(network: Network, **others: Any) -> PolicyFile:
    policy = LearnedPolicy(Features(PROFILE, "warm", ttft_limit_s=2.0, tpot_limit_s=0.03), network)
    usual: dict[str, Any] = {
        "name": "learned",
        "fallback": FALLBACK,
        "training": TRAINING,
        "evaluation": {},
    }
    return learned_file(policy, **(usual | others))


LEARNED = exported(Network(random_weights()))
THRESHOLD = rule_file(RULES[1], PROFILE, "warm", name="threshold", fallback=FALLBACK)


def answers(policy: Any) -> Any:
    """What a policy decides over the golden history."""
    return replay_policy(policy, PROFILE.max_running, TIERS[-1])


def changed(
    file: PolicyFile,
    card: Callable[[Card], object] = lambda card: None,
    tensors: Callable[[Tensors], object] = lambda tensors: None,
) -> bytes:
    """A file that is sound but for a change in its content."""
    new_card, new_tensors = json.loads(json.dumps(file.card)), dict(file.tensors)
    card(new_card)
    tensors(new_tensors)
    return pack(new_card, new_tensors)


def refusal(content: bytes | Path) -> str:
    """The message with which a file is refused: one line."""
    with pytest.raises(UserError) as caught:
        load_policy(content)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_numpy_network_equals_torch() -> None:
    weights = {name: torch.from_numpy(value) for name, value in random_weights(num_hidden=64).items()}
    states = np.random.default_rng(1).normal(0, 0.7, (10_000, NUM_FEATURES)).astype(np.float32)
    state = torch.from_numpy(states)
    hidden = state
    for layer in ("hidden.0", "hidden.1"):
        hidden = torch.tanh(
            torch.nn.functional.linear(hidden, weights[f"{layer}.weight"], weights[f"{layer}.bias"])
        )
    with_advice = torch.cat([hidden, state[:, -NUM_ADVICE:]], dim=1)
    expected = torch.nn.functional.linear(
        with_advice, weights["logits.weight"], weights["logits.bias"]
    ).numpy()

    logits = Network(random_weights(num_hidden=64)).logits(states)

    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(logits.argmax(axis=1), expected.argmax(axis=1))
    assert len(np.unique(expected.argmax(axis=1))) == len(TIERS)


def test_learned_policy_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "policy.safetensors"
    write(path, LEARNED)
    file, policy = read(path), load_policy(path)

    assert path.read_bytes() == LEARNED.data
    assert file.policy_id == LEARNED.policy_id == sha256_of(path.read_bytes())[:12]
    assert file.card == LEARNED.card
    assert list(path.parent.iterdir()) == [path]
    assert isinstance(policy, LearnedPolicy)
    assert (policy.features.ttft_limit_s, policy.features.tpot_limit_s) == (2.0, 0.03)
    original = LearnedPolicy(Features(PROFILE, "warm", ttft_limit_s=2.0, tpot_limit_s=0.03), policy.network)
    for name, tensor in random_weights().items():
        np.testing.assert_array_equal(policy.network.tensors[name], tensor)
    np.testing.assert_array_equal(answers(policy), answers(original))
    assert exported(policy.network).data == LEARNED.data


def test_card_says_what_the_policy_is() -> None:
    card = exported(
        Network(random_weights()),
        evaluation={"ratio": np.float64(0.9), "ci95": (0.8, np.inf), 3: np.arange(2)},
    ).card
    assert card["format"] == {"major": 1, "minor": 0}
    assert (card["kind"], card["off_mode"], tuple(card["tiers"])) == ("learned", "warm", TIERS)
    assert card["fallback"] == {"k": 3, "batch": 48}
    assert card["cost_profile"]["document"] == PROFILE.document
    assert card["features"][0] == {
        "name": "running",
        "unit": "requests",
        "scale": 6.0,
        "transform": "log1p",
    }
    assert card["training"]["config_sha256"] == sha256_of(b"seed: 7\n")
    assert card["training"]["seed"] == 7
    assert card["evaluation"] == {"ratio": 0.9, "ci95": [0.8, None], "3": [0, 1]}


def test_export_leaves_the_policy_alone() -> None:
    policy = LearnedPolicy(Features(PROFILE, "warm"), Network(random_weights()))
    answers(policy)
    before = policy.features.belief.reached.copy()
    learned_file(policy, name="learned", fallback=FALLBACK, training=TRAINING, evaluation={})
    assert before.shape[1] == NUM_SERVERS and before.any()
    np.testing.assert_array_equal(policy.features.belief.reached, before)


def test_golden_vectors_cover_many_clear_answers() -> None:
    tensors = LEARNED.tensors
    assert tensors["golden.observation"].shape == (64, NUM_FEATURES)
    assert set(tensors["golden.k"].tolist()) <= set(TIERS)
    assert len(set(tensors["golden.k"].tolist())) >= 3
    runner_up, best = np.sort(tensors["golden.logits"], axis=1)[:, -2:].T
    assert (best - runner_up > 1e-3).all()


def test_a_network_without_preferences_can_be_exported() -> None:
    silent = {name: np.zeros_like(tensor) for name, tensor in random_weights().items()}
    file = exported(Network(silent))
    assert len(file.tensors["golden.k"]) == 32
    assert not answers(load_policy(file))[:FIRST_WAIT_ROUNDS].any()


def test_features_are_picked_by_name() -> None:
    rng = np.random.default_rng(3)
    columns = rng.permutation(NUM_FEATURES)[:50].tolist()
    weights = random_weights(num_features=50)
    file = exported(SelectedNetwork(weights, columns))
    policy = load_policy(file)

    table = Features(PROFILE, "warm").table
    assert [entry["name"] for entry in file.card["features"]] == [table[column].name for column in columns]
    assert isinstance(policy, LearnedPolicy)
    observation = rng.normal(size=(100, NUM_FEATURES)).astype(np.float32)
    by_hand = Network(weights).logits(observation[:, columns])
    np.testing.assert_array_equal(policy.network.logits(observation), by_hand)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.card()["kind"]))
def test_rules_come_back_as_they_were(rule: Rule) -> None:
    file = rule_file(rule, PROFILE, "skip", name="a-rule", fallback=FALLBACK)
    policy = load_policy(file.data)
    fresh = rule_from_card(rule.card(), TIERS, PROFILE, "skip")

    assert file.card["kind"] == rule.card()["kind"]
    assert type(policy) is type(rule)
    assert policy.tiers == TIERS
    np.testing.assert_array_equal(answers(policy), answers(fresh))
    assert read(file.data).data == rule_file(rule, PROFILE, "skip", name="a-rule", fallback=FALLBACK).data


def test_a_rule_may_leave_tiers_out() -> None:
    some = (1, 3)
    file = rule_file(
        GoodputGreedy(some, PROFILE), PROFILE, "warm", name="greedy", fallback=Threshold(some, 3, 8)
    )
    assert load_policy(file).tiers == some
    tiers = json.dumps([0, 4])

    def four(card: Card) -> None:
        card.update(tiers=[0, 4], fallback={"k": 4, "batch": 8})

    assert f"tiers: found {tiers}, allowed: some of [0, 1, 2, 3, 5, 7]" in refusal(changed(file, four))


def test_a_tuned_rule_says_how() -> None:
    file = rule_file(
        RULES[3],
        PROFILE,
        "warm",
        name="greedy",
        fallback=FALLBACK,
        training=TRAINING,
        evaluation={"ratio": 1},
    )
    assert read(file.data).card["training"]["command"] == "draftdial train seed=7"
    assert THRESHOLD.card["training"] is None


def feature(index: int, **fields: Any) -> Callable[[Card], object]:
    return lambda card: card["features"][index].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda card: card.update(format={"major": 2, "minor": 0}), "format.major: found 2, allowed: 1"),
        (
            lambda card: card.update(format={"major": "1", "minor": 0}),
            'format.major: found "1", allowed: a wh',
        ),
        (lambda card: card.update(format={"major": 1}), "format.minor: found null"),
        (lambda card: card.pop("format"), "format: missing"),
        (
            lambda card: card.update(kind="oracle"),
            'kind: found "oracle", allowed: learned, fixed, threshold,',
        ),
        (lambda card: card.update(name="two words"), 'name: found "two words", allowed: 1 to 64 letters'),
        (lambda card: card.update(off_mode="nospec"), 'off_mode: found "nospec", allowed: warm, skip'),
        (lambda card: card.update(tiers=[0, 3, 3]), "tiers: found [0, 3, 3], allowed: whole numbers"),
        (
            lambda card: card.update(tiers=[0, 1 << 30]),
            "tiers: found [0, 1073741824], allowed: whole numbers",
        ),
        (
            lambda card: card.update(tiers=[0, 3, 7]),
            'found "advice/0/k=1", allowed: advice/0/k=3, advice/0/k=7',
        ),
        (lambda card: card.update(tiers=[0, 1, 2, 3, 4, 5, 7]), "tensor logits.weight: shape: found [6, 52]"),
        (lambda card: card["cost_profile"].update(sha256="0"), 'cost_profile.sha256: found "0"'),
        (lambda card: card["cost_profile"].update(document=3), "cost_profile.document: found 3"),
        (
            lambda card: card.update(fallback={"k": 4, "batch": 8}),
            "fallback.k: found 4, allowed: one of [0, 1",
        ),
        (lambda card: card.update(fallback={"k": 3}), "fallback.batch: found null"),
        (lambda card: card.update(training=None), "training: found null, allowed: an object"),
        (lambda card: card["training"].update(seed=True), "training.seed: found true"),
        (lambda card: card["training"].update(config="x"), "training.config_sha256: found"),
        (lambda card: card["limits"].update(ttft_s=0), "limits.ttft_s: found 0, allowed: seconds above 0"),
        (lambda card: card["limits"].update(tpot_s="1"), 'limits.tpot_s: found "1"'),
        (
            lambda card: card["belief"].update(prior_samples=5.0),
            "belief.prior_samples: found 5.0, allowed: 4.0",
        ),
        (lambda card: card.update(features=[]), "features: found [], allowed: a list of one or more"),
        (lambda card: card["features"].pop(), "tensor hidden.0.weight: shape"),
        (feature(0, name="moon"), 'features[0] "moon": name: found "moon", allowed: running, context, wai'),
        (feature(8, name="evidence/9"), 'found "evidence/9", allowed: evidence/0, evidence/1, evidence/2'),
        (
            lambda card: card["features"].append(card["features"][1]),
            'features[72] "context": name: found "context", allowed: each feature once',
        ),
        (feature(0, unit="servers"), 'features[0] "running": unit: found "servers", allowed: "requests"'),
        (feature(0, scale=5.0), 'features[0] "running": scale: found 5.0, allowed: 6.0'),
        (
            feature(0, transform="linear"),
            'features[0] "running": transform: found "linear", allowed: "log1p"',
        ),
        (lambda card: card.update(features=[3]), "features[0]: found 3, allowed: an object with name"),
    ],
)
def test_a_wrong_field_is_named(change: Callable[[Card], object], message: str) -> None:
    assert message in refusal(changed(LEARNED, change))


def test_a_wrong_profile_is_refused_by_its_field() -> None:
    def slow(card: Card) -> None:
        profile = card["cost_profile"]
        profile["document"]["switch_ms"] = -1
        profile["sha256"] = sha256_of(canonical(profile["document"]).encode())

    assert "cost_profile: switch_ms: found -1" in refusal(changed(LEARNED, slow))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda card: card["rule"].update(k=4), "rule: threshold rule: k = 4 is not among the tiers"),
        (lambda card: card["rule"].update(speed=1), "unknown field 'speed'"),
        (lambda card: card["rule"].pop("batch"), "batch"),
        (
            lambda card: card["rule"].update(batch=[1, 2, 3, 4]),
            "rule.batch: found [1, 2, 3, 4], allowed: one",
        ),
        (lambda card: card["rule"].update(batch=1 << 70), "rule: "),
        (lambda card: card["rule"].update(batch=8), "golden.k["),
        (lambda card: card.update(kind="fixed"), 'rule.kind: found "threshold", allowed: "fixed"'),
        (lambda card: card["golden"]["k"].pop(), "golden.k: found [["),
        (lambda card: card["golden"]["k"][5].append(1), "golden.k: found [["),
    ],
)
def test_a_wrong_rule_is_refused(change: Callable[[Card], object], message: str) -> None:
    assert message in refusal(changed(THRESHOLD, change))


def test_a_newer_minor_version_only_says_more() -> None:
    def newer(card: Card) -> None:
        card.update(format={"major": 1, "minor": 9}, mood="fine")
        card["features"][0]["origin"] = "scheduler"

    policy = load_policy(changed(LEARNED, newer, lambda tensors: tensors.update(mood=np.zeros(3))))
    np.testing.assert_array_equal(answers(policy), answers(load_policy(LEARNED)))


def replace(name: str, change: Callable[[Any], Any]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: np.ascontiguousarray(change(tensors[name].copy()))})


def with_nan(array: Any) -> Any:
    array[1] = np.nan
    return array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("hidden.1.bias"), "tensor hidden.1.bias: missing, found golden.k"),
        (lambda tensors: tensors.clear(), "tensor hidden.0.bias: missing, found no tensors"),
        (replace("logits.bias", with_nan), 'tensor logits.bias: found "NaN or infinity in row 1"'),
        (
            replace("logits.bias", lambda bias: bias.astype(np.float64)),
            'dtype: found "float64", allowed: float32',
        ),
        (replace("logits.bias", lambda bias: bias[:-1]), "logits.bias: shape: found [5], allowed: [6]"),
        (
            replace("hidden.0.bias", lambda bias: np.resize(bias, 513)),
            "hidden.0.bias: shape: found [513], allowed: [up to 512]: with more hidden units",
        ),
        (replace("logits.bias", lambda bias: bias[None]), "logits.bias: shape: found [1, 6], allowed: 1 dim"),
        (
            replace("logits.weight", lambda weight: weight[:, :20]),
            "logits.weight: shape: found [6, 20], allowed",
        ),
        (
            replace("hidden.0.weight", lambda weight: weight.T),
            "hidden.0.weight: shape: found [72, 32], allowed",
        ),
        (replace("hidden.1.weight", lambda weight: weight.T), "tensor golden.logits[0] k=0: found"),
        (replace("golden.logits", lambda logits: logits + 1e-3), "tensor golden.logits[0] k=0: found"),
        (
            replace("golden.observation", lambda seen: seen + 1e-3),
            "tensor golden.observation[0] running: found",
        ),
        (replace("golden.k", lambda k: k[::-1]), "tensor golden.k["),
        (replace("golden.k", lambda k: k[:9]), "tensor golden.k: shape: found [9], allowed: [32 to 256]"),
        (replace("golden.row", lambda row: row + 256), "tensor golden.row: found"),
        (replace("golden.row", lambda row: row[::-1]), "tensor golden.observation[0]"),
    ],
)
def test_a_wrong_tensor_is_named(change: Callable[[Tensors], object], message: str) -> None:
    assert message in refusal(changed(LEARNED, tensors=change))


def test_weights_that_are_not_finite_are_not_exported() -> None:
    weights = random_weights()
    weights["hidden.0.weight"][2, 5] = np.nan
    with pytest.raises(UserError, match=r"tensor (hidden\.0\.weight|golden\.logits)"):
        exported(Network(weights))


def test_a_grid_of_rules_is_not_exported() -> None:
    grid = Threshold(TIERS, k=[1, 3, 5, 7], batch=[8, 16, 32, 64])
    with pytest.raises(UserError, match=r"rule\.batch: found \[8, 16, 32, 64\], allowed: one value"):
        rule_file(grid, PROFILE, "warm", name="grid", fallback=FALLBACK)
    with pytest.raises(UserError, match=r"fallback\.k"):
        exported(Network(random_weights()), fallback=grid)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "file length: found 0, allowed: 8 or more bytes"),
        (b"\x01\x02", "file length: found 2"),
        (b"PK\x03\x04 a zip archive, such as torch.save writes", "header length: found"),
        (
            (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b" " * 9,
            "header length: found 4194305, allowed: at most",
        ),
        (LEARNED.data[:5000], "so the file is cut short"),
        (LEARNED.data[:-1], "not a readable .safetensors file"),
        (LEARNED.data + b"\0", "not a readable .safetensors file"),
        (bytes(MAX_FILE_BYTES + 1), "file: found more than 16777216 bytes"),
        (b"\x03" + bytes(7) + b"[1]", "header: found list, allowed: a JSON object"),
        (b"\x03" + bytes(7) + b"\xff\xfe\xfd", "header: not JSON"),
        (save({"a": np.zeros(1)}), "no draftdial metadata"),
        (save({}, {"draftdial": "[]"}), "card: found list, allowed: a JSON object"),
        (save({}, {"draftdial": "{"}), "card: not JSON"),
        (save({}, {"draftdial": '{"a": NaN}'}), "card: not JSON"),
        (save({}, {"draftdial": '{"a": 1e999}'}), "card: not JSON"),
        (save({}, {"draftdial": "[" * 100_000}), "card: not JSON"),
        (save({}, {"draftdial": '{"a": ' + "9" * 5000 + "}"}), "card: not JSON"),
    ],
    ids=range(17),
)
def test_what_is_not_a_policy_file_is_refused(content: bytes, message: str) -> None:
    assert message in refusal(content)


def test_paths_are_named_in_errors(tmp_path: Path) -> None:
    missing, damaged = tmp_path / "missing.safetensors", tmp_path / "damaged.safetensors"
    damaged.write_bytes(changed(LEARNED, feature(0, scale=5.0)))
    assert refusal(missing) == f"{missing}: cannot read the policy file: No such file or directory"
    assert refusal(tmp_path) == f"{tmp_path}: cannot read the policy file: Is a directory"
    assert refusal(damaged).startswith(f'{damaged}: features[0] "running": scale: found 5.0')


@settings(max_examples=300, deadline=None)
@given(data=st.data(), file=st.sampled_from((LEARNED, THRESHOLD)))
def test_damage_is_refused_or_harmless(data: st.DataObject, file: PolicyFile) -> None:
    content = bytearray(file.data)
    header = 8 + int.from_bytes(content[:8], "little")
    places = st.one_of(st.integers(0, header - 1), st.integers(0, len(content) - 1))
    for place in data.draw(st.lists(places, min_size=1, max_size=3), "places"):
        content[place] ^= 1 << data.draw(st.integers(0, 7), "bit")
    length = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))), "length")
    damaged = bytes(content[:length])
    try:
        found = read(damaged)
        load_policy(found)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert found.card == file.card
        assert found.tensors.keys() == file.tensors.keys()
        for name, tensor in file.tensors.items():
            assert found.tensors[name].tobytes() == tensor.tobytes()


def test_plain_leaves_json_as_it_is() -> None:
    document = PROFILE.to_document()
    assert plain(document) == document


def test_loading_needs_no_training_software(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    write(path, LEARNED)
    program = (
        "import sys; from draftdial.controller.policy_file import load_policy, pack, read; "
        f"load_policy({str(path)!r}); file = read({str(path)!r}); "
        "print(pack(file.card, file.tensors) == file.data, "
        "sorted({'torch', 'gymnasium', 'numba', 'scipy', 'draftdial.envs'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    # Another process, so another hash seed: the same content still gives the same bytes.
    assert result.stdout.strip() == "True []"
