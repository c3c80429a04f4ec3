"""Training runs of language models: what they draw, what they measure, and that no kill changes a number."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from random_model import Interruption, save_random_model

from grpo_repro import stats
from grpo_repro.cells import Cell
from grpo_repro.config import ModelConfig, TaskConfig, load_choice
from grpo_repro.engine.sample import greedy, sample
from grpo_repro.errors import UserError
from grpo_repro.experiments import language_train, training
from grpo_repro.experiments.evaluation import Examination, Record
from grpo_repro.experiments.state import Checkpoint
from grpo_repro.experiments.training_questions import question_numbers
from grpo_repro.policies import causal_lm
from grpo_repro.schema import GroupSizeConfig
from grpo_repro.tasks import load_task
from grpo_repro.tasks.arithmetic import ArithmeticTask

RANGES: dict[str, Any] = dict(operand_min=0, operand_max=4, factor_min=1, factor_max=4)


def quiet(done: int, total: int, what: str) -> None:
    pass


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


def config_of(folder: Path, **changes: Any) -> GroupSizeConfig:
    base = GroupSizeConfig(
        model=ModelConfig(name="random", path=str(folder)),
        task=TaskConfig(name="arithmetic", num_questions=12, **RANGES), group_sizes=[4], budget=32, seeds=[0],
        predict_seeds=[], iterations=12, checkpoints=[0, 6], learning_rate=3e-3, prompt_pool=12, max_new_tokens=2,
        micro_batch=16, device="cpu", save_seconds=0.0,
    )  # fmt: skip
    return replace(base, **changes)


def cell_of(folder: Path, **changes: Any) -> Cell:
    return training.plan(config_of(folder, **changes))[0]


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def value(rows: pd.DataFrame, metric: str, iteration: int) -> float:
    found = rows[(rows["metric"] == metric) & (rows["iteration"] == iteration)]["value"]
    assert len(found) == 1
    return float(found.iloc[0])


def test_a_run_is_killed_over_and_over_and_gives_the_same_rows(model_dir, tmp_path):
    """kill -9 at random moments, also while a state is being written (one is written after every iteration)."""
    cell = cell_of(model_dir, optimizer="adamw", predict_seeds=[0], completions_per_prompt=8)
    start = time.monotonic()
    whole, extras = training.run(cell, made(tmp_path / "whole"), quiet)
    seconds = time.monotonic() - start
    work = made(tmp_path / "killed")
    rng, kills = np.random.default_rng(0), 0
    while kills < 20 or not (tmp_path / "rows").exists():
        child = os.fork()
        if child == 0:  # a child of its own, so that the kill is a real one and the imports are paid once
            try:
                rows, found = training.run(cell, work, quiet)
                rows.to_pickle(tmp_path / ".rows")
                os.replace(tmp_path / ".rows", tmp_path / "rows")
                (tmp_path / "extras").write_text(repr(found))
            finally:
                os._exit(0)
        time.sleep(float(rng.uniform(0.1, 0.5) * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        assert kills < 200
        if (tmp_path / "rows").exists() and kills < 20:  # finished early: once more from the start
            pd.testing.assert_frame_equal(pd.read_pickle(tmp_path / "rows"), whole, check_exact=True)
            (tmp_path / "rows").unlink()
            for path in work.iterdir():
                path.unlink()
    pd.testing.assert_frame_equal(pd.read_pickle(tmp_path / "rows"), whole, check_exact=True)
    assert (tmp_path / "extras").read_text() == repr(extras)


@pytest.mark.parametrize("order", ["iid", "epochs"])
def test_interrupted_between_any_two_iterations_it_goes_on_bit_for_bit(order, model_dir, tmp_path):
    cell = cell_of(model_dir, prompt_order=order, iterations=6, checkpoints=[0, 3], schedule="cosine")
    whole, extras = training.run(cell, made(tmp_path / "whole"), quiet)
    work = made(tmp_path / "cut")
    for _ in range(6):
        with pytest.raises(KeyboardInterrupt):
            training.run(cell, work, Interruption(at=2))
            raise KeyboardInterrupt  # it was finished
    rows, resumed = training.run(cell, work, quiet)
    pd.testing.assert_frame_equal(rows, whole, check_exact=True)
    assert resumed == extras


def test_rows_can_be_read_while_it_runs(model_dir, tmp_path):
    work = made(tmp_path / "work")
    seen = []

    def look(done: int, total: int, what: str) -> None:
        if (work / "metrics.parquet").exists():
            seen.append(pd.read_parquet(work / "metrics.parquet")["iteration"].max())

    rows, _ = training.run(cell_of(model_dir, log_every=1), work, look)
    assert seen[-1] == 11
    assert set(rows[rows["metric"] == "reward_mean"]["iteration"]) == set(range(1, 13))


def test_a_rate_of_zero_leaves_the_policy_alone(model_dir, tmp_path):
    rows, _ = training.run(cell_of(model_dir, learning_rate=0.0), made(tmp_path / "still"), quiet)
    assert value(rows, "greedy_accuracy", 0) == value(rows, "greedy_accuracy", 12)
    gap = rows[rows["metric"] == "suboptimality_gap"].set_index("iteration")
    j = rows[rows["metric"] == "value"].set_index("iteration")
    np.testing.assert_allclose(gap["value"], 1 - j["value"])
    np.testing.assert_allclose(gap["ci_low"], 1 - j["ci_high"])
    spread = (j["ci_high"] - j["ci_low"]).max()
    assert abs(j["value"][12] - j["value"][0]) < 1.5 * spread


def test_training_raises_the_return(model_dir, tmp_path, monkeypatch):
    """One easy rule: the reward is for an answer that begins with the digit 1, whatever the question."""
    monkeypatch.setattr(ArithmeticTask, "reward", lambda self, text, question: float(text[:1] == "1"))
    cell = cell_of(model_dir, iterations=30, learning_rate=1e-2, checkpoints=[0])
    rows, extras = training.run(cell, made(tmp_path / "work"), quiet)
    assert value(rows, "value", 0) < 0.5
    assert value(rows, "value", 30) > 0.95
    assert value(rows, "zero_variance_fraction", 30) > 0.5
    # 30 iterations of 32, two evaluations of 12 + 12 questions with 4 completions.
    assert extras["completions"] == 30 * 32 + 2 * 24 * 4
    assert training.estimate(cell).completions == extras["completions"]


@pytest.mark.slow
def test_the_bundled_policy_learns_arithmetic(tmp_path):
    """The default run, cut to ten updates of 64 completions: J rises by .25 on average over seeds."""
    model = load_choice("model", "bundled-base")
    config = GroupSizeConfig(
        model=model, task=TaskConfig(name="arithmetic", num_questions=50), group_sizes=[4], budget=64, seeds=[0],
        predict_seeds=[], iterations=10, checkpoints=[0], device="cpu",
    )  # fmt: skip
    rows, _ = training.run(training.plan(config)[0], made(tmp_path / "work"), quiet)
    assert value(rows, "value", 10) - value(rows, "value", 0) > 0.15


def test_an_evaluation_measures_the_exact_value_of_the_policy(model_dir):
    """Sampled J against the policy's probabilities of every completion; greedy against the likeliest tokens."""
    config = cell_of(model_dir, eval_samples=400).config
    policy = causal_lm.load(ModelConfig(name="random", path=str(model_dir)), "cpu")
    task = load_task(TaskConfig(name="arithmetic", num_questions=12, **RANGES))
    exam = Examination(policy, task, 1, config)
    record, tokens = exam.sampled(3)
    exact = []
    for prompt, question in zip(exam.prompts, task.questions, strict=True):
        total = 0.0
        every = np.linspace(0, 1, 1000, endpoint=False)
        first = sample(policy, [prompt], np.stack([every, np.full_like(every, 0.5)], 1)[None])
        for token in first.tokens[0, :, 0].unique().tolist():
            share = float((first.tokens[0, :, 0] == token).double().mean())
            if token in policy.eos_ids:
                total += share * float(task.reward(policy.decode([token]), question))
                continue
            second = sample(policy, [[*prompt, token]], every[None, :, None])
            texts = second.tokens[0, :, 0].tolist()
            total += share * np.mean([task.reward(policy.decode([token, t]), question) for t in texts])
        exact.append(total)
    error = (record.high - record.low) / (2 * stats.quantile(0.95, np.inf))
    assert 0 < error < 0.02
    assert abs(record.value - np.mean(exact)) < 4 * error + 2e-3  # 1,000 points of the distribution function
    assert record.count == 12 * 400
    assert 4800 <= tokens <= 9600
    best = greedy(policy, exam.prompts, 2)
    texts = [policy.decode(row[0][: n[0]]) for row, n in zip(best.tokens.tolist(), best.lengths.tolist(), strict=True)]
    rewards = [task.reward(text, question) for text, question in zip(texts, task.questions, strict=True)]
    assert exam.greedy(3).value == np.mean(rewards)


