"""Where completions come from: this engine itself (`torch`) or a vLLM engine that is given the policy's weights.

Both sample from the policy as it is at the time of the call. They differ in what their log-probabilities are good for:
those of `torch` are the trainer's own, those of vLLM come from other kernels and are compared with the trainer's
wherever they are used (`engine.agreement`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from grpo_repro.config import ModelConfig
from grpo_repro.engine.sample import Rollout, greedy, sample, uniforms
from grpo_repro.policies.causal_lm import CausalLM


@runtime_checkable
class Sampler(Protocol):
    """Samples completions of a policy.

    Attributes:
        foreign: Whether its log-probabilities are another engine's, to be compared with the trainer's.
        facts: What the manifest says of it.
    """

    foreign: bool
    facts: dict[str, Any]

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[np.random.SeedSequence], group_size: int, length: int,
        temperature: float = 1.0,
    ) -> Rollout:  # fmt: skip
        """Sample a group of completions for each prompt.

        Args:
            prompts: Token ids, ragged, none empty.
            seeds: One for each prompt.
            group_size: Completions per prompt.
            length: Most tokens per completion.
            temperature: Logits are divided by it, and the log-probabilities are those of the divided logits.

        Raises:
            UserError: For an empty prompt or logits that are not finite.
            RunError: If the engine behind it has died.
        """

    def greedy(self, prompts: Sequence[Sequence[int]], length: int) -> Rollout:
        """Decode the likeliest token at every step; one completion of at most `length` tokens for each prompt."""

    def policy_moved(self) -> None:
        """Say that the policy's weights have changed since the last call."""

    def rest(self) -> None:
        """Give back the memory of a GPU that others share, until it samples again."""


class TorchSampler:
    """This engine's own sampler; see `engine.sample`. A prompt's completions depend on its seed alone.

    Args:
        policy: The policy.
    """

    foreign = False

    def __init__(self, policy: CausalLM) -> None:
        self.policy = policy
        self.facts: dict[str, Any] = {}

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[np.random.SeedSequence], group_size: int, length: int,
        temperature: float = 1.0,
    ) -> Rollout:  # fmt: skip
        """See `Sampler.sample`."""
        return sample(self.policy, prompts, uniforms(seeds, group_size, length), temperature)

    def greedy(self, prompts: Sequence[Sequence[int]], length: int) -> Rollout:
        """See `Sampler.greedy`."""
        return greedy(self.policy, prompts, length)

    def policy_moved(self) -> None:
        """Nothing to do: it reads the policy's own weights."""

    def rest(self) -> None:
        """Nothing to give back."""


def make(policy: CausalLM, model: ModelConfig, config: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> Sampler:
    """Build the sampler of a cell, and try it.

    Args:
        policy: The policy.
        model: What it was loaded from.
        config: The cell's configuration.
        prompts: All prompts that it will see.

    Raises:
        UserError: If vLLM does not run this model, or not as the trainer does.
        RunError: If vLLM does not start.
    """
    if config["sampler"] == "torch":
        return TorchSampler(policy)
    from grpo_repro.engine.vllm_sampler import VllmSampler

    return VllmSampler.start(policy, model, config, prompts)
