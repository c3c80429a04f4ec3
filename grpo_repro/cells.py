"""Cells: one unit of work each, with an identity that its results and its randomness derive from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NOT_IDENTITY = frozenset(
    "results_dir threads device device_count launcher logging hydra dry_run save_seconds gradient_checkpointing "
    "vllm_machine".split()
)
"""Keys of a configuration that cannot change the numbers and stay out of the cell's id."""

SEED_DERIVATION = (
    "numpy SeedSequence([seed, int(first 8 bytes of sha256(cell id)), replicate, stream or iteration]), on language "
    "models its child i for question i; in training, questions and evaluations take a word of their own instead of the "
    "cell id, so that runs of one seed share them over group sizes"
)


@dataclass(frozen=True)
class Cell:
    """One unit of work: what is run, and the identity of its results.

    Attributes:
        experiment: Name of the experiment.
        config: Its resolved configuration, nested dictionaries of plain values.
        label: What a person calls it.
    """

    experiment: str
    config: dict[str, Any]
    label: str

    @property
    def id(self) -> str:
        """First 12 hex digits of the sha256 of the configuration that can change the numbers."""
        return hashlib.sha256(canonical_json(self.config).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Estimate:
    """What a cell is expected to cost.

    Attributes:
        completions: Number of completions sampled.
        tokens: Number of tokens sampled.
        seconds: Wall time in seconds.
        memory_bytes: Peak memory in bytes, of each device.
        parts: What it is made of, in bytes, where that is known.
        notes: What the estimate assumes.
    """

    completions: int
    tokens: int
    seconds: float
    memory_bytes: int
    parts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


Progress = Callable[[int, int, str], None]
"""Called by a cell with (done, total, what)."""


def canonical_json(config: dict[str, Any]) -> str:
    """Return the identity of a configuration as text: sorted keys, no spaces, without `NOT_IDENTITY`.

    A local model whose files are identified by `weights` is the same wherever it lies: its path stays out. So are
    questions that `data` identifies.

    Raises:
        ValueError: If a value is NaN or infinite.
        TypeError: If a value is not plain data.
    """
    kept = {key: value for key, value in config.items() if key not in NOT_IDENTITY}
    if kept.get("weights") and not kept["model"]["path"].startswith("bundled:"):
        kept["model"] = {key: value for key, value in kept["model"].items() if key != "path"}
    if kept.get("data"):
        kept["task"] = {key: value for key, value in kept["task"].items() if key != "path"}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), allow_nan=False)


def cell_rng(seed: int, identity: str, replicate: int = 0) -> np.random.SeedSequence:
    """Derive the randomness of one replicate of a cell; see `SEED_DERIVATION`.

    Args:
        seed: The user's seed, 0 or more.
        identity: Whatever names the cell, usually its id.
        replicate: Number of the replicate, 0 or more.

    Returns:
        A SeedSequence; `numpy.random.default_rng` takes it, and so does `.generate_state` for torch.

    >>> int(cell_rng(0, "a").generate_state(1)[0]) == int(cell_rng(0, "b").generate_state(1)[0])
    False
    """
    word = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big")
    return np.random.SeedSequence([seed, word, replicate])
