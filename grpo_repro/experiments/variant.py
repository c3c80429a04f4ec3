"""The settings of a training run as one line of text: the `method` column of its rows.

Figures are drawn from parquet alone, and runs may be compared only if nothing but G, N, n and the seed differs. So
each row names how its run was trained, in a form that can be taken apart again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from grpo_repro.cells import canonical_json

OF_RUNS = frozenset(
    "group_size budget seed estimator predict completions_per_prompt gradient_memory_gib checkpoints log_every "
    "confidence replicates micro_batch sampler vllm_machine".split()
)
"""Keys that tell runs of one setting apart, or that change no run's law."""

KEYS = {
    "optimizer": "optimizer",
    "schedule": "schedule",
    "learning_rate": "learning_rate",
    "warmup": "warmup",
    "weight_decay": "weight_decay",
    "clip_norm": "clip_norm",
    "normalize": "normalize",
    "minibatches": "minibatches",
    "kl_coefficient": "kl_coefficient",
    "kl_estimator": "kl_estimator",
    "importance_cap": "importance_cap",
    "vllm_dtype": "vllm_dtype",
    "pool": "prompt_pool",
    "order": "prompt_order",
    "iterations": "iterations",
    "temperature": "temperature",
}
"""Name in the text and key of the configuration; a key that a cell lacks is left out."""


def describe(config: Mapping[str, Any]) -> str:
    """Return the settings of a training cell's configuration.

    Its last part, `rest`, is a hash of what else a setting is (model, task, lengths, ...): figures must not take runs
    that differ in any of it for runs of one setting.

    >>> describe({"optimizer": "sgd", "learning_rate": 0.5, "prompt_pool": None})
    'optimizer=sgd learning_rate=0.5 pool=all rest=44136f'
    """
    shown = {name: config[key] for name, key in KEYS.items() if key in config}
    rest = {key: value for key, value in config.items() if key not in OF_RUNS and key not in KEYS.values()}
    shown["rest"] = hashlib.sha256(canonical_json(rest).encode()).hexdigest()[:6]
    shown = {name: "all" if name == "pool" and value is None else value for name, value in shown.items()}
    return " ".join(f"{name}={_text(value)}" for name, value in shown.items())


def _text(value: Any) -> str:
    """Return a value as it is typed."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def parse(text: str) -> dict[str, str]:
    """Take the text of `describe` apart.

    >>> parse("optimizer=sgd pool=all")
    {'optimizer': 'sgd', 'pool': 'all'}
    """
    return dict(part.split("=", 1) for part in text.split() if "=" in part)
