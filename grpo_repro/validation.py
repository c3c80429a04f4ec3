"""Checks of a whole configuration, before anything is sampled."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from grpo_repro.errors import UserError
from grpo_repro.machine import GPUS
from grpo_repro.sampler_schema import VllmConfig
from grpo_repro.schema import (
    ESTIMATORS,
    LARGEST,
    METHODS,
    WORDED_TASKS,
    LoraSettings,
    ModelConfig,
    MseEvalConfig,
    TaskConfig,
    TheoryConfig,
    TrainingConfig,
)
from grpo_repro.theory.catalog import CHECKS

_ARITHMETIC = ("operand_min", "operand_max", "factor_min", "factor_max")
_WORDED = ("path", "hub", "subset", "revision", "instruction", "format_reward", "deadline")
TASK_KEYS = {
    **dict.fromkeys(WORDED_TASKS, ("name", "num_questions", "split", "seed", *_WORDED)),
    "bandit": ("name", "num_questions", "seed"),
    "arithmetic": ("name", "num_questions", "split", "seed", *_ARITHMETIC),
}
"""Keys that each task reads."""

MOST_THREADS = max(256, 4 * (os.cpu_count() or 1))
"""More than any machine gains from; torch crashes at some thousands."""


def validate(config: MseEvalConfig | TrainingConfig | TheoryConfig) -> None:
    """Check every value of a configuration; nothing is read, written or imported.

    Args:
        config: The typed configuration of an experiment.

    Raises:
        UserError: At the first value that cannot be run, with the remedy.
    """
    _finite(config)
    _common(config)
    if isinstance(config, TheoryConfig):
        _theory(config)
    else:
        _with_policy(config)


def _common(config: MseEvalConfig | TrainingConfig | TheoryConfig) -> None:
    """Check what every experiment has."""
    if config.seeds is not None:
        check_seeds("seeds", config.seeds)
    if config.threads is not None:
        at_least("threads", config.threads, 1, "null leaves torch's default")
        at_most("threads", config.threads, MOST_THREADS)
    if not 0 < config.confidence < 1:
        raise UserError(f"confidence={config.confidence} is not between 0 and 1; use for example 0.95")
    if not config.results_dir.strip():
        raise UserError("results_dir is empty; name a folder, for example results_dir=results")


def _theory(config: TheoryConfig) -> None:
    if config.checks is not None:
        check_names("checks", config.checks, list(CHECKS))
    between("runs", config.runs, 2000, "with fewer the intervals miss more often than they say")


def _with_policy(config: MseEvalConfig | TrainingConfig) -> None:
    """Check what every experiment has that runs a policy."""
    from grpo_repro.model_validation import fit, validate_model

    check_names("estimators", config.estimators, ESTIMATORS)
    _group_sizes(config)
    between("completions_per_prompt", config.completions_per_prompt, 4, "its variances need four")
    between("replicates", config.replicates, 3, "an interval needs three")
    between("max_new_tokens", config.max_new_tokens, 1)
    between("micro_batch", config.micro_batch, 1)
    if config.temperature <= 0:
        raise UserError(f"temperature={config.temperature} is not positive; 1.0 is the policy itself")
    if not 1e-3 <= config.temperature <= 1e3:
        raise UserError(f"temperature={config.temperature:g} is not between 1e-3 and 1e3; 1.0 is the policy itself")
    if config.gradient_memory_gib <= 0:
        raise UserError(f"gradient_memory_gib={config.gradient_memory_gib} is not positive; use 2.0")
    at_most("gradient_memory_gib", config.gradient_memory_gib)
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise UserError(f"unknown device {config.device!r}; use auto, cpu, cuda or cuda:N")
    if not config.task.name:
        raise UserError("no task is named; use for example task=arithmetic")
    validate_task(config.task)
    if config.model is None and config.task.name in WORDED_TASKS:
        raise UserError(f"task={config.task.name} needs a model that reads English; use model=hf model.path=DIR")
    _device(config)
    if config.model is not None:
        validate_model(config.model)
        fit(config.model, config.task)
    from grpo_repro.sampler_options import validate_sampler

    validate_sampler(config)
    if isinstance(config, MseEvalConfig):
        _mse_eval(config)
    else:
        from grpo_repro.training_validation import validate_training

        validate_training(config)


def _device(config: MseEvalConfig | TrainingConfig) -> None:
    """Check what a plan's time and memory are reckoned with."""
    if config.assumed_gpu is not None:
        check_name("assumed_gpu", config.assumed_gpu, list(GPUS))
    if config.device_memory_gib is not None and not 0 < config.device_memory_gib <= 10**5:
        raise UserError(f"device_memory_gib={config.device_memory_gib} is not between 0 and 100000; null detects it")
    if not 0 < config.utilization <= 1:
        raise UserError(f"utilization={config.utilization} is not between 0 and 1; use 0.25")


def _mse_eval(config: MseEvalConfig) -> None:
    from grpo_repro.model_validation import score_params

    score_params(config)
    if config.models is not None:
        check_names("models", config.models, ["a name in conf/model"] if not config.models else config.models)
    check_names("methods", config.methods, METHODS)
    if config.model is None and (config.task.name == "bandit" or "exact" in config.methods):
        what = "task=bandit" if config.task.name == "bandit" else "methods=[exact]"
        raise UserError(f"{what} needs a tabular policy, and no model is named; add model=tabular")
    if config.model is not None and config.model.kind == "causal_lm" and "exact" in config.methods:
        raise UserError(
            f"methods={show(config.methods)}: 'exact' needs a tabular policy and {config.model.name!r} is a "
            "language model; use components or monte_carlo, or model=tabular"
        )


