"""Which group size is best, from repeated training runs.

`table[r, k]` is the loss of run r at `group_sizes[k]`: lower is better, so accuracies are negated. Rows are paired,
run r having the same seed at every G, and independent of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import t as student_t

from grpo_repro import stats
from grpo_repro.stats import Interval

DRAWS = 2000
"""Bootstrap draws."""

FEW = 30
"""Degrees of freedom below which the estimated correlation of the differences is not relied upon."""


@dataclass(frozen=True)
class Selection:
    """The best group size on a grid.

    Attributes:
        group_sizes: The grid, ascending.
        means: Mean loss over runs at each G, with its Student t interval.
        best: G of the least mean; the smallest of them if several are equal.
        best_low: Lower end of the bootstrap interval of the best G, a point of the grid.
        best_high: Upper end.
        indistinguishable: Set that holds the truly best G with probability >= confidence.
        runs: Number of runs that exist at every G.
        confidence: Level.
    """

    group_sizes: tuple[int, ...]
    means: tuple[Interval, ...]
    best: int
    best_low: int
    best_high: int
    indistinguishable: tuple[int, ...]
    runs: int
    confidence: float


def select(
    table: Float[np.ndarray, "runs groups"],
    group_sizes: Sequence[int],
    confidence: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> Selection:
    """Select the best group size from paired runs.

    The bootstrap interval of the best G describes how often another G would have won among runs like these. An argmin
    has no regular law, so that interval has no guaranteed level, and with few runs it is too short. The set
    `indistinguishable` (`may_be_best`) is what carries a guarantee.

    Args:
        table: Losses, without nan.
        group_sizes: G of each column, ascending.
        confidence: Level.
        draws: Bootstrap draws of whole rows.
        seed: Of these draws.

    Returns:
        The selection. From one run nothing is known: every interval is infinite or the whole grid.
    """
    runs, sizes = len(table), np.asarray(group_sizes)
    low, high = sizes[0], sizes[-1]
    if runs > 1:
        column = resampled_best(table[:, None], draws, np.random.default_rng(seed))[:, 0]
        low, high = percentile_ends(sizes[column], confidence)
    return Selection(
        group_sizes=tuple(group_sizes),
        means=tuple(stats.mean_interval(column, confidence) for column in table.T),
        best=int(sizes[table.mean(0).argmin()]),
        best_low=int(low),
        best_high=int(high),
        indistinguishable=may_be_best(table, group_sizes, confidence),
        runs=runs,
        confidence=confidence,
    )


def may_be_best(
    table: Float[np.ndarray, "runs groups"], group_sizes: Sequence[int], confidence: float
) -> tuple[int, ...]:
    """Group sizes that may be best: multiple comparisons with the best, for correlated losses.

    For each G, with d_h the mean over runs of loss_G - loss_h and s_h its standard error, G leaves the set if
    max_h d_h / s_h > c. Were G truly best, each d_h would have an expectation <= 0, so that maximum would lie below
    max_h (d_h - E d_h) / s_h, and c is that variable's quantile: G is wrongly left out with probability
    <= 1 - confidence. Only the truly best G has to stay, so nothing is to be corrected over G.

    With at least `FEW` degrees of freedom c is the quantile of the maximum of a multivariate t with runs - 1 degrees
    and the estimated correlation of the differences. With fewer runs that correlation is too uncertain: the set
    would hold the best of six G in 87% of cases with 2 runs and in 92% with 5, for an asked 95%. There
    c = t_{runs-1}(1 - (1 - confidence) / (groups - 1)), Bonferroni's, which holds for normal losses at any number of
    runs and whatever the correlation. Skewed losses of unequal spread need many runs: with six G the set held the
    best in 78% of simulations of 20 exponential runs, in 87% of 20 runs distributed like gaps near an optimum
    (averages of one to twelve chi^2_1), in 87 to 93% of 100 to 1,000 exponential runs.

    Args:
        table: Losses.
        group_sizes: G of each column.
        confidence: Level.

    Returns:
        The set, in the order of `group_sizes`; a difference that is equal in all runs is taken as known exactly.

    Source: Gupta's subset selection, one control at a time as in Hsu, Multiple Comparisons (1996).
    """
    return tuple(size for column, size in enumerate(group_sizes) if _column_stays(table, column, confidence))


def _column_stays(table: Float[np.ndarray, "runs groups"], column: int, confidence: float) -> bool:
    """Whether the G of one column may be best."""
    runs, groups = table.shape
    if runs < 2 or groups < 2:
        return True
    differences = table[:, [column]] - np.delete(table, column, 1)
    covariance = np.atleast_2d(np.cov(differences.T)) / runs
    rounding = 1e-13 * float(np.abs(table).max())
    return _stays(differences.mean(0), covariance, runs - 1, confidence, rounding)


def _stays(
    means: Float[np.ndarray, " others"],
    covariance: Float[np.ndarray, "others others"],
    degrees: int | float,
    confidence: float,
    rounding: float = 0.0,
) -> bool:
    """Whether a G with these mean differences to the others may be best (`may_be_best` gives the rule).

    Args:
        means: d_h.
        covariance: Covariance of the d_h.
        degrees: Degrees of freedom; inf if the covariance is known.
        confidence: Level.
        rounding: Size of differences and standard errors that count as zero.
    """
    errors = np.sqrt(np.diag(covariance))
    exact = errors <= rounding
    if exact.any() and (means[exact] > rounding).any():
        return False
    if exact.all():
        return True
    means, errors = means[~exact], errors[~exact]
    largest = float((means / errors).max())
    one, bonferroni = student_t.ppf([confidence, 1 - (1 - confidence) / len(means)], degrees)
    if degrees < FEW or not one < largest <= bonferroni:  # c lies between these two
        return bool(largest <= bonferroni)
    values, vectors = np.linalg.eigh(covariance[np.ix_(~exact, ~exact)] / np.outer(errors, errors))
    drawn = (vectors * np.sqrt(np.maximum(values, 0.0))) @ _standard_t(len(means), degrees)
    return bool(np.mean(drawn.max(0) < largest) <= confidence)  # largest is not beyond the quantile


@lru_cache(maxsize=8)
def _standard_t(width: int, degrees: int | float) -> Float[np.ndarray, "{width} draws"]:
    """Draws of the uncorrelated multivariate t, always the same ones: a normal vector over sqrt(chi^2 / degrees)."""
    rng, count = np.random.default_rng(0), 50_000
    normal = rng.standard_normal((width, count))
    return normal / np.sqrt(rng.chisquare(degrees, count) / degrees) if np.isfinite(degrees) else normal


def resampled_best(
    tables: Float[np.ndarray, "runs levels groups"], draws: int, rng: np.random.Generator
) -> Int[np.ndarray, "draws levels"]:
    """Column of the least mean at each level, over bootstrap draws of whole rows (multinomial counts, in chunks)."""
    runs = len(tables)
    chunk = max(1, 2**20 // runs)
    best = []
    for start in range(0, draws, chunk):
        size = min(chunk, draws - start)
        rows = rng.integers(runs, size=(size, runs)) + runs * np.arange(size)[:, None]
        counts = np.bincount(rows.ravel(), minlength=size * runs).reshape(size, runs)
        best.append(np.tensordot(counts / runs, tables, 1).argmin(-1))
    return np.concatenate(best)


def percentile_ends(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """Percentile interval whose ends are among the values."""
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2], method="inverted_cdf")
    return float(low), float(high)


def binomial_selection(
    accuracies: Float[np.ndarray, " groups"],
    group_sizes: Sequence[int],
    count: int,
    confidence: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> Selection:
    """Select the best group size from one run at each G, by the error of its test accuracy alone.

    The rule is that of `may_be_best` with normal quantiles and variances p (1 - p) / count, p = (right answers + 1) /
    (count + 2) lest a perfect score have none. Accuracies count as independent, which is on the safe side where all
    policies answer the same questions. The set speaks of these trained policies: how training itself varies from run
    to run comes on top, so a G outside the set may still be the best one to train with.

    Args:
        accuracies: Fraction of right answers at each G.
        group_sizes: Their G, ascending.
        count: Number of test questions.
        confidence: Level.
        draws: Binomial redraws of all accuracies, in place of the bootstrap over runs.
        seed: Of these draws.

    Returns:
        The selection; its means are of the error rate 1 - accuracy, with Wilson's intervals.
    """
    sizes, errors = np.asarray(group_sizes), 1 - accuracies
    smoothed = (count * errors + 1) / (count + 2)
    variances = smoothed * (1 - smoothed) / count
    redrawn = np.random.default_rng(seed).binomial(count, errors, (draws, len(errors))).argmin(1)
    low, high = percentile_ends(sizes[redrawn], confidence)
    kept = []
    for column, size in enumerate(group_sizes):
        covariance = variances[column] + np.diag(np.delete(variances, column))
        if len(errors) == 1 or _stays(errors[column] - np.delete(errors, column), covariance, np.inf, confidence):
            kept.append(size)
    return Selection(
        group_sizes=tuple(group_sizes),
        means=tuple(stats.wilson(count * float(error), count, confidence) for error in errors),
        best=int(sizes[errors.argmin()]),
        best_low=int(low),
        best_high=int(high),
        indistinguishable=tuple(kept),
        runs=1,
        confidence=confidence,
    )
