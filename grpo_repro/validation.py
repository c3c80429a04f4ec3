"""Checks of a whole configuration, before anything is sampled."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from grpo_repro.config import (
    DTYPES,
    ESTIMATORS,
    METHODS,
    MODEL_KINDS,
    SAMPLERS,
    ModelConfig,
    MseEvalConfig,
    TaskConfig,
)
from grpo_repro.errors import UserError


def validate(config: MseEvalConfig) -> None:
    """Check every value of a configuration; nothing is read, written or imported.

    Args:
        config: The typed configuration of an experiment.

    Raises:
        UserError: At the first value that cannot be run, with the remedy.
    """
    _finite(config)
    _names("estimators", config.estimators, ESTIMATORS)
    _names("methods", config.methods, METHODS)
    _name("sampler", config.sampler, SAMPLERS)
    _group_sizes(config)
    _seeds(config.seeds)
    _at_least("completions_per_prompt", config.completions_per_prompt, 4, "its variances need four")
    _at_least("replicates", config.replicates, 3, "an interval needs three")
    _at_least("max_new_tokens", config.max_new_tokens, 1)
    _at_least("micro_batch", config.micro_batch, 1)
    if config.threads is not None:
        _at_least("threads", config.threads, 1, "null leaves torch's default")
    if not 0 < config.confidence < 1:
        raise UserError(f"confidence={config.confidence} is not between 0 and 1; use for example 0.95")
    if config.temperature <= 0:
        raise UserError(f"temperature={config.temperature} is not positive; 1.0 is the policy itself")
    if config.gradient_memory_gib <= 0:
        raise UserError(f"gradient_memory_gib={config.gradient_memory_gib} is not positive; use 2.0")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise UserError(f"unknown device {config.device!r}; use auto, cpu, cuda or cuda:N")
    if not config.results_dir.strip():
        raise UserError("results_dir is empty; name a folder, for example results_dir=results")
    _task(config.task)
    if config.model is not None:
        _model(config.model)
        _fit(config.model, config)
    elif config.task.name == "bandit" or "exact" in config.methods:
        what = "task=bandit" if config.task.name == "bandit" else "methods=[exact]"
        raise UserError(f"{what} needs a tabular policy, and no model is named; add model=tabular")


def _finite(config: Any, prefix: str = "") -> None:
    for item in fields(config):
        value = getattr(config, item.name)
        if isinstance(value, ModelConfig | TaskConfig):
            _finite(value, f"{prefix}{item.name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{prefix}{item.name}={value} is not a finite number; give one")


def _at_least(key: str, value: int, least: int, why: str = "") -> None:
    if value < least:
        raise UserError(f"{key}={value} is too small; use {least} or more{f' ({why})' if why else ''}")


def _name(key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        close = difflib.get_close_matches(value, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"unknown {key} {value!r}; {hint}known: {', '.join(known)}")


def _names(key: str, values: Sequence[str], known: Sequence[str]) -> None:
    if not values:
        raise UserError(f"{key} is empty; name one or more of {', '.join(known)}")
    for value in values:
        _name(key.removesuffix("s"), value, known)
    _distinct(key, values)


def _distinct(key: str, values: Sequence[Any]) -> None:
    twice = sorted({value for value in values if list(values).count(value) > 1})
    if twice:
        raise UserError(f"{key}={_show(values)} names {_show(twice)} more than once; keep one of each")


def _show(values: Sequence[Any]) -> str:
    return "[" + ",".join(str(value) for value in values) + "]"


def _group_sizes(config: MseEvalConfig) -> None:
    sizes = config.group_sizes
    if not sizes:
        raise UserError("group_sizes is empty; use for example group_sizes=[4,8,16,32,64]")
    for size in sizes:
        _at_least("group_sizes: G", size, 1)
    _distinct("group_sizes", sizes)
    if 1 in sizes and "grpo" in config.estimators:
        raise UserError(
            "group size G=1 is not defined for the estimator 'grpo' (its baseline is the mean of the other "
            "G-1 rewards); use G >= 2 or estimators=[vanilla,oracle]"
        )


def _seeds(seeds: Sequence[int]) -> None:
    if not seeds:
        raise UserError("seeds is empty; use for example seeds=[0]")
    negative = [seed for seed in seeds if seed < 0]
    if negative:
        raise UserError(f"seeds={_show(seeds)} has the negative {negative[0]}; seeds are 0 or more")
    _distinct("seeds", seeds)


def _task(task: TaskConfig) -> None:
    if not task.name:
        raise UserError("no task is named; use for example task=arithmetic")
    _at_least("task.num_questions", task.num_questions, 3, "intervals over questions need three")
    _name("task.split", task.split, ("train", "test"))
    _at_least("task.seed", task.seed, 0)


def _model(model: ModelConfig) -> None:
    _name("model.kind", model.kind, MODEL_KINDS)
    _name("model.dtype", model.dtype, DTYPES)
    if not model.name:
        raise UserError("keys of model are set but no model is named; name one, for example model=hf model.path=DIR")
    if model.kind == "tabular":
        if not model.family:
            raise UserError("model.family is empty; a tabular policy needs one, see conf/model/tabular.yaml")
        return
    if not model.path:
        raise UserError(
            f"model.path is empty for model {model.name!r}; give a directory or a Hugging Face id: "
            "model=hf model.path=DIR"
        )
    if "{question}" not in model.template:
        raise UserError(
            f"model.template={model.template!r} has no {{question}}, every prompt would be the same; "
            "put {question} where the question belongs"
        )


def _fit(model: ModelConfig, config: MseEvalConfig) -> None:
    """Refuse a model, a task and methods that do not go together."""
    if model.kind == "tabular" and config.task.name != "bandit":
        raise UserError(f"model {model.name!r} is tabular, task={config.task.name} is not; use task=bandit")
    if model.kind == "causal_lm" and config.task.name == "bandit":
        raise UserError(f"task=bandit has no text for model {model.name!r}; use model=tabular")
    if model.kind == "causal_lm" and "exact" in config.methods:
        raise UserError(
            f"methods={_show(config.methods)}: 'exact' needs a tabular policy and {model.name!r} is a "
            "language model; use components or monte_carlo, or model=tabular"
        )
