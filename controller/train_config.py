"""The configuration of a training run: one dataclass per group of conf/, checked when composed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.errors import HydraException, MissingConfigException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from draftdial import conf
from draftdial.controller.cost_profile import SPECULATIVE_OFF_MODES
from draftdial.controller.errors import UserError
from draftdial.controller.policy_weights import MAX_HIDDEN
from draftdial.envs.lengths import as_lengths
from draftdial.envs.scenario import Scenario
from draftdial.envs.shipped_acceptance import SHIPPED_RECORDINGS

MAX_SEED = 2**31 - 1


@dataclass
class ProfileConfig:
    """Which servers are trained on."""

    names: list[str] = MISSING
    """Shipped profiles or paths; the first one goes into the policy file."""
    num_random: int = MISSING
    """Servers drawn around them in addition; 0 trains on the named ones alone."""


@dataclass
class AcceptanceConfig:
    """How well the draft guesses."""

    kind: str = MISSING
    """`randomised`, `fitted`, `replayed`, or the name of a shipped recording."""
    domains: list[str] = MISSING
    """fitted: names of shipped domains. replayed: paths of JSONL files."""
    num_domains: int = MISSING
    """randomised: domains drawn."""
    num_arrays: int = MISSING
    """Requests per domain in the pool that episodes draw from."""


@dataclass
class EngineConfig:
    """How the server behaves; see ServerOptions."""

    kind: str = "simulated"
    """`simulated`, or `live`: a real server."""
    url: str | None = None
    """live: of a server that runs on this host."""
    command: str | None = None
    """live: SGLang's arguments for a server to start, in place of `url`."""
    prompts: str | None = None
    """live: JSONL file of prompts; random token ids without one."""
    tokenizer: str | None = None
    """live: folder of the tokenizer, for prompts that hold text."""
    off_mode: str = MISSING
    lag: int = MISSING
    gap_floor: float = MISSING
    ttft_limit_s: float = MISSING
    tpot_limit_s: float = MISSING


@dataclass
class ObjectiveConfig:
    """What is rewarded: `throughput`, `latency` or `slo`."""

    name: str = MISSING


@dataclass
class PpoConfig:
    """How the policy learns; conf/ppo/default.yaml says what each number means."""

    total_rounds: int = MISSING
    num_servers: int = MISSING
    rounds_per_update: int = MISSING
    batch_size: int = MISSING
    num_epochs: int = MISSING
    learning_rate: float = MISSING
    gae_lambda: float = MISSING
    clip_range: float = MISSING
    tau_s: float = MISSING
    sharpness: float = MISSING
    width: int = MISSING
    num_evaluations: int = MISSING
    num_validation_episodes: int = MISSING


