"""Training runs of tabular policies: a cell holds many independent runs, with exact values and gaps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Int

from grpo_repro import stats
from grpo_repro.algorithm2 import Options, remedies
from grpo_repro.cells import Cell, Estimate, Progress, cell_rng
from grpo_repro.config import ModelConfig
from grpo_repro.engine.schedule import learning_rate
from grpo_repro.errors import UserError
from grpo_repro.experiments.state import Checkpoint
from grpo_repro.experiments.variant import describe
from grpo_repro.policies import tabular, tabular_algorithm2, tabular_runs
from grpo_repro.policies.families import Family
from grpo_repro.tasks.bandit import family_hash

STATE = "runs"
NUMBERS = 2**23
"""Numbers in the largest array of one pass; runs are taken in blocks of that size."""

BLOCKS = 100
"""Blocks of runs that the interval of the predicted G* leaves out one by one."""


def check(model: ModelConfig) -> tuple[Family, float]:
    """Build the family of a tabular model, with the best return of its policies.

    Raises:
        UserError: If the family or its arguments are wrong, or its best return is not known.
    """
    policy = tabular.build(model.family, model.family_args)
    if policy.best_return is None:
        raise UserError(
            f"the best return of family {model.family} with these arguments is not known, so that no gap can be "
            "measured; use model.family=curved or model.family=three-actions"
        )
    return policy.family, policy.best_return


def run(cell: Cell, workdir: Path, progress: Progress) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Train and evaluate one cell; see `training.run`."""
    config = cell.config
    family, best = check(ModelConfig(**config["model"]))
    runs, last, checkpoints = config["replicates"], config["iterations"], config["checkpoints"]
    penalized = Options.of(config).penalized
    checkpoint = Checkpoint(workdir, cell.id, config["save_seconds"])
    blank = {
        "theta": torch.from_numpy(np.tile(family.theta, (runs, 1))),
        "measured": torch.full((len(checkpoints), 3 + penalized, runs), torch.nan, dtype=torch.float64),
        "done": torch.tensor([-1]),
    }
    state = checkpoint.restore(STATE, blank)
    theta, measured = state["theta"].numpy(), state["measured"].numpy()
    for iteration in range(int(state["done"]) + 1, last + 1):
        if iteration:
            _update(cell, family, theta, iteration)
        if iteration in checkpoints:
            measured[checkpoints.index(iteration)] = _measure(family, theta, penalized)
        progress(iteration, last, "iterations")
        found = {"theta": torch.from_numpy(theta), "measured": torch.from_numpy(measured)}
        checkpoint.save_sometimes(STATE, found | {"done": torch.tensor([iteration])})
    count = runs * config["budget"] * last
    extras = {"completions": count, "tokens": count, "dtype": "float64", "data_hash": family_hash(family)}
    return _frame(cell, measured, best), extras


def _measure(
    family: Family, theta: Float64[np.ndarray, "runs dim"], penalized: bool
) -> Float64[np.ndarray, "numbers runs"]:
    """J, c1 and c3 of every run, and with a penalty its divergence from the initial policy; all exact."""
    found = [tabular_runs.expected_return(family, theta), *tabular_runs.components(family, theta)]
    return np.stack([*found, tabular_algorithm2.divergence(family, theta)] if penalized else found)


