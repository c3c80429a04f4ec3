"""What a cell of the MSE experiment on a language model will cost, from a stated model."""

from __future__ import annotations

from typing import Any

import torch

from grpo_repro import sampler_options
from grpo_repro.cells import Cell, Estimate
from grpo_repro.experiments import cost
from grpo_repro.experiments.language_mse import SAMPLED_AT_ONCE, jackknife_groups
from grpo_repro.experiments.mse_eval import completions, settings
from grpo_repro.machine import Machine
from grpo_repro.sizes import ModelSize, sizes_of


def estimate(cell: Cell, machine: Machine) -> Estimate:
    """Cost of a cell from the formulas of `cost`, without weights.

    With d parameters, prompts of P and completions of T tokens, a distinct completion takes 2d flops per token to
    sample, 2d T to score forward, 2d (T + P) to go back and 2d T for its gradient, and each weighted sum 2d more. Short
    answers repeat: of n completions of at most 16 tokens n^0.7 are taken as distinct. 0.03 s are added for each group.
    """
    config = cell.config
    model, task = settings(cell)
    size, prompts, notes = sizes_of(model, task, config["max_new_tokens"])
    length, count = config["max_new_tokens"], task.num_questions
    sizes, sums = _groups(config)
    distinct = [n**0.7 if length <= cost.SHORT else n for n in sizes]
    work = sum(n * (4 * length + prompts.mean + s) for n, s in zip(distinct, sums, strict=True))
    rate = machine.flops(cost.weights_dtype(config, machine, training=False), torch.get_num_threads())
    seconds = 5.0 + count * (0.03 * len(sizes) + 2.0 * size.parameters * work / rate)
    start, extra = sampler_options.cost(config, machine.on_gpu)
    parts = _memory_parts(config, size, prompts.longest, count, machine) | ({"vLLM": extra} if extra else {})
    sampled = completions(config)
    return Estimate(sampled, sampled * length, seconds + start, sum(parts.values()), parts, notes)


def _groups(config: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Completions of a question that are sampled together, and weighted sums of their scores."""
    replicates = config.get("replicates", 0)
    sizes = [config["completions_per_prompt"]] + [replicates * group for group in config["group_sizes"] if replicates]
    return sizes, [3] + [replicates * len(config["estimators"])] * (len(sizes) - 1)


def _memory_parts(config: dict[str, Any], size: ModelSize, prompt: int, count: int, machine: Machine) -> dict[str, int]:
    """Peak memory in bytes by its parts, as in `language_cost.memory_parts`."""
    width = cost.BYTES[cost.weights_dtype(config, machine, training=False)]
    length, dim = config["max_new_tokens"], cost.trained(config, size)
    sizes, sums = _groups(config)
    kept = max(sums)
    if len(sizes) == 1:  # groups of questions, whose gradients lie in the memory of a GPU's host
        groups = jackknife_groups(config, count, dim)
        kept = kept + 1 if machine.on_gpu else max(groups, *sums)
    rows = max(SAMPLED_AT_ONCE * config["micro_batch"], max(sizes))
    prompts = max(1, rows // min(sizes))
    scored = min(config["micro_batch"], max(sizes))
    # Scores keep the gradient at the output of every layer beside what the backward pass keeps.
    backward = cost.backward_bytes(
        size, width, scored * (prompt + length), prompt + length, scored * length
    )  # fmt: skip
    phase = cost.largest(
        {name: round(1.6 * value) for name, value in backward.items()},
        cost.sampling_bytes(size, width, rows, length, prompts, prompt),
        {"saved state": 0 if machine.on_gpu else 4 * dim * kept},
    )
    fixed = {"base": cost.BASE[machine.on_gpu], "weights": width * size.parameters}
    return fixed | cost.largest({"self-check": cost.SELF_CHECK * dim}, {"gradients": 4 * dim * kept} | phase)
