"""Figures of the theory's checks: one for each check, with a panel for each of its curves' `panel` names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from grpo_repro.errors import UserError
from grpo_repro.experiments.theory import plan
from grpo_repro.plots import style
from grpo_repro.schema import TheoryConfig
from grpo_repro.theory.catalog import CHECKS
from grpo_repro.theory.finding import Curve, Report
from grpo_repro.theory.rows import from_frame
from grpo_repro.theory.table import in_words

HEIGHT = 2.75
"""Height of a figure in inches."""
LEGEND = 0.16
"""Height of a line of a legend below the panel."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
GREEK = {"Sigma": r"\Sigma"}
MOST_INSIDE = 4
"""Up to this many curves have their legend inside the panel."""
MOST_TICKS = 8
"""Group sizes are ticks of their axis up to this many."""


@dataclass(frozen=True)
class Panel:
    """Labels and scales of one panel."""

    title: str
    x: str
    y: str
    x_log: bool = False
    y_log: bool = False


G = "group size $G$"
N_GAP = r"$n \times$ mean gap"
PANELS: dict[tuple[str, str], Panel] = {
    ("theorem-2", "mse"): Panel("error of one prompt's estimate, exact", G, r"$E\,\|\hat g - g\|^2$", True, True),
    ("theorem-2", "difference"): Panel("GRPO less oracle (another policy)", G, "difference of MSE", True, True),
    ("corollary-4", "ratio"): Panel("ratio of errors", G, "MSE ratio − 1", True, True),
    ("lemma-6", "constant"): Panel("constant rate", "iteration $n$", "mean gap", False, True),
    ("lemma-6", "inverse"): Panel(r"rate $\beta/i$", "iteration $n$", "mean gap", True, True),
    ("corollary-5", "order"): Panel("one prompt of each policy", "baseline $b$", r"MSE over the oracle's MSE"),
    ("theorem-7", "curved"): Panel("curved", G, N_GAP, True),
    ("theorem-7", "three-actions"): Panel("three actions", G, "", True),
    ("theorem-7", "flat-direction"): Panel("curved, flat direction", G, "", True),
    ("theorem-8", "law"): Panel("law of the gap", r"$n \times$ gap", "distribution function"),
    ("theorem-8", "convergence"): Panel(
        "distance to the limit", "iteration $n$", "Kolmogorov-Smirnov distance", True, True
    ),
    ("corollary-10", "baselines"): Panel(
        "least weight against the baseline", "baseline $b$", r"$\min_k w_k(b) / w_k(V)$"
    ),
    ("corollary-9", "weights"): Panel("weights, GRPO less oracle", G, r"$w_k$ difference", True, True),
    ("lemma-11", "distance"): Panel("distance to the U-statistic", G, r"$E\,\|\hat g - U\|^2$", True, True),
    ("theorem-12", "bias"): Panel("off-policy bias", r"$(m-1)\,\eta$", r"squared bias", True, True),
    ("theorem-12", "variance"): Panel("variance", G, r"$G \times$ variance", True),
    ("proposition-13", "objectives"): Panel("what is maximised", r"parameter $\theta$", "objective, scaled"),
    ("proposition-13", "training"): Panel("training", "iteration $n$", r"mean $\theta_n$", True),
    ("kl-estimators", "kl"): Panel(
        "gradients of KL estimates", "way along a path from the reference", "slope along the path"
    ),
}
"""Panels by check and name."""


def figures() -> dict[str, Callable[[pd.DataFrame], Figure]]:
    """The figure of each check, by its name on the command line."""

    def drawer(check: str) -> Callable[[pd.DataFrame], Figure]:
        return lambda rows: draw(rows, check)

    return {f"theory-{check}": drawer(check) for check in CHECKS}


