"""Whole experiments with sampler=vllm: their rows, what they say of the sampler, and an engine that dies under one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from random_model import save_random_model

from grpo_repro.cells import Cell
from grpo_repro.config import ModelConfig, TaskConfig
from grpo_repro.experiments import mse_eval, training
from grpo_repro.sampler_schema import VllmConfig
from grpo_repro.schema import GroupSizeConfig, MseEvalConfig
from grpo_repro.validation import validate

SMALL = VllmConfig(memory_fraction=0.05)
TASK = TaskConfig(
    name="arithmetic", num_questions=12, operand_min=0, operand_max=4, factor_min=1, factor_max=4
)  # fmt: skip


def quiet(done: int, total: int, what: str) -> None:
    pass


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory) -> Path:
    """Heads of 32 and an output matrix of its own; right now and then."""
    return save_random_model(
        tmp_path_factory.mktemp("untied"), seed=3, hidden_size=64, num_attention_heads=2, tie_word_embeddings=False
    )


def measured(module, cell: Cell, folder: Path) -> pd.DataFrame:
    folder.mkdir()
    rows, extras = module.run(cell, folder, quiet)
    assert "vllm" in extras["sampler"] and "best effort" in extras["sampler"]
    return rows


def agree(rows: pd.DataFrame) -> None:
    """The metrics of agreement are there, and small."""
    mean = rows[rows["metric"] == "sampler_log_prob_difference"]
    largest = rows[rows["metric"] == "sampler_log_prob_difference_max"]
    assert len(mean) == len(largest) > 0
    assert (mean["count"] > 0).all()
    assert (largest["value"] < 1e-3).all() and (mean["value"].to_numpy() <= largest["value"].to_numpy()).all()


def test_mse_eval_measures_what_it_does_with_torch(untied_model, tmp_path):
    """The value, the score norms and the error of grpo at G = 4, each within its interval and torch's."""
    base = MseEvalConfig(
        model=ModelConfig(name="untied", path=str(untied_model)), task=TASK, estimators=["vanilla", "grpo"],
        group_sizes=[4], methods=["components", "monte_carlo"], completions_per_prompt=64, replicates=8,
        max_new_tokens=2, device="cpu", sampler="vllm", vllm=SMALL,
    )  # fmt: skip
    validate(base)
    ours, both = mse_eval.plan(base)
    rows = measured(mse_eval, ours, tmp_path / "components")
    agree(rows)
    agree(measured(mse_eval, both, tmp_path / "monte_carlo"))
    base.sampler = "torch"
    base.vllm = VllmConfig()
    (tmp_path / "torch").mkdir()
    other, _ = mse_eval.run(mse_eval.plan(base)[0], tmp_path / "torch", quiet)
    for metric in ("value", "score_sq_norm", "completion_length", "mse"):
        a, b = (
            r[(r["metric"] == metric) & r.get("prompt_id", pd.Series(index=r.index)).isna()].iloc[-1]
            for r in (rows, other)
        )
        width = np.hypot(a["ci_high"] - a["ci_low"], b["ci_high"] - b["ci_low"]) / 2
        assert abs(a["value"] - b["value"]) < 2 * width, metric


def test_a_sweep_trains_on_what_vllm_samples(untied_model, tmp_path):
    """Two group sizes share one engine; log-probabilities still agree after 20 updates that move the policy."""
    config = GroupSizeConfig(
        model=ModelConfig(name="untied", path=str(untied_model)), task=TASK, group_sizes=[4, 8], budget=64, seeds=[0],
        predict_seeds=[0], completions_per_prompt=8, iterations=20, checkpoints=[0], learning_rate=1e-2,
        prompt_pool=12, max_new_tokens=2, device="cpu", log_every=1, sampler="vllm", vllm=SMALL, importance_cap=2.0,
        minibatches=2, kl_coefficient=0.01,
    )  # fmt: skip
    validate(config)
    for cell in training.plan(config):
        rows = measured(training, cell, tmp_path / cell.id)
        agree(rows)
        assert rows["method"].str.contains("importance_cap=2.0 vllm_dtype=auto").all()
        rewards = rows[rows["metric"] == "reward_mean"]["value"].to_numpy()
        assert rewards[-5:].mean() > rewards[:5].mean() + 0.1
        divergence = rows[rows["metric"] == "kl_divergence"]["value"].to_numpy()
        assert abs(divergence[0]) < 1e-4  # pi is pi_ref at first, and both are the trainer's
        assert divergence[-1] > 0.01
        c1, value = (rows[rows["metric"] == name] for name in ("c1", "value"))
        assert len(c1) == len(value) == 2


def engine_of(process: subprocess.Popen) -> int | None:
    """The process id of the engine core below a command."""
    psutil = pytest.importorskip("psutil")
    children = psutil.Process(process.pid).children(recursive=True)
    found = [child.pid for child in children if "EngineCore" in child.name()]
    return found[0] if found else None


def test_an_engine_that_is_killed_is_one_message_and_the_cell_goes_on(untied_model, tmp_path):
    """`grpo train` fails with status 1 and says what to do; the same command then ends it from its last state."""
    command = [
        sys.executable, "-m", "grpo_repro.cli", "train", "model=hf", f"model.path={untied_model}", "sampler=vllm",
        "vllm.memory_fraction=0.05", "task.num_questions=12", "prompt_pool=12", "max_new_tokens=2", "budget=64",
        "iterations=400", "checkpoints=[0]", "save_seconds=0", "device=cpu", "results_dir=results", "--json",
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        late = time.monotonic() + 300
        while not list(tmp_path.glob("results/train/.work/*/run.safetensors")):
            assert process.poll() is None and time.monotonic() < late
            time.sleep(0.2)
        os.kill(engine_of(process), signal.SIGKILL)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "the vLLM engine has died" in err and "goes on from the last saved state" in err
    assert "the vLLM engine has died" in json.dumps(json.loads(out))
    work = next(iter(tmp_path.glob("results/train/.work/*/metrics.parquet")))
    assert pd.read_parquet(work)["iteration"].max() >= 0
    again = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    rows = pd.read_parquet(next(iter(tmp_path.glob("results/train/*/metrics.parquet"))))
    assert set(rows[rows["metric"] == "reward_mean"]["iteration"]) == set(range(1, 401))
    manifest = json.loads(next(iter(tmp_path.glob("results/train/*/manifest.json"))).read_text())
    assert "vllm" in manifest["sampler"]
