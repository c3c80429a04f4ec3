"""Checks of a training configuration beyond those that every experiment shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, fields

from grpo_repro.errors import UserError
from grpo_repro.schema import (
    KL_ESTIMATORS,
    LARGEST,
    OPTIMIZERS,
    PROMPT_ORDERS,
    SCHEDULES,
    BudgetConfig,
    TaskConfig,
    TrainingConfig,
)
from grpo_repro.validation import at_least, at_most, between, check_name, check_seeds, distinct, show

LEAST_POOL = 10
"""Fewest training questions from which G* is estimated: its interval leaves questions out one by one."""


def budgets(config: TrainingConfig) -> list[int]:
    """The numbers N of completions per iteration that a configuration asks for."""
    return config.budgets if isinstance(config, BudgetConfig) else [config.budget]  # type: ignore[attr-defined]


def seeds(config: TrainingConfig) -> list[int]:
    """The seeds that a configuration asks for."""
    if config.seeds is not None:
        return config.seeds
    return [0] if config.model is not None and config.model.kind == "tabular" else [0, 1, 2, 3, 4]


def validate_training(config: TrainingConfig) -> None:
    """Check the values of a training configuration.

    Raises:
        UserError: At the first value that cannot be run, with the remedy.
    """
    if config.model is None:
        raise UserError("no model is named; name one, for example model=bundled-base")
    _budgets(config)
    at_least("iterations", config.iterations, 0, "0 evaluates the initial policy")
    at_most("iterations", config.iterations)
    _checkpoints(config)
    _optimizer(config)
    _algorithm2(config)
    if config.log_every is not None:
        at_least("log_every", config.log_every, 1, "null averages from one checkpoint to the next")
    between("eval_samples", config.eval_samples, 2, "an interval needs two")
    if config.predict_seeds:
        check_seeds("predict_seeds", config.predict_seeds)
    check_name("prompt_order", config.prompt_order, PROMPT_ORDERS)
    if config.prompt_pool is not None:
        between("prompt_pool", config.prompt_pool, 1, "null takes the default pool")
    if config.save_seconds < 0:
        raise UserError(f"save_seconds={config.save_seconds} is negative; use 30")
    (_tabular if config.model.kind == "tabular" else _language)(config)


def _budgets(config: TrainingConfig) -> None:
    if not budgets(config):
        raise UserError("budgets is empty; use for example budgets=[64,256]")
    key = "budgets: N" if isinstance(config, BudgetConfig) else "budget"
    for budget in budgets(config):
        at_least(key, budget, 1)
        at_most(key, budget, LARGEST["budget"])
        wrong = [size for size in config.group_sizes if budget % size]
        if wrong:
            valid = [size for size in range(2, min(budget, 4096) + 1) if budget % size == 0]
            raise UserError(
                f"G={wrong[0]} does not divide N={budget}, so that no number of prompts B makes N = B G; valid G: "
                f"{', '.join(map(str, valid)) or 'none, take a larger budget'}"
            )
    distinct("budgets", budgets(config))


def _checkpoints(config: TrainingConfig) -> None:
    for checkpoint in config.checkpoints or []:
        at_least("checkpoints: n", checkpoint, 0)
        if checkpoint > config.iterations:
            raise UserError(
                f"checkpoint n={checkpoint} lies beyond iterations={config.iterations}; raise iterations or leave it "
                "out"
            )
    distinct("checkpoints", config.checkpoints or [])


def _optimizer(config: TrainingConfig) -> None:
    check_name("optimizer", config.optimizer, OPTIMIZERS)
    check_name("schedule", config.schedule, SCHEDULES)
    if config.learning_rate is not None and not 0 <= config.learning_rate <= 1e6:
        raise UserError(
            f"learning_rate={config.learning_rate} is not between 0 (which leaves the policy as it is) and 1e6; "
            "use for example 3e-4 with adamw"
        )
    if config.weight_decay < 0:
        raise UserError(f"weight_decay={config.weight_decay} is negative; use 0.0 for none")
    at_least("warmup", config.warmup, 0, "0 is none")
    if config.warmup > config.iterations:
        raise UserError(f"warmup={config.warmup} is longer than iterations={config.iterations}; lower it")
    clip_norm(config)


def _algorithm2(config: TrainingConfig) -> None:
    if config.normalize and config.estimators != ["grpo"]:
        raise UserError(
            f"normalize=true divides grpo's advantages, and estimators={show(config.estimators)}; use "
            "estimators=[grpo] or normalize=false"
        )
    _minibatches(config)
    if config.kl_coefficient < 0:
        raise UserError(f"kl_coefficient={config.kl_coefficient} is negative; use 0.0 for none")
    at_most("kl_coefficient", config.kl_coefficient)
    check_name("kl_estimator", config.kl_estimator, KL_ESTIMATORS)
    if config.kl_coefficient == 0 and config.kl_estimator != TrainingConfig.kl_estimator:
        raise UserError(
            f"kl_estimator={config.kl_estimator} means nothing without a penalty (kl_coefficient=0); give one, for "
            "example kl_coefficient=0.01, or leave it out"
        )


def _minibatches(config: TrainingConfig) -> None:
    parts = config.minibatches
    between("minibatches", parts, 1, "1 takes all prompts in one step")
    for budget in budgets(config):
        for size in config.group_sizes:
            if budget // size % parts:
                # Equal parts for every planned B are those of their greatest common divisor.
                common = math.gcd(*(n // g for n in budgets(config) for g in config.group_sizes))
                valid = [m for m in range(1, min(common, 4096) + 1) if common % m == 0]
                raise UserError(
                    f"minibatches={parts} does not divide B={budget // size} (N={budget}, G={size}) into equal "
                    f"parts; valid m for every B: {', '.join(map(str, valid))}"
                    + (f"; or leave G={size} out" if len(config.group_sizes) > 1 else "")
                )


def clip_norm(config: TrainingConfig) -> float | None:
    """The longest gradient that a configuration allows, None for any.

    Raises:
        UserError: If it is neither a positive number, null, nor `auto`.
    """
    if config.clip_norm is None:
        return None
    if config.clip_norm == "auto":
        return 1.0 if optimizer(config) == "adamw" else None
    try:
        limit = float(config.clip_norm)
    except ValueError:
        limit = -1.0
    if not 0 < limit < float("inf"):
        raise UserError(f"clip_norm={config.clip_norm} is no positive number; give one, null for no clipping, or auto")
    return limit


def optimizer(config: TrainingConfig) -> str:
    """The optimiser that a configuration means."""
    if config.optimizer != "auto":
        return config.optimizer
    return "sgd" if config.model is not None and config.model.kind == "tabular" else "adamw"


LANGUAGE_ONLY = (
    "temperature", "max_new_tokens", "micro_batch", "eval_samples", "log_every", "predict_seeds",
    "completions_per_prompt", "gradient_memory_gib", "gradient_checkpointing",
)  # fmt: skip
"""Keys that only language models read."""


def _unread(config: TrainingConfig, keys: Sequence[str]) -> None:
    """Refuse keys that would change nothing."""
    for item in fields(config):
        if item.name in keys:
            default = item.default if item.default_factory is MISSING else item.default_factory()
            value = getattr(config, item.name)
            if value != default:
                kind = "a tabular policy" if config.model and config.model.kind == "tabular" else "a language model"
                raise UserError(f"{item.name}={value} means nothing to {kind}; leave it out")


def _tabular(config: TrainingConfig) -> None:
    _unread(config, LANGUAGE_ONLY)
    if config.optimizer == "adamw":
        raise UserError("optimizer=adamw is for language models; a tabular policy takes optimizer=sgd")
    if config.weight_decay:
        raise UserError(f"weight_decay={config.weight_decay} means nothing to a tabular policy; leave it out")
    if config.prompt_order == "epochs" and config.prompt_pool is None:
        raise UserError("prompt_order=epochs needs a pool to go through; name its size, for example prompt_pool=64")
    for name in ("num_questions", "seed"):
        value = getattr(config.task, name)
        if value != getattr(TaskConfig, name):
            raise UserError(
                f"task.{name}={value} means nothing when a tabular policy trains on its family's contexts; leave it "
                "out, and limit them by prompt_pool=M"
            )


def _language(config: TrainingConfig) -> None:
    _unread(config, ("replicates",))
    wrong = [name for name in config.estimators if name not in ("grpo", "vanilla")]
    if wrong:
        raise UserError(
            f"estimators={show(config.estimators)}: {wrong[0]} needs a baseline that only a tabular policy knows; use "
            "grpo or vanilla, or model=tabular"
        )
    if config.model is not None and config.model.dtype == "float16":
        raise UserError("model.dtype=float16 cannot hold the optimiser's averages; use float32 or bfloat16")
    if config.task.split != "test":
        raise UserError(
            f"task.split={config.task.split} is trained on; task names the test questions, so use task.split=test"
        )
    if config.prompt_pool is not None and config.prompt_pool < LEAST_POOL and config.predict_seeds:
        raise UserError(
            f"prompt_pool={config.prompt_pool} is too small to estimate G*; use {LEAST_POOL} or more, or "
            "predict_seeds=[]"
        )
