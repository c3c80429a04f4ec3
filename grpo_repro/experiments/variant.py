"""The settings of a training run as one line of text: the `method` column of its rows.

Figures are drawn from parquet alone, and runs may be compared only if nothing but G, N, n and the seed differs. So
each row names how its run was trained, in a form that can be taken apart again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = {
    "optimizer": "optimizer",
    "schedule": "schedule",
    "learning_rate": "learning_rate",
    "warmup": "warmup",
    "weight_decay": "weight_decay",
    "clip_norm": "clip_norm",
    "pool": "prompt_pool",
    "order": "prompt_order",
    "iterations": "iterations",
    "temperature": "temperature",
}
"""Name in the text and key of the configuration; a key that a cell lacks is left out."""


def describe(config: Mapping[str, Any]) -> str:
    """Return the settings of a training cell's configuration.

    >>> describe({"optimizer": "sgd", "learning_rate": 0.5, "prompt_pool": None})
    'optimizer=sgd learning_rate=0.5 pool=all'
    """
    shown = {name: config[key] for name, key in KEYS.items() if key in config}
    shown = {name: "all" if name == "pool" and value is None else value for name, value in shown.items()}
    return " ".join(f"{name}={'none' if value is None else value}" for name, value in shown.items())


def parse(text: str) -> dict[str, str]:
    """Take the text of `describe` apart.

    >>> parse("optimizer=sgd pool=all")
    {'optimizer': 'sgd', 'pool': 'all'}
    """
    return dict(part.split("=", 1) for part in text.split())
