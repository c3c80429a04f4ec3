"""Sampled accuracy of a saved policy, per kind of question, with its standard error."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from grpo_repro.config import ModelConfig
from grpo_repro.engine.sample import sample, uniforms
from grpo_repro.policies import causal_lm
from grpo_repro.tasks import Question
from grpo_repro.tasks.arithmetic import extract_integer

MAX_NEW_TOKENS = 8
AT_ONCE = 2048
"""Completions sampled in one batch."""


def sampled_values(
    model_dir: str | Path, template: str, questions: list[Question], samples: int, seed: int
) -> np.ndarray:
    """Estimate V(x) of each question by the share of right answers among samples at temperature 1.

    Args:
        model_dir: transformers directory.
        template: text with `{question}`.
        questions: n arithmetic questions.
        samples: completions per question.
        seed: of the sampling.

    Returns:
        (n,) float64.
    """
    policy = causal_lm.load(ModelConfig(name=str(model_dir), path=str(model_dir), template=template), "cpu")
    seeds = np.random.SeedSequence(seed).spawn(len(questions))
    step = max(1, AT_ONCE // samples)
    values: list[float] = []
    for start in range(0, len(questions), step):
        part = questions[start : start + step]
        random = uniforms(seeds[start : start + step], samples, MAX_NEW_TOKENS)
        rollout = sample(policy, [policy.encode(question.text) for question in part], random)
        for question, tokens, lengths in zip(part, rollout.tokens.tolist(), rollout.lengths.tolist(), strict=True):
            texts = [policy.decode(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
            values.append(float(np.mean([extract_integer(text) == question.answer for text in texts])))
    return np.array(values)


def sampled_accuracy(
    model_dir: str | Path, template: str, questions: list[Question], samples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Mean sampled accuracy per kind, and over all questions as `all`.

    The standard error is that of a mean over questions (their V(x) vary, and samples of one question are
    dependent): the standard deviation of the per-question shares over the square root of their number.

    Args:
        model_dir: transformers directory.
        template: text with `{question}`.
        questions: arithmetic questions.
        samples: completions per question.
        seed: of the sampling.

    Returns:
        kind -> (mean, standard error); the error is nan for a kind with a single question.
    """
    values = sampled_values(model_dir, template, questions, samples, seed)
    kinds = np.array([question.kind for question in questions])
    groups = {kind: values[kinds == kind] for kind in dict.fromkeys(kinds.tolist())} | {"all": values}
    return {
        kind: (float(of.mean()), float(of.std(ddof=1) / len(of) ** 0.5) if len(of) > 1 else float("nan"))
        for kind, of in groups.items()
    }
