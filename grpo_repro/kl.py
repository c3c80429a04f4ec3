"""Estimates of a Kullback-Leibler divergence from samples, and the weight that each gives to a score.

With y sampled from pi and l = log pi(y) - log pi_ref(y), the three common estimates of KL(pi || pi_ref) are

    k1 = l                   unbiased
    k2 = l^2 / 2             biased
    k3 = exp(-l) - 1 + l     unbiased (E exp(-l) = 1), never negative

A loss differentiates an estimate through log pi with the sample held fixed: d k / d theta = weight * W, W the score.
Its mean is the gradient of something else than the estimate's mean:

    k1   weight 1              mean zero: no penalty at all
    k2   weight l              the gradient of KL(pi || pi_ref)
    k3   weight 1 - exp(-l)    the gradient of KL(pi_ref || pi), the other direction (Algorithm 2)

(the paper prints k3's weight with the ratio inverted). Subtracting kappa k1 from the *reward* gives the policy gradient
E[W k1], which is the gradient of KL(pi || pi_ref). `theory kl-estimators` shows all of this by enumeration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float

from grpo_repro.estimators import grpo

Array = TypeVar("Array", np.ndarray, torch.Tensor)


def _exp(x: Array) -> Array:
    return torch.exp(x) if isinstance(x, torch.Tensor) else np.exp(x)


def k1(log_ratio: Array) -> Array:
    """The log-ratio l = log pi - log pi_ref itself."""
    return log_ratio


def k2(log_ratio: Array) -> Array:
    """Half the square, l^2 / 2."""
    return log_ratio**2 / 2


def k3(log_ratio: Array) -> Array:
    """The ratio less its logarithm less one, exp(-l) - 1 + l."""
    return _exp(-log_ratio) - 1 + log_ratio


def k1_weight(log_ratio: Array) -> Array:
    """One."""
    return log_ratio * 0 + 1


def k2_weight(log_ratio: Array) -> Array:
    """The log-ratio l itself."""
    return log_ratio


def k3_weight(log_ratio: Array) -> Array:
    """One less the ratio, 1 - exp(-l) = 1 - pi_ref / pi."""
    return 1 - _exp(-log_ratio)


ESTIMATES: dict[str, tuple[Callable, Callable]] = {
    "k1": (k1, k1_weight),
    "k2": (k2, k2_weight),
    "k3": (k3, k3_weight),
}
"""Name -> the estimate and its weight, functions of l = log pi - log pi_ref."""


def score_weights(
    advantage: Array,
    log_probs: Array,
    old: Array | None,
    reference: Array | None,
    coefficient: float | Array,
) -> Array:
    """Weight of each token's score in the ascent direction of Algorithm 2's surrogate.

    A pi / pi_old - kappa (1 - pi_ref / pi), token by token: the importance ratio corrects for minibatches after the
    first, whose policy is no longer the one that was sampled from; the second term is the gradient of kappa k3.

    Args:
        advantage: A of the token's completion, broadcastable; for several equal completions their sum.
        log_probs: log pi of each token under the policy that is updated.
        old: log pi_old under the policy that was sampled from; None where it is the same.
        reference: log pi_ref; None without a penalty.
        coefficient: kappa; for several equal completions times their number, broadcastable.

    Returns:
        The weights, of the tokens' shape.
    """
    weights = advantage + 0 * log_probs if old is None else advantage * _exp(log_probs - old)
    return weights if reference is None else weights - coefficient * k3_weight(log_probs - reference)


def reward_penalty(log_ratio: Float[np.ndarray, "*prompts group"]) -> Float[np.ndarray, "*prompts group"]:
    """What k1 in the reward takes from each advantage at kappa = 1: l_i less the mean of the group's other l_j.

    Like the rewards' own leave-one-out mean this adds no bias, E[W_i (l_i - C_i)] = E[W l], which is the gradient of
    KL(pi || pi_ref). It stays outside the normalisation: kappa would otherwise mean another thing in every group.

    Args:
        log_ratio: l = log pi_old - log pi_ref of whole completions, float64 ``[..., group]``.

    Returns:
        The penalties ``[..., group]``; l itself for a group of one.

    >>> reward_penalty(np.array([1.0, 0.0, 0.0]))
    array([ 1. , -0.5, -0.5])
    """
    blank = np.zeros(log_ratio.shape[:-1])
    return log_ratio if log_ratio.shape[-1] == 1 else grpo(log_ratio, blank, blank)
