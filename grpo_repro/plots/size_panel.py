"""One panel of a metric against G: means, intervals, runs, the best G, those not told from it, the predicted G*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from grpo_repro.plots.training_data import Choice
from grpo_repro.stats import Interval

MAX_DOTS = 30
"""Single runs are drawn as dots up to this many."""
REACH = 4.0
"""The axis of G is widened up to this factor beyond the group sizes to show a predicted G*."""
FOOT = 0.045
"""Height of the interval of the best G above the lower edge, as a share of the panel."""

MEAN = "#0072B2"
BEST = "#000000"
LIGHT = "#56B4E9"
AT_START: dict[str, Any] = {"color": "#D55E00", "linestyle": (0, (4.0, 1.6)), "linewidth": 1.1}
AT_N: dict[str, Any] = {"color": "#009E73", "linestyle": (0, (1.2, 1.2)), "linewidth": 1.4}
PREDICTIONS = {"start": (AT_START, "predicted $G^*$, initial policy"), "now": (AT_N, "predicted $G^*$ at this $n$")}

Handle = Line2D | Patch | ErrorbarContainer


@dataclass(frozen=True)
class Frame:
    """What the panels of one figure or row share.

    Attributes:
        sizes: Group sizes with a tick.
        left: Left end of the axis of G.
        right: Right end.
        bottom: Lower end of the metric's axis.
        top: Upper end.
        log: Whether the metric's axis is logarithmic.
    """

    sizes: tuple[int, ...]
    left: float
    right: float
    bottom: float
    top: float
    log: bool

    @property
    def span(self) -> float:
        """Length of the metric's axis, in decades if logarithmic."""
        return float(np.log10(self.top / self.bottom)) if self.log else self.top - self.bottom


def predictions(choice: Choice) -> dict[str, Interval]:
    """Predicted G* by name: `start` for the initial policy and `now` for this n, those that are measured."""
    found = {"start": choice.predicted_at_start, "now": choice.predicted}
    return {name: interval for name, interval in found.items() if interval is not None}


def frame(row: list[Choice], every: list[Choice], extra: Float[np.ndarray, " values"], may_be_log: bool) -> Frame:
    """Return the axes of a row of panels.

    Args:
        row: Choices drawn in the row: their range of the metric.
        every: Choices of the whole figure: their range of G.
        extra: Further values drawn in the row.
        may_be_log: Whether a metric that spans a decade gets a logarithmic axis.
    """
    sizes = tuple(sorted({size for choice in every for size in choice.selection.group_sizes}))
    left, right = sizes[0] / 1.4, sizes[-1] * 1.4
    for choice in every:
        for interval in predictions(choice).values():
            if np.isfinite(interval.value):
                left = min(left, max(interval.value / 1.2, sizes[0] / REACH))
                right = max(right, min(interval.value * 1.2, sizes[-1] * REACH))
    means = np.array([mean.value for choice in row for mean in choice.selection.means])
    log = may_be_log and means.min() > 0 and means.max() > 10 * means.min()
    dots = [choice.table.ravel() for choice in row if len(choice.table) <= MAX_DOTS]
    drawn = np.concatenate([means, extra, *dots])
    ends = np.array([end for choice in row for mean in choice.selection.means for end in (mean.low, mean.high)])
    if log:
        drawn, ends = np.log(drawn[drawn > 0]), np.log(ends[ends > 0])
    low, high = drawn.min(), drawn.max()
    span = max(high - low, 1e-9 if not log else 0.1, 0.02 * abs(high) if not log else 0.0)
    # Intervals of two or three runs can be far wider than all that is drawn: those are cut.
    near = ends[(ends > low - span) & (ends < high + span)]
    low, high = min([low, *near]), max([high, *near])
    span = max(high - low, span)
    # Below the data lies the interval of the best G.
    low, high = low - 0.17 * span, high + 0.06 * span
    if log:
        low, high = np.exp(low), np.exp(high)
    return Frame(sizes, left, right, float(low), float(high), bool(log))


def draw_panel(choice: Choice, ax: Axes, shared: Frame) -> None:
    """Draw one choice.

    Args:
        choice: What to draw.
        ax: Where.
        shared: Axes.
    """
    ax.set_xscale("log", base=2)
    ax.set_yscale("log" if shared.log else "linear")
    ax.set_xlim(shared.left, shared.right)
    ax.set_ylim(shared.bottom, shared.top)
    _ticks(ax, shared)
    _predicted(choice, ax, shared)
    chosen = choice.selection
    size = np.array(chosen.group_sizes, dtype=float)
    mean, low, high = np.array([(m.value, m.low, m.high) for m in chosen.means]).T
    if len(choice.table) <= MAX_DOTS:
        ax.plot(
            np.tile(size, len(choice.table)), choice.table.ravel(), linestyle="", marker=".", markersize=3.4,
            color="0.62", markeredgewidth=0, zorder=2, gid="runs",
        )  # fmt: skip
    ax.plot(size, mean, color=MEAN, linewidth=0.8, zorder=3, gid="means")
    # One run has no interval.
    known = np.isfinite(low) & np.isfinite(high)
    low, high = (np.clip(end[known], shared.bottom, shared.top) for end in (low, high))
    ax.vlines(size[known], low, high, color=MEAN, linewidth=1.2, zorder=4, gid="bars")
    equal = np.isin(chosen.group_sizes, chosen.indistinguishable)
    best = np.array(chosen.group_sizes) == chosen.best
    for name, shown in (("worse", ~equal & ~best), ("equal", equal & ~best), ("best", best)):
        if shown.any():
            ax.plot(size[shown], mean[shown], linestyle="", **_marker(name), zorder=6 + best[shown].any(), gid=name)
    _best_interval(choice, ax)


