"""Tasks: questions, gold answers and rewards. `load_task` is the only entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_repro.errors import UserError
from grpo_repro.schema import WORDED_TASKS

TASKS = ("arithmetic", "bandit", *WORDED_TASKS)


@dataclass(frozen=True)
class Question:
    """One prompt with its verified answer.

    Args:
        id: unique within the task; the `prompt_id` column of the results.
        text: what the prompt template's `{question}` is replaced by.
        answer: the gold answer as text.
        kind: the sub-family of the question, for accuracy per kind.
    """

    id: str
    text: str
    answer: str
    kind: str


def load_task(task_config: Any) -> Any:
    """Build the task that a `TaskConfig` describes.

    Args:
        task_config: any object with the fields of `TaskConfig`; `name` selects the task.

    Returns:
        An object with `name`, `questions: list[Question]`, `reward(completion, question) -> float` and
        `data_hash`; worded tasks (`worded.WordedTask`) also grade batches and tell outcomes apart.

    Raises:
        UserError: unknown task, or settings that the task refuses.
    """
    # Imported when asked for: a tabular run must not pay for text tasks, nor the reverse.
    if task_config.name == "arithmetic":
        from grpo_repro.tasks import arithmetic

        return arithmetic.load(task_config)
    if task_config.name == "bandit":
        from grpo_repro.tasks import bandit

        return bandit.load(task_config)
    if task_config.name in WORDED_TASKS:
        from grpo_repro.tasks import worded

        return worded.load(task_config, worded_kind(task_config.name))
    raise UserError(f"unknown task {task_config.name!r}; choose one of: {', '.join(TASKS)}")


def worded_kind(name: str) -> Any:
    """The `worded.Kind` of one of the worded tasks: its columns and its rules of grading."""
    if name == "gsm8k":
        from grpo_repro.tasks import gsm8k

        return gsm8k.KIND
    from grpo_repro.tasks import mathematics

    return mathematics.KIND
