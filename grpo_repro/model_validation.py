"""Checks of a model's settings, and of what goes with a model."""

from __future__ import annotations

from dataclasses import fields

from grpo_repro.errors import UserError
from grpo_repro.schema import (
    DTYPES,
    MODEL_KINDS,
    SCORE_PARAMS,
    WORDED_TASKS,
    LoraSettings,
    ModelConfig,
    MseEvalConfig,
    TaskConfig,
)
from grpo_repro.validation import between, check_name, unused

_TABULAR = ("family", "family_args")
MODEL_KEYS = {
    "tabular": ("name", "kind", *_TABULAR),
    "causal_lm": tuple(item.name for item in fields(ModelConfig) if item.name not in _TABULAR),
}
"""Keys that each kind of model reads."""


def score_params(config: MseEvalConfig) -> None:
    """Refuse parameters to score that the model does not have, and adapters whose scores are not taken."""
    check_name("score_params", config.score_params, SCORE_PARAMS)
    tabular = config.task.name == "bandit" or (config.model is not None and config.model.kind == "tabular")
    if tabular and config.score_params != "all":
        raise UserError(f"score_params={config.score_params} means nothing to a tabular policy; leave it out")
    adapted = config.model is not None and bool(config.model.lora.rank)
    if adapted != (config.score_params == "lora"):
        raise UserError(
            f"score_params={config.score_params} and model.lora.rank="
            f"{config.model.lora.rank if config.model and adapted else 'null'} do not go together; use both "
            "score_params=lora and for example model.lora.rank=8, or neither"
        )


def validate_model(model: ModelConfig) -> None:
    """Refuse values that no model can have, and keys that the kind of model does not read."""
    check_name("model.kind", model.kind, MODEL_KINDS)
    check_name("model.dtype", model.dtype, DTYPES)
    if not model.name:
        raise UserError("keys of model are set but no model is named; name one, for example model=hf model.path=DIR")
    unused(model, "model", MODEL_KEYS[model.kind], f"the {model.kind} model {model.name!r}")
    if model.kind == "tabular":
        if not model.family:
            raise UserError("model.family is empty; a tabular policy needs one, see conf/model/tabular.yaml")
        return
    if not model.path:
        raise UserError(
            f"model.path is empty for model {model.name!r}; give a directory or a Hugging Face id: "
            "model=hf model.path=DIR"
        )
    if model.revision is not None and model.path.startswith("bundled:"):
        raise UserError(f"model.revision means nothing to {model.path}, which comes with grpo; leave it out")
    _lora(model.lora)
    if "{question}" not in model.template:
        raise UserError(
            f"model.template={model.template!r} has no {{question}}, every prompt would be the same; "
            "put {question} where the question belongs"
        )


def _lora(lora: LoraSettings) -> None:
    if not lora.rank:
        if lora.alpha is not None or lora.targets is not None:
            raise UserError("model.lora.alpha and targets mean nothing without a rank; add model.lora.rank=8")
        return
    between("model.lora.rank", lora.rank, 1, "0 or null is no adapters")
    if lora.alpha is not None and not 0 < lora.alpha <= 1e6:
        raise UserError(f"model.lora.alpha={lora.alpha:g} is not between 0 and 1e6; null is twice the rank")
    if lora.targets == []:
        raise UserError("model.lora.targets is empty; null takes every linear layer but the output layer")


def fit(model: ModelConfig, task: TaskConfig) -> None:
    """Refuse a model and a task that do not go together."""
    if model.kind == "tabular" and task.name != "bandit":
        raise UserError(f"model {model.name!r} is tabular, task={task.name} is not; use task=bandit")
    if task.name in WORDED_TASKS and str(model.path).startswith("bundled:"):
        raise UserError(
            f"model {model.name!r} knows digits and signs only, and task={task.name} is in English; use model=hf "
            "model.path=DIR"
        )
    if "{instruction}" in model.template and not task.instruction:
        raise UserError(
            f"model.template has {{instruction}}, and task={task.name} has none; set task.instruction, or leave it out"
            if task.name in WORDED_TASKS
            else f"model.template has {{instruction}}, and task={task.name} has none; leave it out of the template"
        )
    if model.kind == "causal_lm" and task.name == "bandit":
        raise UserError(f"task=bandit has no text for model {model.name!r}; use model=tabular")
