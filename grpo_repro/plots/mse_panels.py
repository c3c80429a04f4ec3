"""From rows of the MSE experiment to the panels of its figure: which runs belong together, seeds combined.

A panel is one policy on one set of questions. Runs of one policy that differ (questions, K, replicates, ...)
get panels of their own, named by what differs. Rows do not hold every setting (not the temperature, say): two
cells that agree in all that rows hold, method and seed too, are different runs, told apart by their id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from grpo_repro.config import BUNDLED_MODELS
from grpo_repro.errors import UserError
from grpo_repro.plots.style import ESTIMATORS
from grpo_repro.stats import Interval

METHODS = ("components", "exact", "monte_carlo")
METHOD_NAMES = {"components": "pools", "exact": "exact", "monte_carlo": "Monte Carlo"}
FACTS = ("value", "score_reward_correlation", "c1", "c2", "c3", "optimal_group_size")
"""What a panel says of its policy besides the errors."""


@dataclass(frozen=True)
class Panel:
    """What one panel shows.

    Attributes:
        model: Name of the policy.
        task: Name of the task.
        questions: Number of questions.
        level: Level of the intervals.
        rows: The rows it is made of.
        errors: Seeds combined: `method, estimator, group_size, value, ci_low, ci_high`.
        facts: Metric of `FACTS` -> estimate, seeds combined; from `exact` where there is one.
        settings: What else the rows say of the run, such as `pool` and `replicates`.
        label: What tells it from the other panels; empty if the policy's name does.
    """

    model: str
    task: str
    questions: int
    level: float
    rows: pd.DataFrame
    errors: pd.DataFrame
    facts: dict[str, Interval]
    settings: dict[str, str]
    label: str = ""

    @property
    def methods(self) -> list[str]:
        """Methods whose errors it shows."""
        return [name for name in METHODS if (self.errors["method"] == name).any()]

    def seeds(self, method: str) -> int:
        """Number of seeds of a method."""
        return int(self.rows.loc[self.rows["method"] == method, "seed"].nunique())


@dataclass(frozen=True)
class _Run:
    """Cells of one or several methods that go together; None where its rows do not say."""

    rows: pd.DataFrame
    pool: int | None
    replicates: int | None
    groups: frozenset[int]
    estimators: frozenset[str]
    cell: str | None = None

    def fits(self, other: _Run) -> bool:
        """Whether all that both know agrees (a method may cover fewer group sizes or estimators)."""
        return (
            self.cell is None and other.cell is None
            and (self.pool == other.pool or None in (self.pool, other.pool))
            and (self.groups <= other.groups or self.groups >= other.groups)
            and (self.estimators <= other.estimators or self.estimators >= other.estimators)
        )  # fmt: skip

    def join(self, other: _Run) -> _Run:
        return _Run(
            pd.concat([self.rows, other.rows]), self.pool or other.pool, self.replicates or other.replicates,
            self.groups | other.groups, self.estimators | other.estimators,
        )  # fmt: skip

    def settings(self) -> dict[str, str]:
        known = {
            "pool": f"K = {self.pool}" if self.pool else "",
            "replicates": f"R = {self.replicates}" if self.replicates else "",
            "group sizes": "G = " + ", ".join(str(size) for size in sorted(self.groups)),
            "estimators": ", ".join(name for name in ESTIMATORS if name in self.estimators),
            "methods": " and ".join(METHOD_NAMES[m] for m in METHODS if (self.rows["method"] == m).any()),
            "run": f"run {self.cell}" if self.cell else "",
        }
        return {name: text for name, text in known.items() if text}


def panels(rows: pd.DataFrame) -> list[Panel]:
    """Split rows of results into panels, the bundled policies first.

    Args:
        rows: Rows of the results schema, of any experiments.

    Returns:
        Panels; each row of the experiment's errors is in at least one.

    Raises:
        UserError: If there is no row of the MSE.
    """
    rows = rows[rows["experiment"] == "mse-eval"]
    if not (rows["metric"] == "mse").any():
        raise UserError("no mean squared errors in these results; run `grpo mse-eval` first")
    found = [
        _panel(run)
        for _, part in rows.groupby(["model", "task", "num_prompts", "ci_level"], sort=False)
        for run in _runs(part)
    ]
    if not found:
        raise UserError(
            "the rows of the mean squared error lack model, task, num_prompts or ci_level; measure them again"
        )

    def place(panel: Panel) -> tuple[int, str, str, int, tuple[str, ...]]:
        names = [*BUNDLED_MODELS, panel.model]
        settings = tuple(panel.settings.values())
        return names.index(panel.model), panel.model, panel.task, panel.questions, settings

    return _labelled(sorted(found, key=place))


def _runs(rows: pd.DataFrame) -> list[_Run]:
    """Join the methods' cells that agree; what fits nothing stands alone."""
    runs: list[_Run] = []
    for method in METHODS:
        found = _variants(rows[rows["method"] == method])
        joined = [run.join(other) for run in runs for other in found if run.fits(other)]
        alone = [run for run in runs if not any(run.fits(other) for other in found)]
        runs = joined + alone + [other for other in found if not any(run.fits(other) for run in runs)]
    return runs


