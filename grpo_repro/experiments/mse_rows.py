"""Rows and tables of the MSE experiment, from pools of completions or from exact components."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from grpo_repro import stats, ustat
from grpo_repro.cells import Cell
from grpo_repro.stats import Interval

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """What a pool of completions says: per-completion numbers and the groups' gradient estimates."""

    pool: ustat.Pool
    groups: stats.PromptGroups


def frame(cell: Cell, rows: list[Row]) -> pd.DataFrame:
    """Put a cell's common columns beside its rows."""
    config = cell.config
    common = {
        "model": config["model"]["name"],
        "task": config["task"]["name"],
        "method": config["method"],
        "seed": config["seed"],
        "ci_level": config["confidence"],
        "num_prompts": config["task"]["num_questions"],
    }
    return pd.DataFrame([common | row for row in rows])


def row(metric: str, interval: Interval, count: int, **columns: object) -> Row:
    """One row of a measured quantity."""
    return {
        "metric": metric, "value": interval.value, "ci_low": interval.low, "ci_high": interval.high, "count": count,
    } | columns  # fmt: skip


def exact(value: float) -> Interval:
    """An interval without width."""
    return Interval(value, value, value)


def mse_rows(config: dict[str, Any], interval: Callable[[int, str], Interval], count: int) -> list[Row]:
    """One row for each estimator and group size."""
    return [
        row("mse", interval(group, name), count, estimator=name, group_size=group)
        for name in config["estimators"]
        for group in config["group_sizes"]
    ]


def component_rows(config: dict[str, Any], measured: Measured) -> list[Row]:
    """Everything that one pool gives: the error at every G, the components, G* and the diagnostic.

    Args:
        config: The cell's configuration.
        measured: Pools of M prompts with K completions each.

    Returns:
        Rows. Intervals of `mse` are over completions (the questions are fixed), those of components over prompts.
    """
    pool, groups, level = measured.pool, measured.groups, config["confidence"]
    terms, left_out = ustat.components(pool)
    prompts, size = pool.rewards.shape

    def interval(group: int, name: str) -> Interval:
        variance = ustat.pool_variance(ustat.mse(left_out, group, name))
        return stats.fixed_set_mean(ustat.mse(terms, group, name), variance, level, scale=1 / prompts)

    estimate_sq_norm = ustat.gradient_estimate_sq_norm(pool)
    c1 = stats.between_prompt_variance(groups, terms.gradient_sq_norm, estimate_sq_norm)
    c2, c3 = (groups.left_out_means(x) for x in (terms.first_order, terms.second_order))
    means = {
        "vanilla_variance": terms.vanilla,
        "optimal_variance": terms.optimal,
        "score_sq_norm": terms.score_sq_norm,
        "reward_variance": terms.reward_variance,
        "value": terms.value,
    }
    rows = mse_rows(config, interval, size)
    rows += [row(name, stats.jackknife(*x, level), size) for name, x in {"c1": c1, "c2": c2, "c3": c3}.items()]
    rows += [
        row("optimal_group_size", stats.optimal_group_size_interval(c1, c3, level), size),
        row("gradient_sq_norm", stats.jackknife(*stats.mean_gradient_sq_norm(groups, estimate_sq_norm), level), size),
        row("score_reward_correlation", stats.score_reward_correlation(pool.sq_norms, pool.rewards, level), size),
    ]
    rows += [row(name, stats.jackknife(*groups.left_out_means(x), level), size) for name, x in means.items()]
    return rows


def prompt_value_rows(prompt_ids: list[str], rewards: Float[np.ndarray, "prompts pool"], level: float) -> list[Row]:
    """The value V(x) of each prompt with the interval of its completions (Wilson's for binary rewards)."""
    binary = bool(np.isin(rewards, (0.0, 1.0)).all())
    return [
        row(
            "value",
            stats.wilson(z.sum(), len(z), level) if binary else stats.mean_interval(z, level),
            len(z),
            prompt_id=name,
        )
        for name, z in zip(prompt_ids, rewards, strict=True)
    ]


