"""Does the best group size move? Choices that differ in one respect only, side by side, and the test of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pandas as pd

from grpo_repro.plots import training_names as names
from grpo_repro.plots.training_data import SIGN, Choice, Setting, choices
from grpo_repro.shift import Shift, shift

ASPECTS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, str]], str]]] = {
    "schedule": (("schedule", "learning_rate", "warmup"), names.schedule),
    "pool": (("pool", "order"), names.pool),
}
"""Respect in which settings are compared -> its keys in the method, and how a level is written.

A schedule comes with a rate of its own, so schedules are compared together with their rates.
"""

AXES = {"n": "the number of updates n", "N": "the budget N", "schedule": "the schedule", "pool": "the pool of prompts"}
"""Aspect -> its name in a sentence."""


@dataclass(frozen=True)
class Comparison:
    """Choices that differ in one respect.

    Attributes:
        aspect: `n`, `N`, `schedule` or `pool`.
        title: What they have in common.
        series: The rest of what they have in common: N or n, told apart within one panel.
        levels: Value of the aspect of each choice.
        choices: One for each level.
        shift: The test of whether the best G moves; None where fewer than two levels or common group sizes.
    """

    aspect: str
    title: str
    series: str
    levels: tuple[str, ...]
    choices: tuple[Choice, ...]
    shift: Shift | None


def universality(rows: pd.DataFrame, confidence: float = 0.95) -> list[Shift]:
    """Test whether the best G moves with n, N, schedule and pool, wherever the rows allow it.

    Args:
        rows: Rows of the results schema.
        confidence: Level.

    Returns:
        One test for each series of `comparisons` that has one; sentences begin with what is compared.

    Raises:
        UserError: If there are no trained policies.
    """
    return [found.shift for found in comparisons(choices(rows, confidence=confidence)) if found.shift is not None]


def comparisons(found: list[Choice]) -> list[Comparison]:
    """Put choices side by side: over n, then N, schedule and pool at the last n.

    Args:
        found: Choices by one metric.
    """
    settings = list(dict.fromkeys(choice.setting for choice in found))
    placed: list[Comparison] = []
    for setting in settings:
        own = [choice for choice in found if choice.setting == setting]
        title = names.title(setting, settings)
        for budget in sorted({choice.budget for choice in own}):
            path = [choice for choice in own if choice.budget == budget]
            placed.append(_comparison("n", title, f"N = {budget}", [(str(c.iteration), c) for c in path]))
    for setting in settings:
        own = [choice for choice in found if choice.setting == setting]
        last, ends = _at_last(own, lambda choice: choice.budget)
        if len(ends) > 1:
            levels = [(str(choice.budget), choice) for choice in sorted(ends, key=lambda c: c.budget)]
            placed.append(_comparison("N", names.title(setting, settings), f"n = {last}", levels))
    for aspect in ASPECTS:
        placed += _between_settings(aspect, found, settings)
    return placed


def _between_settings(aspect: str, found: list[Choice], settings: list[Setting]) -> list[Comparison]:
    """Compare settings that differ in the keys of one aspect only, at each N."""
    keys, write = ASPECTS[aspect]
    alike: dict[object, list[Setting]] = {}
    for setting in settings:
        alike.setdefault(setting.less(keys), []).append(setting)
    placed = []
    for group in alike.values():
        for budget in sorted({choice.budget for choice in found if choice.setting in group}):
            own = [choice for choice in found if choice.setting in group and choice.budget == budget]
            last, ends = _at_last(own, lambda choice: choice.setting)
            if len(ends) > 1:
                title = names.title(group[0], [s for s in settings if s not in group], without=keys)
                levels = [(_level(choice.setting, group, write), choice) for choice in ends]
                levels.sort(key=lambda level: _order(level[0]))
                placed.append(_comparison(aspect, title, f"N = {budget}, n = {last}", levels))
    return placed


def _level(setting: Setting, group: list[Setting], write: Callable[[dict[str, str]], str]) -> str:
    text, keys = write(setting.keys), setting.keys
    if len({write(other.keys) for other in group}) < len(group):
        # Only the warm-up, which `write` does not show, can still tell them apart.
        text += f", warmup {keys.get('warmup', 'none')}"
    return text


def _order(level: str) -> tuple[bool, str, list[float], str]:
    """Numbers in text sort as numbers; no number (all prompts) comes last."""
    words = level.split()
    numbers = [float(word) for word in words if word.replace(".", "", 1).replace("e-", "", 1).isdigit()]
    return words[0] == "all", words[0], numbers, level


def _at_last(found: list[Choice], level: Callable[[Choice], object]) -> tuple[int, list[Choice]]:
    """Choices at the last n that all levels have reached; none if they share no n."""
    reached: dict[object, set[int]] = {}
    for choice in found:
        reached.setdefault(level(choice), set()).add(choice.iteration)
    common = set.intersection(*reached.values())
    last = max(common, default=0)
    return last, [choice for choice in found if choice.iteration == last]


def _comparison(aspect: str, title: str, series: str, levels: list[tuple[str, Choice]]) -> Comparison:
    labels, found = tuple(label for label, _ in levels), tuple(choice for _, choice in levels)
    test = _test(aspect, dict(levels))
    if test is not None:
        test = replace(test, sentence=f"{title}; {series}: {test.sentence}")
    return Comparison(aspect, title, series, labels, found, test)


def _test(aspect: str, levels: dict[str, Choice]) -> Shift | None:
    found = list(levels.values())
    sizes = _common(choice.selection.group_sizes for choice in found)
    if len(found) < 2 or len(sizes) < 2:
        return None
    tables = {}
    for label, choice in levels.items():
        columns = [choice.selection.group_sizes.index(size) for size in sizes]
        tables[label] = SIGN[choice.metric] * choice.table[:, columns]
    # Checkpoints are of the same runs; other levels are runs of their own.
    same = len({choice.runs for choice in found}) == 1 and len(found[0].runs) == len(found[0].table)
    paired = aspect == "n" and same
    return shift(tables, sizes, AXES[aspect], found[0].selection.confidence, paired=paired)


def _common(sizes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(set.intersection(*(set(own) for own in sizes))))
