r"""Numbers as people and models write them, read exactly and in linear time.

A number is a run of digits with an optional sign, currency, thousands separators, decimal part, power of ten and
denominator. Nothing is converted to `float`, so that 1,000,000,007 and 1,000,000,008 differ whatever their length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice

Value = tuple[str, str, int]
"""A number in canonical form: ("-" or "", significant digits, power of ten), or ("/", "a/b", 0) if it has no end."""

LONGEST_FRACTION = 100
"""Digits of a numerator or denominator beyond which a fraction is no number: reducing it would take too long."""

_MINUS = "\\-\u2212\uff0d\u2010\u2011\u2012\u2013"
# Comma, LaTeX's {,} and ,\! and \, and the spaces that do not break.
_SEPARATOR = r"(?:,(?:\\!\s?)?|\{,\}|\\,|[\u00a0\u2009\u202f])"
_NUMBER = re.compile(
    rf"(?:(?<![0-9A-Za-z)\]}}%])(?P<sign>[+{_MINUS}]))?(?:\\?[$\u20ac\u00a3\u00a5\u20b9])?(?P<minus>(?<=\$)[{_MINUS}])?"
    rf"(?:(?<![0-9A-Za-z])(?<![0-9]\.)(?P<whole>[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{3}}(?![0-9]))++|[0-9]++)"
    r"(?:\.(?P<part>[0-9]++))?|(?<![0-9A-Za-z.])\.(?P<bare>[0-9]++))"
    r"(?:[eE](?P<exponent>[+-]?[0-9]++)(?![0-9A-Za-z])"
    r"|\s{0,2}(?:\\times|\\cdot|\u00d7|\*)\s{0,2}10\s?(?:\^|\*\*)\s?\{?(?P<power>[+-]?[0-9]++)\}?"
    r"|\s?/\s?(?P<under>[0-9]++(?:\.[0-9]++)?))?"
)
_FRACTION = re.compile(r"\\[dtc]?frac\s?(?:\{([0-9.,]++)\}|([0-9]))\s?(?:\{([0-9.,]++)\}|([0-9]))")
# What may stand around the one number of a gold answer: units, currency, percent, a full stop.
_AROUND = re.compile(r"[A-Za-z\s$%.\u20ac\u00a3\u00a5\u20b9\\]*")


def find(text: str) -> Iterator[re.Match[str]]:
    r"""Yield the numbers of a text as matches, which `value` reads.

    A sign counts when it touches the number (or its currency) and does not follow a digit, letter, percent sign or
    closing bracket: in "50-8" it is an operator. Digits that follow a letter ("x42") are no number.

    Args:
        text: Any text; `\frac{a}{b}` must have been replaced by `plain_fractions`.

    >>> [value(match) for match in find("from $1,234.50 to \u22126 apples.")]
    [('', '12345', -1), ('-', '6', 0)]
    """
    return _NUMBER.finditer(text)


def plain_fractions(text: str) -> str:
    r"""Replace LaTeX fractions of two numbers, `\frac{a}{b}` and `\frac12`, by a/b."""
    return _FRACTION.sub(lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", text) if "frac" in text else text


def only(text: str) -> Value | None:
    """The number of a text that holds exactly one, among nothing but units, currency and punctuation.

    >>> only("$7,250.00"), only("18 dollars"), only("3 to 4"), only("x^2")
    (('', '725', 1), ('', '18', 0), None, None)
    """
    text = plain_fractions(text)
    found = list(islice(find(text), 2))
    if len(found) != 1:
        return None
    (match,) = found
    around = _AROUND.fullmatch(text[: match.start()]) and _AROUND.fullmatch(text[match.end() :])
    return value(match) if around else None


def exact(text: str) -> Value | None:
    """The number that a whole text is, without units; None if it is anything else."""
    match = _NUMBER.fullmatch(text)
    return value(match) if match else None


def fraction(numerator: str, denominator: str, whole: str = "0", negative: bool = False) -> Value | None:
    """The exact value of whole + numerator/denominator, None for a zero denominator or more than 100 digits."""
    if max(len(numerator), len(denominator), len(whole)) > LONGEST_FRACTION:
        return None
    under = Fraction(denominator)
    if not under:
        return None
    total = Fraction(whole) + Fraction(numerator) / under
    return _reduced(-total if negative else total)


def value(match: re.Match[str]) -> Value | None:
    """The value of a number that `find` gave; None for a zero denominator or an exponent of ten digits."""
    whole = re.sub("[^0-9]", "", match["whole"] or "")
    part = match["part"] or match["bare"] or ""
    negative = any(match[name] not in (None, "+") for name in ("sign", "minus"))
    power = match["exponent"] or match["power"] or "0"
    if len(power) > 9:
        return None
    if match["under"]:
        return fraction(f"{whole or 0}.{part or 0}", match["under"], negative=negative)
    return _canonical(negative, whole + part, int(power) - len(part))


def _canonical(negative: bool, digits: str, exponent: int) -> Value:
    digits = digits.lstrip("0")
    short = digits.rstrip("0")
    if not short:
        return "", "0", 0
    return "-" if negative else "", short, exponent + len(digits) - len(short)


def _reduced(number: Fraction) -> Value:
    """A fraction as a finite decimal where it is one, so that 1/2 and 0.5 are the same number."""
    rest, twos, fives = number.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    if rest != 1:
        return "/", f"{number.numerator}/{number.denominator}", 0
    places = max(twos, fives)
    return _canonical(number < 0, str(abs(number.numerator) * 10**places // number.denominator), -places)
