"""Pretraining text of the bundled policies: documents of solved problems whose answers cannot all be trusted.

A document is a few lines `question=answer`, ended by `<eos>`. Its latent quality is drawn once: a clean
document is always right; in a noisy one each answer is wrong with probability `error_rate(question)`, which
grows with the length of the question. A model of such text must infer the quality from the lines before:
right demonstrations raise its accuracy, and with a bare prompt it shows less than it knows. Only questions of
the train split occur.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from grpo_repro.policies.tokenizer import EOS_ID, PAD_ID, VOCABULARY
from grpo_repro.tasks import Question
from grpo_repro.tasks.arithmetic import KINDS, Ranges, count, question_at, split_of

LINES = (3, 12)
# Question characters are nearly random: a low weight leaves the capacity to the answers.
QUESTION_WEIGHT = 0.05


@dataclass(frozen=True)
class Line:
    """One line of a document: a question, the answer written down, and whether that answer is wrong."""

    question: Question
    written: str
    wrong: bool


def error_rate(text: str) -> float:
    """Probability of a wrong answer in a noisy document: 0.12 per character of the question, at most 0.95."""
    return min(0.12 * len(text), 0.95)


def corruptions(question: Question) -> tuple[str, ...]:
    """Plausible wrong answers: off by 1, 2 or 10, and the wrong sign."""
    truth = int(question.answer)
    slips = {truth + step for step in (-10, -2, -1, 1, 2, 10)} | {-truth}
    return tuple(str(value) for value in sorted(slips - {truth}))


@lru_cache(maxsize=2)
def train_questions(ranges: Ranges) -> dict[str, list[Question]]:
    """Every question of the train split, by kind."""
    return {
        kind: [
            question
            for question in (question_at(kind, index, ranges) for index in range(count(kind, ranges)))
            if split_of(question.text) == "train"
        ]
        for kind in KINDS
    }


def draw_document(rng: np.random.Generator, clean_share: float, ranges: Ranges) -> list[Line]:
    """Draw one document.

    Args:
        rng: source of randomness.
        clean_share: probability that the document is clean.
        ranges: of the numbers in the questions.

    Returns:
        Between `LINES[0]` and `LINES[1]` lines, kinds uniform.
    """
    questions = train_questions(ranges)
    clean = rng.random() < clean_share
    size = int(rng.integers(LINES[0], LINES[1] + 1))
    lines = []
    for kind, place, luck, slip in zip(
        rng.integers(len(KINDS), size=size), *rng.random((3, size)), strict=True
    ):
        pool = questions[KINDS[kind]]
        question = pool[int(place * len(pool))]
        wrong = not clean and luck < error_rate(question.text)
        written = question.answer
        if wrong:
            options = corruptions(question)
            written = options[int(slip * len(options))]
        lines.append(Line(question, written, wrong))
    return lines


def draw_rows(
    rng: np.random.Generator, rows: int, length: int, clean_share: float, ranges: Ranges
) -> tuple[np.ndarray, np.ndarray]:
    """Draw documents and pack them into rows of equal length, each row starting with a new document.

    Args:
        rng: source of randomness.
        rows: number of rows.
        length: tokens per row; the last document of a row is cut.
        clean_share: probability that a document is clean.
        ranges: of the numbers in the questions.

    Returns:
        Token ids (rows, length) int64, and the weight of each token as a target of the loss, same shape,
        float32: 1 for an answer and the newline that ends it, `QUESTION_WEIGHT` for a question and `<eos>`.
    """
    tokens = np.full((rows, length), PAD_ID, dtype=np.int64)
    weights = np.zeros((rows, length), dtype=np.float32)
    for row in range(rows):
        ids: list[int] = []
        loss: list[float] = []
        while len(ids) < length:
            for line in draw_document(rng, clean_share, ranges):
                asked, answered = line.question.text + "=", line.written + "\n"
                ids += [VOCABULARY[character] for character in asked + answered]
                loss += [QUESTION_WEIGHT] * len(asked) + [1.0] * len(answered)
            ids.append(EOS_ID)
            loss.append(QUESTION_WEIGHT)
        tokens[row], weights[row] = ids[:length], loss[:length]
    return tokens, weights
