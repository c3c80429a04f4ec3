"""Help and completion of overrides, read from `conf/` and the schema without Hydra or torch."""

from __future__ import annotations

import os
from dataclasses import MISSING, fields
from typing import Any

from typer.core import TyperCommand

from grpo_repro.config import NESTED, SCHEMAS, choices
from grpo_repro.theory.catalog import CHECKS

GROUPS = ("model", "task")
EXAMPLES: dict[str, tuple[str, ...]] = {
    "mse-eval": (
        "grpo mse-eval --dry-run",
        "grpo mse-eval model=bundled-base 'group_sizes=[4,8,16]' replicates=50",
        "grpo mse-eval model=hf model.path=DIR device=cuda",
        "grpo mse-eval -m model=bundled-base,bundled-icl hydra/launcher=joblib",
    ),
    "train": (
        "grpo train 'group_sizes=[16]' budget=256 iterations=200",
        "grpo train model=hf model.path=DIR learning_rate=1e-5 schedule=cosine warmup=10 device=cuda",
        "grpo train model=hf model.path=DIR sampler=vllm vllm.dtype=bfloat16 importance_cap=2",
    ),
    "group-size": (
        "grpo sweep group-size --dry-run",
        "grpo sweep group-size 'group_sizes=[4,8,16]' budget=1024 'seeds=[0,1,2,3,4]'",
        "grpo sweep group-size model=tabular 'group_sizes=[2,4,8,16]' schedule=inverse learning_rate=20",
        "grpo sweep group-size -m 'seeds=[0],[1],[2],[3]' hydra/launcher=joblib",
    ),
    "budget": (
        "grpo sweep budget 'budgets=[256,1024]' 'group_sizes=[4,8,16]'",
        "grpo sweep budget model=tabular 'budgets=[64,256,1024]' replicates=2000",
    ),
    "iterations": (
        "grpo sweep iterations iterations=400 'checkpoints=[0,25,50,100,200,400]'",
        "grpo sweep iterations -m schedule=constant,cosine",
    ),
    "theory": (
        "grpo theory",
        "grpo theory theorem-8 corollary-9 --json",
        "grpo theory theorem-8 runs=100000 'seeds=[1,2,3]'",
    ),
}


class ExperimentCommand(TyperCommand):
    """A command that takes overrides; its help ends with config groups, keys and examples."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write what the overrides can be."""
        schema = SCHEMAS[self.name or ""]
        if set(GROUPS) <= {item.name for item in fields(schema)}:
            with formatter.section("Config groups"):
                formatter.write_dl([(group, ", ".join(choices(group))) for group in GROUPS])
        else:
            with formatter.section("Checks"):
                formatter.write_dl([(name, entry.title) for name, entry in CHECKS.items()])
        with formatter.section("Keys and defaults"):
            formatter.write_dl(_defaults(schema))
        with formatter.section("Examples"):
            for example in EXAMPLES[self.name or ""]:
                formatter.write(f"  {example}\n")


def _defaults(schema: type, prefix: str = "") -> list[tuple[str, str]]:
    """Return each plain key of a schema with its default, both as they are typed."""
    rows = []
    for item in fields(schema):
        if item.name in GROUPS or item.name == "dry_run":
            continue
        if item.name in NESTED:
            rows += _defaults(NESTED[item.name], f"{item.name}.")
            continue
        default: Any = item.default if item.default_factory is MISSING else item.default_factory()
        if isinstance(default, list):
            default = "[" + ",".join(str(value) for value in default) + "]"
        rows.append((prefix + item.name, "null" if default is None else str(default)))
    return rows


def complete_override(incomplete: str) -> list[str]:
    """Complete `model=` and `task=` with the options of `conf/`.

    Args:
        incomplete: The word before the cursor. Bash splits at `=` and passes the value alone.

    Returns:
        Whole words for it.
    """
    group = _split_group()
    if group is not None:
        return [name for name in choices(group) if name.startswith(incomplete)]
    words = [f"{group}={name}" for group in GROUPS for name in choices(group)]
    return [word for word in words if word.startswith(incomplete)]


def complete_check(incomplete: str) -> list[str]:
    """Complete the names of checks."""
    return [name for name in CHECKS if name.startswith(incomplete)]


def _split_group() -> str | None:
    """Return the group whose value is typed, if the shell has split the word at `=`."""
    words = os.environ.get("COMP_WORDS", "").split()
    position = os.environ.get("COMP_CWORD", "")
    if not position.isdigit():
        return None
    before = words[: int(position) + 1]
    if before and before[-1] != "=":
        before = words[: int(position)]
    if len(before) >= 2 and before[-1] == "=" and before[-2] in GROUPS:
        return before[-2]
    return None
