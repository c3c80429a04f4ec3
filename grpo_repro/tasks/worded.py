r"""Worded problems: what GSM8K and MATH share (columns, splits, ids, the draw of questions, their rewards).

Splits. Data that name both, `train` and `test`, keep them. Data that are one set (a single file, or a folder with one
split only) are cut into two halves by a hash of each question's text: they are disjoint and the same for every seed.
`split=all` takes everything.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_repro.errors import UserError
from grpo_repro.rewards import Verdict
from grpo_repro.tasks import Question, hub, records
from grpo_repro.tasks.records import Record

Item = tuple[str, Question, bool]
"""A completion, its question, and whether it was cut off by the length limit."""


@dataclass(frozen=True)
class Kind:
    r"""What tells one worded task from another.

    Attributes:
        name: Of the task.
        texts: Columns of which one holds the question.
        answers: Columns of which one holds the answer, the first that is there.
        kinds: Columns of which one may name the sub-family.
        answer: Takes the gold answer out of the answer column's text.
        unreadable: Why a gold answer cannot be read, or None.
        grade: Verdicts on (completion, gold, cut off), with a deadline for each.
        has_format: Whether a completion has the form that the instruction asks for.
        audit: Why the verifier cannot read each of some golds, found by trying all, or None.
        stated: A completion that gives an answer and nothing else, such as `\boxed{{}}` around it.
    """

    name: str
    texts: tuple[str, ...]
    answers: tuple[str, ...]
    kinds: tuple[str, ...]
    answer: Callable[[str], str]
    unreadable: Callable[[str, float], str | None]
    grade: Callable[[Sequence[tuple[str, str, bool]], float], list[Verdict]]
    has_format: Callable[[str], bool]
    audit: Callable[[Sequence[str], float], list[str | None]]
    stated: Callable[[str], str]


@dataclass(frozen=True, eq=False)
class WordedTask:
    """Questions with the reward (accuracy + w format) / (1 + w), w being `format_reward`.

    Attributes:
        questions: Those that were drawn; every gold answer of theirs is readable.
        excluded: Questions that were passed over because their gold answer cannot be read, with the reason.
        looked_at: Number of questions looked at, those excluded among them.
    """

    kind: Kind
    questions: list[Question]
    data_hash: str
    excluded: list[tuple[Question, str]]
    looked_at: int
    format_reward: float
    deadline: float

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.kind.name

    def grade(self, items: Sequence[Item]) -> list[Verdict]:
        """Verdicts on completions, in order; equal ones are compared once."""
        return self.kind.grade([(text, question.answer, cut) for text, question, cut in items], self.deadline)

    def pay(self, completion: str, verdict: Verdict) -> float:
        """The reward that a verdict earns, between 0 and 1; an unreadable gold and a verifier's error earn nothing."""
        if not self.format_reward or verdict.outcome in ("gold_unparsable", "error"):
            return verdict.accuracy
        format_ = float(self.kind.has_format(completion))
        return (verdict.accuracy + self.format_reward * format_) / (1 + self.format_reward)

    def reward(self, completion: str, question: Question) -> float:
        """Reward of one completion that ended of itself."""
        return self.pay(completion, self.grade([(completion, question, False)])[0])

    def audit(self) -> list[tuple[Question, str]]:
        """Questions whose gold answer the verifier cannot read, with the reason; every one of them is tried."""
        found = self.kind.audit([question.answer for question in self.questions], self.deadline)
        return [(q, reason) for q, reason in zip(self.questions, found, strict=True) if reason is not None]

    def stated(self, answer: str) -> str:
        """A completion that gives this answer in the form that the instruction asks for."""
        return self.kind.stated(answer)


def load(task_config: Any, kind: Kind) -> WordedTask:
    """Read the data and draw `num_questions` of the split (0: all, in their order).

    The order of the draw is a permutation that depends on `seed` and the split; questions whose gold answer cannot be
    read are passed over and the next ones taken.

    Raises:
        UserError: If the data cannot be read or hold too few questions.
    """
    found = records.read(Path(task_config.path).expanduser()) if task_config.path else hub.read(task_config)
    sets = {split: [_question(record, kind) for record in rows] for split, rows in found.items()}
    _check_ids([question for rows in sets.values() for question in rows], task_config.path or task_config.hub)
    pool = _of_split(sets, task_config.split)
    wanted = task_config.num_questions
    if wanted:
        random.Random(f"{kind.name} {task_config.split} {task_config.seed}").shuffle(pool)
    drawn, excluded = _readable(pool, wanted or len(pool), kind, task_config.deadline)
    if len(drawn) < max(wanted, 1):
        more = f" ({len(excluded)} more have gold answers that cannot be read)" if excluded else ""
        raise UserError(
            f"{wanted} questions of split {task_config.split} are needed but {task_config.path or task_config.hub} has "
            f"{len(drawn)}{more}; ask for at most that many, or for all of them with task.num_questions=0"
        )
    lines = json.dumps([[q.text, q.answer] for q in drawn])
    digest = hashlib.sha256(lines.encode()).hexdigest()[:16]
    looked_at = len(drawn) + len(excluded)
    return WordedTask(kind, drawn, digest, excluded, looked_at, task_config.format_reward, task_config.deadline)


def _readable(
    pool: list[Question], wanted: int, kind: Kind, deadline: float
) -> tuple[list[Question], list[tuple[Question, str]]]:
    drawn: list[Question] = []
    excluded: list[tuple[Question, str]] = []
    for question in pool:
        if len(drawn) == wanted:
            break
        reason = kind.unreadable(question.answer, deadline)
        if reason is None:
            drawn.append(question)
        else:
            excluded.append((question, reason))
    return drawn, excluded


def _of_split(sets: dict[str, list[Question]], split: str) -> list[Question]:
    """The questions of a split; one set alone is halved, see the module."""
    if split == "all":
        return [question for name in ("", "train", "test") for question in sets.get(name, [])]
    if len(sets) > 1:
        return list(sets[split])
    (rows,) = sets.values()
    order = sorted(rows, key=lambda q: (_digest(q.text), q.id))
    middle = len(order) // 2
    while 0 < middle < len(order) and order[middle].text == order[middle - 1].text:
        middle += 1  # equal texts stay on one side
    chosen = {id(question) for question in (order[:middle] if split == "train" else order[middle:])}
    return [question for question in rows if id(question) in chosen]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8, person=b"grpo-halves").digest()


def _check_ids(questions: list[Question], where: Any) -> None:
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise UserError(f"id {question.id!r} is used more than once in {where}; give every question its own")
        seen.add(question.id)


def _question(record: Record, kind: Kind) -> Question:
    row = record.row
    text_column = next((name for name in kind.texts if name in row), None)
    answer_column = next((name for name in kind.answers if name in row), None)
    if text_column is None or answer_column is None:
        raise UserError(
            f"{record.place} has the columns {', '.join(map(str, row)) or 'none'}; task={kind.name} expects "
            f"{' or '.join(kind.texts)}, and {' or '.join(kind.answers)}"
        )
    text, gold = _text(record, row, text_column), _text(record, row, answer_column)
    if not text.strip():
        raise UserError(f"{record.place}: {text_column} is empty; give it a question or remove it")
    name = next((row[key] for key in ("id", "unique_id") if row.get(key) is not None), record.key)
    sub = next((str(row[key]) for key in kind.kinds if row.get(key)), kind.name)
    return Question(str(name), text, kind.answer(gold), sub)


def _text(record: Record, row: dict[str, Any], column: str) -> str:
    value = row[column]
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f"{record.place}: {column} is {value!r:.60} and no text; mend or remove it")
    return value
