"""One training run of a causal language model: update, evaluate at checkpoints, resume bit for bit."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_repro.algorithm2 import Options
from grpo_repro.cells import Cell, Progress, cell_rng
from grpo_repro.config import TaskConfig
from grpo_repro.engine.check import self_check
from grpo_repro.engine.sample import Rollout, sample, uniforms
from grpo_repro.engine.update import Learner, log_probs
from grpo_repro.errors import NotFinite, NotHere, UserError
from grpo_repro.estimators import ESTIMATORS, normalized
from grpo_repro.experiments.evaluation import Examination, Record
from grpo_repro.experiments.grading import UNANSWERED, Tally
from grpo_repro.experiments.language_mse import SAMPLED_AT_ONCE, SMALL_MODEL
from grpo_repro.experiments.mse_eval import settings
from grpo_repro.experiments.state import Checkpoint
from grpo_repro.experiments.variant import describe
from grpo_repro.kl import reward_penalty
from grpo_repro.policies import causal_lm
from grpo_repro.results import to_table, write_table
from grpo_repro.tasks import load_task

STATE = "run"
WINDOW = ("reward_mean", "zero_variance_fraction", "gradient_norm", "completion_length")
"""Training averages that every run has, in the order of the window's sums."""


def run(cell: Cell, workdir: Path, progress: Progress) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Train and evaluate one cell; see `training.run`."""
    training = _Run.start(cell, workdir, progress)
    last = cell.config["iterations"]
    for iteration in range(training.done + 1, last + 1):
        try:
            if iteration > 0:
                training.update(iteration)
            if iteration in cell.config["checkpoints"]:
                training.evaluate(iteration)
        except NotFinite as error:
            if iteration < 1:
                raise
            raise UserError(
                f"training has diverged at iteration {iteration}: the policy's logits are not finite; lower "
                f"learning_rate={cell.config['learning_rate']:g}"
                + (f" or weight_decay={decay:g}" if (decay := cell.config["weight_decay"]) else "")
            ) from error
        training.done = iteration
        training.save_sometimes()
    return training.frame(), training.extras()


@dataclass
class _Run:
    """A cell with its policy, its optimiser, its questions and what it has measured so far.

    Attributes:
        reference: The policy as its files have it, which a penalty keeps it near; None without one.
        done: Last iteration that is finished, evaluation included; -1 before the initial evaluation.
        window: Sums of the training averages since the last log line, and the number of iterations.
        counts: Completions and tokens sampled.
    """

    cell: Cell
    policy: causal_lm.CausalLM
    learner: Learner
    train: Examination
    test: Examination
    workdir: Path
    progress: Progress
    checkpoint: Checkpoint
    facts: dict[str, Any]
    reference: causal_lm.CausalLM | None
    window: Float[np.ndarray, " sums"]
    done: int = -1
    records: list[Record] = field(default_factory=list)
    counts: Float[np.ndarray, 2] = field(default_factory=lambda: np.zeros(2))
    value: float = float("nan")
    began: tuple[float, float] = field(default_factory=lambda: (time.monotonic(), 0.0))

    @classmethod
    def start(cls, cell: Cell, workdir: Path, progress: Progress) -> _Run:
        """Load policy and questions, and take up what an interruption left."""
        config = cell.config
        model, test_config = settings(cell)
        tasks = [
            training_task(test_config, config["prompt_pool"]),
            load_task(replace(test_config, format_reward=0.0)),  # accuracy is that of answers alone
        ]
        if model.dtype == "auto":
            model = replace(model, dtype="float32")  # small updates are lost in the 8 bits of bfloat16
        policy = causal_lm.load(model, config["device"])
        if config["threads"] is None and policy.num_parameters < SMALL_MODEL:
            torch.set_num_threads(1)
        train, test = (Examination(policy, task, part, config) for part, task in enumerate(tasks))
        self_check(policy, train.prompts[0])
        facts = {
            "dtype": str(policy.model.dtype).removeprefix("torch."),
            "data_hash": f"train {tasks[0].data_hash}, test {tasks[1].data_hash}",
            "model_revision": model.revision,
            "weights_hash": causal_lm.weights_hash(policy.model),
        }
        checkpoint = Checkpoint(workdir, cell.id, config["save_seconds"])
        learner, reference = Learner(policy, config), None
        if learner.options.penalized:  # before a state is taken up: the reference stays what the files hold
            reference = replace(policy, model=copy.deepcopy(policy.model))
        window = np.zeros(len(_window(tasks[0], reference)) + 1)
        made = cls(
            cell, policy, learner, train, test, workdir, progress, checkpoint, facts, reference, window
        )  # fmt: skip
        made._restore()
        return made

    # One iteration.

    def update(self, iteration: int) -> None:
        """Sample B groups from the policy and make one step (Algorithm 1), or those of Algorithm 2."""
        config = self.cell.config
        group = config["group_size"]
        chosen = question_numbers(config, len(self.train.prompts), iteration)
        prompts = [self.train.prompts[i] for i in chosen]
        rollout = self._sample(prompts, iteration)
        self.train.tally = Tally()
        rewards = self.train.reward(rollout, chosen)
        reference = self._reference_log_probs(prompts, rollout)
        ratio = None if reference is None else (rollout.log_probs - reference).double().sum(-1).cpu().numpy()
        advantages = _advantages(config["estimator"], rewards, ratio, self.learner.options)
        norm = self.learner.step(prompts, rollout, advantages, iteration, reference)
        equal = float((rewards == rewards[:, :1]).all(1).mean())
        length = float(rollout.lengths.double().mean())
        graded = self.train.tally.unanswered() if hasattr(self.train.task, "grade") else ()
        divergence = [] if ratio is None else [float(ratio.mean())]
        self.window += [float(rewards.mean()), equal, norm, length, *graded, *divergence, 1.0]
        self.counts += [len(chosen) * group, float(rollout.mask.sum())]
        every = config["log_every"]
        if iteration in config["checkpoints"] or (every is not None and iteration % every == 0):
            self._log(iteration)
        speed = (self.counts[0] - self.began[1]) / max(time.monotonic() - self.began[0], 1e-9)
        value = "" if np.isnan(self.value) else f", value {self.value:.3f}"
        what = f"iterations, reward {rewards.mean():.3f}{value}, {speed:,.0f} completions/s"
        self.progress(iteration, config["iterations"], what)

    def _sample(self, prompts: list[list[int]], iteration: int) -> Rollout:
        """Completions of the iteration; the random numbers depend on cell, iteration and place only."""
        config = self.cell.config
        root = cell_rng(config["seed"], self.cell.id, iteration).entropy
        seeds = [np.random.SeedSequence(root, spawn_key=(place,)) for place in range(len(prompts))]
        size = max(1, SAMPLED_AT_ONCE * config["micro_batch"] // config["group_size"])
        parts = [
            sample(
                self.policy, prompts[start : start + size],
                uniforms(seeds[start : start + size], config["group_size"], config["max_new_tokens"]),
                config["temperature"],
            )
            for start in range(0, len(prompts), size)
        ]  # fmt: skip
        if len(parts) == 1:
            return parts[0]
        names = ("tokens", "mask", "log_probs", "finished")
        return Rollout(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def _reference_log_probs(self, prompts: list[list[int]], rollout: Rollout) -> Tensor | None:
        if self.reference is None:
            return None
        config = self.cell.config
        return log_probs(self.reference, prompts, rollout, config["temperature"], config["micro_batch"])

    def _log(self, iteration: int) -> None:
        count = int(self.window[-1])
        for name, total in zip(_window(self.train.task, self.reference), self.window[:-1], strict=True):
            self.records.append(Record(name, iteration, total / count, count=count))
        self.window[:] = 0

    def evaluate(self, iteration: int) -> None:
        """Measure J on the training questions, accuracy on the test questions and, for some seeds, G*."""
        value, tokens = self.train.sampled(iteration)
        accuracy, more = self.test.sampled(iteration)
        outcomes = self.test.outcomes(iteration)
        self.value = value.value
        self.counts += [value.count + accuracy.count, tokens + more]
        gap = replace(value, metric="suboptimality_gap", value=1 - value.value, low=1 - value.high, high=1 - value.low)
        greedy = self.test.greedy(iteration)
        self.records += [value, gap, replace(accuracy, metric="accuracy"), greedy, *outcomes]
        if self.cell.config["predict"]:
            records, counts = self.train.components(iteration, self.cell, self.workdir, self.progress)
            self.records += records
            self.counts += counts

    # State and results.

    def save_sometimes(self) -> None:
        """Save the state and the rows so far, if the last time is long enough ago."""
        if not self.checkpoint.due():
            return
        state = self.learner.state() | {
            "done": torch.tensor([self.done]),
            "records": torch.from_numpy(np.array([r.numbers() for r in self.records]).reshape(-1, Record.WIDTH)),
            "window": torch.from_numpy(self.window),
            "counts": torch.from_numpy(self.counts),
        }
        if self.records:
            write_table(to_table(self.cell, self.frame()), self.workdir / "metrics.parquet")
        self.checkpoint.save(STATE, state)

    def _restore(self) -> None:
        state: dict[str, Tensor] | None = self.checkpoint.load(STATE)
        if state is None or not {"done", "records", "window", "counts"} <= state.keys():
            return
        if state["window"].shape != self.window.shape:
            return  # saved by a version that averaged other things
        self.done = int(state.pop("done"))
        self.records = [Record.from_numbers(row) for row in state.pop("records").tolist()]
        self.window, self.counts = (state.pop(name).numpy().copy() for name in ("window", "counts"))
        self.value = next((r.value for r in reversed(self.records) if r.metric == "value"), float("nan"))
        self.began = (time.monotonic(), float(self.counts[0]))
        self.learner.restore(state)

    def frame(self) -> pd.DataFrame:
        """The rows measured so far."""
        config = self.cell.config
        common = {
            "model": config["model"]["name"], "task": config["task"]["name"], "estimator": config["estimator"],
            "method": describe(config), "group_size": config["group_size"], "budget": config["budget"],
            "num_prompts": config["budget"] // config["group_size"], "seed": config["seed"],
            "ci_level": config["confidence"],
        }  # fmt: skip
        return pd.DataFrame([common | record.row() for record in self.records])

    def extras(self) -> dict[str, Any]:
        """What the manifest says."""
        return {"completions": int(self.counts[0]), "tokens": int(self.counts[1])} | self.facts


def _advantages(
    estimator: str, rewards: Float[np.ndarray, "prompts group"], log_ratio: Float[np.ndarray, "prompts group"] | None,
    options: Options,
) -> Float[np.ndarray, "prompts group"]:  # fmt: skip
    """A = (Z - C) / se - kappa (l - its leave-one-out mean), with what of that the options ask for.

    Args:
        estimator: Its name.
        rewards: Z.
        log_ratio: l = log pi_old - log pi_ref of each completion; None without a reference policy.
        options: Whether to divide, and kappa in the reward.
    """
    blank = np.zeros(len(rewards))
    advantages = ESTIMATORS[estimator](rewards, blank, blank)
    if options.normalize:
        advantages = normalized(advantages, rewards)
    if log_ratio is not None and options.in_reward:
        advantages = advantages - options.in_reward * reward_penalty(log_ratio)
    return advantages


def _window(task: Any, reference: Any) -> tuple[str, ...]:
    """Training averages of a run, in the order of the window's sums; the last sum counts iterations."""
    graded = UNANSWERED if hasattr(task, "grade") else ()
    return (*WINDOW, *graded, *(("kl_divergence",) if reference is not None else ()))


def training_task(test: TaskConfig, pool: int) -> Any:
    """The task of the training questions.

    Args:
        test: The test questions' configuration.
        pool: Number M of training questions.

    Raises:
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