def _marker(name: str) -> dict[str, Any]:
    if name == "best":
        return {"marker": "*", "markersize": 9.5, "color": BEST, "markeredgecolor": "white", "markeredgewidth": 0.5}
    fill = MEAN if name == "equal" else "white"
    return {
        "marker": "o", "markersize": 4.6, "markerfacecolor": fill, "markeredgecolor": MEAN, "markeredgewidth": 0.9,
    }  # fmt: skip


def _best_interval(choice: Choice, ax: Axes) -> None:
    """Bootstrap interval of the best G, near the lower edge."""
    chosen, level = choice.selection, ax.get_xaxis_transform()
    ends = [float(chosen.best_low), float(chosen.best_high)]
    ax.plot(
        ends, [FOOT, FOOT], transform=level, color=BEST, linewidth=1.6, marker="|", markersize=6.0,
        markeredgewidth=1.2, zorder=5, gid="best interval",
    )  # fmt: skip


def _predicted(choice: Choice, ax: Axes, shared: Frame) -> None:
    """Vertical lines at the predicted G* with bands; one beyond the axis is an arrow on its edge."""
    for place, (name, interval) in enumerate(predictions(choice).items()):
        look, _ = PREDICTIONS[name]
        if interval.value < shared.left or interval.value > shared.right:
            right = interval.value > shared.right
            ax.plot(
                [0.985 if right else 0.015], [0.93 - 0.09 * place], transform=ax.transAxes, linestyle="",
                marker=">" if right else "<", markersize=5.0, color=look["color"], clip_on=False,
                gid=f"predicted beyond {name}",
            )  # fmt: skip
        else:
            ax.axvline(interval.value, **look, zorder=1.5, gid=f"predicted {name}")
        low, high = max(interval.low, shared.left), min(interval.high, shared.right)
        if low < high:
            ax.axvspan(low, high, color=look["color"], alpha=0.13, linewidth=0, zorder=0.5, gid=f"band {name}")


def _ticks(ax: Axes, shared: Frame) -> None:
    ax.xaxis.set_major_locator(FixedLocator([float(size) for size in thinned(ax, shared)]))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    ax.xaxis.set_minor_locator(NullLocator())
    if shared.log:
        # Numbers at 1, 2 and 5 within two decades, else at the powers of ten.
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if shared.span < 2 else (1.0,)))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        ax.yaxis.set_major_locator(MaxNLocator(5))


def thinned(ax: Axes, shared: Frame) -> list[int]:
    """Group sizes whose labels fit side by side, in a panel of the figure's width shared by its neighbours."""
    figure = ax.get_figure(root=True)
    geometry = ax.get_subplotspec()
    assert figure is not None and geometry is not None
    columns = geometry.get_gridspec().ncols
    # 0.065 inches for each digit and half of that between labels, in about 0.85 of the panel's share of the width.
    inches = 0.85 * (figure.get_size_inches()[0] - 0.6) / columns / np.log2(shared.right / shared.left)
    shown: list[int] = []
    for size in shared.sizes:
        needed = 0.065 * (len(str(size)) + (len(str(shown[-1])) if shown else 0)) / 2 + 0.035
        if not shown or np.log2(size / shown[-1]) * inches >= needed:
            shown.append(size)
    return shown


def legend(found: list[Choice], dots: str = "single run") -> list[Handle]:
    """Return the entries of what is drawn."""
    level = f"{found[0].selection.confidence:.0%}"
    bar = LineCollection([], colors=MEAN, linewidths=1.2)
    point = Line2D([], [], linestyle="", **_marker("equal"))
    handles: list[Handle] = [
        Line2D([], [], linestyle="", **_marker("best"), label="best $G$"),
        Line2D([], [], color=BEST, linewidth=1.6, marker="|", markeredgewidth=1.2,
               label=f"its {level} bootstrap interval"),
        ErrorbarContainer((point, (), (bar,)), has_yerr=True, label=f"not told from the best; {level} interval"),
    ]  # fmt: skip
    if any(len(choice.selection.indistinguishable) < len(choice.selection.group_sizes) for choice in found):
        handles.append(Line2D([], [], linestyle="", **_marker("worse"), label="worse than the best"))
    if any(len(choice.table) <= MAX_DOTS for choice in found):
        handles.append(Line2D([], [], linestyle="", marker=".", color="0.62", label=dots))
    for name, (look, label) in PREDICTIONS.items():
        if any(name in predictions(choice) for choice in found):
            handles.append(Line2D([], [], **look, label=label))
    return handles
