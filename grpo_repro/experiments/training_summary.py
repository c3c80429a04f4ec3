"""What a training command prints: results at each n, N and G, the best G, and whether it moves."""

from __future__ import annotations

from typing import Any

import pandas as pd

from grpo_repro.errors import UserError

SHOWN = {"value": "J (train)", "suboptimality_gap": "gap", "accuracy": "test accuracy", "greedy_accuracy": "greedy"}


def tables(rows: pd.DataFrame) -> Any:
    """The tables and sentences of training rows.

    Args:
        rows: Rows of one command's cells.

    Returns:
        Something that rich prints.
    """
    from rich.console import Group

    parts = [_means(rows)]
    if rows["group_size"].nunique() > 1:
        from grpo_repro.plots.comparisons import universality
        from grpo_repro.plots.training_data import choices

        try:
            parts += [_choices(choices(rows)), *(shift.sentence for shift in universality(rows))]
        except UserError as error:
            parts.append(str(error))
    return Group(*parts)


def _means(rows: pd.DataFrame) -> Any:
    from rich.table import Table

    rows = rows[rows["metric"].isin(SHOWN)]
    if rows["group_size"].nunique() > 1:  # a sweep has too many lines for all n
        rows = rows[rows["iteration"] == rows["iteration"].max()]
    names = [name for name in SHOWN if name in set(rows["metric"])]
    table = Table(title="Means over runs, ± standard error over runs where there are several")
    for column in ("policy", "N", "G", "n", "runs", *(SHOWN[name] for name in names)):
        table.add_column(column, justify="left" if column == "policy" else "right")
    keys = ["model", "method", "estimator", "budget", "group_size", "iteration"]
    for (model, _, _, budget, group, iteration), part in rows.groupby(keys, sort=True):
        by_name = {name: values["value"] for name, values in part.groupby("metric")}
        runs = max(len(values) for values in by_name.values())
        cells = [_cell(by_name[name]) if name in by_name else "" for name in names]
        table.add_row(str(model), str(budget), str(group), str(iteration), str(runs), *cells)
    return table


def _cell(values: pd.Series) -> str:
    mean = float(values.mean())
    return f"{mean:.4f}" + (f" ± {float(values.std()) / len(values) ** 0.5:.4f}" if len(values) > 1 else "")


def _choices(found: list[Any]) -> Any:
    from rich.table import Table

    table = Table(title="The best G by the suboptimality gap; 'may be best' holds the truly best G at the stated level")
    columns = ("policy", "N", "n", "runs", "best G", "bootstrap interval", "may be best", "predicted G*")
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for choice in found:
        picked, star = choice.selection, choice.predicted or choice.predicted_at_start
        table.add_row(
            choice.setting.model, str(choice.budget), str(choice.iteration), str(picked.runs), str(picked.best),
            f"{picked.best_low} to {picked.best_high}", ", ".join(map(str, picked.indistinguishable)),
            "" if star is None else f"{star.value:.2f} [{star.low:.2f}, {star.high:.2f}]",
        )  # fmt: skip
    return table