def baseline_error_rows(config: dict[str, Any], pool: ustat.Pool) -> list[Row]:
    """What the estimated baselines of the Monte Carlo method add to the error of `oracle` and `optimal`, on average.

    With b_hat from K separate completions, E||W||^2 (Z - b_hat)^2 = E||W||^2 (Z - b)^2 + F (b_hat - b)^2 -
    2 (b_hat - b) E||W||^2 (Z - b). Averaged over pools this adds F sigma^2 / K for V, exactly; one pool may add less or
    even take away. For b* the last term is zero, and F Var(b_hat) is estimated, approximately, by the jackknife of the
    ratio. The interval of the first is over completions; the second has none.
    """
    terms, left_out = ustat.components(pool)
    prompts, size = pool.rewards.shape
    fallback = np.repeat(pool.rewards.mean(-1, keepdims=True), size, -1)
    norms, weighted = pool.sq_norms, pool.sq_norms * pool.rewards
    left = norms.sum(-1, keepdims=True) - norms
    ratio = np.divide(weighted.sum(-1, keepdims=True) - weighted, left, out=fallback, where=left > 0)
    known = stats.fixed_set_mean(
        (terms.second_order - terms.gradient_sq_norm) / size,
        ustat.pool_variance((left_out.second_order - left_out.gradient_sq_norm) / size),
        config["confidence"], scale=1 / prompts,
    )  # fmt: skip
    unknown = float(np.mean(terms.score_sq_norm * ustat.pool_variance(ratio))) / prompts
    excess = {"oracle": known, "optimal": Interval(unknown, np.nan, np.nan)}
    return [
        row(
            "baseline_error_mse", Interval(x.value / group, x.low / group, x.high / group), size,
            estimator=name, group_size=group,
        )
        for name, x in excess.items() if name in config["estimators"]
        for group in config["group_sizes"]
    ]  # fmt: skip


def replicate_mse(estimates: Float[np.ndarray, "replicates dim"], confidence: float) -> Interval:
    """The paper's Monte Carlo: mean squared distance of R independent estimates from their mean, unbiased.

    MSE = (1/(R-1)) sum_r ||g_r - mean||^2 (the estimators are unbiased, so their error is their variance). The interval
    is the jackknife's over replicates, with Student's t; nothing is known of the spread from two replicates.
    """
    count = len(estimates)
    mean = estimates.mean(0, dtype=np.float64)
    distances = np.array([((estimate - mean) ** 2).sum() for estimate in estimates])  # one at a time: d may be large
    value = float(distances.sum() / (count - 1))
    if count < 3:
        return Interval(value, -np.inf, np.inf)
    left_out = (distances.sum() - distances * count / (count - 1)) / (count - 2)
    return stats.jackknife(value, left_out, confidence)


def summary_tables(rows: pd.DataFrame) -> Any:
    """The tables that `grpo mse-eval` prints: error by estimator and G, then one line for each policy."""
    from rich.console import Group

    rows = rows.sort_values(["model", "seed", "method"], kind="stable")  # parallel jobs finish in any order
    policies = _policy_table(rows)
    return Group(_mse_table(rows), *([policies] if policies.row_count else []))


def _number(record: pd.Series) -> str:
    half = (record["ci_high"] - record["ci_low"]) / 2
    if np.isnan(half) and np.isnan(record["ci_low"]):
        return f"{record['value']:.3g} [undefined]"
    if not np.isfinite(half) or (record["metric"] == "optimal_group_size" and half > 0):  # not symmetric
        low, high = (f"{record[key]:.3g}" for key in ("ci_low", "ci_high"))
        return f"{record['value']:.3g} [{low}, {high}]"
    return f"{record['value']:.4g}" + (f" ± {half:.2g}" if half > 0 else "")


def _mse_table(rows: pd.DataFrame) -> Any:
    from rich.table import Table

    errors = rows[rows["metric"] == "mse"]
    names = list(dict.fromkeys(errors["estimator"]))
    table = Table(title="Mean squared error of the gradient (95% intervals unless configured otherwise)")
    for column in ("policy", "method", "G", *names):
        table.add_column(column, justify="left" if column in ("policy", "method") else "right")
    for (model, seed, method, group), part in errors.groupby(["model", "seed", "method", "group_size"], sort=False):
        shown = {record["estimator"]: _number(record) for _, record in part.iterrows()}
        label = f"{model} (seed {seed})" if rows["seed"].nunique() > 1 else str(model)
        table.add_row(label, str(method), str(group), *(shown.get(name, "") for name in names))
    return table


def _policy_table(rows: pd.DataFrame) -> Any:
    from rich.table import Table

    columns = {
        "value": "mean reward", "score_reward_correlation": "corr(‖W‖², Z | x)", "c1": "c1", "c2": "c2", "c3": "c3",
        "optimal_group_size": "G* = 1 + √(c3/c1)",
    }  # fmt: skip
    table = Table(
        title="Policies: mean reward (accuracy), Assumption 2 (0 where it holds) and the components behind the error"
    )
    for column in ("policy", "method", *columns.values()):
        table.add_column(column)
    overall = rows[rows["prompt_id"].isna() & rows["metric"].isin(columns) & (rows["method"] != "monte_carlo")]
    for (model, seed, method), part in overall.groupby(["model", "seed", "method"], sort=False):
        shown = {record["metric"]: _number(record) for _, record in part.iterrows()}
        label = f"{model} (seed {seed})" if rows["seed"].nunique() > 1 else str(model)
        table.add_row(label, str(method), *(shown.get(name, "") for name in columns))
    return table
