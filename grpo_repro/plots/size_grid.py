"""Rows of panels against G: one row for each setting and N, one panel for each checkpoint."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from grpo_repro.plots import size_panel, style
from grpo_repro.plots import training_names as names
from grpo_repro.plots.training_data import Choice

MAX_ROWS = 6
MAX_COLUMNS = 6
FLATTENED = 2.5
"""A row's panels share their axis of the metric if it is at most this many times as long as the longest alone."""
X_LABEL = "group size $G$ (completions per prompt)"
LIGHTER: dict[str, Any] = {
    "color": "#CC79A7",
    "linewidth": 0.9,
    "linestyle": (0, (1.0, 1.2)),
    "marker": "x",
    "markersize": 3.4,
}
"""A second metric in the same panel, without intervals."""


@dataclass(frozen=True)
class Grid:
    """Choices in rows.

    Attributes:
        rows: One list for each (setting, N), by n; at most `MAX_ROWS` of at most `MAX_COLUMNS`.
        titles: Name of each row.
        left_out: Rows that are not drawn.
        thinned: Whether checkpoints between the first and the last are not drawn.
    """

    rows: list[list[Choice]]
    titles: list[str]
    left_out: list[str]
    thinned: bool


def grid(found: list[Choice]) -> Grid:
    """Put choices in rows; those of most runs are kept if there are too many."""
    settings = list(dict.fromkeys(choice.setting for choice in found))
    rows: dict[str, list[Choice]] = {}
    for choice in found:
        rows.setdefault(names.title(choice.setting, settings, f"N = {choice.budget}"), []).append(choice)
    by_runs = sorted(rows, key=lambda name: -max(len(choice.table) for choice in rows[name]))
    kept = [name for name in rows if name in by_runs[:MAX_ROWS]]
    drawn = []
    for name in kept:
        places = np.linspace(0, len(rows[name]) - 1, min(len(rows[name]), MAX_COLUMNS)).round().astype(int)
        drawn.append([rows[name][place] for place in places])
    thinned = any(len(rows[name]) > MAX_COLUMNS for name in kept)
    return Grid(drawn, kept, [name for name in rows if name not in kept], thinned)


def draw_grid(
    shown: Grid, y_label: str, lighter: dict[Choice, dict[int, float]] | None = None, lighter_label: str = ""
) -> Figure:
    """Draw the rows.

    Args:
        shown: What to draw.
        y_label: Name of the metric.
        lighter: A second metric: choice -> its mean at each G.
        lighter_label: Its name.

    Returns:
        The figure, without caption.
    """
    lighter = lighter or {}
    every = [choice for row in shown.rows for choice in row]
    columns = max(len(row) for row in shown.rows)
    # Many rows of few panels stand two abreast.
    abreast = 2 if columns <= 2 and len(shown.rows) > 3 else 1
    lines = -(-len(shown.rows) // abreast)
    width = {1: 4.2, 2: 5.4, 3: 6.4, 4: style.TEXT_WIDTH}.get(columns * abreast, 1.75 * columns)
    titles = [textwrap.fill(title, int(15 * width / abreast)) for title in shown.titles]
    title_lines = max(title.count("\n") + 1 for title in titles)
    height = (1.95 if lines <= 3 else 1.6) + 0.14 * title_lines
    handles = size_panel.legend(every)
    if any(lighter.values()):
        handles.append(Line2D([], [], **LIGHTER, label=lighter_label))
    entries = max(1, int(width / 1.95))
    foot = 0.32 + 0.17 * -(-len(handles) // entries)
    figure = style.new_figure(width, height * lines + foot)
    body, last = figure.subfigures(2, 1, height_ratios=[height * lines, foot], squeeze=False)[:, 0]
    parts = body.subfigures(lines, abreast, squeeze=False)
    for place, part in enumerate(parts.flat):
        if place < len(shown.rows):
            part.suptitle(titles[place], fontsize=8.5, linespacing=1.2)
            axes = part.subplots(1, columns, squeeze=False)[0]
            _draw_row(shown.rows[place], every, list(axes), y_label if place % abreast == 0 else "", lighter)
    last.suptitle(X_LABEL, fontsize=8.5)
    last.legend(handles=handles, loc="lower center", ncols=entries, columnspacing=1.4)
    return figure


def _draw_row(
    row: list[Choice], every: list[Choice], axes: list[Axes], y_label: str, lighter: dict[Choice, dict[int, float]]
) -> None:
    """Draw one row of panels; they share their axis unless that would flatten every one of them."""

    def frame(part: list[Choice]) -> size_panel.Frame:
        extra = [value for choice in part for value in lighter.get(choice, {}).values()]
        return size_panel.frame(part, every, np.array(extra), may_be_log=row[0].metric == "suboptimality_gap")

    common, own = frame(row), [frame([choice]) for choice in row]
    spans = [one.span for one in own if one.log == common.log]
    shared = bool(spans) and common.span <= FLATTENED * max(spans)
    for place, ax in enumerate(axes):
        if place >= len(row):
            ax.set_axis_off()
            continue
        size_panel.draw_panel(row[place], ax, common if shared else own[place])
        if lighter.get(row[place]):
            values = lighter[row[place]]
            ax.plot(list(values), list(values.values()), **LIGHTER, zorder=2.5, gid="lighter")
        ax.set_title(f"$n$ = {row[place].iteration}", fontsize=8.0)
        if place and shared:
            ax.tick_params(labelleft=False, which="both")
    axes[0].set_ylabel(y_label)
