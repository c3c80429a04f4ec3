"""From rows of training runs to choices of the best group size, and to tests of whether it moves.

A *setting* is (model, task, estimator, method): what was trained and how. At one setting, N and n, runs differ in G
and in (seed, replicate) only, so their results form a table runs x group sizes, from which `selection` picks the
best G. Settings that differ in a single respect (schedule, pool of prompts) are compared with one another.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from jaxtyping import Float

from grpo_repro import selection
from grpo_repro.errors import UserError
from grpo_repro.experiments import variant
from grpo_repro.results import ResultsWarning
from grpo_repro.run_tables import run_table
from grpo_repro.selection import Selection
from grpo_repro.stats import Interval

EXPERIMENTS = ("group-size", "budget", "iterations")
"""Experiments whose runs are compared over G; `train` is a single run and is left out."""
OTHER_GRADIENTS = ("normalize", "minibatches", "kl_coefficient")
"""Options with which runs do not follow Algorithm 1's gradient of J; G*, of its error, says nothing of them."""

IDENTITY = ("cell_id", "iteration", "replicate", "metric")
"""Rows that agree in these are one number, which two experiments may both hold: equal ids are equal runs."""

NEEDED = ["model", "task", "estimator", "method", "budget", "group_size", "iteration", "seed"]
"""Columns without which a row belongs to no run."""

SIGN = {"suboptimality_gap": 1.0, "accuracy": -1.0, "greedy_accuracy": -1.0}
"""Metrics that a choice can be made by; those with -1 are better when larger."""


@dataclass(frozen=True)
class Setting:
    """What was trained and how: the columns of the same names."""

    model: str
    task: str
    estimator: str
    method: str

    @property
    def keys(self) -> dict[str, str]:
        """The method taken apart."""
        return variant.parse(self.method)

    def less(self, names: tuple[str, ...]) -> tuple[Hashable, ...]:
        """What is left of the setting without these keys: equal for settings that differ in them only."""
        rest = tuple(sorted((key, value) for key, value in self.keys.items() if key not in names))
        return self.model, self.task, self.estimator, rest


@dataclass(frozen=True, eq=False)
class Choice:
    """The best group size at one setting, N and n; compared by identity.

    Attributes:
        setting: What was trained and how.
        budget: N, completions per iteration.
        iteration: n, parameter updates.
        metric: What the choice is made by.
        table: Values of the metric, as measured.
        runs: (seed, replicate) of each run in the table.
        selection: The choice; its means are those of the metric, as measured.
        predicted: G* of the theory for the policies of this n, None where not measured.
        predicted_at_start: The same for the initial policy.
    """

    setting: Setting
    budget: int
    iteration: int
    metric: str
    table: Float[np.ndarray, "runs groups"]
    runs: tuple[tuple[int, int], ...]
    selection: Selection
    predicted: Interval | None
    predicted_at_start: Interval | None


