"""Sampled accuracy of a saved policy, per kind of question, with its standard error."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_repro.tasks import Question
from grpo_repro.tasks.arithmetic import extract_integer

PROMPTS_PER_BATCH = 16


def sample_completions(
    model: Any, tokenizer: Any, prompts: list[str], samples: int, max_new_tokens: int = 8
) -> list[list[str]]:
    """Sample completions at temperature 1 with transformers' `generate`, from torch's global generator.

    Prompts of one length in tokens go together, so that nothing is padded.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        prompts: n texts.
        samples: completions per prompt.
        max_new_tokens: limit of a completion.

    Returns:
        n lists of `samples` texts.
    """
    encoded = [tokenizer(prompt).input_ids for prompt in prompts]
    places: dict[int, list[int]] = defaultdict(list)
    for place, ids in enumerate(encoded):
        places[len(ids)].append(place)
    completions: list[list[str]] = [[] for _ in prompts]
    for length, same in sorted(places.items()):
        for start in range(0, len(same), PROMPTS_PER_BATCH):
            batch = same[start : start + PROMPTS_PER_BATCH]
            ids = torch.tensor([encoded[place] for place in batch]).repeat_interleave(samples, dim=0)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max_new_tokens,
            )
            texts = tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
            for number, place in enumerate(batch):
                completions[place] = texts[number * samples : (number + 1) * samples]
    return completions


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
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = [template.replace("{question}", question.text) for question in questions]
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        completions = sample_completions(model, tokenizer, prompts, samples)
    return np.array(
        [
            np.mean([extract_integer(text) == question.answer for text in texts])
            for question, texts in zip(questions, completions, strict=True)
        ]
    )


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
