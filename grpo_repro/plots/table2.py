"""Figure `table2`: final accuracy for each budget N and group size G, beside the paper's Table 2."""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from grpo_repro.plots import style
from grpo_repro.plots import training_names as names
from grpo_repro.plots.table2_data import Table, tables
from grpo_repro.plots.table2_text import decimals, describe, error

DARKEST = 0.55
"""Part of the colour map that is used: black text stays readable on it, in print too."""
CELL = (0.5, 0.5)
"""Width and height of a cell in inches."""


def draw(rows: pd.DataFrame) -> Figure:
    """Draw one table for each setting, and the paper's.

    Args:
        rows: Rows of the results schema.

    Returns:
        The figure; its label (`Figure.get_label`) is the caption.

    Raises:
        UserError: If there are no trained policies.
    """
    found = tables(rows)
    with style.context():
        columns = min(2, len(found))
        # A column of tables is as wide as its widest needs; a title needs some width too.
        ratios = [max(4, *(len(table.group_sizes) for table in found[place::columns])) for place in range(columns)]
        width = CELL[0] * sum(ratios) + 0.75 * columns
        lines = [found[place : place + columns] for place in range(0, len(found), columns)]
        heights = [CELL[1] * max(len(table.lines) for table in line) + 0.85 for line in lines]
        figure = style.new_figure(width, sum(heights) + 0.4)
        grid = figure.subplots(len(lines), columns, squeeze=False, height_ratios=heights, width_ratios=ratios)
        for place, ax in enumerate(grid.flat):
            if place >= len(found):
                ax.remove()
                continue
            _draw_table(
                found[place], ax, textwrap.fill(found[place].title, int(16 * CELL[0] * ratios[place % columns]))
            )
        figure.legend(handles=_legend(found), loc="outside lower center", ncols=3, columnspacing=1.6)
    figure.set_label(describe(found))
    return figure


def _draw_table(table: Table, ax: Axes, title: str) -> None:
    sizes, digits = table.group_sizes, decimals(table)
    scale = 1000.0 if digits > 5 else 1.0  # small gaps: thousandths, so that a number fits into its cell
    if scale > 1:
        digits, title = digits - 3, f"{title}\n(in thousandths)"
    values = np.full((len(table.lines), len(sizes)), np.nan)
    for row, line in enumerate(table.lines):
        for size, mean in zip(line.selection.group_sizes, line.selection.means, strict=True):
            values[row, sizes.index(size)] = mean.value
    goodness = values if table.metric == "accuracy" else -values
    low, high = np.nanmin(goodness), np.nanmax(goodness)
    span = max(high - low, 1e-12)
    ax.imshow(goodness, cmap="Blues", vmin=low, vmax=low + span / DARKEST, aspect="auto", gid="values")
    for row, line in enumerate(table.lines):
        chosen = line.selection
        for place, size in enumerate(chosen.group_sizes):
            column = sizes.index(size)
            text = f"{names.short(scale * chosen.means[place].value, digits)}"
            half = error(line, place, digits, scale)
            text += f"\n±{half}" if half != "none" else "\none run"
            if table.setting is not None:
                text += f"\n({line.runs})"
            ax.text(column, row, text, ha="center", va="center", fontsize=6.5, linespacing=1.15, gid="cell")
            if size == chosen.best:
                box = Rectangle((column - 0.47, row - 0.47), 0.94, 0.94, fill=False, edgecolor="black", linewidth=1.5)
                box.set_gid(f"best {line.budget}")
                ax.add_patch(box)
            elif size in chosen.indistinguishable:
                ax.plot(
                    column + 0.38, row - 0.37, marker="o", markersize=2.8, color="black", gid=f"equal {line.budget}"
                )
    ax.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    ax.set_yticks(range(len(table.lines)), [_line_name(line.budget, line.iteration) for line in table.lines])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("group size $G$")
    ax.set_title(title, fontsize=8.0)


def _line_name(budget: int, iteration: int | None) -> str:
    return f"$N$ = {budget}" + ("" if iteration is None else f"\n$n$ = {iteration}")


def _legend(found: list[Table]) -> list[Patch | Line2D]:
    metric = "accuracy" if found[0].metric == "accuracy" else "gap here, accuracy in the paper"
    return [
        Patch(fill=False, edgecolor="black", linewidth=1.5, label="best $G$ of the line"),
        Line2D([], [], linestyle="", marker="o", markersize=2.8, color="black", label="not told from it"),
        Patch(facecolor="#6baed6", label=f"darker: better ({metric})"),
    ]
