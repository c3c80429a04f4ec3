"""What a training run of a causal language model will cost, from a stated model."""

from __future__ import annotations

from typing import Any

import torch

from grpo_repro import sampler_options
from grpo_repro.algorithm2 import Options
from grpo_repro.cells import Cell, Estimate
from grpo_repro.experiments import cost
from grpo_repro.experiments.evaluation import PREDICTION_QUESTIONS
from grpo_repro.experiments.language_mse import SAMPLED_AT_ONCE, SMALL_MODEL
from grpo_repro.experiments.mse_eval import settings
from grpo_repro.machine import Machine
from grpo_repro.sizes import ModelSize, Prompts, sizes_of


def estimate(cell: Cell, machine: Machine) -> Estimate:
    """Cost of a run from the formulas of `cost`, without weights.

    With d parameters, prompts of P tokens and completions of at most T, an iteration takes 2d flops for each prompt
    token and 2d for half the tokens of its distinct completions where T <= 16 (short answers repeat: n^0.7 of n are
    distinct, most end early, and groups of equal rewards need no update), else 2d + 6d for every token; an evaluation
    takes 2d. 0.01 s are added for each iteration and 2 s to start. G* from pools takes 0.03 s and 2d (n^0.7 (4T + P))
    for each question. A penalty adds the reference policy: its weights, and 2d flops for every token of an iteration.

    Args:
        cell: The run.
        machine: The device that it is planned for.

    Raises:
        UserError: If the model or the task cannot be used, or the model's context is too short.
    """
    config = cell.config
    model, task = settings(cell)
    size, prompts, notes = sizes_of(model, task, config["max_new_tokens"])
    work, seconds, completions = _work(config, prompts, task.num_questions)
    small = config["threads"] is None and size.parameters < SMALL_MODEL
    threads = 1 if small else config["threads"] or torch.get_num_threads()
    rate = machine.flops(cost.weights_dtype(config, machine, training=True), threads)
    start, extra = sampler_options.cost(config, machine.on_gpu)
    parts = memory_parts(config, size, prompts.longest, machine) | ({"vLLM": extra} if extra else {})
    return Estimate(
        completions, completions * config["max_new_tokens"], start + seconds + 2.0 * size.parameters * work / rate,
        sum(parts.values()), parts, notes,
    )  # fmt: skip


def _work(config: dict[str, Any], prompts: Prompts, asked: int) -> tuple[float, float, int]:
    """Forward passes of one token, seconds beside them, and completions; see `estimate`."""
    length, group, samples = config["max_new_tokens"], config["group_size"], config["eval_samples"]
    short = length <= cost.SHORT

    def tokens(count: int, each: int) -> float:
        return count * (prompts.mean + (each**0.7 * length / 2 if short else each * length))

    examined, checks = asked + config["prompt_pool"], len(config["checkpoints"])
    passes = (1 if short else 4) + Options.of(config).penalized
    work = config["iterations"] * tokens(config["budget"] // group, group) * passes
    work += checks * (tokens(examined, samples) + tokens(asked, 1))
    seconds = 2.0 + 0.01 * config["iterations"]
    completions = config["iterations"] * config["budget"] + checks * examined * samples
    if config["predict"]:
        pool, pooled = config["completions_per_prompt"], min(config["prompt_pool"], PREDICTION_QUESTIONS)
        work += checks * pooled * pool**0.7 * (4 * length + prompts.mean)
        seconds += 0.03 * checks * pooled
        completions += checks * pooled * pool
    return work, seconds, completions


def memory_parts(config: dict[str, Any], size: ModelSize, prompt: int, machine: Machine) -> dict[str, int]:
    """Peak memory in bytes by its parts: what always stays, and the phase that takes most.

    Args:
        config: A cell's configuration.
        size: Of its model.
        prompt: Tokens of the longest prompt.
        machine: The device.
    """
    length, micro = config["max_new_tokens"], min(config["micro_batch"], config["budget"])
    width, taught = cost.BYTES[cost.weights_dtype(config, machine, training=True)], cost.trained(config, size)
    own = width if taught == size.parameters else 4  # adapters are float32 whatever their base
    weights = width * size.parameters * (2 if Options.of(config).penalized else 1)
    weights += own * taught if taught != size.parameters else 0
    scores = 0
    if config["predict"] and not machine.on_gpu:  # on a GPU they lie in the memory of its host
        scores = 4 * size.parameters * min(100, config["prompt_pool"], PREDICTION_QUESTIONS)
    optimiser = 2 * own * taught if config["optimizer"] == "adamw" else 0
    parts = {
        "gradients": own * taught,
        "optimiser": optimiser,
        "gradients of G*": min(scores, int(config.get("gradient_memory_gib", 0) * 2**30)),
    }
    backward = cost.backward_bytes(
        size, width, micro * (length + 1) + prompt, prompt + length, micro * length,
        bool(config.get("gradient_checkpointing")),
    )  # fmt: skip
    rows = SAMPLED_AT_ONCE * config["micro_batch"]
    sampled = max(min(rows, config["budget"]), config["group_size"])
    greedy = min(rows, config["task"]["num_questions"])  # a prompt for each completion
    phase = cost.largest(
        backward,
        {"saved state": 0 if machine.on_gpu else 2 * (own * taught + optimiser)},
        cost.sampling_bytes(size, width, sampled, length, -(-sampled // config["group_size"]), prompt),
        cost.sampling_bytes(size, width, greedy, length, greedy, prompt),
    )
    fixed = {"base": cost.BASE[machine.on_gpu], "weights": weights}
    return fixed | cost.largest({"self-check": cost.SELF_CHECK * taught}, parts | phase)
