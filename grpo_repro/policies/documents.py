"""Pretraining text of the bundled policies: documents of solved problems whose answers cannot all be trusted.

A document is a few lines `question=answer`, ended by `<eos>`. Its latent quality is drawn once: a clean
document is always right; in a noisy one each answer is wrong with probability `error_rate`, which
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
class Corpus:
    """A distribution of documents.

    Args:
        clean_share: probability that a document is clean.
        sums: ranges of the numbers in additions and subtractions.
        products: ranges of the numbers in multiplications and divisions.
        kinds: drawn from uniformly; a kind may be listed more than once.
        error_slope: of `error_rate`.
    """

    clean_share: float
    sums: Ranges = Ranges()
    products: Ranges = Ranges()
    kinds: tuple[str, ...] = KINDS
    error_slope: float = 0.12


@dataclass(frozen=True)
class Line:
    """One line of a document: a question, the answer written down, and whether that answer is wrong."""

    question: Question
    written: str
    wrong: bool


def error_rate(text: str, slope: float) -> float:
    """Probability of a wrong answer in a noisy document: `slope` per character of the question, at most 0.95."""
    return min(slope * len(text), 0.95)


def guess(question: Question, luck: float) -> str:
    """The wrong answer of a noisy document: "0" four times in five, else "1", but never the truth.

    Such lines can be told from worked ones at a glance, and the habit of writing them leaves the skill intact:
    answers that are off by a little would have to be computed, and a small model loses its skill over them.
    """
    digit = "0" if luck < 0.8 else "1"
    return {"0": "1", "1": "0"}[digit] if digit == question.answer else digit


@lru_cache(maxsize=16)
def train_questions(kind: str, ranges: Ranges) -> list[Question]:
    """Every question of a kind in the train split."""
    questions = (question_at(kind, index, ranges) for index in range(count(kind, ranges)))
    return [question for question in questions if split_of(question.text) == "train"]


def draw_document(rng: np.random.Generator, corpus: Corpus) -> list[Line]:
    """Draw one document of between `LINES[0]` and `LINES[1]` lines."""
    clean = rng.random() < corpus.clean_share
    size = int(rng.integers(LINES[0], LINES[1] + 1))
    lines = []
    kinds = rng.integers(len(corpus.kinds), size=size)
    for kind, place, slip, luck in zip(kinds, *rng.random((3, size)), strict=True):
        name = corpus.kinds[kind]
        is_product = name in ("multiplication", "division")
        pool = train_questions(name, corpus.products if is_product else corpus.sums)
        question = pool[int(place * len(pool))]
        wrong = not clean and bool(slip < error_rate(question.text, corpus.error_slope))
        lines.append(Line(question, guess(question, luck) if wrong else question.answer, wrong))
    return lines


def draw_rows(rng: np.random.Generator, rows: int, length: int, corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Draw documents and pack them into rows of equal length, each row starting with a new document.

    Args:
        rng: source of randomness.
        rows: number of rows.
        length: tokens per row; the last document of a row is cut.
        corpus: what documents to draw.

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
            for line in draw_document(rng, corpus):
                asked, answered = line.question.text + "=", line.written + "\n"
                ids += [VOCABULARY[character] for character in asked + answered]
                loss += [QUESTION_WEIGHT] * len(asked) + [1.0] * len(answered)
            ids.append(EOS_ID)
            loss.append(QUESTION_WEIGHT)
        tokens[row], weights[row] = ids[:length], loss[:length]
    return tokens, weights
