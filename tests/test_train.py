"""`draftdial train` on tiny worlds: what a run leaves behind, repeats, resumes and exports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from draftdial.controller import progress_lines, train
from draftdial.controller.cli import main as draftdial
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.features import Features
from draftdial.controller.learned import LearnedPolicy, Network
from draftdial.controller.policy import Policy
from draftdial.controller.policy_file import load_policy, read
from draftdial.controller.run_folder import Evaluation, RunProgress
from draftdial.controller.validation import Validation
from draftdial.envs.closed_loop import stationary
from draftdial.envs.fitted_acceptance import FittedAcceptance
from draftdial.envs.simulated_engine import SimulatedEngine

TINY = (
    "ppo.total_rounds=512",
    "ppo.num_servers=8",
    "ppo.rounds_per_update=16",
    "ppo.batch_size=64",
    "ppo.width=8",
    "ppo.num_evaluations=4",
    "ppo.num_validation_episodes=4",
    "scenario.rounds=16",
    "scenario.high=16",
)
FEW_DOMAINS = ("acceptance.num_domains=5", "acceptance.num_arrays=8")
FILES = {
    "checkpoint.pt",
    "command.txt",
    "config.yaml",
    "evaluations.json",
    "policy.safetensors",
    "progress.csv",
    "versions.json",
}
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train with tiny settings and more overrides, in a folder of its own."""

    def run(*overrides: str) -> Path:
        return train.main([*TINY, *FEW_DOMAINS, *overrides], folder=tmp_path_factory.mktemp("run") / "run")

    return run


@pytest.fixture(scope="module")
def trained(run: Run) -> Path:
    return run("seed=3", "name=tiny")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float]], None]:
    """Let learned policies score as given, one number per evaluation; rules score as they do."""

    def script(scores: Sequence[float]) -> None:
        coming: Iterator[float] = iter(scores)
        real = Validation.score

        def score(self: Validation, policy: Policy) -> float:
            return next(coming) if isinstance(policy, LearnedPolicy) else real(self, policy)

        monkeypatch.setattr(Validation, "score", score)

    return script