def draw(rows: pd.DataFrame, check: str) -> Figure:
    """Draw the panels of a check, side by side.

    Args:
        rows: Rows of the results schema.
        check: Name of the check.

    Returns:
        The figure; its label (`Figure.get_label`) is the caption.

    Raises:
        UserError: If the check has not been run, or has nothing to draw.
    """
    report = _report(rows, check)
    panels = list(dict.fromkeys(curve.panel for curve in report.curves))
    if not panels:
        raise UserError(f"{check} is decided without curves; `grpo theory {check}` prints its statements")
    with style.context():
        width = style.TEXT_WIDTH if len(panels) > 1 else style.TEXT_WIDTH / 2
        most = max(sum(curve.panel == name for curve in report.curves) for name in panels)
        columns = 1 if len(panels) > 2 else 2
        below = columns == 1 or most > MOST_INSIDE
        figure = style.new_figure(width, HEIGHT + below * LEGEND * -(-most // columns))
        for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            curves = [curve for curve in report.curves if curve.panel == name]
            _panel(axes, PANELS.get((check, name), Panel(name, "", "")), curves)
            if columns == 1 or len(curves) > MOST_INSIDE:
                axes.legend(
                    loc="upper center", bbox_to_anchor=(0.5, -0.2), ncol=columns, columnspacing=1.2, handlelength=2.0
                )
            else:
                axes.legend(loc="best")
        figure.draw_without_rendering()  # the layout knows the width of tick labels from its second pass on
    figure.set_label(_caption(check, report))
    return figure


def _report(rows: pd.DataFrame, check: str) -> Report:
    """The report of a check: the only one there is, or that of the plain `grpo theory` of this version.

    Raises:
        UserError: If there is none, or several of which none is that.
    """
    own = rows[(rows["experiment"] == "theory") & (rows["task"] == check)]
    cells = list(dict.fromkeys(own["cell_id"]))
    if not cells:
        raise UserError(f"there are no results of {check}; run `grpo theory {check}` first")
    (plain,) = plan(TheoryConfig(checks=[check]))
    if len(cells) > 1 and plain.id not in cells:
        raise UserError(
            f"there are {len(cells)} results of {check}, of other versions, seeds or settings than those of "
            f"`grpo theory {check}`; run that, or keep one of {', '.join(map(str, cells))}"
        )
    return from_frame(own[own["cell_id"] == (plain.id if plain.id in cells else cells[0])]).popitem()[1]


def _panel(axes: Axes, panel: Panel, curves: list[Curve]) -> None:
    kinds = {kind: [curve for curve in curves if curve.kind == kind] for kind in ("observed", "predicted", "bound")}
    most = max(len(kinds["observed"]), len(kinds["predicted"]))
    for kind, first in (("predicted", 0), ("bound", most), ("observed", 0)):
        for place, curve in enumerate(kinds[kind], first):  # the i-th points belong to the i-th line
            _curve(axes, curve, place)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    if panel.x_log:
        axes.set_xscale("log")
    if panel.y_log:
        axes.set_yscale("log")
    if panel.x == G:
        sizes = sorted({float(x) for curve in curves if curve.kind == "observed" for x in curve.x})
        if len(sizes) <= MOST_TICKS:
            axes.xaxis.set_major_locator(FixedLocator(sizes))
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_minor_formatter(NullFormatter())


def pretty(text: str) -> str:
    r"""Write a curve's plain name with the symbols of formulas.

    >>> pretty("d KL(pi_ref || pi), G^-1")
    'd KL($\\pi_{ref}$ || $\\pi$), $G^{-1}$'
    """
    text = re.sub(r"\b([A-Za-z]+)\^(-?\d+)", r"$\1^{\2}$", text)
    text = re.sub(r"\b(Sigma|w|S)_(\w+)\b", lambda m: f"${GREEK.get(m[1], m[1])}_{{{m[2]}}}$", text)
    text = re.sub(r"\bpi_ref\b", r"$\\pi_{ref}$", text)
    text = re.sub(r"\bsqrt V\b", r"$\\sqrt{V}$", text)
    return re.sub(r"\b(pi|kappa|sigma|theta|eta|lambda)\b(?![}_])", r"$\\\1$", text)


def _curve(axes: Axes, curve: Curve, place: int) -> None:
    look = style.estimator(curve.estimator) if curve.estimator else None
    color = look.color if look else COLORS[place % len(COLORS)]
    if curve.kind == "observed":
        marker: Any = look.marker if look else MARKERS[place % len(MARKERS)]
        spread = None
        if curve.low is not None and curve.high is not None:
            spread = [curve.y - curve.low, curve.high - curve.y]
        axes.errorbar(
            curve.x, curve.y, yerr=spread, linestyle="none", marker=marker, color=color, markeredgecolor="white",
            markeredgewidth=0.4, elinewidth=0.9, label=pretty(curve.name), zorder=3,
        )  # fmt: skip
    else:
        line = "-" if curve.kind == "predicted" else (0, (4.0, 1.6))
        axes.plot(curve.x, curve.y, linestyle=line, color=color, linewidth=1.1, label=pretty(curve.name))


def _caption(check: str, report: Report) -> str:
    lines = [
        f"{check}: {CHECKS[check].title}. Lines: formulas; points: enumerated, or simulated with intervals of the "
        "level that decides (0.9999 by default)."
    ]
    lines += [f"- {in_words(finding)}" for finding in report.findings]
    return "\n".join(lines) + "\n"
