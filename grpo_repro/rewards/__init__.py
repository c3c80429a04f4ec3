"""Rewards of worded tasks: what a completion's final answer is and whether it is right.

The policy is written down in docs/rewards.md. `decimals` reads numbers, `boxed` finds boxes, `gsm8k` and
`mathematics` hold one task's rules each, `pool` asks math-verify in processes that can be killed.
"""

from __future__ import annotations

from dataclasses import dataclass

OUTCOMES = ("right", "wrong", "no_answer", "truncated", "error", "gold_unparsable")
"""What grading one completion can come to; only `right` is paid."""


@dataclass(frozen=True)
class Verdict:
    """What grading one completion came to.

    Attributes:
        outcome: One of `OUTCOMES`.
        detail: Why, where the outcome alone does not say it.
    """

    outcome: str
    detail: str = ""

    @property
    def accuracy(self) -> float:
        """1.0 for a right answer, else 0.0."""
        return float(self.outcome == "right")
