"""Captions of the figures against G: what is drawn, then the numbers of each panel."""

from __future__ import annotations

from grpo_repro.plots import size_panel
from grpo_repro.plots import training_names as names
from grpo_repro.plots.size_grid import Grid
from grpo_repro.plots.training_data import Choice, agreement


def caption_of(shown: Grid, what: str, lighter: dict[Choice, dict[int, float]] | None = None) -> str:
    """Describe the figure and the numbers behind each panel.

    Args:
        shown: Rows of the figure.
        what: The metric, in sentences.
        lighter: A second metric: choice -> its mean at each G.

    Returns:
        One paragraph on what is drawn, then one for each row of panels with a line for each panel.
    """
    paragraphs = [_drawing(shown, what)]
    for title, row in zip(shown.titles, shown.rows, strict=True):
        digits = names.decimals(row)
        paragraphs.append("\n".join([f"{title}.", *(_panel(c, digits, (lighter or {}).get(c, {})) for c in row)]))
    return "\n\n".join(paragraphs) + "\n"


def _drawing(shown: Grid, what: str) -> str:
    every = [choice for row in shown.rows for choice in row]
    level = f"{every[0].selection.confidence:.0%}"
    text = [
        what,
        "One panel for each checkpoint n (parameter updates), one row for each setting and N = B·G (completions per "
        "update), against the group size G (axis logarithmic).",
        f"Circles: means over runs, with {level} Student t intervals over runs; an interval wider than the panel is "
        "cut at its edge, one run alone has none.",
        "Star: the best G, with the lowest gap or the highest accuracy on average; filled circles: group sizes that "
        "the runs do not tell from it; open circles: those that they do. "
        f"(Star and filled circles are a set that holds the truly best G with probability {level} or more.)",
        f"Black bar at the lower edge: {level} bootstrap interval of the best G, over runs (with few runs too short).",
    ]
    if any(len(choice.table) <= size_panel.MAX_DOTS for choice in every):
        text.append(f"Grey dots: single runs, where there are at most {size_panel.MAX_DOTS}.")
    if any(size_panel.predictions(choice) for choice in every):
        text.append(
            "Vertical lines and bands: G* = 1 + √(c3/c1) predicted from the components measured at the initial policy "
            "and at the policies of that n (median over group sizes and seeds, and medians of the ends of their "
            "intervals); an arrow at an edge stands for one beyond it. It minimises the error of one gradient."
        )
    if shown.left_out:
        text.append(
            f"Left out for lack of space, {len(shown.left_out)} with the fewest runs: "
            + "; ".join(shown.left_out)
            + "."
        )
    if shown.thinned:
        text.append("Not all checkpoints are shown.")
    return " ".join(text)


def _panel(choice: Choice, digits: int, lighter: dict[int, float]) -> str:
    chosen = choice.selection
    means = ", ".join(
        f"G = {size}: {names.interval(mean, digits)}"
        for size, mean in zip(chosen.group_sizes, chosen.means, strict=True)
    )
    runs = f"{chosen.runs} runs" if chosen.runs > 1 else "1 run"
    text = [f"n = {choice.iteration} ({runs}): {means}", names.best(chosen)]
    where = {"start": "at the initial policy", "now": f"at n = {choice.iteration}"}
    for name, interval in size_panel.predictions(choice).items():
        text.append(f"predicted G* {where[name]} {names.interval(interval, 2)}")
    if agreement(choice):
        text.append(agreement(choice))
    if lighter:
        greedy = ", ".join(f"{names.short(value, digits)} at G = {size}" for size, value in lighter.items())
        text.append(f"greedy {greedy}")
    return "; ".join(text) + "."
