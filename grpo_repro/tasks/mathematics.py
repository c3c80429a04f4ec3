r"""MATH: competition problems with LaTeX answers (columns problem, and answer or a solution with a `\boxed` answer)."""

from __future__ import annotations

from grpo_repro.rewards import mathematics
from grpo_repro.tasks import worded


def _stated(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


KIND = worded.Kind(
    name="math",
    texts=("problem", "question"),
    answers=("answer", "solution"),
    kinds=("subject", "type"),
    answer=mathematics.gold_answer,
    unreadable=mathematics.unreadable,
    grade=mathematics.grade,
    has_format=mathematics.has_format,
    audit=mathematics.audit,
    stated=_stated,
)