def _update(cell: Cell, family: Family, theta: Float64[np.ndarray, "runs dim"], iteration: int) -> None:
    """One iteration of all runs, in place, in blocks that fit into memory."""
    config = cell.config
    rate, group, clip = learning_rate(config, iteration), config["group_size"], config["clip_norm"]
    size = max(1, NUMBERS // max(config["budget"] * 2 * family.features.shape[1], family.features.size))
    contexts = draw_contexts(cell, family, iteration)
    root = cell_rng(config["seed"], cell.id, iteration).entropy

    def step(direction: Float64[np.ndarray, "runs dim"]) -> Float64[np.ndarray, "runs dim"]:
        if clip is not None:
            norms = np.sqrt(np.einsum("sd,sd->s", direction, direction))
            direction = direction * np.minimum(1.0, clip / np.maximum(norms, 1e-300))[:, None]
        return rate * direction

    for block, start in enumerate(range(0, len(theta), size)):
        part = slice(start, start + size)
        rng = np.random.default_rng(np.random.SeedSequence(root, spawn_key=(block,)))
        with np.errstate(all="ignore"):  # what overflows is not finite, and said below
            theta[part] = tabular_algorithm2.iterate(
                family, theta[part], contexts[part], group, config["estimator"], Options.of(config), step, rng
            )
    if not np.isfinite(theta).all() or np.abs(theta).max() > 1e100:
        raise UserError(f"training diverges at iteration {iteration} with learning rate {rate:g}; {remedies(config)}")


def draw_contexts(cell: Cell, family: Family, iteration: int) -> Int[np.ndarray, "runs prompts"]:
    """Contexts of all runs in one iteration, from the family's distribution or from each run's own pool.

    A pool of M contexts is drawn from the distribution for each run; `epochs` goes through it in a fresh order each
    time, across iterations. The draws depend on the seed and not on G, as those of language models do not.
    """
    config = cell.config
    runs, count, pool = config["replicates"], config["budget"] // config["group_size"], config["prompt_pool"]
    ends = np.cumsum(family.context_probs)[:-1]
    rng = np.random.default_rng(cell_rng(config["seed"], "questions", iteration))
    if pool is None:
        return np.searchsorted(ends, rng.random((count, runs)).T, side="right")
    members = np.random.default_rng(cell_rng(config["seed"], "pool")).random((runs, pool))
    if config["prompt_order"] == "iid":
        places = rng.integers(pool, size=(count, runs)).T
    else:
        asked = np.arange((iteration - 1) * count, iteration * count)
        orders = {
            int(epoch): np.random.default_rng(cell_rng(config["seed"], "epoch", int(epoch)))
            .random((runs, pool))
            .argsort(1)
            for epoch in np.unique(asked // pool)
        }
        places = np.stack([orders[int(place) // pool][:, place % pool] for place in asked], 1)
    return np.searchsorted(ends, np.take_along_axis(members, places, 1), side="right")


def _frame(cell: Cell, measured: Float64[np.ndarray, "checkpoints numbers runs"], best: float) -> pd.DataFrame:
    """Rows: the gap of every run; over runs, the mean value, c1, c3, the G* that they predict, and any divergence."""
    config, level = cell.config, cell.config["confidence"]
    runs = measured.shape[2]
    blocks = np.arange(runs) * min(BLOCKS, runs) // runs
    parts = []
    for iteration, (value, c1, c3, *divergence) in zip(config["checkpoints"], measured, strict=True):
        gaps = {"metric": "suboptimality_gap", "replicate": np.arange(runs), "value": best - value, "count": 1}
        parts.append(pd.DataFrame(gaps | {"iteration": iteration}))
        means = {name: _left_out(x, blocks) for name, x in (("c1", c1), ("c3", c3))}
        found = {"value": stats.mean_interval(value, level)}
        found |= {name: stats.jackknife(*pair, level) for name, pair in means.items()}
        found["optimal_group_size"] = stats.optimal_group_size_interval(means["c1"], means["c3"], level)
        if divergence:
            found["kl_divergence"] = stats.mean_interval(divergence[0], level)
        rows = [
            {
                "metric": name,
                "value": x.value,
                "ci_low": x.low,
                "ci_high": x.high,
                "count": runs,
                "iteration": iteration,
            }
            for name, x in found.items()
        ]
        parts.append(pd.DataFrame(rows))
    common = {
        "model": config["model"]["name"], "task": config["task"]["name"], "estimator": config["estimator"],
        "method": describe(config), "group_size": config["group_size"], "budget": config["budget"],
        "num_prompts": config["budget"] // config["group_size"], "seed": config["seed"], "ci_level": level,
    }  # fmt: skip
    return pd.concat(parts, ignore_index=True).astype({"replicate": "Int64"}).assign(**common)


def _left_out(
    values: Float64[np.ndarray, " runs"], blocks: Int[np.ndarray, " runs"]
) -> tuple[float, Float64[np.ndarray, " blocks"]]:
    """Mean over runs, and over all but each block of runs."""
    sums, sizes = np.bincount(blocks, values), np.bincount(blocks)
    return float(values.mean()), (values.sum() - sums) / (len(values) - sizes)


def estimate(cell: Cell) -> Estimate:
    """Cost of a cell from a stated model, on one core.

    3e-7 s for each group of an iteration, 1.5e-8 s for each number of the runs' score tables, and 1.5e-8 s for each
    member of the runs' pools, which every iteration draws again. Every minibatch has score tables of its own.
    """
    config = cell.config
    steps = Options.of(config).minibatches
    family, _ = check(ModelConfig(**config["model"]))
    runs, prompts = config["replicates"], config["budget"] // config["group_size"]
    count, table = runs * config["budget"] * config["iterations"], runs * family.features.size
    pools = runs * (config["prompt_pool"] or 0)
    seconds = 0.5 + config["iterations"] * (3e-7 * runs * prompts + 1.5e-8 * (steps * table + pools))
    memory = 300_000_000 + 8 * (4 * NUMBERS + 4 * table + runs * prompts + 3 * pools)
    return Estimate(count, count, seconds, int(memory))
