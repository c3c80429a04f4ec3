"""The bandit: the task of a tabular policy. Its questions are contexts drawn from the policy's distribution."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from grpo_repro.config import ModelConfig, TaskConfig
from grpo_repro.errors import UserError
from grpo_repro.policies import tabular
from grpo_repro.tasks import Question


@dataclass(frozen=True, eq=False)
class BanditTask:
    """Contexts as questions, actions as completions.

    Question i is context `contexts[i]`, its answer the best action's index as text. Binary rewards are drawn by
    `tabular.sample`; `reward` is their mean.
    """

    policy: tabular.TabularPolicy
    contexts: np.ndarray
    questions: list[Question]
    data_hash: str
    name: str = "bandit"

    def reward(self, completion: str, question: Question) -> float:
        """Return q(x, a), the mean reward of the action whose index `completion` is; 0 if there is none."""
        row = self.policy.reward_probs[self.contexts[int(question.id)]]
        action = completion.strip()
        return float(row[int(action)]) if action.isdecimal() and int(action) < len(row) else 0.0


def load(task_config: TaskConfig, model_config: ModelConfig | None = None) -> BanditTask:
    """Build the policy of a tabular model with the bandit that it plays.

    Args:
        task_config: `num_questions` contexts are drawn independently, from `seed`; the other keys do not apply.
        model_config: The tabular model; its family holds the contexts and the reward probabilities.

    Returns:
        The task, whose `policy` is the model's.

    Raises:
        UserError: No tabular model, a task key that the bandit lacks, or family arguments that do not fit.
    """
    if model_config is None or model_config.kind != "tabular":
        raise UserError(
            "task=bandit has no questions of its own, only a tabular model's contexts; use `grpo mse-eval "
            "model=tabular`, or another task"
        )
    for item in fields(TaskConfig):
        value = getattr(task_config, item.name)
        if item.name not in ("name", "num_questions", "seed") and value != item.default:
            raise UserError(
                f"task.{item.name}={value} does not apply to task=bandit; leave it out, and choose the "
                "contexts by model.family_args, for example model.family_args.contexts=20"
            )
    policy = tabular.build(model_config.family, model_config.family_args)
    best = policy.reward_probs.argmax(axis=1)
    contexts = tabular.sample_contexts(policy, task_config.num_questions, np.random.default_rng(task_config.seed))
    questions = [Question(str(i), f"context {x}", str(best[x]), policy.family.name) for i, x in enumerate(contexts)]
    return BanditTask(policy, contexts, questions, family_hash(policy.family))


def family_hash(family: Any) -> str:
    """Hash what the contexts and rewards are, so that a manifest tells two families apart."""
    digest = hashlib.sha256(family.name.encode())
    for array in (
        family.context_probs,
        family.reward_probs,
        family.offset,
        family.features,
        family.curvature,
    ):
        if array is not None:
            digest.update(repr(array.shape).encode() + np.ascontiguousarray(array, dtype="<f8").tobytes())
    return digest.hexdigest()[:16]
