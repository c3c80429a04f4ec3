"""The look of every figure: one colour, marker and line style for each estimator, sizes for print.

Nothing is set at import: figures are made under `context()`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from grpo_repro.errors import UserError


@dataclass(frozen=True)
class EstimatorStyle:
    """How one estimator is drawn in every figure.

    Attributes:
        label: Name in legends.
        color: From the palette of Okabe and Ito, told apart with any colour vision.
        marker: Shape of its points.
        line: Dashes, told apart without colour.
        width: Line width in points; the thick ones lie below, so that equal curves stay visible.
    """

    label: str
    color: str
    marker: str
    line: str | tuple[float, tuple[float, ...]]
    width: float

    def curve(self) -> dict[str, Any]:
        """Return the keywords of its line."""
        return {"color": self.color, "linestyle": self.line, "linewidth": self.width}

    def point(self) -> dict[str, Any]:
        """Return the keywords of its points; a white edge parts those that lie close."""
        return {
            "color": self.color,
            "marker": self.marker,
            "markeredgecolor": "white",
            "markeredgewidth": 0.4,
        }


ESTIMATORS: dict[str, EstimatorStyle] = {
    "vanilla": EstimatorStyle("vanilla (no baseline)", "#D55E00", "s", (0.0, (6.0, 1.5)), 1.2),
    "grpo": EstimatorStyle("GRPO (leave-one-out)", "#0072B2", "o", "-", 1.2),
    "oracle": EstimatorStyle("oracle, $V(x)$", "#009E73", "D", "-", 2.2),
    "optimal": EstimatorStyle("optimal, $b^*(x)$", "#000000", "^", (0.0, (1.2, 1.4)), 1.2),
}
"""Estimators in the order of legends."""

REFERENCE: dict[str, Any] = {"color": "0.55", "linewidth": 0.9, "linestyle": (0, (3.0, 2.0, 0.8, 2.0))}
"""Line of a theoretical slope."""

TEXT_WIDTH = 7.0
"""Width in inches of a figure across a page."""

_PRINT: dict[str, Any] = {
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "mathtext.fontset": "dejavusans",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "ytick.minor.width": 0.4,
    "lines.markersize": 3.7,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
}

SMALL = 7.0
"""Size in points of text inside a panel."""


def context() -> AbstractContextManager[None]:
    """Return a context in which figures get the sizes and fonts of print."""
    settings: Any = {**matplotlib.rcParamsDefault, **_PRINT}
    # Reading the backend would choose one.
    del settings["backend"]
    return matplotlib.rc_context(settings)


def new_figure(width: float, height: float) -> Figure:
    """Return a figure on its own Agg canvas; pyplot and the display are not involved.

    Args:
        width: Inches.
        height: Inches.
    """
    figure = Figure(figsize=(width, height), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def estimator(name: str) -> EstimatorStyle:
    """Return the style of an estimator.

    Raises:
        UserError: If it has none.
    """
    if name not in ESTIMATORS:
        raise UserError(
            f"estimator {name!r} has no colour; known: {', '.join(ESTIMATORS)}; add it to grpo_repro/plots/style.py"
        )
    return ESTIMATORS[name]