def test_questions_are_shared_over_group_sizes_and_epochs_use_each_once():
    config = {"seed": 3, "budget": 64, "group_size": 4, "prompt_order": "iid"}
    many = [question_numbers(config, 50, i) for i in range(1, 200)]
    few = [question_numbers(config | {"group_size": 16}, 50, i) for i in range(1, 200)]
    assert all(a[:4] == b for a, b in zip(many, few, strict=True))
    counts = np.bincount(np.concatenate(many), minlength=50)
    expected = len(many) * 16 / 50
    assert ((counts - expected) ** 2 / expected).sum() < 95  # chi-square, 49 degrees: p = 1e-4
    epochs = config | {"prompt_order": "epochs"}
    drawn = np.concatenate([question_numbers(epochs, 50, i) for i in range(1, 26)])  # 400 = 8 passes
    assert (np.sort(drawn.reshape(8, 50), 1) == np.arange(50)).all()
    assert len({tuple(part) for part in drawn.reshape(8, 50)}) == 8
    whole = question_numbers(epochs | {"group_size": 1}, 10, 1)  # B = 64 > 10 questions
    assert np.bincount(whole).min() >= 6


def test_records_survive_as_numbers():
    record = Record("accuracy", 7, 0.5, 0.25, 0.75, 12)
    assert Record.from_numbers(record.numbers()) == record


