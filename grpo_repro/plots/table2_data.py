"""The tables N x G behind `table2`: final results here, one table for each setting, and the paper's Table 2."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from grpo_repro import paper
from grpo_repro.plots import training_names as names
from grpo_repro.plots.training_data import Choice, Setting, choices, training_rows
from grpo_repro.selection import Selection, binomial_selection
from grpo_repro.stats import Interval

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Line:
    """One budget.

    Attributes:
        budget: N.
        iteration: Last checkpoint n; None where the source does not state it.
        selection: Means and the best G.
        standard_error: Of each mean; nan for one run of ours.
        runs: Runs behind each mean.
    """

    budget: int
    iteration: int | None
    selection: Selection
    standard_error: tuple[float, ...]
    runs: int


@dataclass(frozen=True)
class Table:
    """Budgets by group sizes.

    Attributes:
        title: What was trained and how.
        metric: `accuracy` or `suboptimality_gap`.
        lines: By N.
        setting: None for the paper's.
    """

    title: str
    metric: str
    lines: tuple[Line, ...]
    setting: Setting | None

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Group sizes of any line."""
        return tuple(sorted({size for line in self.lines for size in line.selection.group_sizes}))


def tables(rows: pd.DataFrame) -> list[Table]:
    """Return one table for each setting, then the paper's.

    The metric is test accuracy; where no setting has one (tabular policies), the suboptimality gap.

    Args:
        rows: Rows of the results schema.

    Raises:
        UserError: If there are no trained policies.
    """
    metric = "accuracy" if (training_rows(rows)["metric"] == "accuracy").any() else "suboptimality_gap"
    found = choices(rows, metric, CONFIDENCE)
    settings = list(dict.fromkeys(choice.setting for choice in found))
    placed = []
    for setting in settings:
        last: dict[int, Choice] = {}
        for choice in found:
            if choice.setting == setting:
                # By n ascending: the last one stays.
                last[choice.budget] = choice
        lines = tuple(_line(last[budget]) for budget in sorted(last))
        placed.append(Table(names.title(setting, settings), metric, lines, setting))
    return [*placed, published()]


def published() -> Table:
    """Return the paper's Table 2, one run each: the only known error is that of the test questions."""
    setting, lines = paper.TABLE2, []
    for budget, accuracy in paper.TABLE2_ACCURACY.items():
        error = paper.binomial_standard_error(np.array(accuracy), setting.test_questions)
        chosen = binomial_selection(np.array(accuracy), setting.group_sizes, setting.test_questions, CONFIDENCE)
        # Its means are error rates.
        means = tuple(Interval(1 - mean.value, 1 - mean.high, 1 - mean.low) for mean in chosen.means)
        chosen = replace(chosen, means=means)
        lines.append(Line(budget, None, chosen, tuple(float(each) for each in error), setting.runs))
    return Table(f"the paper's Table 2: {setting.model}, {setting.task}", "accuracy", tuple(lines), None)


def _line(choice: Choice) -> Line:
    runs = len(choice.table)
    error = np.std(choice.table, axis=0, ddof=1) / np.sqrt(runs) if runs > 1 else np.full(choice.table.shape[1], np.nan)
    return Line(choice.budget, choice.iteration, choice.selection, tuple(float(each) for each in error), runs)
