"""Evaluations of a policy in training: sampled value, accuracy, and the components behind G*."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from grpo_repro import stats
from grpo_repro.cells import Cell, Progress, cell_rng
from grpo_repro.engine.sample import Rollout
from grpo_repro.engine.samplers import Sampler, TorchSampler
from grpo_repro.experiments.grading import OUTCOME_METRICS, UNANSWERED, Tally, grade
from grpo_repro.experiments.language_mse import SAMPLED_AT_ONCE, PoolJob, measure_components
from grpo_repro.experiments.state import Checkpoint
from grpo_repro.policies.causal_lm import CausalLM

PREDICTION_QUESTIONS = 200
"""Training questions whose pools estimate G*; the first of the pool, which comes in random order."""

METRICS = (
    "value", "suboptimality_gap", "accuracy", "greedy_accuracy", "reward_mean", "zero_variance_fraction",
    "gradient_norm", "completion_length", "c1", "c2", "c3", "optimal_group_size", *OUTCOME_METRICS,
    *UNANSWERED, "kl_divergence", "sampler_log_prob_difference", "sampler_log_prob_difference_max",
)  # fmt: skip
"""Metrics of a training run; their order numbers them in saved states."""


@dataclass(frozen=True)
class Record:
    """One measured number of a run."""

    metric: str
    iteration: int
    value: float
    low: float = float("nan")
    high: float = float("nan")
    count: int = 1
    WIDTH: ClassVar[int] = 6

    def numbers(self) -> list[float]:
        """Return it as numbers."""
        found = (METRICS.index(self.metric), self.iteration, self.value, self.low, self.high, self.count)
        return [float(x) for x in found]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> Record:
        """Take `numbers` back."""
        metric, iteration, value, low, high, count = numbers
        return cls(METRICS[int(metric)], int(iteration), value, low, high, int(count))

    def row(self) -> dict[str, Any]:
        """Return its columns of the results."""
        return {
            "metric": self.metric, "iteration": self.iteration, "value": self.value, "ci_low": self.low,
            "ci_high": self.high, "count": self.count,
        }  # fmt: skip


class Examination:
    """A fixed set of questions that a policy is examined on.

    Args:
        policy: The policy, as it is at the time of each call.
        task: The questions and their reward.
        part: 0 for the training questions, 1 for the test; it separates their random numbers.
        config: The cell's configuration.

    Attributes:
        sampler: Where its completions come from: this engine, unless a run sets another.
    """

    def __init__(self, policy: CausalLM, task: Any, part: int, config: dict[str, Any]) -> None:
        self.policy, self.task, self.part, self.config = policy, task, part, config
        self.sampler: Sampler = TorchSampler(policy)
        self.prompts = [policy.encode(question.text) for question in task.questions]
        self.tally = Tally()

    def reward(self, rollout: Rollout, numbers: list[int]) -> Float[np.ndarray, "prompts group"]:
        """Rewards of completions, see `grading.grade`.

        Args:
            rollout: Completions.
            numbers: The question of each of its prompts.

        Raises:
            UserError: If a reward is not finite.
        """
        return grade(self.policy, self.task, [self.task.questions[i] for i in numbers], rollout, self.tally)

    def outcomes(self, iteration: int) -> list[Record]:
        """Outcomes of the completions of the last `sampled`, none for a task that does not tell them apart."""
        return [
            Record(metric, iteration, float(value), count=count) for metric, value, count in self.tally.rows(self.task)
        ]

    def sampled(self, iteration: int) -> tuple[Record, int]:
        """Mean reward of `eval_samples` completions of every question, and the number of tokens sampled.

        The interval is over completions, the questions being fixed. The random numbers depend on seed, iteration and
        question, so that runs of one seed at several G are compared on equal ones.
        """
        config, samples = self.config, self.config["eval_samples"]
        root = cell_rng(config["seed"], "evaluation", iteration).entropy
        seeds = [np.random.SeedSequence(root, spawn_key=(self.part, i)) for i in range(len(self.prompts))]
        size = max(1, SAMPLED_AT_ONCE * config["micro_batch"] // samples)
        rewards, tokens = [], 0
        self.tally = Tally()
        for start in range(0, len(self.prompts), size):
            chosen = list(range(start, min(start + size, len(self.prompts))))
            rollout = self.sampler.sample(
                [self.prompts[i] for i in chosen], [seeds[i] for i in chosen], samples, config["max_new_tokens"],
                config["temperature"],
            )  # fmt: skip
            rewards.append(self.reward(rollout, chosen))
            tokens += int(rollout.mask.sum())
        found = np.concatenate(rewards)
        interval = stats.fixed_set_mean(found.mean(1), found.var(1, ddof=1) / samples, config["confidence"])
        return Record("value", iteration, interval.value, interval.low, interval.high, found.size), tokens

    def greedy(self, iteration: int) -> Record:
        """Accuracy of the likeliest token at every step: nothing in it is random, so it has no interval."""
        size = SAMPLED_AT_ONCE * self.config["micro_batch"]
        rewards = []
        for start in range(0, len(self.prompts), size):
            chosen = list(range(start, min(start + size, len(self.prompts))))
            rollout = self.sampler.greedy([self.prompts[i] for i in chosen], self.config["max_new_tokens"])
            rewards.append(self.reward(rollout, chosen))
        found = np.concatenate(rewards)
        return Record("greedy_accuracy", iteration, float(found.mean()), count=found.size)

    def components(
        self, iteration: int, cell: Cell, workdir: Path, progress: Progress
    ) -> tuple[list[Record], Float[np.ndarray, 2]]:
        """Unbiased c1, c2, c3 and G* = 1 + sqrt(c3/c1) of the policy as it is, from pools of completions.

        Returns:
            Their records, and the completions and tokens sampled.
        """
        questions = self.task.questions[:PREDICTION_QUESTIONS]
        config = self.config | {"estimators": [], "group_sizes": [], "method": "components"}
        own = Cell(cell.experiment, config | {"components_at": iteration}, cell.label)
        folder = workdir / f"components-{iteration}"
        folder.mkdir(exist_ok=True)

        def shown(done: int, total: int, what: str) -> None:
            progress(iteration, config["iterations"], f"iterations, G*: {done}/{total} questions")

        job = PoolJob(
            own, self.policy, questions, self.prompts[: len(questions)], self.task,
            Checkpoint(folder, own.id, config["save_seconds"]), shown, self.sampler,
        )  # fmt: skip
        rows = [row for row in measure_components(job) if row.get("prompt_id") is None]
        shutil.rmtree(folder, ignore_errors=True)
        records = [
            Record(row["metric"], iteration, row["value"], row["ci_low"], row["ci_high"], row["count"])
            for row in rows
            if row["metric"] in ("c1", "c2", "c3", "optimal_group_size")
        ]
        return records, np.array([len(questions) * config["completions_per_prompt"], job.tokens], dtype=np.float64)
