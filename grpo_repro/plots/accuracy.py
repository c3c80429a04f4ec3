"""Figure `accuracy`, the form of the paper's Figure 5: test accuracy against the group size at each checkpoint."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from grpo_repro import paper
from grpo_repro.errors import UserError
from grpo_repro.plots import style
from grpo_repro.plots import training_names as names
from grpo_repro.plots.size_caption import caption_of
from grpo_repro.plots.size_grid import Grid, draw_grid, grid
from grpo_repro.plots.training_data import Choice, choices

WHAT = "Accuracy of sampled completions on the test questions; larger is better."
GREEDY = "Crosses: mean accuracy of greedy decoding, without interval."


def draw(rows: pd.DataFrame) -> Figure:
    """Draw a row of panels for each setting and N.

    Args:
        rows: Rows of the results schema.

    Returns:
        The figure; its label (`Figure.get_label`) is the caption.

    Raises:
        UserError: If there is no test accuracy of a trained policy.
    """
    shown, greedy = _found(rows)
    with style.context():
        figure = draw_grid(shown, "test accuracy", greedy, "greedy decoding (mean)")
    figure.set_label(_caption(shown, greedy))
    return figure


def _found(rows: pd.DataFrame) -> tuple[Grid, dict[Choice, dict[int, float]]]:
    """Rows of panels, and the mean greedy accuracy at each G of those that have one."""
    shown = grid(choices(rows, "accuracy"))
    try:
        greedy = {_place(choice): choice.selection for choice in choices(rows, "greedy_accuracy")}
    except UserError:
        greedy = {}
    means = {}
    for choice in (choice for row in shown.rows for choice in row):
        found = greedy.get(_place(choice))
        if found is not None:
            means[choice] = {size: mean.value for size, mean in zip(found.group_sizes, found.means, strict=True)}
    return shown, means


def _place(choice: Choice) -> tuple[object, ...]:
    return choice.setting, choice.budget, choice.iteration


def _caption(shown: Grid, greedy: dict[Choice, dict[int, float]]) -> str:
    return caption_of(shown, f"{WHAT} {GREEDY}" if greedy else WHAT, greedy) + f"\n{_published()}\n"


def _published() -> str:
    setting, (best,) = paper.FIGURE5, set(paper.FIGURE5_BEST.values())
    other = [n for n in setting.checkpoints if n not in paper.FIGURE5_BEST]
    return (
        f"The paper's Figure 5, for comparison: {setting.model}, {setting.task}, N = {setting.budgets[0]}, G = "
        f"{names.group_sizes(setting.group_sizes)}, {setting.runs} runs; the highest accuracy is at G = {best} for n = "
        f"{names.group_sizes(paper.FIGURE5_BEST)} and the last n, but not for n = {names.group_sizes(other)}. Its "
        "authors call most differences insignificant."
    )
