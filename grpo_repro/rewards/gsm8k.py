r"""GSM8K: the final number of a completion against that of the gold answer, exactly."""

from __future__ import annotations

import re
from collections import deque

from grpo_repro.rewards import Verdict
from grpo_repro.rewards.boxed import last_boxed
from grpo_repro.rewards.decimals import Value, find, only, plain_fractions, value

MARKER = "####"
_PHRASE = re.compile(r"\banswer\b[*_\s]{0,4}(?:is\b|would be\b|comes to\b|[:=])", re.IGNORECASE)
# The end of a sentence or line; a full stop inside a number does not end one.
_END = re.compile(r"\n|[.!?](?=\s|$)")
Found = tuple[Value | None, int]
"""A number and where it ends in the text; the value is None where an answer is given that is no number."""


def gold_value(gold: str) -> Value | None:
    """The number of a gold answer: what follows its last `####`, or the whole, None if that is not one number."""
    return only(gold.rpartition(MARKER)[2])


def grade(completion: str, gold: str, cut: bool = False) -> Verdict:
    r"""Grade one completion.

    Args:
        completion: Decoded text.
        gold: The gold answer, bare or at the end of a solution after `####`.
        cut: Whether the completion ended because it had reached the longest length, not of itself.

    Returns:
        `right` for the same number, `wrong` for another or for an answer that is no number; see docs/rewards.md.

    >>> grade("So it costs $31.00.", "31").outcome, grade("I do not know.", "5").outcome
    ('right', 'no_answer')
    """
    truth = gold_value(gold)
    if truth is None:
        return Verdict("gold_unparsable", f"gold answer {gold[:80]!r} is not one number")
    found = extract(completion, cut)
    if found is None:
        return Verdict("truncated" if cut else "no_answer")
    return Verdict("right" if found[0] == truth else "wrong")


def extract(completion: str, cut: bool = False) -> Found | None:
    r"""The final answer: of the last `####`, else the last box, else the last answer phrase, else the last number.

    In a completion that was cut off, a number at the very end may lack digits, and the last number is one of the
    reasoning: neither is an answer.

    Args:
        completion: Decoded text.
        cut: Whether it was cut off.

    Returns:
        The answer, or None if there is none.
    """
    found = _marked(completion)
    boxed = last_boxed(completion) if found is None else None
    if boxed:
        return _boxed_value(boxed), -1
    if found is None:
        found = _after_phrase(completion)
    if found is None and not cut:
        found = _pick(completion, 0, len(completion), last=True)
    return None if found is None or (cut and found[1] == len(completion)) else found


def has_format(completion: str) -> bool:
    """Whether a completion gives its answer in the form that was asked for: a number after `####`."""
    return _marked(completion) is not None


def _marked(text: str) -> Found | None:
    """The number on the line of the last `####`: after its last equals sign if it has one, else its first."""
    place = text.rfind(MARKER)
    if place < 0:
        return None
    start = place + len(MARKER)
    start += len(text[start:]) - len(text[start:].lstrip())
    end = text.find("\n", start)
    end = len(text) if end < 0 else end
    start = max(start, text.rfind("=", start, end) + 1)
    return _pick(text, start, end, last=False)


def _boxed_value(content: str) -> Value | None:
    """The one number of a box, after its last equals sign and without units in words."""
    return only(re.sub(r"\\(?:text|mathrm|mbox)\{[^{}]*\}|\\[;!]", "", content.rpartition("=")[2]))


def _after_phrase(text: str) -> Found | None:
    """The last number of the sentence after the last "answer is", "answer:" and the like."""
    match = next(iter(deque(_PHRASE.finditer(text), maxlen=1)), None)
    if match is None:
        return None
    end = _END.search(text, match.end())
    return _pick(text, match.end(), end.start() if end else len(text), last=True)


def _pick(text: str, start: int, end: int, last: bool) -> Found | None:
    """The first or last number of a part of the text; where it ends is exact if it ends the part."""
    piece = text[start:end]
    plain = plain_fractions(piece)
    match = next(iter(deque(find(plain), maxlen=1)), None) if last else next(find(plain), None)
    if match is None:
        return None
    return value(match), end if match.end() == len(plain) else start + min(match.end(), len(piece) - 1)
