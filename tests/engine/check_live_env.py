"""Gymnasium's checker on a live server: `check_live_env.py URL PROFILE LENGTHS` prints ok, or what is not."""

from __future__ import annotations

import sys
import warnings

import gymnasium as gym
from gymnasium.utils.env_checker import check_env

import draftdial.envs  # noqa: F401  registers the id
from draftdial.envs.scenario import Scenario

url, profile, lengths = sys.argv[1:]
scenario = Scenario(high=4, rounds=40, lengths=f"trace:{lengths}")
env = gym.make("draftdial/LiveSpeculation-v0", url=url, profile=profile, scenario=scenario)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    check_env(env.unwrapped)
env.reset(seed=1)
num_steps, is_cut = 0, False
while not is_cut:
    _, reward, _, is_cut, info = env.step(env.action_space.sample())
    num_steps += 1
env.close()
assert num_steps == scenario.rounds and abs(reward) < 1e6 and info["elapsed_s"] >= 0
print("ok")
