"""The mean squared error of the estimators and its unbiased components from a pool of completions.

For one prompt with score W, reward Z, V = E Z, rho = Z - V and g = E[W Z] the mean squared errors are exactly

    vanilla  (E||W||^2 Z^2   - ||g||^2) / G
    oracle    S_o / G,                     S_o = E||W||^2 rho^2 - ||g||^2
    grpo      S_o / G + R / (G (G - 1)),   R   = E||W||^2 Var(Z) + ||g||^2
    optimal  (E||W||^2 (Z - b*)^2 - ||g||^2) / G,   b* = E||W||^2 Z / E||W||^2

(Theorem 2, with the exact Hoeffding decomposition instead of the paper's O(.)). A minibatch of B prompts drawn
independently has c1/B + c2/(B G) + c3/(B G (G-1)) with c1 = E||g(X) - g||^2, c2 = E S_o(X), c3 = E R(X)
(Proposition 3), and a fixed set of M prompts, each used once, has (1/M^2) sum_x MSE(x; G).

`Pool` holds what is needed of K completions per prompt; `components` estimates every term without bias, but for the
ratio in `optimal` (see there). Nothing is clamped: an unbiased estimate of a small positive number may be negative.
Rewards should be of order one: far from zero, differences of large sums lose digits (float64: half at 1e4).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float

from grpo_repro.errors import UserError

PerPrompt = Float[np.ndarray, "*shape"]


@dataclass(frozen=True)
class Components:
    """The terms of the mean squared error, per prompt (or averaged), each of one shape.

    Attributes:
        value: V = E Z.
        score_sq_norm: F = E||W||^2.
        reward_variance: Var(Z).
        gradient_sq_norm: ||g||^2.
        vanilla: E||W||^2 Z^2 - ||g||^2.
        first_order: S_o = E||W||^2 rho^2 - ||g||^2, the oracle's.
        second_order: R = F Var(Z) + ||g||^2.
        optimal: E||W||^2 (Z - b*)^2 - ||g||^2.
    """

    value: PerPrompt
    score_sq_norm: PerPrompt
    reward_variance: PerPrompt
    gradient_sq_norm: PerPrompt
    vanilla: PerPrompt
    first_order: PerPrompt
    second_order: PerPrompt
    optimal: PerPrompt


def mse(terms: Components, group_size: int, estimator: str) -> PerPrompt:
    """Mean squared error of one prompt's estimate from G completions (Theorem 2, exact form).

    Args:
        terms: Components of any shape.
        group_size: G.
        estimator: `vanilla`, `grpo`, `oracle` or `optimal`.

    Returns:
        E||g_hat(x) - g(x)||^2, of the components' shape.

    Raises:
        UserError: For G < 1, for `grpo` with G = 1, and for an unknown estimator.
    """
    if group_size < 1 or (estimator == "grpo" and group_size < 2):
        raise UserError(f"estimator {estimator} has no mean squared error at group size {group_size}")
    if estimator == "grpo":
        return terms.first_order / group_size + terms.second_order / (group_size * (group_size - 1))
    single = {"vanilla": terms.vanilla, "oracle": terms.first_order, "optimal": terms.optimal}
    if estimator not in single:
        raise UserError(f"unknown estimator {estimator!r}; use one of {', '.join([*single, 'grpo'])}")
    return single[estimator] / group_size


def minibatch_mse(c1: float, c2: float, c3: float, num_prompts: int, group_size: int, pool: int | None = None) -> float:
    """MSE of the grpo estimate from B prompts with G completions each (Proposition 3, exact form).

    Args:
        c1: E||g(X) - g||^2; the population variance over the pool (divisor M) where there is one.
        c2: E S_o(X).
        c3: E R(X).
        num_prompts: B.
        group_size: G >= 2.
        pool: M, for B different prompts from a finite pool of M equally likely ones, g being the pool's gradient;
            None for independent prompts.

    Returns:
        c1/B + c2/(B G) + c3/(B G (G - 1)). With a pool, 1/B of the first term is (1/B - 1/M) M/(M-1): zero at B = M,
        where the estimate uses the whole, fixed set.

    Raises:
        UserError: For B < 1, G < 2 or M < B.
    """
    if num_prompts < 1 or group_size < 2:
        raise UserError(f"no minibatch of {num_prompts} prompts with {group_size} completions; B >= 1 and G >= 2")
    if pool is not None and pool < num_prompts:
        raise UserError(f"no {num_prompts} different prompts in a pool of {pool}; lower B or leave pool out")
    # A pool of one prompt has no spread: 0/1, not 0/0.
    left = 1.0 if pool is None else (pool - num_prompts) / max(pool - 1, 1)
    return (c1 * left + c2 / group_size + c3 / (group_size * (group_size - 1))) / num_prompts


def optimal_group_size(c1: float, c3: float) -> float:
    """Best group size at a fixed budget N = B G: the minimiser of c1 G + c3/(G - 1) (Theorem 7, exact form).

    Args:
        c1: E||g(X) - g||^2.
        c3: E R(X).

    Returns:
        G* = 1 + sqrt(c3/c1); infinite where the (estimated) c1 is not positive, else 1 where c3 is not. It may be
        below 2, the smallest group of grpo: then the best one is 2.

    >>> optimal_group_size(c1=1.0, c3=9.0)
    4.0
    """
    if c1 <= 0:
        return float("inf")
    return 1.0 + float(np.sqrt(max(c3, 0.0) / c1))


@dataclass(frozen=True)
class Pool:
    """What the components need of K completions for each of M prompts, float64 ``[prompts, pool]``.

    Attributes:
        rewards: Z_i.
        sq_norms: ||W_i||^2.
        cross: sum_{j != i} <W_i, W_j>.
        cross_rewards: sum_{j != i} <W_i, W_j> Z_j.
        cross_sq_rewards: sum_{j != i} <W_i, W_j> Z_j^2 (equal to the last for binary rewards).
    """

    rewards: Float[np.ndarray, "prompts pool"]
    sq_norms: Float[np.ndarray, "prompts pool"]
    cross: Float[np.ndarray, "prompts pool"]
    cross_rewards: Float[np.ndarray, "prompts pool"]
    cross_sq_rewards: Float[np.ndarray, "prompts pool"]

    @classmethod
    def from_gram(
        cls, gram: Float[np.ndarray, "prompts pool pool"], rewards: Float[np.ndarray, "prompts pool"]
    ) -> Pool:
        """Reduce full matrices of inner products <W_i, W_j> to a pool."""
        sq_norms = np.diagonal(gram, axis1=-2, axis2=-1)
        row = [np.einsum("...ij,...j->...i", gram, rewards**power) - sq_norms * rewards**power for power in range(3)]
        return cls(rewards, sq_norms, *row)


@dataclass(frozen=True)
class _Sums:
    """Sums over a pool that determine every component; additive when a completion leaves."""

    count: int
    z: PerPrompt
    z2: PerPrompt
    a: PerPrompt
    az: PerPrompt
    az2: PerPrompt
    p00: PerPrompt  # sum_{i != j} <W_i, W_j>
    p10: PerPrompt  # ... Z_i
    p11: PerPrompt  # ... Z_i Z_j
    p20: PerPrompt  # ... Z_i^2


def _sums(pool: Pool) -> _Sums:
    z, a = pool.rewards, pool.sq_norms
    totals = (z, z**2, a, a * z, a * z**2, pool.cross, pool.cross * z, pool.cross_rewards * z, pool.cross * z**2)
    return _Sums(z.shape[-1], *(x.sum(-1) for x in totals))


def _leave_one_out(pool: Pool, s: _Sums) -> _Sums:
    """The sums of the K pools from which one completion is missing, ``[prompts, pool]``."""
    z, a = pool.rewards, pool.sq_norms
    gone = (
        z, z**2, a, a * z, a * z**2, 2 * pool.cross, pool.cross * z + pool.cross_rewards, 2 * pool.cross_rewards * z,
        pool.cross * z**2 + pool.cross_sq_rewards,
    )  # fmt: skip
    names = [f.name for f in fields(_Sums)][1:]
    return _Sums(s.count - 1, *(getattr(s, n)[..., None] - x for n, x in zip(names, gone, strict=True)))


def _gradient_sq_norm(s: _Sums) -> PerPrompt:
    """Unbiased ||g||^2: mean over i != j of <W_i, W_j> (Z_i - c_ij)(Z_j - c_ij), c_ij the mean of the other K-2.

    Unbiased because a score has mean zero: E W (Z - c) = g for every c that does not depend on the pair. With
    rewards centred at the pool's mean, Z_i - c_ij = ((K-1) Z_i + Z_j)/(K-2), which leaves the two sums below.
    """
    k, mean = s.count, s.z / s.count
    p11 = s.p11 - 2 * mean * s.p10 + mean**2 * s.p00
    p20 = s.p20 - 2 * mean * s.p10 + mean**2 * s.p00
    return (((k - 1) ** 2 + 1) * p11 + 2 * (k - 1) * p20) / ((k - 2) ** 2 * k * (k - 1))


def _optimal_second_moment(s: _Sums) -> PerPrompt:
    """Plug-in E||W||^2 (Z - b*)^2 = E||W||^2 Z^2 - (E||W||^2 Z)^2 / E||W||^2; 0 where every score is zero."""
    safe = np.where(s.a > 0, s.a, 1.0)
    return (s.az2 - np.where(s.a > 0, s.az**2 / safe, 0.0)) / s.count


def _components(s: _Sums) -> Components:
    """Every term by distinct-index products: unbiased, except `optimal`, whose plug-in is off by O(1/K)."""
    k = s.count
    pairs, triples = k * (k - 1), k * (k - 1) * (k - 2)
    f_v2 = (s.a * (s.z**2 - s.z2) - 2 * (s.az * s.z - s.az2)) / triples  # E||W||^2 V^2
    second_moment = s.az2 / k - 2 * (s.az * s.z - s.az2) / pairs + f_v2  # E||W||^2 rho^2
    g2 = _gradient_sq_norm(s)
    return Components(
        value=s.z / k,
        score_sq_norm=s.a / k,
        reward_variance=(s.z2 - s.z**2 / k) / (k - 1),
        gradient_sq_norm=g2,
        vanilla=s.az2 / k - g2,
        first_order=second_moment - g2,
        second_order=(s.a * s.z2 - s.az2) / pairs - f_v2 + g2,
        optimal=_optimal_second_moment(s) - g2,
    )


def components(pool: Pool) -> tuple[Components, Components]:
    """Unbiased estimates of the terms from each prompt's pool, and their leave-one-completion-out values.

    `optimal` contains a ratio; the jackknife over completions leaves it a bias of O(1/K^2), towards zero, once K is
    large against the rarest completions that matter. Where those with large scores are rarer than 1/K it is a few
    per cent too low (1.5% at K = 64 on the tabular family `curved`), which its interval does not know. Every other term
    is exactly unbiased.

    Args:
        pool: K >= 4 completions for each prompt.

    Returns:
        Components ``[prompts]`` and the leave-one-out ones ``[prompts, pool]``, from which `pool_variance` gets the
        sampling variance.

    Raises:
        UserError: If K < 4: leaving one out must still leave three distinct completions.
    """
    if pool.rewards.shape[-1] < 4:
        raise UserError(f"components need at least 4 completions per prompt, got {pool.rewards.shape[-1]}")
    sums = _sums(pool)
    full, left_out = _components(sums), _components(_leave_one_out(pool, sums))
    k = sums.count
    ratio, ratio_out = full.optimal + full.gradient_sq_norm, left_out.optimal + left_out.gradient_sq_norm
    unbiased = k * ratio - (k - 1) * ratio_out.mean(-1) - full.gradient_sq_norm
    values = {f.name: getattr(full, f.name) for f in fields(full)} | {"optimal": unbiased}
    return Components(**values), left_out


def pool_variance(left_out: Float[np.ndarray, "prompts pool"]) -> Float[np.ndarray, " prompts"]:
    """Variance of a per-prompt statistic over redraws of its completions, by the jackknife.

    Args:
        left_out: The statistic without completion i, ``[prompts, pool]``.

    Returns:
        (K-1)/K sum_i (T_(-i) - mean)^2, ``[prompts]``.
    """
    k = left_out.shape[-1]
    return (k - 1) * left_out.var(-1)


def group_gradient_weights(rewards: Float[np.ndarray, "prompts pool"]) -> Float[np.ndarray, "prompts pool"]:
    """Weights w with g_hat(x) = sum_i w_i W_i, the U-statistic (Lemma 1) of the whole pool: (Z_i - mean)/(K-1)."""
    return (rewards - rewards.mean(-1, keepdims=True)) / (rewards.shape[-1] - 1)


def gradient_estimate_sq_norm(pool: Pool) -> Float[np.ndarray, " prompts"]:
    """||g_hat(x)||^2 of the pool's U-statistic, ``[prompts]`` (not an unbiased estimate of ||g||^2)."""
    k = pool.rewards.shape[-1]
    centred = pool.rewards - pool.rewards.mean(-1, keepdims=True)
    mean = pool.rewards.mean(-1, keepdims=True)
    cross = pool.cross_rewards - mean * pool.cross
    return ((cross + pool.sq_norms * centred) * centred).sum(-1) / (k - 1) ** 2


def optimal_baseline(pool: Pool) -> Float[np.ndarray, " prompts"]:
    """Plug-in b*(x) = sum ||W||^2 Z / sum ||W||^2, ``[prompts]``; the mean reward where every score is zero."""
    total = pool.sq_norms.sum(-1)
    weighted = (pool.sq_norms * pool.rewards).sum(-1)
    return np.where(total > 0, weighted / np.where(total > 0, total, 1.0), pool.rewards.mean(-1))