def _finite(config: Any, prefix: str = "") -> None:
    for item in fields(config):
        value = getattr(config, item.name)
        nested = [x for x in value if isinstance(x, list | dict)] if isinstance(value, list) else []
        if nested:  # which OmegaConf lets through
            raise UserError(f"{item.name}={show(value)} holds {nested[0]!r}; give a flat list: {item.name}=[A,B]")
        if isinstance(value, ModelConfig | TaskConfig | VllmConfig | LoraSettings):
            _finite(value, f"{prefix}{item.name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{prefix}{item.name}={value} is not a finite number; give one")


def at_least(key: str, value: int, least: int, why: str = "") -> None:
    """Refuse a value below the least."""
    if value < least:
        raise UserError(f"{key}={value} is too small; use {least} or more{f' ({why})' if why else ''}")


def at_most(key: str, value: int | float, most: int | None = None) -> None:
    """Refuse a value above the largest, that of `LARGEST` unless another is given."""
    most = LARGEST[key] if most is None else most
    if value > most:
        raise UserError(f"{key}={value} is too large; use {most} or less")


def between(key: str, value: int, least: int, why: str = "") -> None:
    """Refuse a value below the least or above that of `LARGEST`."""
    at_least(key, value, least, why)
    at_most(key, value)


def check_name(key: str, value: str, known: Sequence[str]) -> None:
    """Refuse an unknown name, with the closest known one."""
    if value not in known:
        close = difflib.get_close_matches(value, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"unknown {key} {value!r}; {hint}known: {', '.join(known)}")


def check_names(key: str, values: Sequence[str], known: Sequence[str]) -> None:
    """Refuse an empty list, unknown and repeated names."""
    if not values:
        raise UserError(f"{key} is empty; name one or more of {', '.join(known)}")
    for value in values:
        check_name(key.removesuffix("s"), value, known)
    distinct(key, values)


def distinct(key: str, values: Sequence[Any]) -> None:
    """Refuse a value that is named twice."""
    twice = sorted({value for value in values if list(values).count(value) > 1})
    if twice:
        raise UserError(f"{key}={show(values)} names {show(twice)} more than once; keep one of each")


def show(values: Sequence[Any]) -> str:
    """Return a list as it is typed."""
    return "[" + ",".join(str(value) for value in values) + "]"


def _group_sizes(config: MseEvalConfig | TrainingConfig) -> None:
    sizes = config.group_sizes
    if not sizes:
        raise UserError("group_sizes is empty; use for example group_sizes=[4,8,16,32,64]")
    for size in sizes:
        at_least("group_sizes: G", size, 1)
        if size > LARGEST["group_sizes"]:
            raise UserError(f"group_sizes: G={size} is too large; use {LARGEST['group_sizes']} or less")
    distinct("group_sizes", sizes)
    if 1 in sizes and "grpo" in config.estimators:
        raise UserError(
            "group size G=1 is not defined for the estimator 'grpo' (its baseline is the mean of the other "
            "G-1 rewards); use G >= 2 or estimators without a group: [vanilla,oracle,optimal]"
        )


def check_seeds(key: str, seeds: Sequence[int]) -> None:
    """Refuse an empty list, negative seeds and repeated ones."""
    if not seeds:
        raise UserError(f"{key} is empty; use for example {key}=[0]")
    negative = [seed for seed in seeds if seed < 0]
    if negative:
        raise UserError(f"{key}={show(seeds)} has the negative {negative[0]}; seeds are 0 or more")
    for seed in seeds:
        at_most(key, seed, LARGEST["seeds"])
    distinct(key, seeds)


def validate_task(task: TaskConfig, least: int = 3) -> None:
    """Check the values of a task.

    Args:
        task: A task that is named.
        least: Fewest questions; intervals over questions need three.

    Raises:
        UserError: At the first value that cannot be used, with the remedy.
    """
    why = "intervals over questions need three" if least == 3 else ""
    worded = task.name in WORDED_TASKS
    if task.num_questions or not worded:
        between("task.num_questions", task.num_questions, least, why or ("0 takes all" if worded else ""))
    check_name("task.split", task.split, ("train", "test", "all") if worded else ("train", "test"))
    between("task.seed", task.seed, 0)
    unused(task, "task", TASK_KEYS.get(task.name), f"task={task.name}")
    if task.name == "arithmetic":
        between("task.operand_max", task.operand_max, task.operand_min, "task.operand_min is that")
        between("task.factor_max", task.factor_max, task.factor_min, "task.factor_min is that")
    for key, low, high in (("format_reward", 0.0, 100.0), ("deadline", 0.1, 3600.0)):
        value = getattr(task, key)
        if not low <= value <= high:
            raise UserError(
                f"task.{key}={value} is not between {low:g} and {high:g}; the default is {getattr(TaskConfig, key):g}"
            )


def unused(config: Any, group: str, used: Sequence[str] | None, owner: str) -> None:
    """Refuse keys that would change the cell's id and nothing else."""
    for item in fields(config):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if used is not None and item.name not in used and getattr(config, item.name) != default:
            raise UserError(
                f"{group}.{item.name} means nothing to {owner}"
                + (f", which takes {', '.join(used)}" if used else "")
                + "; leave it out"
            )
