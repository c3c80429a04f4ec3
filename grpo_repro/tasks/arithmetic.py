"""Integer arithmetic: the paper's five kinds of question (section 6, Figure 4).

| kind | form | paper's example |
|---|---|---|
| `two_step` | a + b, a - b | 15+25 |
| `three_step` | a +/- b +/- c | 20+30-15 |
| `multiplication` | a * f | 3*4 |
| `division` | (a*f) / f, always exact | 24/6 |
| `brackets` | a +/- (b +/- c) | 25-(10+5) |

The paper calls the first two "two-step" and "three-step" and gives one example of each kind: we read the
number as that of operands. The letters a, b, c stand for operands (1..30) and f for factors (1..10), both
ranges configurable: products of two large numbers would be a table to learn by heart, on which a small model
fails outside its training split. Results may be negative.

The split is a function of the question's text alone (`split_of`): train and test are disjoint for any seeds,
ranges and numbers of questions.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import deque
from dataclasses import dataclass
from typing import Any

from grpo_repro.errors import UserError
from grpo_repro.schema import LARGEST
from grpo_repro.tasks import Question

KINDS = ("two_step", "three_step", "multiplication", "division", "brackets")
SPLITS = ("train", "test")
# Multiplication within the default ranges has only 300 questions, of which 500 test questions need 100.
TEST_FRACTION = 0.35

_SIGNS = "+-"
_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9)])[+\-\u2212\uff0d])?"
    r"(?<![0-9A-Za-z])(?<![^.]\.)(?P<digits>[0-9]{1,3}(?:[,\u00a0\u2009\u202f][0-9]{3}(?![0-9]))++|[0-9]++)"
    r"(?:\.(?P<fraction>[0-9]++))?(?P<exponent>[eE][+-]?[0-9]++)?"
)


@dataclass(frozen=True)
class Ranges:
    """Inclusive ranges of the numbers in a question.

    Args:
        operand_min: smallest operand of an addition or subtraction, left factor and quotient; at least 0.
        operand_max: the largest of these.
        factor_min: smallest right factor and divisor, at least 1.
        factor_max: the largest of these.
    """

    operand_min: int = 1
    operand_max: int = 30
    factor_min: int = 1
    factor_max: int = 10

    def __post_init__(self) -> None:
        """Refuse empty ranges, those that allow a division by zero, and more questions than 64 bits can number."""
        for name, floor in (("operand", 0), ("factor", 1)):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if not floor <= low <= high:
                raise UserError(f"{name} range is {low}..{high}; it needs {floor} <= {name}_min <= {name}_max")
            if high > LARGEST[f"task.{name}_max"]:
                raise UserError(f"{name}_max={high} is too large; use {LARGEST[f'task.{name}_max']} or less")

    @property
    def operands(self) -> range:
        """Operands of additions and subtractions, left factors and quotients."""
        return range(self.operand_min, self.operand_max + 1)

    @property
    def factors(self) -> range:
        """Right factors and divisors."""
        return range(self.factor_min, self.factor_max + 1)


def count(kind: str, ranges: Ranges) -> int:
    """Number of distinct questions of a kind, both splits together."""
    n, m = len(ranges.operands), len(ranges.factors)
    return {"two_step": 2 * n**2, "three_step": 4 * n**3, "brackets": 4 * n**3}.get(kind, n * m)


def question_at(kind: str, index: int, ranges: Ranges) -> Question:
    """The question with a given number among the `count(kind, ranges)` of its kind.

    >>> question_at("two_step", 0, Ranges())
    Question(id='1+1', text='1+1', answer='2', kind='two_step')
    """
    places = {"two_step": 1, "three_step": 2, "brackets": 2}.get(kind, 0)
    pools = [ranges.operands] * (1 + places) if places else [ranges.operands, ranges.factors]
    numbers = []
    for pool in pools:
        index, place = divmod(index, len(pool))
        numbers.append(pool[place])
    signs = [(index >> bit) & 1 for bit in range(places)]
    terms = [-number if minus else number for number, minus in zip(numbers[1:], signs, strict=False)]
    marks = [_SIGNS[minus] for minus in signs]
    a, b, *c = numbers
    if kind == "multiplication":
        text, value = f"{a}*{b}", a * b
    elif kind == "division":
        text, value = f"{a * b}/{b}", a
    elif kind == "brackets":
        text, value = f"{a}{marks[0]}({b}{marks[1]}{c[0]})", a + (terms[0] + terms[1] * (1 - 2 * signs[0]))
    else:
        text = str(a) + "".join(f"{mark}{number}" for mark, number in zip(marks, numbers[1:], strict=True))
        value = a + sum(terms)
    return Question(text, text, str(value), kind)


def split_of(text: str) -> str:
    """The split that owns a question: a hash of its text below `TEST_FRACTION` means test."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"grpo-arith").digest()
    return "test" if int.from_bytes(digest, "big") < TEST_FRACTION * 2**64 else "train"


