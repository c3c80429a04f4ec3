"""Figure 4: the mean squared error of the gradient estimators against the group size.

A cell is one policy, one seed and one method:

- `exact`: closed forms (tabular policies only);
- `components`: one pool of K completions per question gives the error at every G at once (`ustat`);
- `monte_carlo`: the paper's protocol, independent replicates of the whole estimate at each G.

The questions are a fixed set, all used in every estimate, as in the paper: the error is that of
``(1/M) sum_x g_hat(x)`` around ``(1/M) sum_x g(x)``, which is ``(1/M^2) sum_x MSE(x; G)``. The components c1, c2, c3
and G* speak of questions drawn independently from the task's distribution.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_repro.cells import Cell, Estimate, Progress
from grpo_repro.config import BUNDLED_MODELS, ModelConfig, MseEvalConfig, TaskConfig, load_choice
from grpo_repro.errors import NotHere, UserError
from grpo_repro.machine import CPU, Machine
from grpo_repro.sampler_options import stated
from grpo_repro.sizes import stated_task

MAX_GROUPS = 100
"""Most groups of prompts in the jackknife of c1 and G*: each holds one gradient in memory."""


def plan(config: MseEvalConfig) -> list[Cell]:
    """List the cells: one for each policy, seed and method.

    A tabular policy has the method `exact` in addition to those asked for.

    Args:
        config: A validated configuration.

    Returns:
        Cells whose configuration holds just what their numbers depend on.

    Raises:
        UserError: If a method does not fit a policy.
    """
    from grpo_repro.fingerprint import task_fingerprint

    data: dict[str, str] = {}
    try:
        task, data = task_fingerprint(config.task)
    except NotHere:
        if not config.dry_run:
            raise
        task = stated_task(config.task)
    config = replace(config, task=task)
    names = config.models or BUNDLED_MODELS
    models = [named(config.model)] if config.model else [load_choice("model", name) for name in names]
    return [
        _cell(config, model, seed, method, data)
        for model in models
        for seed in config.seeds
        for method in _methods(config, model)
    ]


def named(model: ModelConfig) -> ModelConfig:
    """Call a model that was given by its path after the last part of that, so that two of them differ."""
    return replace(model, name=Path(model.path).name) if model.name == "hf" and model.path else model


def _methods(config: MseEvalConfig, model: ModelConfig) -> list[str]:
    tabular = model.kind == "tabular"
    if tabular != (config.task.name == "bandit"):
        raise UserError(
            f"model={model.name} does not play task={config.task.name}; a tabular model plays task=bandit, "
            "a language model any other"
        )
    if "exact" in config.methods and not tabular:
        raise UserError(f"method exact needs a tabular model, {model.name} is a language model; use components")
    if tabular:
        from grpo_repro.policies.tabular import build

        build(model.family, model.family_args)  # a bad family is told before anything starts
    return (["exact"] if tabular and "exact" not in config.methods else []) + list(config.methods)


def _cell(config: MseEvalConfig, model: ModelConfig, seed: int, method: str, data: dict[str, str]) -> Cell:
    from grpo_repro.fingerprint import model_fingerprint, model_settings, task_settings

    shared = ("estimators", "group_sizes", "confidence", "results_dir", "device", "threads")
    language = ("temperature", "max_new_tokens", "sampler", "micro_batch", "gradient_memory_gib")
    keys = [*shared]
    if method != "exact":
        keys += ["completions_per_prompt"]
    if method == "monte_carlo":
        keys += ["replicates"]
    if model.kind != "tabular":
        keys += language
        model_state = {"weights": model_fingerprint(model)} | stated(config)
        if config.score_params != "all":
            keys += ["score_params"]
            # Errors of other gradients: figures, which know models by their names, must not put them together.
            model = replace(model, name=f"{model.name} ({config.score_params} scores)")
    else:
        model_state = {}
    values = {key: getattr(config, key) for key in keys}
    values |= {"model": model_settings(model), "task": task_settings(config.task), "seed": seed, "method": method}
    values |= model_state | data
    return Cell("mse-eval", values, f"{model.name} {method}" + (f" seed {seed}" if len(config.seeds) > 1 else ""))


def run(cell: Cell, workdir: Path, progress: Progress) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Measure one cell.

    Args:
        cell: One of `plan`.
        workdir: Folder of its partial state; an interrupted cell goes on from there.
        progress: Called with (questions done, questions in all, what).

    Returns:
        Rows of the results schema and what the manifest says of the model and the data.

    Raises:
        UserError: If the model or the task cannot be used.
    """
    if cell.config["model"]["kind"] == "tabular":
        from grpo_repro.experiments import tabular_mse

        return tabular_mse.run(cell, progress)
    from grpo_repro.experiments import language_mse

    return language_mse.run(cell, workdir, progress)


def estimate(cell: Cell, machine: Machine = CPU) -> Estimate:
    """Say what a cell will cost on a machine, without loading weights.

    Completions are exact, tokens an upper bound (every completion at its longest). Time and memory follow the stated
    model of `mse_cost.estimate`.
    """
    if cell.config["model"]["kind"] == "tabular":
        count = 0 if cell.config["method"] == "exact" else completions(cell.config)
        pool, sizes = cell.config.get("completions_per_prompt", 0), cell.config["group_sizes"]
        at_once = cell.config["task"]["num_questions"] * (max(sizes) if "replicates" in cell.config else pool)
        return Estimate(count, count, 1.0 + 2e-6 * count, 200_000_000 + 200 * at_once)
    from grpo_repro.experiments import mse_cost

    return mse_cost.estimate(cell, machine)


def completions(config: dict[str, Any]) -> int:
    """Number of completions that a cell samples, over all questions."""
    pool = config["completions_per_prompt"]
    replicates = config.get("replicates", 0) * sum(config["group_sizes"])
    return int(config["task"]["num_questions"] * (pool + replicates))


def settings(cell: Cell) -> tuple[ModelConfig, TaskConfig]:
    """The model and the task of a cell, the task's instruction put into the model's template."""
    from grpo_repro.fingerprint import model_of

    model, task = model_of(cell.config["model"]), TaskConfig(**cell.config["task"])
    return replace(model, template=model.template.replace("{instruction}", task.instruction or "")), task


def summary(rows: pd.DataFrame) -> Any:
    """Short tables: the error of each estimator at each G, then accuracy, diagnostic and components."""
    from grpo_repro.experiments.mse_rows import summary_tables

    return summary_tables(rows)
