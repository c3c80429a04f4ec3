"""Intervals: the jackknife over prompts, the sampling error of a fixed set, Fieller's ratio, replicates.

Two populations must be kept apart. The mean squared error on a *fixed set* of questions (Figure 4) varies only
because completions are random, so its interval comes from the completions of each question (`fixed_set_mean`).
The components c1, c2, c3 and the best group size speak of prompts drawn from a distribution, so their intervals
come from the prompts (`jackknife`), taken as independent draws. Where the set was drawn in equal parts from kinds of
prompts, as the arithmetic task's is, those intervals also hold the spread between kinds: too wide, not too narrow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import t as student_t

from grpo_repro import ustat


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval (`low` and `high` may be infinite)."""

    value: float
    low: float
    high: float


def quantile(confidence: float, degrees: int | float) -> float:
    """Two-sided Student t quantile; inf without a degree of freedom (nothing is known of the spread)."""
    return float(student_t.ppf(0.5 + confidence / 2, degrees)) if degrees > 0 else float("inf")


def mean_interval(values: Float[np.ndarray, " n"], confidence: float) -> Interval:
    """Mean of independent values with its Student t interval.

    Args:
        values: Independent, identically distributed.
        confidence: Level, for example 0.95.

    Returns:
        mean +- t_{n-1} s/sqrt(n); infinitely wide for one value.
    """
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Interval(mean, -np.inf, np.inf)
    half = quantile(confidence, n - 1) * float(np.std(values, ddof=1)) / np.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def fixed_set_mean(
    values: Float[np.ndarray, " prompts"],
    variances: Float[np.ndarray, " prompts"],
    confidence: float,
    scale: float = 1.0,
) -> Interval:
    """Mean over a fixed set of prompts whose only randomness is in their completions.

    Args:
        values: Estimate for each prompt.
        variances: Variance of each of them over redraws of its completions (`ustat.pool_variance`).
        confidence: Level.
        scale: Factor on the mean (1/M turns a mean of per-prompt errors into the error of the set's gradient).

    Returns:
        scale * mean(values) +- z sqrt(sum variances) / M * scale; degrees of freedom are taken as
        many, so a handful of prompts gets too narrow an interval.
    """
    count = len(values)
    mean = float(np.mean(values))
    half = quantile(confidence, np.inf) * float(np.sqrt(np.sum(variances))) / count
    return Interval(scale * mean, scale * (mean - half), scale * (mean + half))


def jackknife(value: float, left_out: Float[np.ndarray, " groups"], confidence: float) -> Interval:
    """Interval of a smooth statistic from its values without each of J groups of prompts.

    Args:
        value: The statistic on all prompts.
        left_out: The statistic without group j.
        confidence: Level.

    Returns:
        value +- t_{J-1} sqrt((J-1)/J sum (T_(-j) - mean)^2).
    """
    half = quantile(confidence, len(left_out) - 1) * float(np.sqrt(jackknife_cov(left_out, left_out)))
    return Interval(value, value - half, value + half)


def jackknife_cov(first: Float[np.ndarray, " groups"], second: Float[np.ndarray, " groups"]) -> float:
    """Jackknife covariance of two statistics: (J-1)/J sum_j (T_(-j) - mean)(U_(-j) - mean)."""
    return float((len(first) - 1) * np.mean((first - first.mean()) * (second - second.mean())))


def fieller(
    numerator: tuple[float, Float[np.ndarray, " groups"]],
    denominator: tuple[float, Float[np.ndarray, " groups"]],
    confidence: float,
) -> Interval:
    """Fieller's interval of a ratio: all r for which numerator - r * denominator does not differ from zero.

    Unlike the delta method it keeps its level when the numerator is uncertain to the point of changing sign.

    Args:
        numerator: Estimate and its leave-a-group-out values.
        denominator: The same of the denominator.
        confidence: Level.

    Returns:
        The ratio and its interval; unbounded on both sides where the denominator does not differ from zero.
    """
    (a, a_out), (b, b_out) = numerator, denominator
    t2 = quantile(confidence, len(a_out) - 1) ** 2
    quadratic = b**2 - t2 * jackknife_cov(b_out, b_out)
    linear = a * b - t2 * jackknife_cov(a_out, b_out)
    constant = a**2 - t2 * jackknife_cov(a_out, a_out)
    if quadratic <= 0:
        return Interval(a / b if b else np.nan, -np.inf, np.inf)
    root = float(np.sqrt(max(linear**2 - quadratic * constant, 0.0)))
    return Interval(a / b, (linear - root) / quadratic, (linear + root) / quadratic)


def optimal_group_size_interval(
    c1: tuple[float, Float[np.ndarray, " groups"]], c3: tuple[float, Float[np.ndarray, " groups"]], confidence: float
) -> Interval:
    """G* = 1 + sqrt(c3/c1) (Theorem 7, exact form), its interval carried over from Fieller's of c1/c3.

    Args:
        c1: Estimate of E||g(X) - g||^2 and its leave-a-group-out values.
        c3: The same of E R(X).
        confidence: Level.

    Returns:
        `ustat.optimal_group_size` with its interval; the upper end is infinite where c1 may be zero, and both
        ends are nan where c3 does not differ from zero, the value too where c3 is not positive.
    """
    ratio = fieller(c1, c3, confidence)
    value = ustat.optimal_group_size(c1[0], c3[0])
    if c3[0] <= 0 or not np.isfinite([ratio.low, ratio.high]).all():
        return Interval(value if c3[0] > 0 else np.nan, np.nan, np.nan)

    def best(bound: float) -> float:
        return 1 + 1 / float(np.sqrt(bound)) if bound > 0 else float("inf")

    return Interval(value, best(ratio.high), best(ratio.low))