@dataclass
class TrainConfig:
    """Everything a run depends on."""

    profile: ProfileConfig = field(default_factory=ProfileConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    scenario: Scenario = field(default_factory=Scenario)
    engine: EngineConfig = field(default_factory=EngineConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    ppo: PpoConfig = field(default_factory=PpoConfig)
    name: str = "learned"
    seed: int = 0
    resume: str | None = None


LIVE_ENGINE = "engine=live"
"""The one group that a resumed run may change: what was learned in simulation goes on on a server."""
GROUPS = ("profile", "acceptance", "scenario", "engine", "objective", "ppo", "experiment")


def load_config(overrides: Sequence[str]) -> tuple[TrainConfig, str]:
    """The configuration that `overrides` (Hydra syntax) make of conf/train.yaml, and its text.

    With `resume=RUN` they change the configuration of that run instead.

    Raises:
        UserError: an override that Hydra refuses, an unknown key, or a value of the wrong kind.
    """
    for override in overrides:
        if "=" not in override:
            raise UserError(f"train: {override}: not an override; allowed: group.key=value or group=choice")
        _check_key(override.split("=", 1)[0].lstrip("+"))
    try:
        schema = OmegaConf.structured(TrainConfig)
        OmegaConf.set_readonly(schema.scenario, False)  # frozen dataclasses start out read-only
        merged = OmegaConf.merge(schema, _composed(list(overrides)))
        config: Any = OmegaConf.to_object(merged)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"train: {_one_line(str(error))}{_also_allowed(error)}") from None
    _check(config)
    return config, OmegaConf.to_yaml(merged)


def _composed(overrides: list[str]) -> Any:
    overrides = [_named_profile(override.lstrip("+")) for override in overrides]
    resumed = next((o.split("=", 1)[1] for o in overrides if o.startswith("resume=")), None)
    if resumed is None or resumed == "null":
        with initialize_config_module("draftdial.conf", version_base="1.3"):
            return compose("train", overrides=overrides)
    if not Path(resumed, "checkpoint.pt").is_file():
        raise UserError(f"train: resume: {resumed} holds no checkpoint.pt; allowed: the folder of a run")
    is_made_live = LIVE_ENGINE in overrides
    for override in overrides:
        if override.split("=", 1)[0] in GROUPS and override != LIVE_ENGINE:
            raise UserError(f"train: {override}: a run resumes its own groups; allowed: group.key=value")
    try:
        kept = OmegaConf.load(Path(resumed, "config.yaml"))
    except (OSError, ValueError, yaml.YAMLError):
        raise UserError(
            f"train: resume: {resumed}/config.yaml cannot be read; allowed: the folder of a run"
        ) from None
    if is_made_live:
        overrides.remove(LIVE_ENGINE)
        kept = OmegaConf.merge(kept, OmegaConf.create((files(conf) / "engine" / "live.yaml").read_text()))
    return OmegaConf.merge(kept, OmegaConf.from_dotlist(overrides))


def resumed_kind(config: TrainConfig) -> str:
    """The `engine.kind` of the run that is resumed."""
    assert config.resume is not None
    kept = OmegaConf.load(Path(config.resume, "config.yaml"))
    return str(OmegaConf.select(kept, "engine.kind", default="simulated"))


def _named_profile(override: str) -> str:
    """`profile=FILE.json` as the key that takes files; any other override as it is."""
    group, _, choice = override.partition("=")
    if group != "profile" or not choice.endswith(".json"):
        return override
    quoted = choice.replace("\\", "\\\\").replace("'", "\\'")
    return f"profile.names=['{quoted}']"


def _check_key(key: str) -> None:
    """Refuse a key that no group has; Hydra would advise to add it."""
    group, _, name = key.partition(".")
    top = TrainConfig.__dataclass_fields__
    if group not in top and key not in GROUPS:
        raise UserError(f"train: {key}: no such key; allowed: {', '.join([*top, 'experiment'])}")
    if name:
        keys = getattr(getattr(TrainConfig(), group), "__dataclass_fields__", {})
        if name not in keys:
            raise UserError(f"train: {key}: no such key; allowed: {', '.join(keys) or 'no keys below it'}")


def _one_line(message: str) -> str:
    """Hydra's message without its search path, its type names and its advice to add keys."""
    key_of = re.search(r"full_key: (\S+)", message)
    kept = re.split(r"\s*(?:full_key:|Config search path:|To append to your config|See https)", message)[0]
    if "is not a ListConfig" in kept:
        kept = "not a list; allowed: a list, as in profile.names=[h200-llama3-8b]"
    return " ".join(f"{key_of.group(1) + ': ' if key_of else ''}{kept}".split())


def _also_allowed(error: Exception) -> str:
    """What Hydra does not know of as it lists a group's choices: `_named_profile` takes files."""
    missing = error.missing_cfg_file if isinstance(error, MissingConfigException) else None
    return ", or a file: profile=FILE.json" if (missing or "").startswith("profile/") else ""


def _check(config: TrainConfig) -> None:
    ppo, scenario = config.ppo, config.scenario
    _one_of("objective.name", config.objective.name, ("throughput", "latency", "slo"))
    _one_of(
        "acceptance.kind", config.acceptance.kind, ("randomised", "fitted", "replayed", *SHIPPED_RECORDINGS)
    )
    _one_of("engine.kind", config.engine.kind, ("simulated", "live"))
    if config.engine.kind == "live":
        _check_live(config)
    _one_of("engine.off_mode", config.engine.off_mode, SPECULATIVE_OFF_MODES)
    _one_of("engine.lag", config.engine.lag, (1, 2))
    _one_of("scenario.mode", scenario.mode, ("closed", "open"))
    if (config.objective.name == "throughput") != (scenario.mode == "closed"):
        allowed = "throughput" if scenario.mode == "closed" else "latency, slo"
        raise UserError(
            f"train: objective.name: {config.objective.name}; allowed in {scenario.mode} loop: {allowed}"
        )
    for name in ("total_rounds", "num_servers", "rounds_per_update", "batch_size", "num_epochs", "width"):
        _at_least(f"ppo.{name}", getattr(ppo, name), 1)
    if ppo.width > MAX_HIDDEN:
        raise UserError(f"train: ppo.width: {ppo.width}; allowed: up to {MAX_HIDDEN}")
    _at_least("ppo.num_evaluations", ppo.num_evaluations, 1)
    _at_least("ppo.num_validation_episodes", ppo.num_validation_episodes, 1)
    _at_least("scenario.low", scenario.low, 1)
    _at_least("scenario.high", scenario.high, scenario.low)
    _at_least("scenario.rounds", scenario.rounds, 8)
    _at_least("profile.num_random", config.profile.num_random, 0)
    if not 0 <= config.seed <= MAX_SEED:
        raise UserError(f"train: seed: {config.seed}; allowed: 0 or more, up to {MAX_SEED}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", config.name):
        raise UserError(f"train: name: {config.name}; allowed: up to 64 letters, digits, '.', '_' and '-'")
    if not 0 <= config.engine.gap_floor <= 1:
        raise UserError(f"train: engine.gap_floor: {config.engine.gap_floor}; allowed: 0 to 1")
    for name in ("ttft_limit_s", "tpot_limit_s"):
        if not 0 < getattr(config.engine, name) < 1e9:
            raise UserError(
                f"train: engine.{name}: {getattr(config.engine, name)}; allowed: above 0, below 1e9"
            )
    as_lengths(scenario.lengths)
    per_update = ppo.num_servers * ppo.rounds_per_update
    if per_update < 2:
        raise UserError(f"train: ppo.num_servers: {ppo.num_servers}; allowed: two rounds or more per update")
    if per_update % min(ppo.batch_size, per_update):
        raise UserError(
            f"train: ppo.batch_size: {ppo.batch_size}; allowed: a divisor of ppo.num_servers * "
            f"ppo.rounds_per_update, which is {per_update}"
        )
    for name in ("learning_rate", "tau_s", "sharpness", "clip_range"):
        if not 0 < getattr(ppo, name) < math.inf:
            raise UserError(f"train: ppo.{name}: {getattr(ppo, name)}; allowed: above 0 and finite")
    if not 0 <= ppo.gae_lambda <= 1:
        raise UserError(f"train: ppo.gae_lambda: {ppo.gae_lambda}; allowed: 0 to 1")
    _at_least("acceptance.num_arrays", config.acceptance.num_arrays, 1)
    if not config.profile.names:
        raise UserError("train: profile.names: empty; allowed: at least one profile")
    if not 0 < scenario.utilisation_low <= scenario.utilisation_high:
        raise UserError("train: scenario.utilisation_low: must be above 0 and at most utilisation_high")
    if config.acceptance.kind == "randomised":
        _at_least("acceptance.num_domains", config.acceptance.num_domains, 5)
    elif config.acceptance.kind not in SHIPPED_RECORDINGS and not config.acceptance.domains:
        raise UserError("train: acceptance.domains: empty; allowed: at least two domains")


def _check_live(config: TrainConfig) -> None:
    """Without these there is nothing to train on, or no way to."""
    if (config.engine.url is None) == (config.engine.command is None):
        raise UserError("train: engine=live: give engine.url of a server, or engine.command to start one")
    if len(config.profile.names) != 1 or config.profile.num_random:
        names = ", ".join(config.profile.names)
        raise UserError(f"train: profile.names: {names}; allowed with engine=live: the server's own, alone")
    _one_of("objective.name", config.objective.name, ("throughput",))
    _one_of("ppo.num_servers", config.ppo.num_servers, (1,))


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise UserError(f"train: {name}: {value}; allowed: {', '.join(map(str, allowed))}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"train: {name}: {value}; allowed: {least} or more")
