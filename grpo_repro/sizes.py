"""Size of a model and of its prompts, known without its weights and, where need be, without the model or a network."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpo_repro.config import ModelConfig, TaskConfig, conf_dir
from grpo_repro.errors import NotHere, UserError
from grpo_repro.fingerprint import resolve_path

CHARACTERS_PER_TOKEN = 2.5
"""Of a prompt without its tokenizer: low, for numbers and formulas take about a token a character, words one in 4."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers that cost depends on.

    Attributes:
        parameters: Number of parameters, shared ones once.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        intermediate: Width of the feed-forward layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        vocabulary: Tokens.
        positions: Longest context; 0 where there is no limit.
        source: Where the numbers come from.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    positions: int
    source: str

    @property
    def kv_width(self) -> int:
        """Width of the keys of one layer."""
        return self.hidden // self.heads * self.kv_heads


@dataclass(frozen=True)
class Prompts:
    """Lengths of the prompts of a task in tokens.

    Attributes:
        longest: The longest.
        mean: Their mean.
        source: Where the numbers come from.
    """

    longest: int
    mean: float
    source: str


STATED_QUESTIONS = {"gsm8k": {"train": 7473, "test": 1319}, "math": {"train": 7500, "test": 5000}}
"""Questions of data sets that are not here."""

# Characters of a question of theirs, the longest and the mean, rounded up.
_STATED_CHARACTERS = {"gsm8k": (1000, 240), "math": (4400, 220)}


def size_of(model: ModelConfig) -> tuple[ModelSize, Any]:
    """Size of a model and its tokenizer, None where that is not here.

    A model's own config.json comes first, in a folder or in the hub's cache, then the table `conf/sizes.yaml`, and the
    hub is asked only for what neither knows.

    Raises:
        UserError: If there is no such model.
    """
    return _size_of(json.dumps([model.path, model.revision, model.trust_remote_code, model.chat]), resolve_path(model))


@lru_cache(maxsize=8)
def _size_of(key: str, path: str) -> tuple[ModelSize, Any]:
    original, revision, code, chat = json.loads(key)
    table = sizes_table()
    if not Path(path).expanduser().exists() and path in table and not _cached(path, revision):
        return ModelSize(**table[path], source="conf/sizes.yaml (the model is not on this machine)"), None
    from grpo_repro.policies import causal_lm

    model = ModelConfig(name=path, path=original, revision=revision, trust_remote_code=code, chat=chat)
    shape = causal_lm.shape(model)
    return _described(shape.described, shape.parameters, f"config.json of {original}"), shape.tokenizer


def _described(config: Any, parameters: int, source: str) -> ModelSize:
    """Read what transformers says of a model; names differ between architectures."""

    def number(*names: str, default: int = 0) -> int:
        return next((int(value) for name in names if (value := getattr(config, name, None))), default)

    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head", default=1)
    return ModelSize(
        parameters,
        number("num_hidden_layers", "n_layer"),
        hidden,
        number("intermediate_size", "n_inner", default=4 * hidden),
        heads,
        number("num_key_value_heads", default=heads),
        number("vocab_size"),
        number("max_position_embeddings", "n_positions"),
        source=source,
    )


def sizes_table() -> dict[str, dict[str, int]]:
    """Return `conf/sizes.yaml`: hub id -> numbers of a `ModelSize`."""
    from omegaconf import OmegaConf

    found: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / "sizes.yaml"))
    return found


def _cached(path: str, revision: str | None) -> bool:
    """Whether the hub's cache holds a model's configuration and tokenizer."""
    from huggingface_hub import try_to_load_from_cache

    names = ("config.json", "tokenizer_config.json")
    return all(isinstance(try_to_load_from_cache(path, name, revision=revision), str) for name in names)


@lru_cache(maxsize=8)
def _texts(task_text: str) -> tuple[str, ...]:
    from grpo_repro.tasks import load_task

    return tuple(question.text for question in load_task(TaskConfig(**json.loads(task_text))).questions)


def stated_task(task: TaskConfig) -> TaskConfig:
    """A task whose data are not here, with the number of questions that they are known to have where all are asked."""
    return replace(task, num_questions=task.num_questions or STATED_QUESTIONS[task.name].get(task.split, 0))


def prompts_of(model: ModelConfig, task: TaskConfig, tokenizer: Any) -> Prompts:
    """Lengths of a task's prompts, counted where task and tokenizer are here, else estimated.

    Raises:
        UserError: If the task cannot be read for another reason than that it is not here.
    """
    around = len(model.template.replace("{question}", "").replace("{instruction}", ""))
    around += len(task.instruction or "") + (200 if model.chat else 0)  # a chat template with its system message
    try:
        texts = _texts(json.dumps(asdict(task)))
    except NotHere:
        longest, mean = (around + characters for characters in _STATED_CHARACTERS[task.name])
        rate = CHARACTERS_PER_TOKEN
        return Prompts(
            round(longest / rate),
            mean / rate,
            f"characters / {rate} (the data are not on this machine; cells get their final ids with them)",
        )
    if tokenizer is None:
        lengths = [(around + len(text)) / CHARACTERS_PER_TOKEN for text in texts]
        source = f"characters / {CHARACTERS_PER_TOKEN} (the tokenizer is not on this machine)"
    else:
        chat = 80 if model.chat else 0
        lengths = [chat + len(tokenizer.encode(model.template.replace("{question}", text))) for text in texts]
        source = "counted by the tokenizer"
    return Prompts(round(max(lengths)), sum(lengths) / len(lengths), source)


def check_context(name: str, size: ModelSize, prompts: Prompts, length: int) -> None:
    """Refuse completions that the model has no positions for.

    Raises:
        UserError: With what to shorten.
    """
    if size.positions and prompts.longest + length > size.positions:
        raise UserError(
            f"{name} has {size.positions} positions, and a prompt of {prompts.longest} tokens with "
            f"max_new_tokens={length} needs more; shorten the template or lower max_new_tokens"
        )


def sizes_of(model: ModelConfig, task: TaskConfig, length: int) -> tuple[ModelSize, Prompts, list[str]]:
    """Sizes of a model and of its prompts, and where they come from, for completions of at most `length` tokens.

    Raises:
        UserError: If the model or the task cannot be used, or the model's context is too short.
    """
    size, tokenizer = size_of(model)
    prompts = prompts_of(model, task, tokenizer)
    check_context(model.name, size, prompts, length)
    return size, prompts, [f"size of {model.name}: {size.source}", f"lengths of prompts: {prompts.source}"]
