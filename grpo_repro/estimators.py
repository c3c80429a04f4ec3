"""The policy-gradient estimators: rewards of a group -> advantages.

Every estimator is ``g_hat(x) = (1/G) sum_i W_i (Z_i - C_i)`` and differs only in the baseline C_i (Eq. 4-5 and Table 1
of the paper for `vanilla`, `grpo` and `oracle`; `optimal` is what remains best when Assumption 2 fails), so an
estimator is a function that turns rewards into advantages ``Z_i - C_i``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from grpo_repro.errors import UserError

Rewards = Float[np.ndarray, "*prompts group"]
Baseline = Float[np.ndarray, "*prompts"]


def vanilla(rewards: Rewards, value: Baseline, optimal_baseline: Baseline) -> Rewards:
    """No baseline: C = 0 (REINFORCE).

    Args:
        rewards: Z, float64 ``[..., group]``.
        value: Unused.
        optimal_baseline: Unused.

    Returns:
        Advantages ``[..., group]``.
    """
    return rewards


def grpo(rewards: Rewards, value: Baseline, optimal_baseline: Baseline) -> Rewards:
    """Leave-one-out mean: C_i = mean of the other G - 1 rewards.

    Z_i - C_i = G/(G-1) (Z_i - mean(Z)). The self-inclusive mean would shrink every advantage by (G-1)/G and so
    change the learning rate from one G to another.

    Args:
        rewards: Z, float64 ``[..., group]``, group >= 2.
        value: Unused.
        optimal_baseline: Unused.

    Returns:
        Advantages ``[..., group]``; they sum to zero over the group.

    Raises:
        UserError: If the group holds a single completion.

    >>> one = np.zeros(())
    >>> grpo(np.array([1.0, 0.0, 0.0]), one, one)
    array([ 1. , -0.5, -0.5])
    """
    group = rewards.shape[-1]
    if group < 2:
        raise UserError("estimator grpo needs group size >= 2, got 1: leave-one-out has nothing left; use vanilla")
    return (rewards - rewards.mean(-1, keepdims=True)) * (group / (group - 1))


def oracle(rewards: Rewards, value: Baseline, optimal_baseline: Baseline) -> Rewards:
    """The prompt's value: C = V(x) = E[Z | x].

    Args:
        rewards: Z, float64 ``[..., group]``.
        value: V(x), exact or estimated from completions that are not in the group, ``[...]``.
        optimal_baseline: Unused.

    Returns:
        Advantages ``[..., group]``.
    """
    return rewards - value[..., None]


def optimal(rewards: Rewards, value: Baseline, optimal_baseline: Baseline) -> Rewards:
    """The best baseline that depends on the prompt only: C = b*(x) = E[||W||^2 Z | x] / E[||W||^2 | x].

    It minimises E ||W||^2 (Z - b)^2 over b and equals V(x) when ||W||^2 and Z are uncorrelated given the prompt
    (Assumption 2 of the paper).

    Args:
        rewards: Z, float64 ``[..., group]``.
        value: Unused.
        optimal_baseline: b*(x), exact or estimated from completions that are not in the group, ``[...]``.

    Returns:
        Advantages ``[..., group]``.
    """
    return rewards - optimal_baseline[..., None]


def normalized(advantages: Rewards, rewards: Rewards) -> Rewards:
    """Advantages over the standard deviation of their group: A_i = (Z_i - C_i) / se (Algorithm 2).

    se^2 = (1/(G-1)) sum_i (Z_i - mean(Z))^2, with ddof = 1. A group of equal rewards has the advantage zero: its
    leave-one-out advantages are 0/0, and nothing is added to the denominator, which would favour easy prompts.

    Args:
        advantages: Z - C, float64 ``[..., group]``.
        rewards: Z, float64 ``[..., group]``, group >= 2.

    Returns:
        A ``[..., group]``. For binary rewards the estimate's mean is E[se] / Var(Z | x) times g(x), for every G.

    Raises:
        UserError: If the group holds a single completion.

    >>> z = np.array([1.0, 0.0, 0.0, 1.0])
    >>> one = np.zeros(())
    >>> bool(np.isclose(normalized(grpo(z, one, one), z)[0], (2 / 3) / np.sqrt(1 / 3)))
    True
    """
    if rewards.shape[-1] < 2:
        raise UserError("a standard deviation needs group size >= 2, got 1; use a larger group or normalize=false")
    deviation = rewards.std(-1, ddof=1, keepdims=True)
    # Rewards that are equal may have a deviation of rounding error, never an advantage.
    equal = (rewards == rewards[..., :1]).all(-1, keepdims=True)
    return np.divide(advantages, deviation, out=np.zeros_like(advantages), where=~equal)


ESTIMATORS: dict[str, Callable[[Rewards, Baseline, Baseline], Rewards]] = {
    "vanilla": vanilla,
    "grpo": grpo,
    "oracle": oracle,
    "optimal": optimal,
}
"""Estimators by the name that configurations, results and figures use."""
