"""The caption of Figure 4, and how its numbers are written."""

from __future__ import annotations

import math

import pandas as pd

from grpo_repro.plots.mse_panels import METHOD_NAMES, Panel
from grpo_repro.stats import Interval


def number(interval: Interval, digits: int = 2) -> str:
    """Write an estimate and its interval, such as ``−0.24 [−0.34, −0.14]``; without a width it stands alone."""
    value, low, high = (_plain(x, digits) for x in (interval.value, interval.low, interval.high))
    return f"{value}" if interval.low == interval.high else f"{value} [{low}, {high}]"


def percent(interval: Interval) -> str:
    """Write a probability in percent with its interval."""
    value, low, high = (_plain(100 * x, 1) for x in (interval.value, interval.low, interval.high))
    return f"{value}%" if interval.low == interval.high else f"{value}% [{low}, {high}]"


def _plain(value: float, digits: int) -> str:
    if math.isnan(value):
        return "undefined"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    # A rounded negative zero is zero.
    text = f"{round(value, digits) + 0.0:.{digits}f}"
    return text.replace("-", "−")


def _short(interval: Interval) -> str:
    value, low, high = (f"{x:.3g}".replace("-", "−") for x in (interval.value, interval.low, interval.high))
    return f"{value}" if interval.low == interval.high else f"{value} [{low}, {high}]"


def caption_of(found: list[Panel]) -> str:
    """Describe the figure and the numbers behind each panel.

    Args:
        found: The panels of the figure.

    Returns:
        One paragraph on what is drawn, then one for each panel.
    """
    return "\n\n".join([_drawing(found), *(_policy(panel) for panel in found)]) + "\n"


def _drawing(found: list[Panel]) -> str:
    methods = {method for panel in found for method in panel.methods}
    levels = sorted({f"{panel.level:.0%}" for panel in found})
    text = [
        "Mean squared error E‖ĝ − g‖² of the policy-gradient estimate over a fixed set of questions, all "
        "used in each estimate, against the group size G; both axes logarithmic."
    ]
    if "components" in methods:
        text.append(
            "Lines and bands: estimates at every G from one pool of K completions per question, unbiased but for "
            "optimal (a ratio; too low where completions with large scores are rarer than 1/K), "
            f"with their {' or '.join(levels)} interval (over completions, the questions being fixed). "
            "Estimates at different G come from the same pool and are correlated."
        )
    if "exact" in methods:
        text.append(
            "Lines of tabular policies: exact values"
            + ("; bands there: the pools' interval, around its own value" if "components" in methods else "")
            + "."
        )
    if "monte_carlo" in methods:
        text.append(
            "Markers: R independent replicates of the whole estimate at each G, set a little apart "
            "horizontally, with Student t intervals; estimators at one G share their completions. On "
            "language models the baselines of oracle and optimal are estimated from a separate pool, and its "
            "error is part of the markers, not of the lines."
        )
    text.append(f"Grey: slope of 1/G. {_edges(found)}")
    if any(panel.seeds(method) > 1 for panel in found for method in panel.methods):
        text.append(
            "Several seeds: means; intervals of errors are combined as independent, those of accuracy, "
            "correlation and components (over questions, which seeds share) are averaged, not narrowed."
        )
    if any(panel.label for panel in found):
        text.append("Runs that differ in what their rows show are drawn in panels of their own, named by it.")
    return " ".join(text)


def _edges(found: list[Panel]) -> str:
    errors = pd.concat([panel.errors.assign(model=panel.model) for panel in found])
    text = ""
    if (errors["ci_low"] <= 0).any():
        text += "Intervals that reach zero or below end at the lower edge of the axis. "
    below = errors[errors["value"] <= 0]
    if not below.empty:
        listed = "; ".join(
            f"{row['model']} {row['estimator']} at G = {row['group_size']} ({METHOD_NAMES[row['method']]}): "
            + f"{row['value']:.3g}".replace("-", "−")
            for _, row in below.iterrows()
        )
        text += f"Open triangles mark estimates that are not positive: {listed}. "
    return text.strip()


def _policy(panel: Panel) -> str:
    facts = panel.facts
    kind = "mean reward" if panel.task == "bandit" else "accuracy"
    label = f"; {panel.label}" if panel.label else ""
    head = f"{panel.model} ({panel.task}, {panel.questions} questions{label})"
    value = facts.get("value")
    text = [f"{kind} of sampled completions {percent(value)}" if value else f"{kind} not measured"]
    if "score_reward_correlation" in facts:
        text.append(
            "correlation of ‖W‖² with the reward given the question (Assumption 2: zero) "
            + number(facts["score_reward_correlation"], 3)
        )
    text += [f"{name} = {_short(facts[name])}" for name in ("c1", "c2", "c3") if name in facts]
    if "optimal_group_size" in facts:
        text.append(f"G* = 1 + √(c3/c1) = {number(facts['optimal_group_size'])}")
    text += [_ratios(panel), _sizes(panel)]
    return f"{head}: " + "; ".join(part for part in text if part) + "."


def _ratios(panel: Panel) -> str:
    """Errors relative to the oracle's, smallest and largest G, from the method of the lines."""
    method = next((m for m in ("exact", "components", "monte_carlo") if m in panel.methods), "")
    errors = panel.errors[panel.errors["method"] == method].set_index(["estimator", "group_size"])["value"]
    sizes = sorted(set(errors.index.get_level_values("group_size")))
    parts = []
    for name in ("vanilla", "grpo", "optimal"):
        shown = [
            f"{errors[name, size] / errors['oracle', size]:.2f} at G = {size}"
            for size in dict.fromkeys([sizes[0], sizes[-1]])
            if (name, size) in errors.index and errors.get(("oracle", size), 0.0) > 0
        ]
        if shown:
            parts.append(f"{name} {', '.join(shown)}".replace("-", "−"))
    return f"error relative to the oracle's ({METHOD_NAMES[method]}): " + "; ".join(parts) if parts else ""


def _sizes(panel: Panel) -> str:
    known = [panel.settings[key] for key in ("pool", "replicates") if key in panel.settings]
    seeds = [f"{panel.seeds(m)} seeds ({METHOD_NAMES[m]})" for m in panel.methods if panel.seeds(m) > 1]
    return ", ".join(known + seeds)
