"""The questions of a training run: its pool, and which of them each iteration draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from grpo_repro.cells import cell_rng
from grpo_repro.config import TaskConfig
from grpo_repro.errors import NotHere, UserError
from grpo_repro.tasks import load_task


def training_task(test: TaskConfig, pool: int) -> Any:
    """The task of the training questions.

    Args:
        test: The test questions' configuration.
        pool: Number M of training questions.

    Raises:
        NotHere: If the data are not on this machine.
        UserError: If the task has not as many.
    """
    try:
        return load_task(replace(test, split="train", num_questions=pool))
    except NotHere:
        raise
    except UserError as error:
        raise UserError(f"prompt_pool={pool}: {error}") from error


def question_numbers(config: dict[str, Any], pool: int, iteration: int) -> list[int]:
    """Numbers of the B training questions of one iteration.

    They depend on the seed and not on G: with `iid`, a run with fewer questions sees the first of those that a run
    of the same seed with more sees; with `epochs`, all runs of a seed go through the same permutations.

    Args:
        config: A cell's configuration.
        pool: Number M of training questions.
        iteration: i, counted from 1.

    Returns:
        B numbers in 0..M-1.
    """
    count = config["budget"] // config["group_size"]
    if config["prompt_order"] == "iid":
        rng = np.random.default_rng(cell_rng(config["seed"], "questions", iteration))
        return [int(i) for i in rng.integers(pool, size=count)]
    places = np.arange((iteration - 1) * count, iteration * count)
    passes = {
        int(epoch): np.random.default_rng(cell_rng(config["seed"], "epoch", int(epoch))).permutation(pool)
        for epoch in np.unique(places // pool)
    }
    return [int(passes[int(place) // pool][place % pool]) for place in places]