def checkpoint(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return state


def networks(folder: Path) -> list[dict[str, np.ndarray]]:
    """The network of every evaluation."""
    return [
        {name: tensor.numpy() for name, tensor in tensors.items()}
        for _, _, tensors in checkpoint(folder)["evaluations"]
    ]


def equal(one: dict[str, np.ndarray], other: dict[str, Any]) -> bool:
    return all(np.array_equal(value, other[name]) for name, value in one.items())


def test_a_run_leaves_the_documented_files(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    events = {name for name in names if name.startswith("events.out.tfevents")}
    assert names - events == FILES and len(events) == 1
    assert (trained / "command.txt").read_text().startswith("draftdial train ppo.total_rounds=512")
    config = OmegaConf.load(trained / "config.yaml")
    assert (config.seed, config.name, config.ppo.total_rounds) == (3, "tiny", 512)
    assert not OmegaConf.missing_keys(config), "the resolved configuration is whole"
    assert {"torch", "stable-baselines3", "numpy", "draftdial"} <= set(
        json.loads((trained / "versions.json").read_text())
    )
    assert "eval/score" in (trained / "progress.csv").read_text().splitlines()[0].split(",")


def test_evaluations_start_before_training_and_end_with_it(trained: Path) -> None:
    record = json.loads((trained / "evaluations.json").read_text())
    num_rounds = [rounds for rounds, _ in record["evaluations"]]
    assert num_rounds == [0, 128, 256, 384, 512]
    assert set(record["rules"]) == {"off", "greedy", "threshold"}
    assert record["best"]["score"] == max(score for _, score in record["evaluations"])
    assert record["best"]["worse_than_greedy"] == (record["best"]["score"] < record["rules"]["greedy"])
    assert checkpoint(trained)["num_timesteps"] == 512


def test_training_moves_the_weights(trained: Path) -> None:
    first, *others = networks(trained)
    assert all(not equal(first, other) for other in others)
    assert all(np.isfinite(value).all() for other in others for value in other.values())


def test_the_card_tells_where_the_policy_comes_from(trained: Path) -> None:
    card = read(trained / "policy.safetensors").card
    assert card["name"] == "tiny" and card["training"]["seed"] == 3
    assert card["training"]["config"] == (trained / "config.yaml").read_text()
    assert card["training"]["command"] + "\n" == (trained / "command.txt").read_text()
    assert card["training"]["versions"] == json.loads((trained / "versions.json").read_text())
    assert {"profile/h200-llama3-8b", "workload/drift5"} <= set(card["training"]["hashes"])
    assert card["evaluation"] == json.loads((trained / "evaluations.json").read_text())


def test_the_exported_policy_decides_as_the_best_network_did(trained: Path) -> None:
    state = checkpoint(trained)
    best = max(range(len(state["evaluations"])), key=lambda i: state["evaluations"][i][1])
    profile = CostProfile.load("h200-llama3-8b")
    expected = LearnedPolicy(Features(profile, "warm"), Network(networks(trained)[best]))
    bank = FittedAcceptance(["chat"], num_arrays=16).bank(0)
    histories = []
    for policy in (expected, load_policy(trained / "policy.safetensors")):
        engine = SimulatedEngine([stationary(c, 60).requests(c) for c in (1, 8, 40)], bank, profile)
        policy.reset(3)
        history = []
        for _ in range(100):
            k = policy.decide(engine.signals())
            history.append(k.tolist())
            for outcome in engine.run_round(k):
                policy.observe(outcome)
        histories.append(history)
    assert histories[0] == histories[1]
    assert len({k for row in histories[0] for k in row}) > 1


def test_the_best_of_the_evaluations_is_exported_not_the_last(
    run: Run, scripted: Callable[[Sequence[float]], None]
) -> None:
    scripted([0.0, 1.0, 7.0, 3.0, 5.0])
    folder = run()
    file = read(folder / "policy.safetensors")
    by_evaluation = networks(folder)
    assert equal(by_evaluation[2], file.tensors)
    assert not equal(by_evaluation[4], file.tensors)
    assert file.card["evaluation"]["best"] == {"num_rounds": 256, "score": 7.0, "worse_than_greedy": False}


def test_a_policy_worse_than_greedy_says_so(run: Run, scripted: Callable[[Sequence[float]], None]) -> None:
    scripted([-9.0, -9.5, -8.0, -9.0, -9.0])
    card = read(run() / "policy.safetensors").card
    assert card["evaluation"]["best"]["worse_than_greedy"] is True


def test_the_same_seed_gives_the_same_weights_and_another_one_does_not(run: Run, trained: Path) -> None:
    again, other = run("seed=3", "name=tiny"), run("seed=4", "name=tiny")
    assert all(equal(*pair) for pair in zip(networks(trained), networks(again), strict=True))
    assert (again / "policy.safetensors").read_bytes() == (trained / "policy.safetensors").read_bytes()
    assert not any(equal(*pair) for pair in zip(networks(trained)[1:], networks(other)[1:], strict=True))


def test_resuming_goes_on_counting_and_keeps_the_best(
    run: Run, scripted: Callable[[Sequence[float]], None]
) -> None:
    scripted([0.0, 4.0, 2.0])
    first = run("ppo.total_rounds=256", "ppo.num_evaluations=2")
    assert checkpoint(first)["num_timesteps"] == 256
    scripted([1.0, 3.0])
    second = run("ppo.total_rounds=512", f"resume={first}")
    num_rounds = [rounds for rounds, *_ in checkpoint(second)["evaluations"]]
    assert num_rounds == [0, 128, 256, 384, 512]
    assert checkpoint(second)["num_timesteps"] == 512
    before, after = networks(first), networks(second)
    assert all(equal(*pair) for pair in zip(before, after, strict=False))
    assert not equal(after[3], before[2]), "it went on from where it was and moved"
    assert equal(before[1], read(second / "policy.safetensors").tensors), "the best came before the break"
    steps = [int(state["step"]) for state in checkpoint(second)["optimizer"]["state"].values()]
    earlier = [int(state["step"]) for state in checkpoint(first)["optimizer"]["state"].values()]
    assert min(steps) == 2 * max(earlier), "the optimiser went on too"


def test_a_resumed_run_keeps_its_configuration_but_for_what_is_said(trained: Path, tmp_path: Path) -> None:
    folder = train.main([f"resume={trained}", "ppo.total_rounds=640"], folder=tmp_path / "run")
    before, after = (OmegaConf.load(path / "config.yaml") for path in (trained, folder))
    assert (after.ppo.total_rounds, after.resume) == (640, str(trained))
    after.ppo.total_rounds, after.resume = before.ppo.total_rounds, before.resume
    assert after == before
    assert checkpoint(folder)["num_timesteps"] == 640


def test_a_checkpoint_of_another_network_is_refused_in_one_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert draftdial(["train", f"resume={trained}", "ppo.width=16"]) == 2
    assert draftdial(["train", f"resume={trained}", "profile=seeds-pcie"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and "not a checkpoint of this configuration" in err and "profile" in err
    assert list(tmp_path.iterdir()) == []


def test_resuming_a_finished_run_trains_no_further(run: Run, trained: Path) -> None:
    again = run("seed=3", "name=tiny", f"resume={trained}")
    exported = [read(folder / "policy.safetensors").tensors for folder in (trained, again)]
    assert equal(exported[0], exported[1])


def interrupt(*_: object) -> float:
    raise KeyboardInterrupt


def interrupt_as_numba_has_it(*_: object) -> float:
    try:
        try:
            return interrupt()
        except KeyboardInterrupt as error:
            raise SystemError("_numba_unpickle returned a result with an exception set") from error
    except SystemError as error:
        raise SystemError("CPUDispatcher returned a result with an exception set") from error


@pytest.mark.parametrize(
    ("num_rounds", "how"), [(8, interrupt), (200, interrupt), (384, interrupt_as_numba_has_it)]
)
def test_ctrl_c_exports_and_can_be_resumed(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_rounds: int,
    how: Callable[[], float],
) -> None:
    def interrupted(self: Any) -> bool:
        if self.num_timesteps >= num_rounds:
            how()
        return True

    monkeypatch.setattr(train._Evaluations, "_on_step", interrupted)
    folder = run()
    monkeypatch.undo()
    assert "interrupted" in capsys.readouterr().err
    assert load_policy(folder / "policy.safetensors").tiers == (0, 1, 2, 3, 5, 7)
    assert {path.name for path in folder.iterdir()} >= FILES
    assert checkpoint(folder)["num_timesteps"] == num_rounds
    resumed = run(f"resume={folder}")
    assert checkpoint(resumed)["num_timesteps"] >= 512
    evaluated = [rounds for rounds, *_ in checkpoint(resumed)["evaluations"]]
    assert evaluated[0] == 0 and evaluated[-1] >= 512 and evaluated == sorted(evaluated)


@pytest.mark.parametrize("when", ["__init__", "best_threshold", "score"])
def test_ctrl_c_before_training_says_that_nothing_is_kept(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    real = Validation.score

    def interrupted_by_learned(self: Validation, policy: Policy) -> float:
        return interrupt() if isinstance(policy, LearnedPolicy) else real(self, policy)

    monkeypatch.setattr(Validation, when, interrupted_by_learned if when == "score" else interrupt)
    assert draftdial(["train", "--json", *TINY, *FEW_DOMAINS]) == 130
    out, err = capsys.readouterr()
    assert out == "" and list(tmp_path.iterdir()) == []
    assert err.splitlines()[1:] == ["draftdial train: interrupted before it began; nothing is kept"]


def test_ctrl_c_in_compiled_code_is_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    monkeypatch.setattr(Validation, "score", interrupt_as_numba_has_it)
    assert draftdial(["train", *TINY, *FEW_DOMAINS]) == 130
    assert capsys.readouterr().err.endswith("interrupted before it began; nothing is kept\n")

    def broken(*_: object) -> None:
        raise SystemError("a defect of its own")

    monkeypatch.setattr(Validation, "score", broken)
    with pytest.raises(SystemError, match="a defect"):
        draftdial(["train", *TINY, *FEW_DOMAINS])
    assert "nothing is kept" not in capsys.readouterr().err


def test_a_pipe_hears_how_far_training_is(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_lines, "LINE_EVERY_S", 0.0)
    run()
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "draftdial train: scoring the rules that it is compared with"
    assert [line.split(" rounds; ")[0] for line in lines] == [
        f"draftdial train: {rounds} of 512" for rounds in (0, 128, 256, 384)
    ]
    assert all(" % vs greedy, " in line for line in lines)


def test_a_pipe_hears_no_more_than_a_line_in_ten_seconds(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    monkeypatch.setattr(progress_lines, "monotonic", lambda: now_s)
    progress = RunProgress({"greedy": 1.0}, [Evaluation(0, 1.02, Network(networks(trained)[0]))])
    capsys.readouterr()
    with progress.bar(9000) as move:
        for num_rounds in range(0, 9000, 1000):
            move(num_rounds)
            now_s += 4.0
    assert capsys.readouterr().err.splitlines() == [
        f"draftdial train: {rounds} of 9,000 rounds; +2.0 % vs greedy" for rounds in ("3,000", "6,000")
    ]


def test_a_terminal_shows_a_bar_and_no_lines(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_lines, "LINE_EVERY_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes a pipe for a terminal by
    run()
    err = capsys.readouterr().err
    assert " 75 %" in err and "draftdial train:" not in err


def test_json_prints_one_object_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress_lines, "LINE_EVERY_S", 0.0)
    assert draftdial(["train", "--json", *TINY, *FEW_DOMAINS]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"run_dir", "policy"}
    assert Path(printed["run_dir"]).parts[0] == "runs" and len(Path(printed["run_dir"]).parts) == 3
    assert load_policy(tmp_path / printed["policy"])


WORLDS = [
    ("profile=seeds-pcie",),
    ("profile=randomised", "engine=skip"),
    ("acceptance=fitted", "acceptance.num_arrays=16", "engine.lag=1"),
    ("scenario=open", "objective=latency"),
    ("scenario=open", "objective=slo"),
]


@pytest.mark.parametrize("overrides", WORLDS, ids=" ".join)
def test_every_kind_of_world_trains(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    randomised = () if "acceptance=fitted" in overrides else FEW_DOMAINS
    folder = train.main([*overrides, *TINY, *randomised, "ppo.total_rounds=256"], folder=tmp_path / "run")
    file = read(folder / "policy.safetensors")
    assert file.card["off_mode"] == ("skip" if "engine=skip" in overrides else "warm")
    assert np.isfinite([score for _, score in file.card["evaluation"]["evaluations"]]).all()
    assert load_policy(file).tiers == file.profile().tiers


EXPERIMENTS = sorted(
    Path(file.name).stem for file in (resources.files("draftdial.conf") / "experiment").iterdir()
)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_runs(tmp_path: Path, experiment: str) -> None:
    small = [override for override in TINY if not override.startswith("scenario.high")]
    folder = train.main(
        [f"experiment={experiment}", *small, "ppo.num_evaluations=1"], folder=tmp_path / "run"
    )
    assert load_policy(folder / "policy.safetensors")
