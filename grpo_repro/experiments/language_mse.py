"""The MSE experiment on causal language models: pools and replicates, in bounded memory, resumable."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_repro import stats, ustat
from grpo_repro.cells import Cell, Progress, cell_rng
from grpo_repro.engine import samplers
from grpo_repro.engine.agreement import Agreement, compare
from grpo_repro.engine.check import self_check
from grpo_repro.engine.layers import chosen_parameters
from grpo_repro.engine.sample import Rollout
from grpo_repro.engine.scores import Scorer, unique_completions
from grpo_repro.errors import UserError
from grpo_repro.estimators import ESTIMATORS
from grpo_repro.experiments.grading import Tally, grade
from grpo_repro.experiments.mse_eval import MAX_GROUPS, completions, settings
from grpo_repro.experiments.mse_rows import (
    Measured,
    Row,
    baseline_error_rows,
    component_rows,
    exact,
    frame,
    mse_rows,
    prompt_value_rows,
    replicate_mse,
    row,
)  # fmt: skip
from grpo_repro.experiments.state import Checkpoint
from grpo_repro.policies import causal_lm
from grpo_repro.tasks import Question, load_task

SAMPLED_AT_ONCE = 16
"""Completions sampled together, in micro-batches: sampling keeps no graph and takes far less memory than scoring."""

SMALL_MODEL = 5_000_000
"""Parameters below which one thread is taken unless `threads` says otherwise.