def _variants(rows: pd.DataFrame) -> list[_Run]:
    """Cells of one method: seeds of equal settings together, equal settings and seed apart."""
    alike: dict[tuple[object, ...], list[_Run]] = {}
    for _, cell in rows.groupby("cell_id", sort=False):
        run = _cell_run(cell)
        if run is not None:
            key = (run.pool, run.replicates, run.groups, run.estimators)
            alike.setdefault(key, []).append(run)
    runs = []
    for cells in alike.values():
        seeds = [cell.rows["seed"].iloc[0] for cell in cells]
        if len(set(seeds)) < len(seeds):
            runs += [replace(cell, cell=str(cell.rows["cell_id"].iloc[0])[:6]) for cell in cells]
        else:
            runs.append(replace(cells[0], rows=pd.concat([cell.rows for cell in cells])))
    return runs


def _cell_run(cell: pd.DataFrame) -> _Run | None:
    errors = cell[cell["metric"] == "mse"]
    if errors.empty:
        return None
    method, count = errors["method"].iloc[0], int(errors["count"].max())
    baseline = cell.loc[cell["metric"] == "baseline_error_mse", "count"]
    pool = count if method == "components" else (int(baseline.max()) if len(baseline) else None)
    return _Run(
        cell, pool if method != "exact" else None, count if method == "monte_carlo" else None,
        frozenset(int(size) for size in errors["group_size"]), frozenset(errors["estimator"]),
    )  # fmt: skip


def _panel(run: _Run) -> Panel:
    rows, first = run.rows, run.rows.iloc[0]
    errors = rows[rows["metric"] == "mse"]
    keys = ["method", "estimator", "group_size"]
    combined = [
        dict(zip(keys, key, strict=True)) | _columns(independent_mean(part))
        for key, part in errors.groupby(keys, sort=True)
    ]
    facts = {}
    overall = rows[rows["prompt_id"].isna() & (rows["method"] != "monte_carlo")]
    for name in FACTS:
        found = overall[overall["metric"] == name]
        known = found[found["method"] == "exact"]
        found = found if known.empty else known
        if not found.empty:
            facts[name] = same_questions_mean(found)
    return Panel(
        str(first["model"]), str(first["task"]), int(first["num_prompts"]), float(first["ci_level"]),
        rows, pd.DataFrame(combined), facts, run.settings(),
    )  # fmt: skip


def _columns(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "ci_low": interval.low, "ci_high": interval.high}


def independent_mean(rows: pd.DataFrame) -> Interval:
    """Mean over seeds of errors whose intervals come from the completions, which seeds draw independently.

    Half-widths add as squares: low = mean - sqrt(sum_s (value_s - low_s)^2)/S, and so the upper end.
    """
    value, low, high = (rows[key].to_numpy(dtype=float) for key in ("value", "ci_low", "ci_high"))
    if len(value) == 1:
        return Interval(float(value[0]), float(low[0]), float(high[0]))
    mean = float(value.mean())
    down, up = (float(np.sqrt(np.sum(side**2))) / len(value) for side in (value - low, high - value))
    return Interval(mean, mean - down, mean + up)


def same_questions_mean(rows: pd.DataFrame) -> Interval:
    """Mean over seeds of the estimate and of both ends.

    These intervals come from the questions, which all seeds share: more seeds do not make them narrower.
    """
    return Interval(*(float(rows[key].mean()) for key in ("value", "ci_low", "ci_high")))


def _setting(key: str) -> Callable[[Panel], str]:
    return lambda panel: panel.settings.get(key, "")


def _labelled(found: list[Panel]) -> list[Panel]:
    """Name each panel by what tells it from the others of its policy, and by its task if tasks differ."""
    several_tasks = len({panel.task for panel in found}) > 1
    fields: list[Callable[[Panel], str]] = [
        lambda panel: panel.task,
        lambda panel: f"{panel.questions} questions",
        lambda panel: f"{panel.level:.0%} intervals",
    ]
    for key in ("pool", "replicates", "group sizes", "estimators", "methods", "run"):
        fields.append(_setting(key))
    labelled = []
    for panel in found:
        twins = [other for other in found if other.model == panel.model]
        parts = [field(panel) for field in fields if len({field(other) for other in twins} - {""}) > 1]
        if several_tasks and panel.task not in parts:
            parts.insert(0, panel.task)
        labelled.append(replace(panel, label="; ".join(part for part in parts if part)))
    return labelled
