"""The training configuration: every choice in conf/ composes, and a wrong one is one line and no file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from draftdial.controller.cli import main as draftdial
from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.train_config import TrainConfig, load_config
from draftdial.envs.scenario import Scenario

CONF = resources.files("draftdial.conf")
GROUPS = ("acceptance", "engine", "experiment", "objective", "ppo", "profile", "scenario")
CHOICES = [
    (group, Path(file.name).stem)
    for group in GROUPS
    for file in sorted((CONF / group).iterdir(), key=lambda file: file.name)
]


def choice(group: str, name: str) -> list[str]:
    """The overrides that choose it, with what it needs beside it."""
    if group == "objective" and name != "throughput":
        return [f"{group}={name}", "scenario=open"]
    if (group, name) == ("scenario", "open"):
        return [f"{group}={name}", "objective=latency"]
    if (group, name) == ("engine", "live"):
        return [f"{group}={name}", "engine.url=http://127.0.0.1:30000"]
    return [f"{group}={name}"]


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_of_every_group_composes(group: str, name: str) -> None:
    config, text = load_config(choice(group, name))
    resolved = OmegaConf.create(text)
    assert not OmegaConf.missing_keys(resolved)
    source = OmegaConf.load(str(CONF / group / f"{name}.yaml"))
    values = source if group in ("experiment",) or group in source else {group: source}
    for key, value in OmegaConf.to_container(OmegaConf.create(values)).items():  # type: ignore[union-attr]
        if isinstance(value, dict):
            chosen = vars(getattr(config, str(key)))
            said = {name: setting for name, setting in value.items() if setting is not None}
            assert said.items() <= chosen.items(), "what the file says is what the run gets"


def test_the_groups_tested_are_the_groups_of_the_main_file() -> None:
    defaults = OmegaConf.load(str(CONF / "train.yaml")).defaults
    assert {group for entry in defaults if entry != "_self_" for group in entry} == set(GROUPS)


def test_the_text_alone_gives_the_same_configuration_again() -> None:
    config, text = load_config(["seed=7", "ppo.tau_s=0.5"])
    schema = OmegaConf.structured(TrainConfig)
    OmegaConf.set_readonly(schema.scenario, False)
    assert OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.create(text))) == config
    assert (config.seed, config.ppo.tau_s) == (7, 0.5)


def test_defaults_of_the_scenario_stand_in_one_place() -> None:
    config, _ = load_config([])
    assert config.scenario == Scenario(), "conf/scenario/closed.yaml says what the class says"


def test_every_key_of_every_group_is_in_the_manual() -> None:
    manual = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    for group in dataclasses.fields(TrainConfig):
        value = getattr(TrainConfig(), group.name)
        keys = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        for key in [f"{group.name}.{key}" for key in keys] or [group.name]:
            assert f"`{key}`" in manual, f"docs/training.md does not explain {key}"


WRONG = {
    "ppo.tau_s=abc": ("ppo.tau_s", "abc"),
    "ppo.tau_s=0": ("ppo.tau_s", "allowed: above 0"),
    "ppo.learning_rate=nan": ("ppo.learning_rate", "allowed: above 0"),
    "ppo.gae_lambda=1.5": ("ppo.gae_lambda", "allowed: 0 to 1"),
    "ppo.total_rounds=0": ("ppo.total_rounds", "allowed: 1 or more"),
    "ppo.width=513": ("ppo.width", "allowed: up to 512"),
    "ppo.total_rounds=1.5": ("ppo.total_rounds", "1.5"),
    "ppo.bogus=1": ("ppo.bogus", "allowed: total_rounds, num_servers"),
    "+ppo.bogus=1": ("bogus", "allowed"),
    "bogus=1": ("bogus", "allowed"),
    "+bogus=1": ("bogus", "allowed"),
    "objective=bogus": ("objective/bogus", "latency slo throughput"),
    "objective.name=bogus": ("objective.name", "allowed: throughput, latency, slo"),
    "objective=latency": ("objective.name", "allowed in closed loop: throughput"),
    "scenario=open": ("objective.name", "allowed in open loop: latency, slo"),
    "scenario.low=0": ("scenario.low", "allowed: 1 or more"),
    "scenario.high=0": ("scenario.high", "allowed: 1 or more"),
    "scenario.rounds=4": ("scenario.rounds", "allowed: 8 or more"),
    "scenario.utilisation_low=0": ("scenario.utilisation_low", "above 0"),
    "scenario.lengths=bogus": ("bogus", "allowed: general, short-chat, agentic"),
    "engine.off_mode=nospec": ("engine.off_mode", "allowed: warm, skip"),
    "engine.lag=3": ("engine.lag", "allowed: 1, 2"),
    "engine.gap_floor=7": ("engine.gap_floor", "allowed: 0 to 1"),
    "engine.ttft_limit_s=0": ("engine.ttft_limit_s", "allowed: above 0"),
    "engine.tpot_limit_s=-1": ("engine.tpot_limit_s", "allowed: above 0"),
    "profile=bogus": ("profile/bogus", "h100-llama3-8b h200-llama3-8b", ", or a file: profile=FILE.json"),
    "profile.names=[]": ("profile.names", "allowed: at least one"),
    "profile.names=[bogus]": ("bogus", "allowed: h100-llama3-8b, h200-llama3-8b"),
    "profile.names=[h200-llama3-8b,seeds-pcie]": ("profile.names", "allowed"),
    "profile.names=h200-llama3-8b": ("profile.names", "list"),
    "profile.num_random=-1": ("profile.num_random", "allowed: 0 or more"),
    "acceptance.kind=bogus": ("acceptance.kind", "allowed: randomised, fitted, replayed"),
    "acceptance.num_domains=2": ("acceptance.num_domains", "allowed: 5 or more"),
    "acceptance.kind=fitted": ("acceptance.domains", "allowed"),
    "name='my policy'": ("name", "allowed"),
    f"name={'a' * 65}": ("name", "allowed"),
    "acceptance=replayed": ("acceptance/replayed", "fitted randomised"),
    "ppo.batch_size=48": ("ppo.batch_size", "divisor"),
    "seed=-1": ("seed", "allowed: 0 or more"),
    "seed=99999999999999999999": ("seed", "allowed"),
    "resume=nowhere": ("resume", "checkpoint.pt"),
    "experiment=bogus": ("experiment/bogus", "smoke"),
    "noequals": ("noequals", "="),
}


SMALL = (
    "ppo.total_rounds=64",
    "ppo.num_servers=4",
    "ppo.rounds_per_update=16",
    "ppo.num_validation_episodes=2",
    "scenario.rounds=8",
)
"""Should a wrong value pass, the run that follows is short."""


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_value_is_one_line_that_says_where_and_what_is_allowed(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert draftdial(["train", *SMALL, override]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("draftdial: ") and err.count("\n") == 1 and err.endswith("\n")
    for part in WRONG[override]:
        assert part in err
    assert ("FILE.json" in err) == override.startswith("profile=")
    for leftover in ("full_key", "object_type", "https://", "Config search path", "AnyNode", "use +"):
        assert leftover not in err
    assert list(tmp_path.iterdir()) == [], "nothing may be written"


def test_two_runs_side_by_side_need_room_for_an_update() -> None:
    # PPO normalises advantages over a minibatch of two at least.
    with pytest.raises(UserError, match=r"ppo\.(num_servers|rounds_per_update).*allowed"):
        load_config(["ppo.num_servers=1", "ppo.rounds_per_update=1"])


def test_a_profile_may_be_a_file(make_profile: Callable[..., CostProfile], tmp_path: Path) -> None:
    path = tmp_path / "it's, mine.json"
    path.write_text(json.dumps(make_profile().to_document()))
    config, _ = load_config([f"profile={path}"])
    assert list(config.profile.names) == [str(path)]
