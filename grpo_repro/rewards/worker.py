r"""The process that asks math-verify; `pool` starts it, talks to it in JSON lines and kills it at a deadline.

It is a program of its own (``python -m grpo_repro.rewards.worker SECONDS``) and not a forked child: it works from
threads and from workers of other pools, and inherits neither locks nor file descriptors.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

MEMORY_BYTES = 4 * 2**30
"""Address space of one worker: an expression that needs more is an error of the verifier, not of the machine."""

RELATIVE = 1e-6
"""Largest relative error of an answer with a decimal point against an exact gold."""

EXACT = 1e-25
"""The same where neither side has a decimal point: rounding of a 30-digit evaluation."""


def judge(answer: str, gold: str) -> str:
    r"""Compare an answer with a gold, both LaTeX.

    Args:
        answer: The content of a completion's box.
        gold: The gold answer.

    Returns:
        `right`, `wrong`, or `gold_unparsable`. An answer that cannot be parsed is wrong.
    """
    from math_verify import verify

    truth = _parse(gold)
    if not truth:
        return "gold_unparsable"
    if answer == gold:
        return "right"
    found = _parse(answer)
    # timeout_seconds=None: its own time limit is a signal, which only a main thread can have; the pool has one.
    if not found or not verify(truth, found, timeout_seconds=None, raise_on_error=True):
        return "wrong"
    return "right" if _close(truth[0], found[0]) else "wrong"


def _parse(text: str) -> list[Any]:
    """The expression that math-verify reads in a text, empty if none; only its LaTeX grammar is used.

    The box keeps tuples, intervals, sets, matrices and words in one piece.
    """
    from math_verify import LatexExtractionConfig, parse

    found: list[Any] = parse(
        f"\\boxed{{{text}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found


def _close(gold: Any, answer: Any) -> bool:
    """Whether two expressions that math-verify calls equal are so on a relative scale too.

    It rounds to six decimals, so that 2^-80 and 2^-81 are both zero to it. Tuples, intervals and matrices of one shape
    are compared place by place; what is not a number passes.
    """
    import sympy

    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        return len(gold) == len(answer) and all(map(_close, list(gold), list(answer)))
    if isinstance(gold, sympy.Tuple | sympy.Interval) and isinstance(answer, type(gold)):
        return all(_close(a, b) for a, b in zip(gold.args, answer.args, strict=False))
    if not all(isinstance(x, sympy.Expr) and x.is_number for x in (gold, answer)):
        return True
    a, b = (sympy.N(x, 30) for x in (gold, answer))
    scale = max(abs(a), abs(b))
    if not scale or not scale.is_finite:
        return True
    tolerance = RELATIVE if gold.has(sympy.Float) or answer.has(sympy.Float) else EXACT
    return bool(abs(a - b) <= tolerance * scale)


def _answer(line: bytes) -> dict[str, str]:
    try:
        request = json.loads(line)
        return {"outcome": judge(request["answer"], request["gold"])}
    except (Exception, RecursionError, MemoryError) as error:  # whatever sympy or the parser raises
        return {"outcome": "error", "detail": type(error).__name__}


def main() -> None:
    """Read requests from standard input until it ends, and answer each on standard output."""
    seconds = float(sys.argv[1])
    # Parsers print; their words must not get between the answers.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    with suppress(OSError, ValueError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    import logging

    import math_verify  # noqa: F401

    logging.disable(logging.CRITICAL)
    os.dup2(null, 2)
    out.write(b"ready\n")
    for line in sys.stdin.buffer:
        # Should the parent die while sympy hangs, nobody else would end this process.
        signal.alarm(int(seconds) + 5)
        out.write(json.dumps(_answer(line)).encode() + b"\n")
        signal.alarm(0)


if __name__ == "__main__":
    main()
