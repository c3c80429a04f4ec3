"""Rewards of sampled completions, each distinct one graded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from grpo_repro.engine.sample import Rollout
from grpo_repro.errors import UserError
from grpo_repro.policies.causal_lm import CausalLM
from grpo_repro.tasks import Question


def grade(
    policy: CausalLM, reward: Callable[[str, Question], float], questions: Sequence[Question], rollout: Rollout
) -> Float[np.ndarray, "prompts group"]:
    """Grade a rollout; equal completions of a question are graded once.

    Args:
        policy: Decodes the completions.
        reward: The task's.
        questions: The question of each prompt of the rollout.
        rollout: Completions.

    Raises:
        UserError: If a reward is not finite.
    """
    rewards = np.empty(rollout.tokens.shape[:2])
    tokens, lengths = rollout.tokens.tolist(), rollout.lengths.tolist()
    for place, question in enumerate(questions):
        known: dict[tuple[int, ...], float] = {}
        for k, (row, length) in enumerate(zip(tokens[place], lengths[place], strict=True)):
            key = tuple(row[:length])
            if key not in known:
                known[key] = float(reward(policy.decode(key), question))
            rewards[place, k] = known[key]
        if not np.isfinite(rewards[place]).all():
            raise UserError(
                f"the reward of a completion of question {question.id!r} is {rewards[place].min()}; "
                "a task must give finite rewards"
            )
    return rewards
