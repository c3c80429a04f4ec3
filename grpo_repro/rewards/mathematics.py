r"""MATH: the content of a completion's last box against the gold answer.

Equal text, exact numbers and differing brackets are decided here; the rest is math-verify's, in `pool`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from grpo_repro.rewards import Verdict, pool
from grpo_repro.rewards.boxed import balanced, last_boxed
from grpo_repro.rewards.decimals import Value, exact, fraction

DEADLINE = 5.0
"""Seconds of one comparison."""

LONGEST = 1000
"""Characters of an answer beyond which it is compared as text only."""

DEEPEST = 100
"""Brackets of one kind beyond which the same holds: the parser's time grows fast with their depth."""

TALLEST = 10_000
"""Largest numeric exponent that is evaluated; an answer with a greater one is compared as text only."""

_WORDS = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|operatorname)\s?\{([^{}]*)\}"
_UNIT = re.compile(rf"(?<=[0-9A-Za-z)}}\]])\s*(?:\\[ ,;!])*{_WORDS}(?:\^\{{?[0-9]\}}?)?\s*$")
_NOISE = re.compile(r"\\(?:left|right|displaystyle|big|Big|bigg|Bigg)(?![A-Za-z])|\\[!,;: ]|~|\s")
_DROPPED = re.compile(r"\\?[$%]|\^\s?(?:\\circ|\{\s?\\circ\s?\})|\\degree")
_SIGNS = str.maketrans(dict.fromkeys("\u2212\uff0d\u2010\u2011\u2012\u2013", "-"))
_FRACTION = re.compile(r"(-?)([0-9]*)\\frac(?:\{([0-9]+)\}|([0-9]))(?:\{([0-9]+)\}|([0-9]))")
_BASE = re.compile(r"([0-9A-Za-z]+)_\{?([0-9]+)\}?")
_POWER = re.compile(r"(?<![A-Za-z0-9.])([0-9]+)(?:\^|\*\*)")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
# Commands that math-verify reads; a gold of none but these needs no trial.
_READABLE = frozenset(
    "frac dfrac tfrac cfrac sqrt pi theta alpha beta gamma omega phi lambda sigma infty cup cap pm mp cdot times div "
    "left right text textbf mbox mathrm circ sin cos tan cot sec csc log ln begin end le ge leq geq ne neq in quad "
    "ldots dots displaystyle degree boxed fbox angle".split()
)


