"""Whether the best group size moves along an axis (iterations, budgets, schedules), from repeated training runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from grpo_repro.errors import UserError
from grpo_repro.selection import DRAWS, Selection, may_be_best, percentile_ends, resampled_best, select
from grpo_repro.stats import Interval

MARGIN = 2.0
"""Largest ratio of two best group sizes that still counts as "not moved": one step of a grid of powers of two."""


@dataclass(frozen=True)
class Shift:
    """Whether the best group size differs between levels of one axis.

    Attributes:
        axis: What differs, for example "iterations n".
        levels: Its values.
        selections: One for each level, at the asked confidence.
        factor: Best G at the last level over best G at the first, with its bootstrap interval.
        verdict: "moved", "not moved" or "not enough runs".
        sentence: The verdict in words, with its numbers.
    """

    axis: str
    levels: tuple[str, ...]
    selections: tuple[Selection, ...]
    factor: Interval
    verdict: str
    sentence: str


def shift(
    tables: Mapping[str, Float[np.ndarray, "_ groups"]],
    group_sizes: Sequence[int],
    axis: str,
    confidence: float = 0.95,
    paired: bool = True,
    draws: int = DRAWS,
    seed: int = 0,
) -> Shift:
    """Tell whether the best group size moves between levels.

    The sets `may_be_best` at level 1 - (1 - confidence) / L hold the best G of all L levels at once with probability
    >= confidence (Bonferroni), and two verdicts follow from them:

    - "moved": the sets of two levels share no G. If one G is best at all levels, this has probability
      <= 1 - confidence.
    - "not moved": in no pair of levels do two members of the sets differ by more than a factor of two (`MARGIN`). If
      the best G of two levels do, this has probability <= 1 - confidence. The bootstrap interval of the ratio must
      lie within [1/2, 2] for every pair too, which guards against skewed losses. Alone it does not suffice: noise
      that runs share between levels carries the argmin along, so the ratio stays at 1 even where it hides a move.
    - "not enough runs": neither.

    On a grid that spans a factor of two or less, "not moved" means no more than that grid.

    Paired runs are resampled jointly. This is right also where a common seed is but a label: rows that are independent
    between levels have that joint law, and resampling whole rows keeps each level's own law in any case.

    Args:
        tables: Losses by level, in order; all at the same `group_sizes`.
        group_sizes: G of each column, ascending.
        axis: What differs between levels.
        confidence: Level.
        paired: Whether row r is the same run at all levels; tables of unequal length are never paired.
        draws: Bootstrap draws.
        seed: Of these draws.

    Returns:
        The shift; `factor` spans the whole grid where a level has one run.

    Raises:
        UserError: With fewer than two levels, or a table of another width.
    """
    losses = list(tables.values())
    if len(losses) < 2 or any(table.shape[1] != len(group_sizes) for table in losses):
        widths = ", ".join(f"{level}: {table.shape[1]}" for level, table in tables.items()) or "none"
        raise UserError(
            f"a shift along {axis} needs two levels or more at the same {len(group_sizes)} group sizes, but the levels "
            f"have ({widths}); run the same group sizes at every level"
        )
    sizes = np.asarray(group_sizes)
    selections = tuple(select(table, group_sizes, confidence, draws, seed) for table in losses)
    sets = [may_be_best(table, group_sizes, 1 - (1 - confidence) / len(losses)) for table in losses]
    best = sizes[_best_by_level(losses, paired, draws, seed)]
    few = min(len(table) for table in losses) < 2

    def ratio(first: int, last: int) -> Interval:
        widest = sizes[0] / sizes[-1], sizes[-1] / sizes[0]
        ends = widest if few else percentile_ends(best[:, last] / best[:, first], confidence)
        return Interval(selections[last].best / selections[first].best, *map(float, ends))

    pairs = list(itertools.combinations(range(len(losses)), 2))
    apart = next(((a, b) for a, b in pairs if not set(sets[a]) & set(sets[b])), None)
    close = all(max(max(sets[a]) / min(sets[b]), max(sets[b]) / min(sets[a])) <= MARGIN for a, b in pairs)
    steady = all(1 / MARGIN <= ratio(a, b).low and ratio(a, b).high <= MARGIN for a, b in pairs)
    verdict = "moved" if apart else "not moved" if close and steady else "not enough runs"
    found = Shift(axis, tuple(map(str, tables)), selections, ratio(0, -1), verdict, "")
    return replace(found, sentence=_sentence(found, sets, apart))


def _best_by_level(losses: list[np.ndarray], paired: bool, draws: int, seed: int) -> Int[np.ndarray, "draws levels"]:
    """Column of the least mean at each level, rows resampled jointly if paired."""
    if paired and len({len(table) for table in losses}) == 1:
        return resampled_best(np.stack(losses, 1), draws, np.random.default_rng(seed))
    streams = [np.random.default_rng([seed, level]) for level in range(len(losses))]
    return np.hstack([resampled_best(table[:, None], draws, rng) for table, rng in zip(losses, streams, strict=True)])


def _sentence(found: Shift, sets: Sequence[tuple[int, ...]], apart: tuple[int, int] | None) -> str:
    """The verdict in words: what was found, the ratio, and each level's best G with those that may be best."""
    asked = found.selections[0].confidence
    surely = f"wrong in at most {100 * (1 - asked):.3g}% of cases"
    if apart:
        first, last = (found.levels[level] for level in apart)
        verdict = f"The best G moves with {found.axis}: no G may be best both at {first} and at {last} ({surely})."
    elif found.verdict == "not moved":
        verdict = (
            f"The best G does not move with {found.axis} by more than a factor of two, one step of a grid of powers "
            f"of two ({surely})."
        )
    else:
        verdict = f"The runs are not enough to tell whether the best G moves with {found.axis}."
    levels = [
        f"{level}: G = {chosen.best} of {chosen.runs} runs, may be {', '.join(map(str, members))}"
        for level, chosen, members in zip(found.levels, found.selections, sets, strict=True)
    ]
    ratio = found.factor
    return (
        f"{verdict} Best G at {found.levels[-1]} over best G at {found.levels[0]}: {ratio.value:.3g}, "
        f"{100 * asked:.3g}% bootstrap interval {ratio.low:.3g} to {ratio.high:.3g}. "
        f"Best by level: {'; '.join(levels)}."
    )