def generate(num_questions: int, split: str, seed: int, ranges: Ranges) -> list[Question]:
    """Draw distinct questions, kinds in equal numbers (a remainder goes to random kinds), shuffled.

    Args:
        num_questions: how many, at least 1.
        split: "train" or "test".
        seed: same seed, same questions.
        ranges: of the numbers in a question.

    Returns:
        `num_questions` questions with distinct texts, all of the given split.

    Raises:
        UserError: unknown split, no questions asked for, or ranges that hold too few.
    """
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r} of arithmetic; choose one of: {', '.join(SPLITS)}")
    if num_questions < 1:
        raise UserError(f"num_questions is {num_questions}; it must be at least 1")
    rng = random.Random(f"arithmetic {split} {seed}")
    share, rest = divmod(num_questions, len(KINDS))
    extra = set(rng.sample(KINDS, rest))
    chosen: list[Question] = []
    for kind in KINDS:
        chosen += _draw(kind, share + (kind in extra), split, rng, ranges)
    rng.shuffle(chosen)
    return chosen


def _draw(kind: str, wanted: int, split: str, rng: random.Random, ranges: Ranges) -> list[Question]:
    total, size = count(kind, ranges), 4 * wanted + 64
    while True:
        numbers = rng.sample(range(total), min(size, total))
        found = [q for q in (question_at(kind, i, ranges) for i in numbers) if split_of(q.text) == split]
        if len(found) >= wanted:
            return found[:wanted]
        if size >= total:
            fewer = f" or ask for at most {len(found) * len(KINDS)} questions" if found else ""
            raise UserError(
                f"{wanted} {split} questions of kind {kind} are needed but operands {ranges.operand_min}.."
                f"{ranges.operand_max} and factors {ranges.factor_min}..{ranges.factor_max} hold only "
                f"{len(found)}; widen the ranges{fewer}"
            )
        size *= 4


def extract_integer(completion: str) -> str | None:
    """The integer that a completion gives as its answer, in canonical form.

    It is the *last number on the first line that contains a digit*. A base model answers and goes on with the
    next problem on a new line; a chat model wraps its answer in a sentence ("The answer is 42.", "40 + 2 =
    42"). A sign counts when it touches the number and does not follow a digit or bracket (in "50-8" it is an
    operator). Thousands separators are a comma or a no-break or thin space. A last number that is not an
    integer is no answer.

    Nothing is converted to `int`, so the length of the number does not matter; the time is linear in the
    text.

    Args:
        completion: decoded text of any length.

    Returns:
        The integer without leading zeros or plus sign ("-0" is "0"), or None.

    >>> extract_integer(" 1,234 apples"), extract_integer("The answer is \u221242."), extract_integer("4.5")
    ('1234', '-42', None)
    """
    first = re.search("[0-9]", completion)
    if first is None:
        return None
    start = completion.rfind("\n", 0, first.start()) + 1
    end = completion.find("\n", first.start())
    numbers = _NUMBER.finditer(completion, start, len(completion) if end < 0 else end)
    last = next(iter(deque(numbers, maxlen=1)), None)
    if last is None or last["exponent"] or (last["fraction"] or "").strip("0"):
        return None
    digits = re.sub("[^0-9]", "", last["digits"]).lstrip("0") or "0"
    negative = last["sign"] not in (None, "+") and digits != "0"
    return "-" + digits if negative else digits


@dataclass(frozen=True)
class ArithmeticTask:
    """A drawn set of questions with the binary reward of the paper's Figure 4."""

    questions: list[Question]
    data_hash: str
    name: str = "arithmetic"

    def reward(self, completion: str, question: Question) -> float:
        """1.0 when the extracted integer equals the truth, else 0.0."""
        return float(extract_integer(completion) == question.answer)


def load(task_config: Any) -> ArithmeticTask:
    """Build the task from `num_questions`, `split`, `seed` and the fields of `Ranges` in a `TaskConfig`."""
    ranges = Ranges(**{name: getattr(task_config, name) for name in Ranges.__dataclass_fields__})
    questions = generate(task_config.num_questions, task_config.split, task_config.seed, ranges)
    lines = json.dumps([[q.text, q.answer] for q in questions])
    return ArithmeticTask(questions, hashlib.sha256(lines.encode()).hexdigest()[:16])
