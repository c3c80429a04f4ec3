"""Figure `gap`: suboptimality gap against the group size, one panel for each checkpoint."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from grpo_repro.plots import style
from grpo_repro.plots.size_caption import caption_of
from grpo_repro.plots.size_grid import draw_grid, grid
from grpo_repro.plots.training_data import choices

LANGUAGE_MODELS = (
    "Suboptimality gap: on language models 1 minus the mean reward of sampled completions on the training questions; "
    "on tabular policies J* − J exactly."
)


def draw(rows: pd.DataFrame) -> Figure:
    """Draw a row of panels for each setting and N.

    Args:
        rows: Rows of the results schema.

    Returns:
        The figure; its label (`Figure.get_label`) is the caption.

    Raises:
        UserError: If there is no gap of a trained policy.
    """
    shown = grid(choices(rows, "suboptimality_gap"))
    with style.context():
        figure = draw_grid(shown, _label(rows))
    figure.set_label(caption_of(shown, LANGUAGE_MODELS))
    return figure


def _label(rows: pd.DataFrame) -> str:
    """A language model's best return is not known: its gap is that to a perfect one."""
    tabular = set(rows.loc[rows["metric"] == "suboptimality_gap", "task"]) == {"bandit"}
    return "suboptimality gap\n" + ("$J^* - J$" if tabular else "$1 - J$")
