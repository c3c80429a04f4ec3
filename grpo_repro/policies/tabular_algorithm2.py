"""Algorithm 2 for many tabular runs at once: normalised advantages, minibatches with a ratio, and a penalty.

A completion is one action, so that all of it is exact and a completion's weight depends on context and action only:

    (1/(B G)) sum_b sum_i [A_bi pi(a_bi) / pi_old(a_bi) - kappa (1 - pi_ref(a_bi) / pi(a_bi))] W(a_bi)

is the direction of a step (k3), pi being the policy as it is; with k1 in the reward the second term is absent, and A_bi
is less by kappa times log pi_old / pi_ref, centred by its leave-one-out mean. The reference pi_ref has the family's own
parameter, at which every run starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Float64, Int

from grpo_repro.algorithm2 import Options
from grpo_repro.kl import score_weights
from grpo_repro.policies.families import Family
from grpo_repro.policies.tabular_runs import Draw, along, draw, log_probs, probs, scores


def divergence(family: Family, theta: Float64[np.ndarray, "runs dim"]) -> Float64[np.ndarray, " runs"]:
    """E_X KL(pi_theta(. | X) || pi_ref(. | X)) of every run, exact, in nats."""
    log_pi = log_probs(family, theta)
    return np.einsum("x,sxa,sxa->s", family.context_probs, np.exp(log_pi), log_pi - _reference(family), optimize=True)


def ascent(
    family: Family, theta: Float64[np.ndarray, "runs dim"], batch: Draw, estimator: str, options: Options
) -> Float[np.ndarray, "runs dim"]:
    """The direction of one step; of a draw's own parameters and with no option used, Algorithm 1's estimate.

    Args:
        family: The family.
        theta: Parameters as they are; those of the draw are pi_old.
        batch: The minibatch's completions.
        estimator: Name of the estimator.
        options: What of Algorithm 2 is used; the number of minibatches is not read.

    Raises:
        UserError: For `grpo` with G = 1.
    """
    moved = not np.array_equal(theta, batch.theta)
    w = scores(family, theta, probs(family, theta)) if moved else batch.scores
    weights = batch.weights(family, estimator)
    if options.normalize:
        weights = _normalized(weights, batch)
    if options.in_reward:
        weights = weights - options.in_reward * _reward_penalty(family, batch)
    totals = batch.totals(weights)
    if moved or options.in_loss:
        totals = _token_weights(family, theta, batch, totals, moved, options.in_loss)
    return along(totals, w, batch.contexts.shape[1] * batch.group_size)


def iterate(
    family: Family,
    theta: Float64[np.ndarray, "runs dim"],
    contexts: Int[np.ndarray, "runs prompts"],
    group_size: int,
    estimator: str,
    options: Options,
    step: Callable[[Float[np.ndarray, "runs dim"]], Float[np.ndarray, "runs dim"]],
    rng: np.random.Generator,
) -> Float64[np.ndarray, "runs dim"]:
    """One iteration of every run: sample, then one step for each minibatch, in the order of the prompts.

    Args:
        family: The family.
        theta: Parameters; they are left as they are.
        contexts: The B contexts of each run; the number of minibatches divides B.
        group_size: G.
        estimator: Name of the estimator.
        options: What of Algorithm 2 is used.
        step: From a direction to what is added to the parameters, such as ``lambda d: 0.1 * d``.
        rng: Source of the completions and rewards.

    Returns:
        The new parameters.
    """
    batch = draw(family, theta, contexts, group_size, rng)
    size = contexts.shape[1] // options.minibatches
    for start in range(0, size * options.minibatches, size):
        part = slice(start, start + size)
        minibatch = replace(batch, contexts=contexts[:, part], counts=batch.counts[:, part])
        theta = theta + step(ascent(family, theta, minibatch, estimator, options))
    return theta


def _reference(family: Family) -> Float64[np.ndarray, "1 contexts actions"]:
    """The logarithm of pi_ref(a | x)."""
    return log_probs(family, family.theta[None])


def _normalized(weights: Float[np.ndarray, "groups actions"], batch: Draw) -> Float[np.ndarray, "groups actions"]:
    """Divide by se: with R of G binary rewards equal to 1, se^2 = R (G - R) / (G (G - 1)); 0 where that is 0."""
    size = batch.group_size
    right = batch.groups()[..., 1].sum(1, keepdims=True)
    deviation = np.sqrt(right * (size - right) / (size * (size - 1)))
    return np.divide(weights, deviation, out=np.zeros(weights.shape), where=deviation > 0)


def _reward_penalty(family: Family, batch: Draw) -> Float[np.ndarray, "groups actions"]:
    """Sum of `kl.reward_penalty` over each action's n completions: n (l - mean(l)) G / (G - 1)."""
    log_ratio = log_probs(family, batch.theta) - _reference(family)
    own = log_ratio.reshape(-1, log_ratio.shape[2])[batch.places]
    count, size = batch.groups().sum(2), batch.group_size
    if size == 1:
        return count * own
    mean = (count * own).sum(1, keepdims=True) / size
    return count * (own - mean) * (size / (size - 1))


def _token_weights(
    family: Family,
    theta: Float64[np.ndarray, "runs dim"],
    batch: Draw,
    totals: Float[np.ndarray, "runs contexts actions"],
    moved: bool,
    coefficient: float,
) -> Float[np.ndarray, "runs contexts actions"]:
    """`kl.score_weights` of all completions of each context and action."""
    number = batch.totals(batch.groups().sum(2).astype(float))

    def seen(values: Float[np.ndarray, "_ contexts actions"]) -> Float[np.ndarray, "runs contexts actions"]:
        """0 where no completion is: a ratio of tiny probabilities may be no number there."""
        return np.where(number > 0, values, 0.0)

    old = seen(log_probs(family, batch.theta)) if moved else None
    reference = seen(_reference(family)) if coefficient else None
    return score_weights(totals, seen(log_probs(family, theta)), old, reference, coefficient * number)
