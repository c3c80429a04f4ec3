"""Tabular policies: building them by name, sampling groups, and inner products of scores by look-up.

`TabularPolicy` holds the exact quantities (closed_form.py), `FAMILIES` the policies there are (families.py).
The functions here take any number of prompts, so that thousands of simulated pools cost one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float64, Int

from grpo_repro.policies.closed_form import TabularPolicy
from grpo_repro.policies.families import FAMILIES, Family, build_family
from grpo_repro.ustat import Pool

__all__ = [
    "FAMILIES",
    "Family",
    "TabularPolicy",
    "build",
    "gram",
    "gram_row_sums",
    "pool",
    "sample",
    "sample_contexts",
    "score_sums",
]


def build(family: str | None, args: Mapping[str, Any] = MappingProxyType({})) -> TabularPolicy:
    """Build the policy of a named family at the family's own theta.

    Args:
        family: Key in `FAMILIES`.
        args: Arguments of the family; the others keep their defaults.

    Raises:
        UserError: Unknown family or argument, or a value that does not fit.
    """
    built = build_family(family, args)
    return TabularPolicy(built, built.theta)


def sample_contexts(policy: TabularPolicy, count: int, rng: np.random.Generator) -> Int[np.ndarray, " prompts"]:
    """Draw contexts X ~ f, independently; shape [count]."""
    ends = np.cumsum(policy.context_probs)[:-1]
    return np.searchsorted(ends, rng.random(count), side="right")


def sample(
    policy: TabularPolicy, contexts: Int[np.ndarray, " prompts"], group_size: int, rng: np.random.Generator
) -> tuple[Int[np.ndarray, "prompts group"], Float64[np.ndarray, "prompts group"]]:
    """Draw a group of actions and their rewards for every context, by the inverse distribution function.

    Args:
        policy: The policy.
        contexts: Context of each prompt; repeats are independent groups. Shape [prompts].
        group_size: G, actions per prompt.
        rng: Source of randomness.

    Returns:
        Actions [prompts, group] and rewards in {0, 1} [prompts, group].
    """
    uniforms = rng.random((len(contexts), group_size))
    ends = np.cumsum(policy.probs, axis=1)[contexts]
    actions = np.zeros(uniforms.shape, dtype=np.intp)
    for action in range(ends.shape[1] - 1):
        actions += uniforms >= ends[:, action, None]
    rewards = rng.random(actions.shape) < policy.reward_probs[contexts[:, None], actions]
    return actions, rewards.astype(np.float64)


def gram(
    policy: TabularPolicy, contexts: Int[np.ndarray, " prompts"], actions: Int[np.ndarray, "prompts group"]
) -> Float64[np.ndarray, "prompts group group"]:
    """Return the inner products <W_i, W_j> of each group's scores, looked up in the policy's table.

    It takes 8 M G^2 bytes (820 MB for 1000 pools of 100 prompts with G = 32): use `gram_row_sums` where that
    serves, or go pool by pool.

    Args:
        policy: The policy.
        contexts: Shape [prompts].
        actions: Shape [prompts, group].
    """
    size = policy.probs.shape[1]
    rows = contexts[:, None] * size + actions
    return np.take(policy.gram_table.reshape(-1), rows[:, :, None] * size + actions[:, None, :])


def gram_row_sums(
    policy: TabularPolicy,
    contexts: Int[np.ndarray, " prompts"],
    actions: Int[np.ndarray, "prompts group"],
    weights: Float64[np.ndarray, "prompts group"],
) -> Float64[np.ndarray, "prompts group"]:
    """Return sum_j <W_i, W_j> w_j for every i (j = i included), without forming the Gram matrix.

    Weights are first added up per action, so the cost is M (G + actions^2) instead of M G^2.

    Args:
        policy: The policy.
        contexts: Shape [prompts].
        actions: Shape [prompts, group].
        weights: w, shape [prompts, group].
    """
    totals = _action_totals(policy, actions, weights)
    by_action = np.matmul(policy.gram_table[contexts], totals[:, :, None])[:, :, 0]
    return np.take_along_axis(by_action, actions, axis=1)


def pool(
    policy: TabularPolicy,
    contexts: Int[np.ndarray, " prompts"],
    actions: Int[np.ndarray, "prompts group"],
    rewards: Float64[np.ndarray, "prompts group"],
) -> Pool:
    """Return what `ustat.components` needs of these groups, without forming their Gram matrices.

    Args:
        policy: The policy.
        contexts: Shape [prompts].
        actions: Shape [prompts, group].
        rewards: Z, shape [prompts, group].
    """
    sq_norms = policy.sq_norms[contexts[:, None], actions]
    cross = [
        gram_row_sums(policy, contexts, actions, weights) - sq_norms * weights
        for weights in (np.ones_like(rewards), rewards, rewards**2)
    ]
    return Pool(rewards, sq_norms, *cross)


def score_sums(
    policy: TabularPolicy,
    contexts: Int[np.ndarray, " prompts"],
    actions: Int[np.ndarray, "prompts group"],
    weights: Float64[np.ndarray, "prompts group"],
) -> Float64[np.ndarray, "prompts dim"]:
    """Return sum_i w_i W_i of each group: G times the gradient estimate when w is the advantage.

    Args:
        policy: The policy.
        contexts: Shape [prompts].
        actions: Shape [prompts, group].
        weights: w, shape [prompts, group].
    """
    totals = _action_totals(policy, actions, weights)
    return np.einsum("ma,mad->md", totals, policy.scores[contexts])


def _action_totals(
    policy: TabularPolicy,
    actions: Int[np.ndarray, "prompts group"],
    weights: Float64[np.ndarray, "prompts group"],
) -> Float64[np.ndarray, "prompts actions"]:
    """Return the sum of each group's weights per action, shape [prompts, actions]."""
    prompts, size = len(actions), policy.probs.shape[1]
    cells = np.arange(prompts)[:, None] * size + actions
    return np.bincount(cells.ravel(), weights.ravel(), minlength=prompts * size).reshape(prompts, size)