def normal(text: str) -> str:
    r"""An answer as text, without what makes no difference: spacing, `\left`, `$`, `%`, degrees, units, a full stop.

    >>> normal(r"\$ 1,\!000 \text{ dollars}."), normal(r"\text{(C)}"), normal(r"\dfrac{1}{2}")
    ('1,000', 'C', '\\frac{1}{2}')
    """
    text = prepared(text)
    text = re.sub(_WORDS, r"\1", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", _NOISE.sub("", text))
    choice = re.fullmatch(r"\(?([A-Za-z])\)?", text)
    return choice[1] if choice else text


def prepared(text: str) -> str:
    r"""An answer as math-verify gets it: without currency, percent, degrees, units and full stop."""
    text = _DROPPED.sub("", text.translate(_SIGNS)).strip()
    text = text[:-1].rstrip() if text.endswith((".", ",")) else text
    return _UNIT.sub("", text)


def number(text: str) -> Value | None:
    r"""The exact value of normal text that is a number, a fraction or a mixed number; else None."""
    if match := _FRACTION.fullmatch(text):
        sign, whole, *parts = match.groups()
        over, under = parts[0] or parts[1], parts[2] or parts[3]
        return fraction(over, under, whole or "0", sign == "-")
    return exact(text.strip("{}") if re.fullmatch(r"\{[^{}]*\}", text) else text)


def gold_answer(gold: str) -> str:
    r"""The answer of a gold: the content of its last box if it has one (a whole solution), else the gold itself."""
    boxed = last_boxed(gold)
    return gold.strip() if boxed is None else boxed


@lru_cache(maxsize=100_000)
def unreadable(gold: str, deadline: float = DEADLINE) -> str | None:
    """Why a gold answer cannot be read, or None; only one with unusual commands is tried in a process."""
    answer = gold_answer(gold)
    text = normal(answer)
    if not re.search(r"[^\W_]", text) or text.casefold() in ("nan", "none", "null"):
        return f"gold answer {gold[:80]!r} is empty"
    if not balanced(answer) or re.search(r"[\^_\\]$", text):
        return f"gold answer {gold[:80]!r} is cut off or has unbalanced braces"
    if len(answer) > LONGEST or set(_COMMAND.findall(answer)) <= _READABLE:
        return None
    verdict = pool.shared(deadline).compare([(prepared(answer), prepared(answer))])[0]
    return None if verdict.outcome == "right" else f"math-verify cannot read gold answer {gold[:80]!r}"


def grade(items: Sequence[tuple[str, str, bool]], deadline: float = DEADLINE) -> list[Verdict]:
    r"""Grade completions; those that only math-verify can decide are compared several at once.

    Args:
        items: Completion, gold answer (bare, or a solution with a box) and whether the completion was cut off.
        deadline: Seconds of one comparison by math-verify.

    Returns:
        Verdicts in order, see docs/rewards.md.

    >>> [verdict.outcome for verdict in grade([(r"\boxed{1,000}", "1000", False), (r"\boxed{2", "2", True)])]
    ['right', 'truncated']
    """
    verdicts = [_read(*item, deadline) for item in items]
    open_: dict[tuple[str, str], list[int]] = {}
    for place, found in enumerate(verdicts):
        if not isinstance(found, Verdict):
            open_.setdefault(found, []).append(place)
    if open_:
        for places, verdict in zip(open_.values(), pool.shared(deadline).compare(list(open_)), strict=True):
            for place in places:
                verdicts[place] = verdict
    return [found for found in verdicts if isinstance(found, Verdict)]


def audit(golds: Sequence[str], deadline: float = DEADLINE) -> list[str | None]:
    """Why math-verify cannot read each gold answer, or does not find it equal to itself; None where all is well."""
    texts = [prepared(gold_answer(gold)) for gold in golds]
    # The space keeps the worker from deciding by equal text.
    verdicts = pool.shared(deadline).compare([(f"{text} ", text) for text in texts])
    return [
        None if verdict.outcome == "right" else f"math-verify grades {gold[:80]!r} against itself {verdict.outcome}"
        for gold, verdict in zip(golds, verdicts, strict=True)
    ]


def has_format(completion: str) -> bool:
    r"""Whether a completion gives its answer in the form that was asked for: a closed box that is not empty."""
    return bool(last_boxed(completion))


def _read(completion: str, gold: str, cut: bool, deadline: float) -> Verdict | tuple[str, str]:
    """The verdict on one completion, or the answer and the gold that math-verify has to compare."""
    reason = unreadable(gold, deadline)
    if reason:
        return Verdict("gold_unparsable", reason)
    answer, truth = (last_boxed(completion) or "").strip(), gold_answer(gold)
    if not answer:
        return Verdict("truncated" if cut else "no_answer")
    return _decided(answer, truth) or (prepared(answer), prepared(truth))


def _decided(answer: str, gold: str) -> Verdict | None:
    """The verdict on two answers where text and exact numbers decide it."""
    a, g = normal(answer), normal(gold)
    if a == g:
        return Verdict("right")
    wrong = Verdict("wrong")
    if a.isalpha() and g.isalpha():
        return Verdict("right") if a.casefold() == g.casefold() else wrong
    values = number(a), number(g)
    if None not in values:
        return Verdict("right") if values[0] == values[1] else wrong
    if len(answer) > LONGEST:
        return Verdict("wrong", f"an answer of {len(answer)} characters is compared as text only")
    if max(map(a.count, "{([")) > DEEPEST:
        return Verdict("wrong", f"an answer with more than {DEEPEST} brackets is compared as text only")
    if not balanced(answer) or _brackets(a) != _brackets(g) and "" not in (_brackets(a), _brackets(g)):
        return wrong
    if _too_tall(a):
        return Verdict("wrong", f"an answer with an exponent above {TALLEST} is compared as text only")
    bases = _BASE.fullmatch(a), _BASE.fullmatch(g)
    if bases[0] and bases[1]:
        return wrong  # a_b is text: neither equal above nor a product
    return None


def _brackets(text: str) -> str:
    r"""The kind of brackets around a tuple, interval or set: "()", "[)", "{}" and so on, empty for anything else.

    math-verify takes the set {1, 2} for the pair (1, 2) and an interval for a pair of the same numbers.
    """
    opening = text[:1] if text[:1] in "([" else text[:2] if text.startswith("\\{") else ""
    closing = "\\}" if text.endswith("\\}") else text[-1:] if text[-1:] in ")]" else ""
    inner = text[len(opening) : len(text) - len(closing)]
    one_piece = opening and closing and "," in inner and not re.search(r"[)\]}].*[(\[{]", inner)
    return opening[-1] + closing[-1] if one_piece else ""


def _too_tall(text: str) -> bool:
    """Whether a number is raised to a numeric power that is too large to be evaluated, towers included."""
    return any(_exponent(text, match.end(), 0) > TALLEST for match in _POWER.finditer(text))


def _exponent(text: str, start: int, depth: int) -> float:
    """Size of the exponent that begins at a place of the text: 0 if it is no number, infinite if it is a tall tower."""
    match = re.compile(r"\{*\(*([0-9]+)\)*\}*((?:\^|\*\*)?)").match(text, start)
    if match is None:
        return 0.0
    base = float(match[1]) if len(match[1]) < 9 else float("inf")
    if not match[2]:
        return base
    upper = _exponent(text, match.end(), depth + 1) if depth < 8 else float("inf")
    return base if base <= 1 else base**upper if upper < 20 else float("inf")
