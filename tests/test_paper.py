"""The paper's runs: every number of their configurations, what a user may change, their plans without a network."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_repro import config as schema
from grpo_repro import paper, sizes
from grpo_repro.experiments import mse_eval, training
from grpo_repro.tasks import load_task
from grpo_repro.validation import validate

EXPERIMENTS = {"fig4": "mse-eval", "fig5": "group-size", "table2": "budget"}
POLICIES = {
    "fig4-base": ("Qwen/Qwen2.5-0.5B", False),
    "fig4-instruct": ("Qwen/Qwen2.5-0.5B-Instruct", True),
    "fig4-icl": ("Qwen/Qwen2.5-0.5B-Instruct", True),
}
EXAMPLES = {"15+25": 40, "20+30-15": 35, "3*4": 12, "24/6": 4, "25-(10+5)": 10}


def composed(name: str, *overrides: str) -> Any:
    schema.register()
    with initialize_config_dir(str(schema.conf_dir()), version_base="1.3"):
        given = [f"paper={name}", *overrides]
        return schema.typed(compose(f"experiment/{EXPERIMENTS[name]}", overrides=given))


def test_every_shipped_file_is_tested_here():
    assert schema.choices("paper") == sorted(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_file_is_valid(name):
    validate(composed(name))


def test_figure_4_has_the_papers_numbers():
    found = composed("fig4")
    assert found.task == schema.TaskConfig(name="arithmetic", num_questions=500)
    assert found.group_sizes == [4, 8, 16, 32, 64]
    assert found.estimators == ["vanilla", "grpo", "oracle"]
    assert (found.confidence, found.model, found.models) == (0.95, None, list(POLICIES))
    cells = mse_eval.plan(replace(found, dry_run=True))
    assert [(c.config["model"]["name"], c.config["method"]) for c in cells] == [
        (name, method) for name in POLICIES for method in ("components", "monte_carlo")
    ]


def test_figure_4_has_the_papers_policies_and_prompts():
    for name, (path, chat) in POLICIES.items():
        model = schema.load_choice("model", name)
        assert (model.name, model.path, model.chat) == (name, path, chat)
        assert model.template.count("{question}") == 1
        if name == "fig4-icl":
            lines = model.template.split("\n")
            assert "calculator" in lines[0]
            assert dict(line.split(" = ") for line in lines[1:-1]) == {k: str(v) for k, v in EXAMPLES.items()}
            assert lines[-1] == "{question} ="
        else:
            assert "\n" not in model.template and "{question}" in model.template


def test_one_question_of_figure_4_is_one_of_the_examples():
    questions = {question.text for question in load_task(composed("fig4").task).questions}
    assert len(questions) == 500
    assert questions & set(EXAMPLES) == {"3*4"}


def test_figure_5_has_the_papers_numbers():
    found, stated = composed("fig5"), paper.FIGURE5
    assert found.model.path == f"Qwen/{stated.model}"
    assert (found.task.name, found.task.num_questions, found.task.split) == (stated.task.lower(), 0, "test")
    assert (found.budget,) == stated.budgets
    assert tuple(found.group_sizes) == stated.group_sizes
    assert training.checkpoints(found) == [*stated.checkpoints, found.iterations]
    assert found.iterations > max(stated.checkpoints)
    assert len(found.seeds) == stated.runs
    assert (found.confidence, found.estimators) == (0.95, ["grpo"])
    assert found.prompt_pool == sizes.STATED_QUESTIONS["gsm8k"]["train"]
    assert sizes.STATED_QUESTIONS["gsm8k"]["test"] == stated.test_questions


def test_table_2_has_the_papers_numbers():
    found, stated = composed("table2"), paper.TABLE2
    assert found.model.path == f"Qwen/{stated.model}"
    assert (found.task.name, found.task.num_questions, found.task.split) == (stated.task.lower(), 0, "test")
    assert tuple(found.budgets) == stated.budgets == tuple(paper.TABLE2_ACCURACY)
    assert tuple(found.group_sizes) == stated.group_sizes
    assert training.checkpoints(found) == [found.iterations]
    assert len(found.seeds) == stated.runs
    assert found.estimators == ["grpo"]
    assert sizes.STATED_QUESTIONS["math"]["test"] == stated.test_questions


def test_the_users_choice_wins_over_the_file():
    changes = ["model=bundled-base", "task=arithmetic", "task.num_questions=50", "learning_rate=0.5", "group_sizes=[8]"]
    found = composed("fig5", *changes)
    assert (found.model.name, found.task.name, found.task.num_questions) == ("bundled-base", "arithmetic", 50)
    assert (found.learning_rate, found.group_sizes, found.budget) == (0.5, [8], 1024)
    one = composed("fig4", "model=fig4-icl")
    assert {cell.config["model"]["name"] for cell in mse_eval.plan(one)} == {"fig4-icl"}


def test_the_table_of_sizes_is_that_of_the_architectures():
    """Built on no device from the numbers of the table, each model has the parameters that the table says."""
    for path, row in sizes.sizes_table().items():
        described = Qwen2Config(
            vocab_size=row["vocabulary"], hidden_size=row["hidden"], intermediate_size=row["intermediate"],
            num_hidden_layers=row["layers"], num_attention_heads=row["heads"], num_key_value_heads=row["kv_heads"],
            max_position_embeddings=row["positions"], tie_word_embeddings=not path.endswith("7B"),
        )  # fmt: skip
        with torch.device("meta"):
            model = Qwen2ForCausalLM(described)
        assert sum(p.numel() for p in model.parameters()) == row["parameters"], path
    named = {schema.load_choice("model", name).path for name in schema.choices("model")}
    assert {path for path in named if path and path.startswith("Qwen/")} == set(sizes.sizes_table())


# -- the command line


def test_a_plan_needs_neither_the_model_nor_the_data(grpo):
    run = grpo("sweep", "group-size", "+paper=fig5", "--dry-run", "--json", HF_HOME="nowhere")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found["plan"]) == 30 and "H200 (assumed)" in found["device"]
    first = found["plan"][0]
    assert first["completions"] == 1000 * 1024 + 6 * (1319 + 7473) * 2
    assert first["tokens"] == first["completions"] * 512
    assert first["memory_bytes"] == sum(first["parts"].values())
    assert (first["parts"]["weights"], first["parts"]["optimiser"]) == (4 * 1543714304, 8 * 1543714304)
    assert any("conf/sizes.yaml" in note for note in first["notes"])


def test_a_plan_that_cannot_fit_is_shown_and_refused(grpo):
    every_weight = ("model.lora.rank=null", "gradient_checkpointing=false", "learning_rate=1e-6", "micro_batch=1")
    run = grpo(
        "sweep", "budget", "+paper=table2", "--dry-run", "device_memory_gib=80", *every_weight, HF_HOME="nowhere"
    )  # fmt: skip
    assert run.returncode == 2
    assert "18 of 18 cells" in run.stdout and "qwen2.5-math-7b N=4096 G=128 seed 0" in run.stdout
    assert "GPU hours" in run.stdout
    (line,) = run.stderr.strip().splitlines()
    for word in (
        "needs about",
        "has 80",
        "no micro_batch",
        "model.dtype",
        "max_new_tokens",
        "smaller model",
        "weights",
    ):
        assert word in line
    run = grpo("sweep", "group-size", "+paper=fig5", "--dry-run", "device_memory_gib=60", HF_HOME="nowhere")
    assert run.returncode == 2 and "has 60; lower micro_batch, max_new_tokens; or " in run.stderr
    assert grpo.files() == []


def test_the_paper_is_a_group_and_says_what_it_knows(grpo):
    run = grpo("sweep", "budget", "+paper=table2", "--cfg", "job")
    assert run.returncode == 0 and "- 4096" in run.stdout and "qwen2.5-math-7b" in run.stdout
    assert "known: fig4, fig5, table2" in grpo("sweep", "budget", "+paper=table3").stderr
    for arguments in (["mse-eval", "+paper=fig5"], ["sweep", "group-size", "paper=table2"], ["train", "+paper=fig4"]):
        run = grpo(*arguments)
        assert run.returncode == 2
        assert "is of `grpo " in run.stderr, run.stderr