@dataclass(frozen=True)
class PromptGroups:
    """Prompts in J groups, with the inner products of the groups' summed gradient estimates.

    Attributes:
        index: Group of each prompt, 0..J-1.
        sq_norms: ||b_j||^2 with b_j = sum of g_hat(x) over group j.
        with_total: <b_j, sum_k b_k>.
    """

    index: Int[np.ndarray, " prompts"]
    sq_norms: Float[np.ndarray, " groups"]
    with_total: Float[np.ndarray, " groups"]

    @classmethod
    def from_sums(cls, index: Int[np.ndarray, " prompts"], sums: Float[np.ndarray, "groups dim"]) -> PromptGroups:
        """Build from the groups' summed gradient estimates (any float type; products in float64)."""
        total = sums.sum(0, dtype=np.float64)
        norms = np.array([float(np.dot(row.astype(np.float64), row)) for row in sums])
        return cls(index, norms, np.array([float(np.dot(row.astype(np.float64), total)) for row in sums]))

    def left_out_means(self, values: Float[np.ndarray, " prompts"]) -> tuple[float, Float[np.ndarray, " groups"]]:
        """Mean over all prompts, and over all but each group."""
        sums = np.bincount(self.index, values, len(self.sq_norms))
        sizes = np.bincount(self.index, minlength=len(self.sq_norms))
        return float(values.mean()), (values.sum() - sums) / (len(values) - sizes)


def mean_gradient_sq_norm(
    groups: PromptGroups, estimate_sq_norm: Float[np.ndarray, " prompts"]
) -> tuple[float, Float[np.ndarray, " groups"]]:
    """Unbiased ||E g(X)||^2 from the inner products of *different* prompts' estimates, and without each group.

    (||sum g_hat||^2 - sum ||g_hat||^2) / (M (M-1)): noise within a prompt does not enter.

    Args:
        groups: Groups of prompts.
        estimate_sq_norm: ||g_hat(x)||^2.

    Returns:
        ||g||^2 and its leave-a-group-out values (nan where fewer than two prompts are left).
    """
    count = len(groups.index)
    left = count - np.bincount(groups.index, minlength=len(groups.sq_norms))
    own = np.bincount(groups.index, estimate_sq_norm, len(groups.sq_norms))
    total, diagonal = float(groups.with_total.sum()), float(estimate_sq_norm.sum())
    pairs_out = total - 2 * groups.with_total + groups.sq_norms - (diagonal - own)
    out = np.divide(pairs_out, left * (left - 1), out=np.full(len(own), np.nan), where=left > 1)
    return (total - diagonal) / (count * (count - 1)), out


def between_prompt_variance(
    groups: PromptGroups,
    gradient_sq_norm: Float[np.ndarray, " prompts"],
    estimate_sq_norm: Float[np.ndarray, " prompts"],
) -> tuple[float, Float[np.ndarray, " groups"]]:
    """Unbiased c1 = E||g(X) - g||^2 = E||g(X)||^2 - ||g||^2 (Proposition 3), and without each group of prompts.

    Args:
        groups: Groups of prompts.
        gradient_sq_norm: Unbiased ||g(x)||^2.
        estimate_sq_norm: ||g_hat(x)||^2.

    Returns:
        c1 and its leave-a-group-out values.
    """
    mean_norm, mean_norm_out = groups.left_out_means(gradient_sq_norm)
    overall, overall_out = mean_gradient_sq_norm(groups, estimate_sq_norm)
    return mean_norm - overall, mean_norm_out - overall_out


def wilson(successes: int | float, count: int, confidence: float) -> Interval:
    """Wilson's interval of a proportion; unlike Student's it has a width at 0 and at 1."""
    z2, share = quantile(confidence, np.inf) ** 2, successes / count
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = np.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return Interval(share, float(max(0.0, centre - half)), float(min(1.0, centre + half)))


def score_reward_correlation(
    sq_norms: Float[np.ndarray, "prompts pool"], rewards: Float[np.ndarray, "prompts pool"], confidence: float
) -> Interval:
    """Correlation of ||W||^2 with Z given the prompt, pooled over prompts: the diagnostic of Assumption 2.

    sum_x cov_x(||W||^2, Z) / sqrt(sum_x var_x(||W||^2) sum_x var_x(Z)), with a jackknife over prompts. It is 0 where
    either is constant given the prompt, up to rounding (Assumption 2 then holds).
    """
    scale = np.sqrt(np.mean(sq_norms**2)) * 1e-6  # float32 scores carry about this much rounding
    a = sq_norms - sq_norms.mean(1, keepdims=True)
    a[np.abs(a).max(1) <= scale] = 0.0
    z = rewards - rewards.mean(1, keepdims=True)
    sums = np.stack([(a * z).sum(1), (a * a).sum(1), (z * z).sum(1)])
    left = sums.sum(1, keepdims=True) - sums

    def ratio(part: np.ndarray) -> np.ndarray:
        spread = np.sqrt(np.maximum(part[1] * part[2], 0.0))
        return np.divide(part[0], spread, out=np.zeros_like(spread), where=spread > 0)

    return jackknife(float(ratio(sums.sum(1))), ratio(left), confidence)
