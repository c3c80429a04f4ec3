"""Figure 4: mean squared error of each estimator against the group size, one panel for each policy."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from grpo_repro.errors import UserError
from grpo_repro.plots import style
from grpo_repro.plots.mse_caption import caption_of, number, percent
from grpo_repro.plots.mse_panels import Panel, panels

X_LABEL = "group size $G$ (completions per prompt)"
Y_LABEL = r"MSE  $\mathrm{E}\,\Vert\hat{g}-g\Vert^2$"
Y_UNIT = "(squared score norm, dimensionless)"
OFFSET = 2**0.11
"""Ratio of the horizontal places of neighbouring estimators' markers, so that they do not overlap."""
SHARED_RANGE = 1e4
"""Panels share their y axis unless the errors span more than this factor."""

Handle = Line2D | Patch | ErrorbarContainer


def draw(rows: pd.DataFrame) -> Figure:
    """Draw one panel for each policy in the results.

    Args:
        rows: Rows of the results schema.

    Returns:
        The figure; its label (`Figure.get_label`) is the caption.

    Raises:
        UserError: If there is nothing to draw.
    """
    found = panels(rows)
    with style.context():
        columns = {1: 1, 2: 2, 4: 2}.get(len(found), 3)
        lines = -(-len(found) // columns)
        width = {1: 3.6, 2: 5.2}.get(columns, style.TEXT_WIDTH)
        figure = style.new_figure(width, 2.4 * lines + (1.0 if columns == 1 else 0.7))
        grid = figure.subplots(lines, columns, squeeze=False)
        shared = _shares_axis(found)
        for place, ax in enumerate(grid.flat):
            if place >= len(found):
                ax.remove()
                continue
            _draw_panel(found[place], ax, _limits(found if shared else [found[place]]))
            if place % columns == 0:
                ax.set_ylabel(f"{Y_LABEL}\n{Y_UNIT}", linespacing=1.5)
            elif shared:
                ax.tick_params(labelleft=False, which="both")
            # Only the lowest axes of each column carry the label of x.
            if place >= len(found) - columns:
                ax.set_xlabel(X_LABEL if columns == 1 else X_LABEL.replace(" (", "\n("))
        ncols = {1: 2, 2: 3}.get(columns, 4)
        figure.legend(handles=_legend(found), loc="outside lower center", ncols=ncols, columnspacing=1.4)
    figure.set_label(caption_of(found))
    return figure


def plot_mse(rows: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw the panel of one policy.

    Args:
        rows: Rows of one policy and one set of questions.
        ax: Where; None makes a figure.

    Returns:
        The axes: log-log, one line for each estimator, bands and error bars at the rows' level.

    Raises:
        UserError: If there is nothing to draw, or more than one panel.
    """
    found = panels(rows)
    if len(found) != 1:
        names = ", ".join(panel.model + (f" ({panel.label})" if panel.label else "") for panel in found)
        raise UserError(f"rows hold {len(found)} panels: {names}; select one, or use plots.mse.draw for all")
    with style.context():
        if ax is None:
            ax = style.new_figure(3.6, 3.0).subplots()
        _draw_panel(found[0], ax, _limits(found))
        ax.set_xlabel(X_LABEL)
        ax.set_ylabel(f"{Y_LABEL}\n{Y_UNIT}", linespacing=1.5)
    return ax


def caption(rows: pd.DataFrame) -> str:
    """Return the caption of the figure: what is drawn, and each policy's numbers.

    Args:
        rows: Rows of the results schema.

    Raises:
        UserError: If there is nothing to draw.
    """
    return caption_of(panels(rows))


def _draw_panel(panel: Panel, ax: Axes, limits: tuple[float, float]) -> None:
    errors = panel.errors
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_ylim(*limits)
    names = [name for name in style.ESTIMATORS if (errors["estimator"] == name).any()]
    for unknown in set(errors["estimator"]) - set(names):
        style.estimator(str(unknown))
    line = "exact" if "exact" in panel.methods else "components"
    for place, name in enumerate(names):
        shift = OFFSET ** (place - (len(names) - 1) / 2)
        own = errors[errors["estimator"] == name]
        _band(ax, own[own["method"] == "components"], name)
        _curve(ax, own[own["method"] == line], name, shift)
        _points(ax, own[own["method"] == "monte_carlo"], name, shift)
    _slope(ax, errors)
    _ticks(ax, sorted({int(size) for size in errors["group_size"]}))
    ax.set_title(_title(panel), linespacing=1.25)
    ax.text(
        0.98, 0.98, _diagnostics(panel), transform=ax.transAxes, ha="right", va="top",
        fontsize=style.SMALL, linespacing=1.35, gid="diagnostics",
    )  # fmt: skip


def _band(ax: Axes, rows: pd.DataFrame, name: str) -> None:
    """Interval of the pools; an end at or below zero is drawn at the edge of the axis."""
    if rows.empty:
        return
    size, low, high = (rows[key].to_numpy(dtype=float) for key in ("group_size", "ci_low", "ci_high"))
    low, high = (_shown(end, ax.get_ylim()) for end in (low, high))
    color = style.estimator(name).color
    ax.fill_between(size, low, high, color=color, alpha=0.22, linewidth=0, gid=f"band {name}")


def _curve(ax: Axes, rows: pd.DataFrame, name: str, shift: float) -> None:
    if rows.empty:
        return
    look = style.estimator(name)
    size, value = (rows[key].to_numpy(dtype=float) for key in ("group_size", "value"))
    ax.plot(
        size, np.where(value > 0, value, np.nan), **look.curve(),
        marker=look.marker if len(size) == 1 else "", zorder=3 - look.width / 10, gid=f"line {name}",
    )  # fmt: skip
    _not_positive(ax, size * shift, value, name)


def _points(ax: Axes, rows: pd.DataFrame, name: str, shift: float) -> None:
    if rows.empty:
        return
    look = style.estimator(name)
    size, value, low, high = (rows[key].to_numpy(dtype=float) for key in ("group_size", "value", "ci_low", "ci_high"))
    place = size * shift
    drawn = value > 0
    low, high = (_shown(end, ax.get_ylim())[drawn] for end in (low, high))
    ax.vlines(place[drawn], low, high, color=look.color, linewidth=0.9, zorder=4, gid=f"bars {name}")
    ax.plot(place[drawn], value[drawn], linestyle="", **look.point(), zorder=5, gid=f"points {name}")
    _not_positive(ax, place, value, name)


def _not_positive(ax: Axes, place: np.ndarray, value: np.ndarray, name: str) -> None:
    """Mark estimates that a logarithmic axis cannot show by open triangles on its lower edge."""
    below = value <= 0
    if below.any():
        ax.plot(
            place[below], np.full(below.sum(), 0.03), transform=ax.get_xaxis_transform(), linestyle="",
            marker="v", markersize=4.5, markerfacecolor="white", markeredgecolor=style.estimator(name).color,
            zorder=6, gid=f"not positive {name}",
        )  # fmt: skip


def _shown(end: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Ends of intervals, those not on a logarithmic axis (not positive, infinite) moved to its edge."""
    return np.where(end <= 0, limits[0], np.where(np.isposinf(end), limits[1], end))


def _slope(ax: Axes, errors: pd.DataFrame) -> None:
    """Reference ``constant/G`` below all estimates."""
    size, positive = errors["group_size"].to_numpy(dtype=float), errors["value"] > 0
    if len(set(size)) < 2 or not positive.any():
        return
    ends = np.array([size.min(), size.max()])
    ax.plot(ends, _slope_constant(errors) / ends, **style.REFERENCE, zorder=1, gid="slope")


def _slope_constant(errors: pd.DataFrame) -> float:
    positive = errors[errors["value"] > 0]
    return 0.6 * float((positive["value"] * positive["group_size"].astype(float)).min())


def _limits(found: Iterable[Panel]) -> tuple[float, float]:
    """Range of y: estimates and intervals, but not the far lower ends of those that come near zero."""
    low, high = [], []
    for panel in found:
        errors = panel.errors[panel.errors["value"] > 0]
        if errors.empty:
            low.append(1e-3)
            high.append(1.0)
            continue
        values, ends = errors["value"].to_numpy(dtype=float), errors["ci_low"].to_numpy(dtype=float)
        low += [float(values.min()), *ends[ends > values.min() / 5]]
        low.append(_slope_constant(errors) / float(errors["group_size"].max()))
        tops = errors["ci_high"].to_numpy(dtype=float)
        high += [float(values.max()), *tops[np.isfinite(tops)]]
    bottom, top = min(low) / 1.25, max(high) * 1.25
    # A sixth of the height, above the data, is left for the text.
    return bottom, top * (top / bottom) ** 0.18


def _shares_axis(found: list[Panel]) -> bool:
    values = np.concatenate([panel.errors["value"].to_numpy(dtype=float) for panel in found])
    values = values[values > 0]
    return len(values) > 0 and float(values.max() / values.min()) <= SHARED_RANGE


def _ticks(ax: Axes, sizes: list[int]) -> None:
    """Whole numbers at the group sizes present, thinned where they would touch."""
    shown: list[int] = []
    for size in sizes:
        if not shown or size >= 1.3 * shown[-1]:
            shown.append(size)
    ax.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    ax.xaxis.set_major_locator(FixedLocator([float(size) for size in shown]))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    ax.xaxis.set_minor_locator(NullLocator())


def _title(panel: Panel) -> str:
    name = "\n".join(textwrap.wrap(panel.model, 30) + textwrap.wrap(panel.label, 30))
    value = panel.facts.get("value")
    kind = "mean reward" if panel.task == "bandit" else "accuracy"
    return f"{name}\n{kind} {percent(value) if value else 'not measured'}"


def _diagnostics(panel: Panel) -> str:
    lines = []
    if "score_reward_correlation" in panel.facts:
        lines.append(r"corr($\Vert W\Vert^2\!,\,Z\,|\,x$)")
        lines.append(number(panel.facts["score_reward_correlation"]))
    if "optimal_group_size" in panel.facts:
        lines.append("$G^*$  " + number(panel.facts["optimal_group_size"], 1))
    return "\n".join(lines)


def _legend(found: list[Panel]) -> list[Handle]:
    methods = {method for panel in found for method in panel.methods}
    errors = pd.concat([panel.errors for panel in found])
    levels = {f"{panel.level:.0%} " for panel in found}
    level = levels.pop() if len(levels) == 1 else ""
    handles: list[Handle] = [
        Line2D([], [], **look.curve() | (look.point() if "monte_carlo" in methods else {}), label=look.label)
        for name, look in style.ESTIMATORS.items()
        if (errors["estimator"] == name).any()
    ]
    if "components" in methods:
        handles.append(Patch(facecolor="0.8", label=f"{level}interval (pools)"))
    if "monte_carlo" in methods:
        point = Line2D([], [], color="0.35", marker="o", linestyle="", markeredgewidth=0)
        bar = LineCollection([], colors="0.35", linewidths=0.9)
        handles.append(ErrorbarContainer((point, (), (bar,)), has_yerr=True, label=f"{level}interval (Monte Carlo)"))
    if errors["group_size"].nunique() > 1:
        handles.append(Line2D([], [], **style.REFERENCE, label="slope of $1/G$"))
    if (errors["value"] <= 0).any():
        handles.append(Line2D([], [], color="0.35", marker="v", mfc="white", linestyle="", label="estimate ≤ 0"))
    return handles
