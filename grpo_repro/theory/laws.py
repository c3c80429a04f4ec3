"""Small laws of (score, reward), the gradient estimates of every group drawn from them, and measures of agreement.

Notation: W = score, Z = reward, V = E Z, g = E W Z; G outputs for each prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb

import numpy as np
from jaxtyping import Float64, Int

from grpo_repro import estimators, stats, ustat
from grpo_repro.policies import families
from grpo_repro.policies.closed_form import TabularPolicy
from grpo_repro.policies.families import Family
from grpo_repro.theory.exact import Law, groups, law

Estimator = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
Groups = tuple[Float64[np.ndarray, " groups"], Int[np.ndarray, "groups size"]]

SIZES = (2, 3, 4, 8, 16, 32, 64)
LARGEST = 3_200_000
"""Most members (groups times G) that an enumeration lists: G = 64 for four outcomes, 8 for eight."""


def at_theta(family: Family) -> TabularPolicy:
    """The policy of a family at the family's own parameter."""
    return TabularPolicy(family, family.theta)


def every_law(seed: int) -> dict[str, Law]:
    """One prompt of every family, and a law of real rewards that is no policy's."""
    built = [
        families.softmax(contexts=1, actions=2, dimension=3, seed=seed),
        # Rewards that the action decides, as a verified answer's are: four actions, four outcomes.
        families.likely_right(contexts=1, actions=4, dimension=4, theta_scale=1.0, right=1.0, wrong=0.0, seed=seed),
        families.constant_norm(contexts=1, factors=2, dimension=2, seed=seed),
        families.three_actions(contexts=2, dimension=2, rank=2, seed=seed),
        families.curved(contexts=2, dimension=2, rank=2, seed=seed),
    ]
    return {family.name: law(at_theta(family), 0) for family in built} | {"real rewards": real_law(seed)}


def real_law(seed: int, outcomes: int = 4, dim: int = 3) -> Law:
    """Real rewards of either sign, scores of mean zero in `dim` dimensions."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(outcomes, 2.0))
    scores = rng.normal(size=(outcomes, dim))
    return Law(probs, scores - probs @ scores, 0.5 + rng.normal(size=outcomes))


def sq_norms(prompt: Law) -> Float64[np.ndarray, " outcomes"]:
    """||W||^2 of each outcome."""
    return (prompt.scores**2).sum(1)


def components(prompt: Law) -> ustat.Components:
    """The terms of the mean squared error from their definitions, each of shape [1]."""
    p, z, norms = prompt.probs, prompt.rewards, sq_norms(prompt)
    score_sq_norm, variance = p @ norms, p @ (z - prompt.value) ** 2
    gradient_sq_norm = prompt.gradient @ prompt.gradient
    single = [p @ (norms * (z - b) ** 2) - gradient_sq_norm for b in (0.0, prompt.value, optimal_baseline(prompt))]
    second_order = score_sq_norm * variance + gradient_sq_norm
    terms = (prompt.value, score_sq_norm, variance, gradient_sq_norm, single[0], single[1], second_order, single[2])
    return ustat.Components(*(np.array([term]) for term in terms))


def optimal_baseline(prompt: Law) -> float:
    """b* = E||W||^2 Z / E||W||^2."""
    weight = prompt.probs * sq_norms(prompt)
    return float(weight @ prompt.rewards / weight.sum())


def every_group(prompt: Law, size: int) -> Groups:
    """Every group up to order: its probability, and the outcome of each of its members."""
    probs, counts = groups(prompt.probs, size)
    outcomes = np.tile(np.arange(counts.shape[1]), len(counts))
    return probs, np.repeat(outcomes, counts.ravel()).reshape(len(counts), size)


def sizes(prompt: Law) -> list[int]:
    """Group sizes at which the law's groups can be listed."""
    outcomes = len(prompt.probs)
    return [size for size in SIZES if size * comb(size + outcomes - 1, size) <= LARGEST]


def estimates(
    prompt: Law, members: Int[np.ndarray, "groups size"], estimator: Estimator
) -> Float64[np.ndarray, "groups dim"]:
    """The gradient estimate g_hat = (1/G) sum_i W_i (Z_i - C_i) of each group.

    For expectations over `every_group` the estimator must treat the members of a group alike, whatever their order.
    """
    count, size = members.shape
    constants = (np.full(count, value) for value in (prompt.value, optimal_baseline(prompt)))
    advantages = estimator(prompt.rewards[members], *constants)
    # Added up per outcome first: less memory than the scores of every member.
    cells = np.arange(count)[:, None] * len(prompt.probs) + members
    weights = np.bincount(cells.ravel(), advantages.ravel(), count * len(prompt.probs))
    return weights.reshape(count, -1) @ prompt.scores / size


def squared_errors(
    prompt: Law, members: Int[np.ndarray, "groups size"], estimator: Estimator
) -> Float64[np.ndarray, " groups"]:
    """||g_hat - g||^2 of each group."""
    return ((estimates(prompt, members, estimator) - prompt.gradient) ** 2).sum(1)


def mse(prompt: Law, size: int, estimator: Estimator) -> float:
    """E||g_hat - g||^2, over every group."""
    probs, members = every_group(prompt, size)
    return float(probs @ squared_errors(prompt, members, estimator))


def pair_mse(policy: TabularPolicy, size: int, probs: Float64[np.ndarray, "contexts contexts"]) -> float:
    """E||(g_hat(x) + g_hat(y))/2 - g||^2 over every group of every two contexts, drawn with `probs`."""
    drawn = []
    for context in range(len(policy.context_probs)):
        prompt = law(policy, context)
        chance, members = every_group(prompt, size)
        drawn.append((chance, estimates(prompt, members, estimators.grpo)))
    total = 0.0
    for (x, y), weight in np.ndenumerate(probs):
        (p, first), (q, second) = drawn[x], drawn[y]
        errors = (first[:, None] + second[None]) / 2 - policy.gradient
        total += float(weight * (p @ (errors**2).sum(2) @ q))
    return total


def largest_deviation(observed: Sequence[float], predicted: Sequence[float]) -> float:
    """Largest relative deviation of positive numbers from what is predicted of them."""
    return float(np.max(np.abs(np.array(observed) / np.array(predicted) - 1)))


def log_slope(
    x: Float64[np.ndarray, " points"],
    y: Float64[np.ndarray, " points"],
    standard_error: Float64[np.ndarray, " points"],
    confidence: float,
) -> stats.Interval:
    """Slope of log y against log x by weighted least squares, y being independent means of known standard error.

    The standard error of log y is that of y over y (delta method). Not a number where some y is not positive.
    """
    if (y <= 0).any():
        return stats.Interval(np.nan, np.nan, np.nan)
    log_x, weight = np.log(x), (y / standard_error) ** 2
    centred = log_x - weight @ log_x / weight.sum()
    spread = weight @ centred**2
    slope = float(weight @ (centred * np.log(y)) / spread)
    half = stats.quantile(confidence, np.inf) / float(np.sqrt(spread))
    return stats.Interval(slope, slope - half, slope + half)
