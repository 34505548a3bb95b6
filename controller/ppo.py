"""Stable-Baselines3's PPO, taught two things: rounds last differently long, and advice is a good start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from draftdial.controller.learned import Network


class TimedEnv(Protocol):
    """A vector environment that tells how long its last step took and what it paid."""

    elapsed_s: NDArray[np.float64]
    raw_reward: NDArray[np.float32]


class SemiMarkovRolloutBuffer(RolloutBuffer):
    """Discounts by time: a step of `dt` seconds counts `exp(-dt / tau_s)` (semi-Markov decision process).

    With one discount per step, many short rounds would look better than few long ones that do the same
    work in the same time. Used with `PPO(gamma=1.0)`: PPO adds `gamma * V(last observation)` to the
    reward of a step that cuts an episode, and here that value gets the step's own discount.
    Bradtke and Duff, "Reinforcement learning methods for continuous-time Markov decision problems" (1994).
    """

    def __init__(self, *args: Any, env: TimedEnv, tau_s: float, **kwargs: Any) -> None:
        self._env = env
        self._tau_s = tau_s
        super().__init__(*args, **kwargs)
        assert self.gamma == 1.0, "the discount is per time: PPO's own must be 1"

    def reset(self) -> None:
        """Empty the buffer."""
        self.discounts = np.zeros((self.buffer_size, self.n_envs), np.float32)
        super().reset()

    def add(
        self,
        obs: NDArray[Any],
        action: NDArray[Any],
        reward: NDArray[Any],
        episode_start: NDArray[Any],
        value: torch.Tensor,
        log_prob: torch.Tensor,
    ) -> None:
        """One step of every environment, as `RolloutBuffer.add`."""
        discount = np.exp(-self._env.elapsed_s / self._tau_s).astype(np.float32)
        self.discounts[self.pos] = discount
        bootstrap = reward - self._env.raw_reward
        super().add(obs, action, self._env.raw_reward + discount * bootstrap, episode_start, value, log_prob)

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: NDArray[Any]) -> None:
        """Generalised advantage estimates (Schulman et al. 2016) with a discount per step."""
        next_values = last_values.clone().cpu().numpy().flatten()
        alive = 1.0 - dones.astype(np.float32)
        advantage = np.zeros(self.n_envs, np.float32)
        for step in reversed(range(self.buffer_size)):
            discount = self.discounts[step] * alive
            delta = self.rewards[step] + discount * next_values - self.values[step]
            advantage = delta + discount * self.gae_lambda * advantage
            self.advantages[step] = advantage
            next_values = self.values[step]
            alive = 1.0 - self.episode_starts[step]
        self.returns = self.advantages + self.values


class _AdviceExtractor(nn.Module):
    """Two hidden tanh layers each for actor and critic.

    An observation is the policy's features, advice last, then one column per tier that only the critic
    reads: what the tier would truly gain. The actor's output carries the advice along.
    """

    def __init__(self, num_columns: int, num_advice: int, num_tiers: int, width: int) -> None:
        super().__init__()
        self.num_features = num_columns - num_tiers
        self.num_advice = num_advice
        self.policy_net = _tanh_layers(self.num_features, width)
        self.value_net = _tanh_layers(num_columns, width)
        self.latent_dim_pi = width + num_advice
        self.latent_dim_vf = width + num_tiers

    def forward(self, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.forward_actor(columns), self.forward_critic(columns)

    def forward_actor(self, columns: torch.Tensor) -> torch.Tensor:
        features = columns[:, : self.num_features]
        advice = features[:, self.num_features - self.num_advice :]
        return torch.cat([self.policy_net(features), advice], dim=1)

    def forward_critic(self, columns: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.value_net(columns), columns[:, self.num_features :]], dim=1)


def _tanh_layers(num_inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())


class _SharpLinear(nn.Linear):
    """A linear layer whose output is multiplied by a constant."""

    sharpness: float = 1.0

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        return super().forward(latent) * self.sharpness


class AdvicePolicy(ActorCriticPolicy):
    """An actor that starts as goodput-greedy on the belief.

    logits = sharpness * (W [hidden, advice] + b), where W starts at zero for the hidden units and at
    the memories' `advice_shares` for the advice of each tier above 0. The bracket is a predicted log
    speed-up; `sharpness` sets how freely tiers of nearly equal promise are sampled.
    """

    def __init__(
        self,
        observation_space: spaces.Box,
        action_space: spaces.Discrete,
        lr_schedule: Callable[[float], float],
        *,
        width: int = 64,
        sharpness: float = 200.0,
        advice_shares: tuple[float, ...] = (1.0,),
        **kwargs: Any,
    ) -> None:
        self._width = width
        self._sharpness = sharpness
        self._advice_shares = advice_shares
        super().__init__(observation_space, action_space, lr_schedule, **kwargs)

    def _build_mlp_extractor(self) -> None:
        assert isinstance(self.action_space, spaces.Discrete)
        num_tiers = int(self.action_space.n)
        num_advice = len(self._advice_shares) * (num_tiers - 1)
        extractor = _AdviceExtractor(self.features_dim, num_advice, num_tiers, self._width)
        self.mlp_extractor = extractor.to(self.device)  # type: ignore[assignment]

    def _build(self, lr_schedule: Callable[[float], float]) -> None:
        super()._build(lr_schedule)
        assert isinstance(self.action_net, nn.Linear)
        sharp = _SharpLinear(self.action_net.in_features, self.action_net.out_features)
        sharp.sharpness = self._sharpness
        self.action_net = sharp
        optimizer: Any = self.optimizer_class
        self.optimizer = optimizer(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)
        num_speculative = self.action_net.out_features - 1
        with torch.no_grad():
            self.action_net.weight.zero_()
            self.action_net.bias.zero_()
            for memory, share in enumerate(self._advice_shares):
                for tier in range(num_speculative):
                    column = self._width + memory * num_speculative + tier
                    self.action_net.weight[tier + 1, column] = share


def network_of(policy: ActorCriticPolicy) -> Network:
    """The actor of an `AdvicePolicy` as the NumPy network that serving runs."""
    extractor: Any = policy.mlp_extractor
    head: Any = policy.action_net
    hidden = extractor.policy_net
    tensors = {
        "hidden.0.weight": hidden[0].weight,
        "hidden.0.bias": hidden[0].bias,
        "hidden.1.weight": hidden[2].weight,
        "hidden.1.bias": hidden[2].bias,
        "logits.weight": head.weight * head.sharpness,
        "logits.bias": head.bias * head.sharpness,
    }
    return Network({name: value.detach().cpu().numpy().copy() for name, value in tensors.items()})
