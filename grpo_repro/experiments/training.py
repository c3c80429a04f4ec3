"""Training runs: `grpo train`, and the sweeps over G (Figure 5), over N x G (Table 2) and over n.

A cell is one run of Algorithm 1, or of Algorithm 2 where its options ask for that: one policy, estimator, group size G,
budget N and seed, evaluated at checkpoints n. A tabular cell holds `replicates` independent runs at once. The sweeps
differ only in which cells they list, and a cell that one of them has finished is not run again for another.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_repro.algorithm2 import Options
from grpo_repro.cells import Cell, Estimate, Progress
from grpo_repro.config import SCHEMAS, ModelConfig
from grpo_repro.errors import NotHere
from grpo_repro.experiments.mse_eval import named
from grpo_repro.machine import CPU, Machine
from grpo_repro.sampler_options import stated
from grpo_repro.schema import TrainingConfig
from grpo_repro.sizes import stated_task
from grpo_repro.training_validation import budgets, clip_norm, optimizer, seeds

SHARE_CELLS = ("group-size", "iterations", "budget")
"""Experiments whose cells are the same runs."""

LEARNING_RATE = {"adamw": 1e-4, "sgd": 1.0}
LANGUAGE_POOL = 500
_SHARED = (
    "iterations", "seed", "schedule", "warmup", "weight_decay", "prompt_pool", "prompt_order", "confidence",
    "results_dir", "device", "threads", "save_seconds",
)  # fmt: skip
_LANGUAGE = (
    "temperature", "max_new_tokens", "sampler", "micro_batch", "eval_samples", "log_every",
)  # fmt: skip


def plan(config: TrainingConfig) -> list[Cell]:
    """List the runs: one for each budget, estimator, group size and seed, the seeds outermost.

    An interrupted sweep then has whole comparisons of all G for some seeds.

    Args:
        config: A validated configuration.

    Returns:
        Cells whose configuration holds just what their numbers depend on.
    """
    assert config.model is not None
    model = named(config.model)
    if model.kind == "tabular":
        from grpo_repro.experiments.tabular_train import check

        check(model)
        model, state = replace(model, name=_tabular_name(model)), {}
    else:
        from grpo_repro.fingerprint import model_fingerprint

        config, data = _with_data(config)
        state = {"weights": model_fingerprint(model), **data}
    return [
        _cell(config, model, {"seed": seed, "budget": budget, "estimator": estimator, "group_size": group} | state)
        for seed in seeds(config)
        for budget in budgets(config)
        for estimator in config.estimators
        for group in config.group_sizes
    ]


def _with_data(config: TrainingConfig) -> tuple[TrainingConfig, dict[str, str]]:
    """The configuration with its number of test questions, and the identity of the data.

    Raises:
        UserError: If the data cannot be read; but a dry run goes on without data that are not here.
    """
    from grpo_repro.experiments.training_questions import training_task
    from grpo_repro.fingerprint import task_fingerprint

    try:
        # Too large a pool is told before anything runs.
        trained_on = training_task(config.task, config.prompt_pool or LANGUAGE_POOL)
        task, data = task_fingerprint(config.task)
    except NotHere:
        if not config.dry_run:
            raise
        return replace(config, task=stated_task(config.task)), {}
    return replace(config, task=task), {key: f"{trained_on.data_hash}-{value}" for key, value in data.items()}


def _tabular_name(model: ModelConfig) -> str:
    """Name a tabular policy after its family and arguments: figures must not take two of them for one."""
    arguments = ", ".join(f"{key}={value}" for key, value in sorted(model.family_args.items()))
    return f"{model.name}:{model.family}" + (f"({arguments})" if arguments else "")


def _cell(config: TrainingConfig, model: ModelConfig, own: dict[str, Any]) -> Cell:
    from grpo_repro.fingerprint import model_settings, task_settings

    kind = optimizer(config)
    values = {key: getattr(config, key) for key in _SHARED if key != "seed"} | own
    values |= {
        "model": model_settings(model),
        "task": task_settings(config.task),
        "optimizer": kind,
        "learning_rate": LEARNING_RATE[kind] if config.learning_rate is None else config.learning_rate,
        "clip_norm": clip_norm(config),
        "checkpoints": checkpoints(config),
    } | Options.of(vars(config)).stated()
    if model.kind == "tabular":
        values["replicates"] = config.replicates
    else:
        values |= {key: getattr(config, key) for key in _LANGUAGE} | stated(config)
        if config.gradient_checkpointing:
            values["gradient_checkpointing"] = True
        values["prompt_pool"] = config.prompt_pool or LANGUAGE_POOL
        values["predict"] = own["seed"] in config.predict_seeds
        if values["predict"]:
            values |= {key: getattr(config, key) for key in ("completions_per_prompt", "gradient_memory_gib")}
    experiment = next(name for name, schema in SCHEMAS.items() if type(config) is schema)
    label = f"{model.name} N={own['budget']} G={own['group_size']} seed {own['seed']}"
    return Cell(experiment, values, label + (f" {own['estimator']}" if len(config.estimators) > 1 else ""))


def checkpoints(config: TrainingConfig) -> list[int]:
    """The iterations at which a run is evaluated, ascending; the last iteration is always one of them."""
    last = config.iterations
    chosen = config.checkpoints if config.checkpoints is not None else [0, last // 10, last // 4, last // 2]
    return sorted({*chosen, last})


def run(cell: Cell, workdir: Path, progress: Progress) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Train and evaluate one cell.

    Args:
        cell: One of `plan`.
        workdir: Folder of its partial state; an interrupted cell goes on from there, to the same rows.
        progress: Called with (iterations done, iterations in all, what).

    Returns:
        Rows of the results schema and what the manifest says of the model and the data.

    Raises:
        UserError: If the model or the task cannot be used, or training diverges.
    """
    if cell.config["model"]["kind"] == "tabular":
        from grpo_repro.experiments import tabular_train

        return tabular_train.run(cell, workdir, progress)
    from grpo_repro.experiments import language_train

    return language_train.run(cell, workdir, progress)


def estimate(cell: Cell, machine: Machine = CPU) -> Estimate:
    """Say what a cell will cost on a machine, without loading weights, from the model of the module that runs it."""
    if cell.config["model"]["kind"] == "tabular":
        from grpo_repro.experiments import tabular_train

        return tabular_train.estimate(cell)
    from grpo_repro.experiments import language_cost

    return language_cost.estimate(cell, machine)


def summary(rows: pd.DataFrame) -> Any:
    """Short tables: the gap at each G, N and n with the best G, then whether the best G moves."""
    from grpo_repro.experiments.training_summary import tables

    return tables(rows)
