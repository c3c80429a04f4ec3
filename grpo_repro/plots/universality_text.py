"""What `universality` says in words: the answer of each test, and the numbers of each point."""

from __future__ import annotations

import pandas as pd

from grpo_repro.plots import training_names as names
from grpo_repro.plots.comparisons import Comparison, comparisons
from grpo_repro.plots.training_data import agreement, choices


def texts(rows: pd.DataFrame) -> dict[str, str]:
    """Return the file beside the figure: the sentences of the tests and the numbers.

    Args:
        rows: Rows of the results schema.

    Raises:
        UserError: If there are no trained policies.
    """
    found = comparisons(choices(rows))
    return {".txt": "\n\n".join(["\n".join(sentences(found)), *_numbers(found)]) + "\n"}


def sentences(found: list[Comparison]) -> list[str]:
    """Return the answer of each test, or what is missing for one."""
    answers = [one.shift.sentence for one in found if one.shift is not None]
    return answers or [
        "No test: it needs results at two checkpoints, budgets, schedules or pools, with two group sizes in common."
    ]


def describe(found: list[Comparison], left_out: list[str]) -> str:
    """Return the caption.

    Args:
        found: All comparisons.
        left_out: Titles of those that the figure has no room for.
    """
    level = f"{found[0].choices[0].selection.confidence:.0%}"
    text = (
        "The group size with the lowest suboptimality gap, against the number of updates n, against the budget N at "
        "the last n, and over settings that differ only in schedule (with its learning rate) or only in the pool of "
        f"prompts. Large markers: best G; bars: its {level} bootstrap interval over runs; small open markers: group "
        "sizes that the runs do not tell from it. Grey: predicted G* = 1 + √(c3/c1), a line where measured at the "
        "policies of that n, a dotted line where measured at the initial policy; bars and bands: their intervals "
        "(medians over group sizes and seeds). Axis of G logarithmic; levels are evenly spaced. "
        "The sentences on whether the best G moves use sets of their own, wider, since they must hold at all levels at "
        "once."
    )
    if left_out:
        text += f" Left out of the figure for lack of space: {'; '.join(left_out)}."
    return "\n\n".join([text, "\n".join(sentences(found)), *_numbers(found)]) + "\n"


def _numbers(found: list[Comparison]) -> list[str]:
    return ["\n".join([f"{one.title}; {one.series}.", *_points(one)]) for one in found]


def _points(one: Comparison) -> list[str]:
    lines = []
    unit = {"n": "n = ", "N": "N = "}.get(one.aspect, "")
    for level, choice in zip(one.levels, one.choices, strict=True):
        chosen = choice.selection
        runs = f"{chosen.runs} runs" if chosen.runs > 1 else "1 run"
        text = f"{unit}{level} ({runs}): {names.best(choice.selection)}"
        for interval, where in ((choice.predicted, "there"), (choice.predicted_at_start, "at the initial policy")):
            if interval is not None:
                text += f"; predicted G* {where} {names.interval(interval, 2)}"
        lines.append("; ".join(part for part in (text, agreement(choice)) if part) + ".")
    return lines