def training_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of runs that are compared over G, each run once.

    Args:
        rows: Rows of the results schema, of any experiments.

    Raises:
        UserError: If there are none.
    """
    found = rows[rows["experiment"].isin(EXPERIMENTS)].drop_duplicates(list(IDENTITY))
    whole = found[NEEDED].notna().all(axis=1) & (found["group_size"] > 0).fillna(False)
    if not whole.all():
        warnings.warn(ResultsWarning(f"left out {(~whole).sum()} rows that name no run"), stacklevel=2)
        found = found[whole]
    if found.empty:
        raise UserError("no training runs in these results; run `grpo sweep group-size` first")
    return found


def choices(rows: pd.DataFrame, metric: str = "suboptimality_gap", confidence: float = 0.95) -> list[Choice]:
    """Choose the best G at each setting, N and checkpoint n > 0.

    Args:
        rows: Rows of the results schema.
        metric: `suboptimality_gap`, `accuracy` or `greedy_accuracy`.
        confidence: Level of all intervals.

    Returns:
        Settings in order of appearance, N and n ascending. Those whose runs form no table are left out with a warning.

    Raises:
        UserError: If no training run has this metric after an update, or none at every group size.
    """
    rows = training_rows(rows)
    measured = rows[(rows["metric"] == metric) & (rows["iteration"] > 0)]
    if measured.empty:
        raise UserError(
            f"no {metric} of trained policies in these results; "
            + ("tabular policies have none, draw `gap` instead" if SIGN[metric] < 0 else "run `grpo sweep group-size`")
        )
    predictions = rows[rows["metric"] == "optimal_group_size"]
    found, problems = [], []
    for key, own in measured.groupby(["model", "task", "estimator", "method"], sort=False):
        setting = Setting(*(str(part) for part in key))
        known = predictions[_is(predictions, setting)]
        if set(OTHER_GRADIENTS) & set(setting.keys):
            known = known[:0]
        for _, part in own.groupby(["budget", "iteration"], sort=True):
            budget, iteration = int(part["budget"].iloc[0]), int(part["iteration"].iloc[0])
            try:
                table, sizes = run_table(part)
            except UserError as error:
                problems.append(f"{setting.model} {setting.task} at N = {budget}, n = {iteration}: {error}")
                continue
            now = known[(known["budget"] == budget) & (known["iteration"] == iteration)]
            found.append(
                Choice(
                    setting, budget, iteration, metric, table, runs_of(part, sizes),
                    selected(table, sizes, metric, confidence),
                    predicted(now), predicted(known[known["iteration"] == 0]),
                )
            )  # fmt: skip
    if not found:
        raise UserError(problems[0])
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        warnings.warn(ResultsWarning(f"left out of figures by {metric}: {problems[0]}{more}"), stacklevel=2)
    return found


def runs_of(rows: pd.DataFrame, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(seed, replicate) of the rows of `run_tables.run_table`; replicate -1 stands for none.

    Args:
        rows: Rows of one metric at one setting, N and n.
        sizes: Group sizes of the table.
    """
    runs = rows.loc[rows["group_size"].isin(sizes), ["seed", "replicate"]].fillna({"replicate": -1})
    made = runs.value_counts().sort_index().rename("sizes").reset_index()
    made = made[made["sizes"] == len(sizes)]
    return tuple((int(seed), int(replicate)) for seed, replicate in made[["seed", "replicate"]].to_numpy())


def selected(
    table: Float[np.ndarray, "runs groups"], sizes: tuple[int, ...], metric: str, confidence: float
) -> Selection:
    """Choose the best G by a metric; the means returned are those of the metric itself, larger-is-better or not."""
    sign = SIGN[metric]
    chosen = selection.select(sign * table, sizes, confidence)
    if sign > 0:
        return chosen
    turned = tuple(Interval(0.0 - mean.value, 0.0 - mean.high, 0.0 - mean.low) for mean in chosen.means)
    return replace(chosen, means=turned)


def predicted(rows: pd.DataFrame) -> Interval | None:
    """Median of G* = 1 + sqrt(c3/c1) over group sizes and seeds, with the medians of both ends.

    An end that is not a number is not known: c3 does not differ from zero there, and G* may be anything from 1 on.
    """
    values = rows["value"].to_numpy(dtype=float)
    known = ~np.isnan(values)
    if not known.any():
        return None
    low, high = (rows[key].to_numpy(dtype=float)[known] for key in ("ci_low", "ci_high"))
    low, high = np.where(np.isnan(low), 1.0, low), np.where(np.isnan(high), np.inf, high)
    return Interval(*(float(np.median(part)) for part in (values[known], low, high)))


def predicted_sizes(star: Interval, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Group sizes of a grid that the theory names for a G* within its interval.

    At fixed N = B G the error is c1 G + c3/(G - 1) up to constants, and c3/c1 = (G* - 1)^2: so the best one of a grid
    minimises G + (G* - 1)^2 / (G - 1), and is the last one where G* is infinite.

    Args:
        star: G* with its interval.
        sizes: The grid, ascending, at least 2.
    """

    def best(value: float) -> int:
        if not np.isfinite(value):
            return len(sizes) - 1
        return int(np.argmin([size + (value - 1) ** 2 / (size - 1) for size in sizes]))

    return sizes[best(star.low) : best(star.high) + 1]


def agreement(choice: Choice) -> str:
    """Say whether the runs contradict the prediction at their n; empty where there is none.

    They do if no group size that the prediction names may be the best of training.
    """
    star = choice.predicted or choice.predicted_at_start
    sizes = choice.selection.group_sizes
    if star is None or np.isnan(star.value) or sizes[0] < 2:
        return ""
    named = predicted_sizes(star, sizes)
    apart = not set(named) & set(choice.selection.indistinguishable)
    return f"on this grid the prediction names G = {', '.join(map(str, named))}: " + (
        "the runs contradict it" if apart else "the runs do not contradict it"
    )


def _is(rows: pd.DataFrame, setting: Setting) -> pd.Series:
    same = pd.Series(True, index=rows.index)
    for name in ("model", "task", "estimator", "method"):
        same &= rows[name] == getattr(setting, name)
    return same
