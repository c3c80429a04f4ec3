"""Figure `universality`: does the best group size move with n, N, schedule or pool of prompts?"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from grpo_repro.plots import style
from grpo_repro.plots.comparisons import Comparison, comparisons
from grpo_repro.plots.size_panel import REACH
from grpo_repro.plots.training_data import Choice, choices
from grpo_repro.plots.universality_text import describe
from grpo_repro.stats import Interval

AXES = {
    "n": "checkpoint $n$ (updates)",
    "N": "budget $N$ (completions per update)",
    "schedule": "schedule and learning rate",
    "pool": "pool of prompts",
}
SERIES: tuple[tuple[str, str, Any], ...] = (
    ("#0072B2", "o", "-"), ("#D55E00", "s", (0, (5.0, 1.5))), ("#009E73", "D", (0, (1.2, 1.2))),
    ("#CC79A7", "^", (0, (4.0, 1.5, 1.0, 1.5))), ("#000000", "v", (0, (2.5, 1.0))), ("#E69F00", "P", (0, (7.0, 2.0))),
)  # fmt: skip
"""Colour, marker and dashes of the series of a panel; they repeat after six."""
PREDICTED: dict[str, Any] = {"color": "0.45", "linewidth": 1.0, "linestyle": (0, (3.0, 1.5))}
SPREAD = 0.5
"""Part of the distance between neighbouring levels over which the series of a panel are spread."""
MAX_BLOCKS = 6
"""At most so many settings, and so many comparisons between settings, are drawn."""
LETTER = 0.066
"""Width of a letter of the tick labels in inches."""


@dataclass(frozen=True)
class Frame:
    """Axis of G of all panels: group sizes with a tick, and its ends."""

    sizes: tuple[int, ...]
    limits: tuple[float, float]


def draw(rows: pd.DataFrame) -> Figure:
    """Draw a line of panels (n, N) for each setting, and a panel for each set of settings that differ in one respect.

    Args:
        rows: Rows of the results schema.

    Returns:
        The figure; its label (`Figure.get_label`) is the caption.

    Raises:
        UserError: If there are no trained policies.
    """
    found = comparisons(choices(rows))
    lines, left_out = layout(found)
    with style.context():
        abreast = max(len(line) for line in lines)
        widest = max(len(block.panels) for line in lines for block in line)
        width = style.TEXT_WIDTH if max(abreast, widest) > 1 else 4.2
        handles = _legend(found)
        entries = max(1, int(width / 1.75))
        foot = 0.12 + 0.17 * -(-len(handles) // entries)
        height = 2.5 if len(lines) <= 3 else 2.05
        figure = style.new_figure(width, height * len(lines) + foot)
        parts = figure.subfigures(len(lines) + 1, 1, height_ratios=[height] * len(lines) + [foot], squeeze=False)[:, 0]
        frame = _frame(found)
        for part, line in zip(parts, lines, strict=False):
            for block, spot in zip(line, part.subfigures(1, len(line), squeeze=False)[0], strict=True):
                _draw_block(block, spot, frame, width / len(line))
        parts[-1].legend(handles=handles, loc="center", ncols=entries, columnspacing=1.4)
    figure.set_label(describe(found, left_out))
    return figure


@dataclass(frozen=True)
class Block:
    """Panels under one title; each panel holds the series of one aspect."""

    title: str
    panels: list[list[Comparison]]

    @property
    def runs(self) -> int:
        """Largest number of runs of any choice."""
        return max(len(choice.table) for panel in self.panels for one in panel for choice in one.choices)


def layout(found: list[Comparison]) -> tuple[list[list[Block]], list[str]]:
    """Put comparisons into lines of blocks; those of most runs are kept if there are too many.

    Returns:
        Lines: a setting each, then two comparisons between settings each; and the titles that found no room.
    """
    grouped: dict[str, dict[str, dict[str, list[Comparison]]]] = {"setting": {}, "between": {}}
    for one in found:
        kind = "setting" if one.aspect in ("n", "N") else "between"
        grouped[kind].setdefault(one.title, {}).setdefault(one.aspect, []).append(one)
    settings = [Block(title, list(panels.values())) for title, panels in grouped["setting"].items()]
    between = [Block(title, [panel]) for title, panels in grouped["between"].items() for panel in panels.values()]
    kept, lost = _most_runs(settings)
    pairs, further = _most_runs(between)
    lines = [[block] for block in kept] + [pairs[place : place + 2] for place in range(0, len(pairs), 2)]
    return lines, [block.title for block in lost + further]


def _most_runs(blocks: list[Block]) -> tuple[list[Block], list[Block]]:
    order = sorted(range(len(blocks)), key=lambda place: -blocks[place].runs)
    kept = set(order[:MAX_BLOCKS])
    return (
        [block for place, block in enumerate(blocks) if place in kept],
        [block for place, block in enumerate(blocks) if place not in kept],
    )


def _draw_block(block: Block, part: SubFigure, frame: Frame, width: float) -> None:
    part.suptitle(textwrap.fill(block.title, int(15 * width)), fontsize=8.5, linespacing=1.2)
    levels = [_levels(panel) for panel in block.panels]
    ratios = [max(3, len(labels)) for labels in levels]
    axes = part.subplots(1, len(block.panels), squeeze=False, width_ratios=ratios)[0]
    for ax, panel, labels, ratio in zip(axes, block.panels, levels, ratios, strict=True):
        inches = 0.85 * width * ratio / sum(ratios) / len(labels)
        _draw_panel(panel, ax, frame, labels, max(5, int(inches / LETTER)))
    axes[0].set_ylabel("group size $G$")


def _levels(panel: list[Comparison]) -> list[str]:
    levels = list(dict.fromkeys(level for one in panel for level in one.levels))
    return sorted(levels, key=int) if panel[0].aspect in ("n", "N") else levels


def _frame(found: list[Comparison]) -> Frame:
    """Axis of G: group sizes, and predictions unless they are far off."""
    every = [choice for one in found for choice in one.choices]
    sizes = sorted({size for choice in every for size in choice.selection.group_sizes})
    low, high = float(sizes[0]), float(sizes[-1])
    for choice in every:
        for interval in (choice.predicted, choice.predicted_at_start):
            if interval is not None and np.isfinite(interval.value):
                low = min(low, max(interval.value, sizes[0] / REACH))
                high = max(high, min(interval.value, sizes[-1] * REACH))
    return Frame(tuple(sizes), (low / 1.35, high * 1.35))


def _draw_panel(series: list[Comparison], ax: Axes, frame: Frame, levels: list[str], letters: int) -> None:
    ax.set_yscale("log", base=2)
    ax.set_ylim(*frame.limits)
    ax.set_xlim(-0.6, len(levels) - 0.4)
    _initial(ax, series, frame.limits)
    for place, one in enumerate(series):
        shift = min(0.12, SPREAD / len(series)) * (place - (len(series) - 1) / 2)
        at = np.array([levels.index(level) + shift for level in one.levels])
        _series(ax, at, one, SERIES[place % len(SERIES)], frame.limits)
    ax.yaxis.set_major_locator(FixedLocator([float(size) for size in frame.sizes]))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_xticks(range(len(levels)), [textwrap.fill(level, letters) for level in levels])
    ax.set_xlabel(AXES[series[0].aspect])
    handles = [
        Line2D([], [], color=color, marker=marker, linestyle=dashes, linewidth=0.8, label=_math(one.series))
        for one, (color, marker, dashes) in zip(series, SERIES * (1 + len(series) // len(SERIES)), strict=False)
    ]
    ncols = max(1, min(len(series), int(letters * len(levels) / (len(series[0].series) + 8))))
    ax.legend(
        handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=1.8, ncols=ncols,
        fontsize=style.SMALL, borderaxespad=0.2, columnspacing=1.0,
    )  # fmt: skip


def _math(series: str) -> str:
    return series.replace("N =", "$N$ =").replace("n =", "$n$ =")


def _series(ax: Axes, at: np.ndarray, one: Comparison, look: tuple[str, str, Any], limits: tuple[float, float]) -> None:
    color, marker, dashes = look
    chosen = [choice.selection for choice in one.choices]
    best = [selection.best for selection in chosen]
    lows, highs = ([float(getattr(s, key)) for s in chosen] for key in ("best_low", "best_high"))
    ax.vlines(at, lows, highs, color=color, linewidth=1.6, zorder=4, gid=f"interval {one.series}")
    ax.plot(at, best, color=color, linewidth=0.7, linestyle=dashes, zorder=3)
    x, y = [], []
    for place, selection in zip(at, chosen, strict=True):
        others = [size for size in selection.indistinguishable if size != selection.best]
        x += [place] * len(others)
        y += others
    ax.plot(
        x, y, linestyle="", marker=marker, markersize=3.2, markerfacecolor="white", markeredgecolor=color,
        markeredgewidth=0.8, zorder=5, gid=f"equal {one.series}",
    )  # fmt: skip
    ax.plot(
        at, best, linestyle="", marker=marker, markersize=6.0, color=color, markeredgecolor="white",
        markeredgewidth=0.5, zorder=6, gid=f"best {one.series}",
    )  # fmt: skip
    known = [(place, c.predicted) for place, c in zip(at, one.choices, strict=True) if c.predicted is not None]
    if known:
        _predicted(ax, known, one.series, limits)


def _predicted(ax: Axes, known: list[tuple[float, Interval]], name: str, limits: tuple[float, float]) -> None:
    x = [place for place, _ in known]
    y = np.array([interval.value for _, interval in known])
    low, high = (np.array([getattr(interval, key) for _, interval in known]) for key in ("low", "high"))
    ax.plot(
        x, np.clip(y, *limits), **PREDICTED, marker="x", markersize=4.0, zorder=2.5, clip_on=False,
        gid=f"predicted {name}",
    )  # fmt: skip
    ax.vlines(x, np.clip(low, *limits), np.clip(high, *limits), color=PREDICTED["color"], linewidth=0.7, zorder=2.4)


def _initial(ax: Axes, series: list[Comparison], limits: tuple[float, float]) -> None:
    """G* of the initial policy: one for all levels of n, N and schedule."""
    found = [c.predicted_at_start for one in series for c in one.choices if c.predicted_at_start is not None]
    if not found:
        return
    value, low, high = (float(np.median([getattr(each, key) for each in found])) for key in ("value", "low", "high"))
    ax.axhline(min(max(value, limits[0]), limits[1]), color="0.45", linewidth=1.2, linestyle=":", zorder=1.5,
               gid="predicted initial")  # fmt: skip
    low, high = max(low, limits[0]), min(high, limits[1])
    if low < high:
        ax.axhspan(low, high, color="0.45", alpha=0.13, linewidth=0, zorder=0.5, gid="band initial")


def _legend(found: list[Comparison]) -> list[Line2D]:
    every: list[Choice] = [choice for one in found for choice in one.choices]
    level = f"{every[0].selection.confidence:.0%}"
    dark: dict[str, Any] = {"color": "0.25", "linestyle": ""}
    handles = [
        Line2D([], [], marker="o", markersize=6.0, markeredgecolor="white", **dark, label="best $G$"),
        Line2D([], [], color="0.25", linewidth=1.6, label=f"its {level} bootstrap interval"),
    ]
    if any(len(choice.selection.indistinguishable) > 1 for choice in every):
        handles.append(Line2D([], [], marker="o", markersize=3.2, mfc="white", **dark, label="not told from it"))
    if any(choice.predicted is not None for choice in every):
        handles.append(Line2D([], [], **PREDICTED, marker="x", label="predicted $G^*$ at that $n$"))
    if any(choice.predicted_at_start is not None for choice in every):
        handles.append(
            Line2D([], [], color="0.45", linewidth=1.2, linestyle=":", label="predicted $G^*$, initial policy")
        )
    return handles
