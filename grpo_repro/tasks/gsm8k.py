"""GSM8K: grade-school word problems with one number as their answer (columns question, answer)."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_repro.rewards import Verdict, gsm8k
from grpo_repro.tasks import worded


def _answer(text: str) -> str:
    """What follows the last `####` of a solution, or the whole."""
    return text.rpartition(gsm8k.MARKER)[2].strip()


def _unreadable(gold: str, deadline: float) -> str | None:
    return None if gsm8k.gold_value(gold) is not None else f"gold answer {gold[:80]!r} is not one number"


def _grade(items: Sequence[tuple[str, str, bool]], deadline: float) -> list[Verdict]:
    known = {item: gsm8k.grade(*item) for item in dict.fromkeys(items)}
    return [known[item] for item in items]


KIND = worded.Kind(
    name="gsm8k",
    texts=("question", "problem"),
    answers=("answer",),
    kinds=(),
    answer=_answer,
    unreadable=_unreadable,
    grade=_grade,
    has_format=gsm8k.has_format,
    audit=lambda golds, deadline: [None] * len(golds),
    stated="#### {}".format,
)
