"""The MSE experiment on tabular policies: exact, from pools, and by replicates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from grpo_repro import stats, ustat
from grpo_repro.cells import Cell, Progress, cell_rng
from grpo_repro.estimators import ESTIMATORS
from grpo_repro.experiments.mse_eval import completions, settings
from grpo_repro.experiments.mse_rows import (
    Measured,
    Row,
    component_rows,
    exact,
    frame,
    mse_rows,
    prompt_value_rows,
    replicate_mse,
    row,
)  # fmt: skip
from grpo_repro.policies import tabular
from grpo_repro.tasks import bandit


def run(cell: Cell, progress: Progress) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Measure one cell of a tabular policy; see `mse_eval.run`."""
    model, task_config = settings(cell)
    task = bandit.load(task_config, model)
    method = {"exact": _exact, "components": _components, "monte_carlo": _monte_carlo}[cell.config["method"]]
    rows = method(cell, task)
    progress(1, 1, "policy")
    count = 0 if cell.config["method"] == "exact" else completions(cell.config)
    extras = {"completions": count, "tokens": count, "dtype": "float64", "data_hash": task.data_hash}
    return frame(cell, rows), extras


def _exact(cell: Cell, task: bandit.BanditTask) -> list[Row]:
    """Closed forms: the error on the drawn questions, the components of the family's distribution."""
    policy, contexts = task.policy, task.contexts
    terms = policy.components

    def interval(group: int, name: str) -> stats.Interval:
        return exact(float(ustat.mse(terms, group, name)[contexts].mean()) / len(contexts))

    def mean(values: np.ndarray) -> float:
        return float(policy.context_probs @ values)

    quantities = {
        "c1": policy.c1, "c2": policy.c2, "c3": policy.c3,
        "optimal_group_size": ustat.optimal_group_size(policy.c1, policy.c3),
        "gradient_sq_norm": float(policy.gradient @ policy.gradient),
        "score_reward_correlation": policy.score_reward_correlation,
        "vanilla_variance": mean(terms.vanilla), "optimal_variance": mean(terms.optimal),
        "score_sq_norm": mean(terms.score_sq_norm), "reward_variance": mean(terms.reward_variance),
        "value": mean(terms.value),
    }  # fmt: skip
    rows = mse_rows(cell.config, interval, 0) + [row(name, exact(float(x)), 0) for name, x in quantities.items()]
    return rows + [row("value", exact(float(terms.value[x])), 0, prompt_id=str(i)) for i, x in enumerate(contexts)]


def _components(cell: Cell, task: bandit.BanditTask) -> list[Row]:
    config = cell.config
    rng = np.random.default_rng(cell_rng(config["seed"], cell.id))
    actions, rewards = tabular.sample(task.policy, task.contexts, config["completions_per_prompt"], rng)
    pool = tabular.pool(task.policy, task.contexts, actions, rewards)
    weights = ustat.group_gradient_weights(rewards)
    gradients = tabular.score_sums(task.policy, task.contexts, actions, weights)
    groups = stats.PromptGroups.from_sums(np.arange(len(gradients)), gradients)
    ids = [question.id for question in task.questions]
    return component_rows(config, Measured(pool, groups)) + prompt_value_rows(ids, rewards, config["confidence"])


def _monte_carlo(cell: Cell, task: bandit.BanditTask) -> list[Row]:
    """Independent replicates of the estimate over all questions, baselines exact."""
    config, policy, contexts = cell.config, task.policy, task.contexts
    value, best = policy.value[contexts], policy.optimal_baseline[contexts]
    replicates = config["replicates"]
    estimates: dict[tuple[int, str], np.ndarray] = {
        (group, name): np.empty((replicates, policy.scores.shape[-1]))
        for group in config["group_sizes"] for name in config["estimators"]
    }  # fmt: skip
    for replicate in range(replicates):
        rng = np.random.default_rng(cell_rng(config["seed"], cell.id, replicate))
        for group in config["group_sizes"]:
            actions, rewards = tabular.sample(policy, contexts, group, rng)
            for name in config["estimators"]:
                weights = ESTIMATORS[name](rewards, value, best) / (group * len(contexts))
                estimates[group, name][replicate] = tabular.score_sums(policy, contexts, actions, weights).sum(0)
    return mse_rows(config, lambda g, name: replicate_mse(estimates[g, name], config["confidence"]), replicates)