The matrices of such a model are too small to share out, and threads that wait for each other on a busy machine made
the bundled job ten times slower; cells in parallel (a Hydra launcher) use several cores better.
"""


@dataclass
class PoolJob:
    """A cell with its policy, its questions and its place in the work."""

    cell: Cell
    policy: causal_lm.CausalLM
    questions: list[Question]
    prompts: list[list[int]]
    task: Any
    checkpoint: Checkpoint
    progress: Progress
    sampler: samplers.Sampler
    tokens: int = 0
    tally: Tally = field(default_factory=Tally)
    agreement: Agreement = field(default_factory=Agreement)
    config: dict[str, Any] = field(init=False)

    score_params: str = field(init=False)
    dim: int = field(init=False)

    def __post_init__(self) -> None:
        self.config = self.cell.config
        self.score_params = self.config.get("score_params", self.policy.score_params)
        self.dim = sum(p.numel() for p in chosen_parameters(self.policy.model, self.score_params).values())

    def scorer(self) -> Scorer:
        """Takes the scores of the parameters in question."""
        config = self.config
        return Scorer(self.policy, config["temperature"], config["micro_batch"], score_params=self.score_params)

    def kept(self) -> dict[str, Tensor]:
        """What a saved state holds beside its own: the agreement so far, where there is another engine."""
        return {"agreement": self.agreement.numbers()} if self.sampler.foreign else {}

    def restore(self, name: str, blank: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a saved state, see `Checkpoint.restore`, and take `kept` back unless a later one was taken already."""
        state = self.checkpoint.restore(name, blank | self.kept())
        if "agreement" in state and int(state["agreement"][1]) > self.agreement.tokens:
            self.agreement = Agreement.from_numbers(state["agreement"])
        return state

    def batches(self, start: int, per_prompt: int) -> list[range]:
        """Ranges of questions that are sampled together, from `start` on, always cut at the same places."""
        size = max(1, SAMPLED_AT_ONCE * self.config["micro_batch"] // per_prompt)
        whole = [range(i, min(i + size, len(self.prompts))) for i in range(0, len(self.prompts), size)]
        return [part for part in whole if part.start >= start]

    def rollout(self, part: range, per_prompt: int, stream: int) -> tuple[Rollout, Float[np.ndarray, "p k"]]:
        """Completions and rewards; the random numbers of a question depend on its number and the stream only."""
        config = self.config
        root = cell_rng(config["seed"], self.cell.id, stream)
        seeds = [np.random.SeedSequence(root.entropy, spawn_key=(i,)) for i in part]
        prompts = [self.prompts[i] for i in part]
        rollout = self.sampler.sample(prompts, seeds, per_prompt, config["max_new_tokens"], config["temperature"])
        self.sampler.rest()
        if self.sampler.foreign:
            rollout = compare(
                self.policy, prompts, rollout, config["temperature"], config["micro_batch"], self.agreement
            )
        self.tokens += int(rollout.mask.sum())
        # The pools' outcomes are reported; those of the Monte Carlo replicates say the same again.
        tally = self.tally if stream == 0 else None
        return rollout, grade(self.policy, self.task, [self.questions[i] for i in part], rollout, tally)


def run(cell: Cell, workdir: Path, progress: Progress) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Measure one cell of a language model; see `mse_eval.run`."""
    model, task_config = settings(cell)
    task = load_task(task_config)
    policy = causal_lm.load(model, cell.config["device"])
    if cell.config["threads"] is None and policy.num_parameters < SMALL_MODEL:
        torch.set_num_threads(1)
    prompts = [policy.encode(question.text) for question in task.questions]
    which = cell.config.get("score_params", "all")
    self_check(policy, prompts[0], which)
    sampler = samplers.make(policy, model, cell.config, prompts)
    job = PoolJob(cell, policy, task.questions, prompts, task, Checkpoint(workdir, cell.id), progress, sampler)
    rows = measure_components(job) if cell.config["method"] == "components" else _monte_carlo(job)
    rows += [row(metric, exact(value), count) for metric, value, count in job.tally.rows(task)]
    rows += agreement_rows(job.agreement)
    extras = {
        "completions": completions(cell.config),
        "tokens": job.tokens,
        "dtype": str(policy.model.dtype).removeprefix("torch."),
        "data_hash": task.data_hash,
        "model_revision": model.revision,
        "weights_hash": causal_lm.weights_hash(policy.model),
        "score_parameters": f"{which} ({job.dim})",
    } | sampler.facts
    return frame(cell, rows), extras


def _pools(job: PoolJob, groups: np.ndarray | None) -> tuple[ustat.Pool, Tensor, np.ndarray]:
    """K completions of every question: their pool, the groups' summed gradient estimates and the lengths.

    Args:
        job: The cell.
        groups: Group of each question; None takes norms only (the Monte Carlo method's baselines).
    """
    size, count = job.config["completions_per_prompt"], len(job.prompts)
    dim = job.dim
    blank = {
        "columns": torch.zeros(6, count, size, dtype=torch.float64),
        "sums": torch.zeros(0 if groups is None else int(groups.max()) + 1, dim),
        "done": torch.tensor([0, 0]),
        "outcomes": torch.from_numpy(Tally().counts),
    }
    state = job.restore("pool", blank)
    job.tally.counts = state["outcomes"].numpy()
    columns, sums = state["columns"], state["sums"]
    job.tokens += int(state["done"][1])
    with job.scorer() as scorer:
        for part in job.batches(int(state["done"][0]), size):
            rollout, rewards = job.rollout(part, size, stream=0)
            for place, i in enumerate(part):
                z = rewards[place]
                tokens, mask, index = unique_completions(rollout.tokens[place], rollout.mask[place])
                columns[:2, i] = torch.from_numpy(np.stack([z, rollout.lengths[place].cpu().numpy()]))
                job.progress(i + 1, count, "questions" if groups is not None else "questions, baselines")
                if groups is None:
                    columns[2, i] = torch.from_numpy(scorer.products(job.prompts[i], tokens, mask).sq_norms[index])
                    continue
                # <W_i, sum_j Z_j^p W_j> for p = 0, 1, 2; equal completions share their weights.
                weights = np.stack([np.bincount(index, z**p, len(tokens)) for p in range(3)])
                found = scorer.products(job.prompts[i], tokens, mask, weights)
                norms = found.sq_norms[index]
                cross = found.products[index].T - norms * np.stack([z**p for p in range(3)])
                columns[2:, i] = torch.from_numpy(np.concatenate([norms[None], cross]))
                estimate = (found.sums[1] - z.mean() * found.sums[0]) / (size - 1)
                sums[int(groups[i])] += estimate.cpu()
            state |= {"done": torch.tensor([part.stop, job.tokens])} | job.kept()
            job.checkpoint.save_sometimes("pool", state)
    job.checkpoint.save("pool", state)
    z, lengths, *rest = columns.numpy()
    return ustat.Pool(z, *rest), sums, lengths


def measure_components(job: PoolJob) -> list[Row]:
    """Rows of everything that one pool of completions per question gives."""
    count = len(job.prompts)
    index = np.arange(count) * jackknife_groups(job.config, count, job.dim) // count
    pool, sums, lengths = _pools(job, index)
    measured = Measured(pool, stats.PromptGroups.from_sums(index, sums.numpy()))
    level = job.config["confidence"]
    rows = component_rows(job.config, measured)
    rows.append(row("completion_length", stats.mean_interval(lengths.mean(1), level), lengths.shape[1]))
    return rows + prompt_value_rows([q.id for q in job.questions], pool.rewards, level)


def agreement_rows(agreement: Agreement) -> list[Row]:
    """How far the sampler's log-probabilities were from the trainer's; no rows where they are the same engine's."""
    if not agreement.tokens:
        return []
    found = {"sampler_log_prob_difference": agreement.mean, "sampler_log_prob_difference_max": agreement.largest}
    return [row(name, exact(value), agreement.tokens) for name, value in found.items()]


def jackknife_groups(config: dict[str, Any], count: int, parameters: int) -> int:
    """Number of groups of questions: as many as memory allows gradients for, at most `MAX_GROUPS`.

    Raises:
        UserError: If memory does not hold ten.
    """
    size = 4 * parameters / 2**30
    groups = min(count, MAX_GROUPS, int(config["gradient_memory_gib"] / size))
    needed = min(count, 10)
    if groups < needed:
        raise UserError(
            f"gradient_memory_gib={config['gradient_memory_gib']:g} holds {groups} gradients of {parameters:,} "
            f"parameters, and the intervals need {needed}; raise it to {needed * size * 1.01:.3g} or take a "
            "smaller model"
        )
    return groups


def _monte_carlo(job: PoolJob) -> list[Row]:
    """Independent replicates of the estimate over all questions at each G; baselines from a separate pool."""
    config = job.config
    pool, _, _ = _pools(job, None)
    value, best = pool.rewards.mean(1), ustat.optimal_baseline(pool)
    intervals = {}
    for number, group in enumerate(config["group_sizes"]):
        estimates = _replicates(job, group, number, value, best)
        for place, name in enumerate(config["estimators"]):
            intervals[group, name] = replicate_mse(estimates[place], config["confidence"])
    rows = mse_rows(config, lambda g, name: intervals[g, name], config["replicates"])
    rows.append(row("value", stats.mean_interval(value, config["confidence"]), pool.rewards.shape[1]))
    return rows + baseline_error_rows(config, pool)


def _replicates(
    job: PoolJob, group: int, number: int, value: np.ndarray, best: np.ndarray
) -> Float[np.ndarray, "estimators replicates dim"]:
    """Gradient estimates over all questions, for each estimator and replicate."""
    config, count = job.config, len(job.prompts)
    replicates, names = config["replicates"], config["estimators"]
    key = f"replicates-{group}"
    blank = {
        "sums": torch.zeros(len(names) * replicates, job.dim),
        "done": torch.tensor([0, job.tokens]),
    }
    state = job.restore(key, blank)
    sums = state["sums"].to(job.policy.device)
    job.tokens = max(job.tokens, int(state["done"][1]))
    steps = len(config["group_sizes"]) * count
    with job.scorer() as scorer:
        for part in job.batches(int(state["done"][0]), replicates * group):
            rollout, rewards = job.rollout(part, replicates * group, stream=1 + number)
            for place, i in enumerate(part):
                tokens, mask, index = unique_completions(rollout.tokens[place], rollout.mask[place])
                z = rewards[place].reshape(replicates, group)
                baselines = np.full(replicates, value[i]), np.full(replicates, best[i])
                advantages = np.stack([ESTIMATORS[name](z, *baselines) for name in names]).reshape(-1, group)
                owner = np.tile(index.reshape(replicates, group), (len(names), 1))
                weights = np.zeros((len(advantages), len(tokens)))
                np.add.at(weights, (np.arange(len(weights))[:, None], owner), advantages / (group * count))
                scorer.add_sums(job.prompts[i], tokens, mask, weights, sums)
                job.progress(number * count + i + 1, steps, f"questions, G = {group}")
            state = {"sums": sums.cpu(), "done": torch.tensor([part.stop, job.tokens])} | job.kept()
            job.checkpoint.save_sometimes(key, state)
    job.checkpoint.save(key, state)
    return sums.cpu().numpy().reshape(len(names), replicates, -1)
