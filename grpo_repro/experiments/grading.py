"""Rewards of sampled completions, each distinct one graded once, and what grading came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from grpo_repro.engine.sample import Rollout
from grpo_repro.errors import UserError
from grpo_repro.policies.causal_lm import CausalLM
from grpo_repro.rewards import OUTCOMES
from grpo_repro.tasks import Question

OUTCOME_METRICS = (*(f"outcome_{name}" for name in OUTCOMES), "questions_excluded")
"""Metrics that count outcomes, in the order of `OUTCOMES`, and questions that are not asked."""

UNANSWERED = ("truncated_fraction", "error_fraction")
"""Metrics of training completions that were not paid for another reason than their answer."""


@dataclass
class Tally:
    """Numbers of completions with each outcome.

    Attributes:
        counts: In the order of `OUTCOMES`.
    """

    counts: Int[np.ndarray, " outcomes"] = field(default_factory=lambda: np.zeros(len(OUTCOMES), dtype=np.int64))

    def add(self, outcome: str, times: int) -> None:
        """Count completions."""
        self.counts[OUTCOMES.index(outcome)] += times

    def unanswered(self) -> tuple[float, float]:
        """Fractions that were cut off before an answer, and on which the verifier failed (`UNANSWERED`)."""
        cut, failed = (float(self.counts[OUTCOMES.index(name)]) for name in ("truncated", "error"))
        total = max(int(self.counts.sum()), 1)
        return cut / total, failed / total

    def rows(self, task: Any) -> list[tuple[str, float, int]]:
        """Metric, value and count of each outcome, none for a task that does not tell them apart.

        The value is a number of completions, the count that of all graded. Questions whose gold answer cannot be read
        are not asked: `questions_excluded` is their number, its count that of the questions looked at.
        """
        if not hasattr(task, "grade"):
            return []
        total = int(self.counts.sum())
        rows = [(name, float(n), total) for name, n in zip(OUTCOME_METRICS, self.counts, strict=False)]
        return [*rows, (OUTCOME_METRICS[-1], float(len(task.excluded)), task.looked_at)]


def grade(
    policy: CausalLM, task: Any, questions: Sequence[Question], rollout: Rollout, tally: Tally | None = None
) -> Float[np.ndarray, "prompts group"]:
    """Grade a rollout; equal completions of a question are graded once.

    Args:
        policy: Decodes the completions.
        task: The task; one that has `grade` gets all distinct completions at once, any other gives its `reward`.
        questions: The question of each prompt of the rollout.
        rollout: Completions; one that is not finished was cut off by the length limit.
        tally: Counts the outcomes.

    Returns:
        Rewards.

    Raises:
        UserError: If a reward is not finite.
    """
    shape = rollout.tokens.shape[:2]
    tokens, lengths, finished = rollout.tokens.tolist(), rollout.lengths.tolist(), rollout.finished.tolist()
    texts: dict[tuple[int, ...], str] = {}
    items: list[tuple[int, str, bool]] = []
    for place in range(len(questions)):
        for row, length, ended in zip(tokens[place], lengths[place], finished[place], strict=True):
            key = tuple(row[:length])
            if key not in texts:
                texts[key] = policy.decode(key)
            items.append((place, texts[key], not ended))
    rewards = _rewards(task, questions, items, tally)
    found = np.array([rewards[item] for item in items], dtype=np.float64).reshape(shape)
    bad = ~np.isfinite(found).all(1)
    if bad.any():
        place = int(bad.argmax())
        raise UserError(
            f"the reward of a completion of question {questions[place].id!r} is {found[place].min()}; "
            "a task must give finite rewards"
        )
    return found


def _rewards(
    task: Any, questions: Sequence[Question], items: list[tuple[int, str, bool]], tally: Tally | None
) -> dict[tuple[int, str, bool], float]:
    """Reward of each distinct (place of the question, completion, cut off)."""
    times = Counter(items)
    if not hasattr(task, "grade"):
        return {item: float(task.reward(item[1], questions[item[0]])) for item in times}
    verdicts = dict(zip(times, task.grade([(text, questions[i], cut) for i, text, cut in times]), strict=True))
    # What cannot be read is not paid even where it is equal as text.
    unreadable = {item[0] for item, verdict in verdicts.items() if verdict.outcome == "gold_unparsable"}
    rewards = {}
    for item, verdict in verdicts.items():
        lost = item[0] in unreadable
        rewards[item] = 0.0 if lost else float(task.pay(item[1], verdict))
        if tally is not None:
            tally.add("gold_unparsable" if lost else verdict.outcome, times[item])
    return rewards