def test_a_reward_that_is_not_finite_is_one_message(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(ArithmeticTask, "reward", lambda self, text, question: float("nan"))
    with pytest.raises(UserError, match="reward of a completion of question .* is nan"):
        training.run(cell_of(model_dir), made(tmp_path / "work"), quiet)


def test_divergence_is_one_message_that_names_the_iteration_and_the_rate(model_dir, tmp_path):
    cell = cell_of(model_dir, learning_rate=1e6, weight_decay=1e6, iterations=6)
    with pytest.raises(
        UserError, match=r"diverged at iteration \d.* at learning_rate=1e\+06; lower.* weight_decay=1e\+06"
    ):
        training.run(cell, made(tmp_path / "work"), quiet)


def test_no_iterations_evaluate_the_initial_policy(model_dir, tmp_path):
    rows, _ = training.run(cell_of(model_dir, iterations=0, checkpoints=None), made(tmp_path / "work"), quiet)
    assert set(rows["iteration"]) == {0}
    assert set(rows["metric"]) == {"value", "suboptimality_gap", "accuracy", "greedy_accuracy"}


def test_a_state_that_cannot_be_read_is_done_again(model_dir, tmp_path):
    cell = cell_of(model_dir, iterations=2, checkpoints=[0])
    whole, _ = training.run(cell, made(tmp_path / "whole"), quiet)
    work = made(tmp_path / "work")
    (work / f"{language_train.STATE}.safetensors").write_bytes(b"no tensors")
    rows, _ = training.run(cell, work, quiet)
    pd.testing.assert_frame_equal(rows, whole, check_exact=True)
    assert Checkpoint(work, cell.id).load(language_train.STATE) is not None


def test_the_state_of_another_cell_is_not_taken_up(model_dir, tmp_path):
    """Its weights would fit, and the rows would be another run's without a sign."""
    own, other = (cell_of(model_dir, iterations=3, checkpoints=[0], learning_rate=rate) for rate in (3e-3, 1e-2))
    whole, _ = training.run(own, made(tmp_path / "whole"), quiet)
    work = made(tmp_path / "work")
    training.run(other, work, quiet)
    rows, _ = training.run(own, work, quiet)
    pd.testing.assert_frame_equal(rows, whole, check_exact=True)
