"""What a training run of a causal language model will cost, from a stated model."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch

from grpo_repro import sampler_options
from grpo_repro.algorithm2 import Options
from grpo_repro.cells import Cell, Estimate
from grpo_repro.config import TaskConfig
from grpo_repro.errors import UserError
from grpo_repro.experiments.evaluation import PREDICTION_QUESTIONS
from grpo_repro.experiments.language_mse import SAMPLED_AT_ONCE, SMALL_MODEL
from grpo_repro.experiments.mse_eval import settings
from grpo_repro.fingerprint import model_of
from grpo_repro.policies import causal_lm
from grpo_repro.tasks import load_task


@lru_cache(maxsize=8)
def _sizes(model_text: str, task_text: str) -> tuple[causal_lm.Shape, int, int]:
    """Size of a model, tokens of its longest prompt and number of test questions: the same for all cells of a plan."""
    model, task = model_of(json.loads(model_text)), TaskConfig(**json.loads(task_text))
    shape, questions = causal_lm.shape(model), load_task(task).questions
    prompts = (model.template.replace("{question}", question.text) for question in questions)
    return shape, max(len(shape.tokenizer.encode(prompt)) for prompt in prompts), len(questions)


def estimate(cell: Cell) -> Estimate:
    """Cost of a run from a stated model, without weights.

    With d parameters, prompts of P tokens and completions of at most T, an iteration takes 2d flops for each prompt
    token and 2d for half the tokens of its distinct completions where T <= 16 (short answers repeat: n^0.7 of n are
    distinct, most end early, and groups of equal rewards need no update), else 8d for every token; an evaluation 2d.
    The rate is 3e10 flops a second for each CPU thread and 1e14 for a GPU, plus 0.01 s for each iteration and 2 s to
    start. G* from pools takes 0.03 s and 2d (n^0.7 (4T + P)) for each question. Memory is weights, gradient and two
    averages (with adapters the weights, and the adapters' own), the activations of one micro-batch and the cache of a
    sampled batch. A penalty adds the reference policy: its weights, unless it is the policy without its adapters, and
    2d flops more for every token of an iteration. `sampler_options.cost` is added.
    """
    config = cell.config
    reference = Options.of(config).penalized
    model, task = settings(cell)
    shape, prompt, asked = _sizes(json.dumps(asdict(model)), json.dumps(asdict(task)))
    length, group, samples = config["max_new_tokens"], config["group_size"], config["eval_samples"]
    if shape.positions and prompt + length > shape.positions:
        raise UserError(
            f"{model.name} has {shape.positions} positions, and a prompt of {prompt} tokens with "
            f"max_new_tokens={length} needs more; shorten the template or lower max_new_tokens"
        )
    short = length <= 16

    def tokens(prompts: int, each: int) -> float:
        return prompts * (prompt + (each**0.7 * length / 2 if short else each * length))

    examined = asked + config["prompt_pool"]
    checks = len(config["checkpoints"])
    work = config["iterations"] * tokens(config["budget"] // group, group) * ((1 if short else 4) + reference)
    work += checks * (tokens(examined, samples) + tokens(asked, 1))
    seconds = 2.0 + 0.01 * config["iterations"]
    completions = config["iterations"] * config["budget"] + checks * examined * samples
    if config["predict"]:
        pool, pooled = config["completions_per_prompt"], min(config["prompt_pool"], PREDICTION_QUESTIONS)
        work += checks * pooled * pool**0.7 * (4 * length + prompt)
        seconds += 0.03 * checks * pooled
        completions += checks * pooled * pool
    on_gpu = causal_lm.device_of(config["device"]).startswith("cuda")
    start, extra = sampler_options.cost(config, on_gpu)
    seconds += start + 2.0 * shape.parameters * work / (1e14 if on_gpu else 3e10 * _threads(config, shape))
    return Estimate(completions, completions * length, seconds, _memory(config, shape, prompt) + extra)


def _threads(config: dict[str, Any], shape: causal_lm.Shape) -> int:
    """Threads of torch that a run takes on a CPU."""
    small = config["threads"] is None and shape.parameters < SMALL_MODEL
    return 1 if small else config["threads"] or torch.get_num_threads()


def _memory(config: dict[str, Any], shape: causal_lm.Shape, prompt: int) -> int:
    """Peak memory in bytes; see `estimate`."""
    length, size = config["max_new_tokens"], shape.width * shape.layers
    activations = 40 * 4 * min(config["micro_batch"], config["budget"]) * (prompt + length) * size
    cache = 8 * min(SAMPLED_AT_ONCE * config["micro_batch"], config["budget"]) * length * size
    if "lora" in shape.scored:  # the base's weights, of which the penalty needs no copy, and what adapters have
        weights = 4 * shape.parameters + 16 * shape.scored["lora"]
    else:
        weights = (20 if Options.of(config).penalized else 16) * shape.parameters
    scores = 0
    if config["predict"]:
        scores = 4 * shape.scored.get("lora", shape.parameters) * min(100, config["prompt_pool"], PREDICTION_QUESTIONS)
    return weights + activations + cache + scores + 500_000_000
