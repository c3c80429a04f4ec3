"""Whether a cell fits into the memory of its device."""

from __future__ import annotations

from grpo_repro.cells import Cell, Estimate
from grpo_repro.errors import UserError
from grpo_repro.machine import Machine

MEMORY_KEYS = (
    "group_sizes",
    "completions_per_prompt",
    "replicates",
    "micro_batch",
    "max_new_tokens",
    "gradient_memory_gib",
    "budget",
    "prompt_pool",
)
"""Keys of a cell that its memory grows with."""

MOVABLE = ("activations", "logits", "cache")
"""Parts of a language model's memory that its keys change; its weights, gradients and optimiser stay."""

TABULAR_ONLY = ("budget", "prompt_pool", "group_sizes")
"""Keys that the memory of a tabular policy grows with, and that of a language model hardly does."""


def check_fit(cell: Cell, estimate: Estimate, machine: Machine) -> None:
    """Refuse a cell that a machine cannot hold.

    Args:
        cell: The cell.
        estimate: Its cost on that machine.
        machine: The machine.

    Raises:
        UserError: If its estimated memory exceeds the machine's, with what to change.
    """
    if machine.memory_bytes is None or estimate.memory_bytes <= machine.memory_bytes:
        return
    where = f"{machine.name} has" if machine.on_gpu else "this machine has"
    raise UserError(
        f"{cell.label} needs about {estimate.memory_bytes / 2**30:,.3g} GiB of memory{_parts(estimate)} and {where} "
        f"{machine.memory_bytes / 2**30:.4g}; {_remedy(cell, estimate, machine.memory_bytes)}"
    )


def _parts(estimate: Estimate) -> str:
    """The three largest parts, in words."""
    largest = sorted(estimate.parts.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} {size / 2**30:,.3g}" for name, size in largest)
    return f" ({listed}, ...)" if listed else ""


def _remedy(cell: Cell, estimate: Estimate, memory: int) -> str:
    """What to change: the keys that memory grows with, or, where they cannot help, the model."""
    keys = [key for key in MEMORY_KEYS if key in cell.config]
    if "iterations" not in cell.config:
        keys.append("task.num_questions")
    if (cell.config.get("model") or {}).get("kind") != "causal_lm":
        return f"lower {', '.join(keys)} or take a smaller model"
    adapters = "train adapters (model.lora.rank=64), " if "iterations" in cell.config else ""
    model = f"{adapters}take model.dtype=bfloat16, or a smaller model"
    if sum(size for name, size in estimate.parts.items() if name not in MOVABLE) > memory:
        return f"no micro_batch or max_new_tokens is small enough: {model}"
    return f"lower {', '.join(key for key in keys if key not in TABULAR_ONLY)}; or {model}"
