"""Gradient ascent on many runs at once, and the families whose optimum is known that the checks let it climb.

The answers of these families are signs s, and contexts come in pairs of equal features and opposite asymmetry: the
gradients g(x) then do not vanish at the optimum theta = 0 (c1 > 0), only their mean does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from grpo_repro.policies import tabular_runs
from grpo_repro.policies.closed_form import TabularPolicy
from grpo_repro.policies.families import Family
from grpo_repro.policies.tabular import sample_contexts

BLOCK = 2000
"""Runs that are simulated together; more do not fit into the cache."""


def curved(
    features: Float64[np.ndarray, "pairs rank"],
    kappa: Float64[np.ndarray, " pairs"],
    gap: float,
    asymmetry: Float64[np.ndarray, " pairs"],
    idle: float = 0.0,
) -> Family:
    """The family `curved` with given features, and, if `idle` > 0, a parameter on which the return does not depend.

    Actions (s, t) in {-1, 1}^2 have the logit s z - kappa t z^2 / 2, z = <phi(x), theta>, and the reward probability
    1/2 + gap t / 2 + s asymmetry_x / 2, so J = E[1/2 - (gap / 2) tanh(kappa z^2 / 2)]. One more context has the logit
    s idle theta_last and answers that are right half of the time: its gradient is noise, along a flat direction.

    Args:
        features: phi of each pair of contexts; all contexts are equally likely.
        kappa: Curvature of each pair.
        gap: Difference of the reward probabilities of t = 1 and t = -1; gap + asymmetry <= 1.
        asymmetry: Difference of those of s = 1 and s = -1 in the first context of each pair, minus it in the second.
        idle: Feature of the context whose answers do not matter.
    """
    s, t = np.array(list(itertools.product([-1.0, 1.0], repeat=2))).T
    phi, tilt = _paired(features, asymmetry)
    rewards = 0.5 + 0.5 * gap * t + tilt[:, None] * s
    bend = np.einsum("x,a,xi,xj->xaij", np.repeat(kappa, 2), -t, phi, phi)
    if idle > 0:
        phi = np.pad(phi, ((0, 1), (0, 1)))
        phi[-1, -1] = idle
        rewards, bend = (
            np.pad(rewards, ((0, 1), (0, 0)), constant_values=0.5),
            np.pad(bend, ((0, 1), (0, 0), (0, 1), (0, 1))),
        )
    return _family("curved", s, phi, rewards, bend)


def three_actions(
    features: Float64[np.ndarray, "pairs rank"], gap: float, asymmetry: Float64[np.ndarray, " pairs"]
) -> Family:
    """The family `three-actions` with given features: s in {-1, 0, 1}, logit s z, reward 1/2 + gap (1/2 - |s|) + tilt.

    Args:
        features: phi of each pair of contexts.
        gap: Difference of the reward probabilities of s = 0 and of the others' mean.
        asymmetry: As in `curved`; gap + asymmetry <= 1.
    """
    s = np.array([-1.0, 0.0, 1.0])
    phi, tilt = _paired(features, asymmetry)
    return _family("three-actions", s, phi, 0.5 + gap * (0.5 - np.abs(s)) + tilt[:, None] * s, None)


def two_directions(gap: float = 0.45, better: float = 0.4, kappa: float = 4.0) -> Family:
    """Actions (k, s, t), k in {1, 2}, s, t in {-1, 1}: logit s theta_k - kappa t ||theta||^2 / 2.

    Rewards 1/2 + better (3/2 - k) + gap t / 2. With better < gap the optimum is theta = 0, where W = s e_k has norm
    one, and W W' = e_k e_k' is correlated with the reward.
    """
    k, s, t = np.array(list(itertools.product([0, 1], [-1, 1], [-1, 1]))).T
    rewards = 0.5 + better * (0.5 - k) + 0.5 * gap * t
    return Family(
        name="two-directions",
        context_probs=np.ones(1),
        reward_probs=rewards[None],
        offset=np.zeros((1, 8)),
        features=(s[:, None] * np.eye(2)[k])[None],
        curvature=-kappa * t[None, :, None, None] * np.eye(2),
        theta=np.zeros(2),
        optimum=np.zeros(2),
    )


@dataclass(frozen=True, eq=False)
class Runs:
    """What was simulated.

    Attributes:
        gaps: J* - J(theta_n) of every run at the marked iterations.
        reach: The largest absolute value of any coordinate of theta in any run at any iteration.
    """

    gaps: Float64[np.ndarray, "marks runs"]
    reach: float


def ascend(
    family: Family,
    start: Float64[np.ndarray, " dim"],
    rates: Float64[np.ndarray, " iterations"],
    marks: tuple[int, ...],
    estimator: str,
    group_size: int,
    num_prompts: int,
    runs: int,
    rng: np.random.Generator,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Runs:
    """Simulate theta_i = theta_{i-1} + rates[i] g_hat(theta_{i-1}) with B fresh prompts and G outputs for each.

    Args:
        family: A family with a known optimum.
        start: theta_0 of every run.
        rates: Learning rate of each iteration; the last mark is their number.
        marks: Iterations whose gaps are kept, ascending.
        estimator: `vanilla`, `grpo`, `oracle` or `optimal`.
        group_size: G.
        num_prompts: B.
        runs: Number of independent runs.
        rng: Source of randomness.
        progress: Called with (blocks done, blocks in all).
    """
    policy = TabularPolicy(family, start)
    sizes = [min(BLOCK, runs - first) for first in range(0, runs, BLOCK)]
    blocks, reach = [], float(np.abs(start).max())
    for done, size in enumerate(sizes):
        progress(done, len(sizes))
        theta, kept = np.tile(start, (size, 1)), []
        for i, rate in enumerate(rates, start=1):
            contexts = sample_contexts(policy, size * num_prompts, rng).reshape(size, num_prompts)
            theta = theta + rate * tabular_runs.gradient_estimate(family, theta, contexts, group_size, estimator, rng)
            reach = max(reach, float(np.abs(theta).max()))
            if i in marks:
                kept.append((policy.best_return or 0.0) - tabular_runs.expected_return(family, theta))
        blocks.append(np.array(kept))
    return Runs(np.concatenate(blocks, 1), reach)


def _paired(
    features: Float64[np.ndarray, "pairs rank"], asymmetry: Float64[np.ndarray, " pairs"]
) -> tuple[Float64[np.ndarray, "contexts rank"], Float64[np.ndarray, " contexts"]]:
    """Features of both contexts of each pair, and half their asymmetries."""
    return np.repeat(features, 2, axis=0), (np.array([0.5, -0.5]) * asymmetry[:, None]).ravel()


def _family(
    name: str,
    signs: Float64[np.ndarray, " actions"],
    phi: Float64[np.ndarray, "contexts dim"],
    rewards: Float64[np.ndarray, "contexts actions"],
    curvature: Float64[np.ndarray, "contexts actions dim dim"] | None,
) -> Family:
    """Equally likely contexts, logits s <phi, theta>, and the optimum at zero."""
    contexts, dim = phi.shape
    return Family(
        name=name,
        context_probs=np.full(contexts, 1 / contexts),
        reward_probs=rewards.clip(0, 1),  # 0.9 + 0.1 may exceed 1
        offset=np.zeros_like(rewards),
        features=signs[None, :, None] * phi[:, None, :],
        curvature=curvature,
        theta=np.zeros(dim),
        optimum=np.zeros(dim),
    )
