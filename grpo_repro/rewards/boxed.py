r"""The last balanced `\boxed{...}` of a text, in one pass."""

from __future__ import annotations

import re
from collections import deque

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{|\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,8}(?=\{)")
# TeX's short form, as in "\boxed 5$".
_SHORT = re.compile(r"\\(?:boxed|fbox)\s{1,8}([+-]?[0-9][0-9.,/]*+|[A-Za-z](?![A-Za-z]))")
_DEEPEST = 50
_LONGEST = 10_000


def last_boxed(text: str) -> str | None:
    r"""The content of the last box that is closed; of nested boxes the outermost, the inner ones opened.

    `\{` and `\}` are characters, not braces. A box that is never closed does not count, those inside or before it do.

    Args:
        text: A completion or a solution, of any length.

    Returns:
        The content without surrounding space (it may be empty), or None if there is no closed box.

    >>> last_boxed(r"\boxed{3}, no, \boxed{\frac{1}{2}}"), last_boxed(r"\boxed{\boxed{5}}"), last_boxed(r"\boxed{1")
    ('\\frac{1}{2}', '5', None)
    """
    if "box" not in text:
        return None
    opened: list[tuple[bool, int, int]] = []
    closed: list[tuple[int, int, int]] = []
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token.endswith("{") and token != "\\{":
            opened.append((len(token) > 1, match.start(), match.end()))
        elif token == "}" and opened:
            box, start, inside = opened.pop()
            if box:
                while closed and closed[-1][0] > start:
                    closed.pop()
                closed.append((start, inside, match.start()))
    short = next(iter(deque(_SHORT.finditer(text), maxlen=1)), None)
    if short is not None and (not closed or short.start() > closed[-1][2]):
        return short[1].rstrip(".,")
    return _unboxed(text[closed[-1][1] : closed[-1][2]]) if closed else None


def _unboxed(content: str) -> str:
    r"""Open the boxes inside a box: `x = \boxed{5}` is `x = {5}`, and a lone `{5}` is 5."""
    content = _BOX.sub("", content).strip()
    if len(content) > _LONGEST:
        return content
    for _ in range(_DEEPEST):
        if not (content.startswith("{") and content.endswith("}") and balanced(content[1:-1])):
            break
        content = content[1:-1].strip()
    return content


def balanced(text: str) -> bool:
    r"""Whether every brace of a text has its partner; escaped ones are characters."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth < 0:
            return False
    return depth == 0
