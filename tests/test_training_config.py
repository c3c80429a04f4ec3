"""Training configurations: defaults, cells, and every bad value refused with its remedy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from house import message
from hydra import compose, initialize_config_dir

from grpo_repro import config as schema
from grpo_repro.config import ModelConfig, TaskConfig
from grpo_repro.errors import UserError
from grpo_repro.experiments import training, variant
from grpo_repro.schema import BudgetConfig, GroupSizeConfig, TrainConfig
from grpo_repro.training_validation import clip_norm
from grpo_repro.validation import validate

BASE = schema.load_choice("model", "bundled-base")
TABULAR = ModelConfig(name="tabular", kind="tabular", family="curved")
GOOD = GroupSizeConfig(model=BASE, task=TaskConfig(name="arithmetic"))
EXACT = replace(GOOD, model=TABULAR, task=TaskConfig(name="bandit"))


def composed(experiment: str, *overrides: str) -> Any:
    schema.register()
    with initialize_config_dir(str(schema.conf_dir()), version_base="1.3"):
        return schema.typed(compose(f"experiment/{experiment}", overrides=list(overrides)))


@pytest.mark.parametrize("experiment", ["train", "group-size", "budget", "iterations"])
def test_defaults_are_the_bundled_policy_on_arithmetic(experiment):
    settings = composed(experiment)
    assert settings == schema.SCHEMAS[experiment](model=BASE, task=TaskConfig(name="arithmetic"))
    validate(settings)
    cells = training.plan(settings)
    assert {cell.experiment for cell in cells} == {experiment}
    assert all(cell.config["learning_rate"] == 1e-4 and cell.config["clip_norm"] == 1.0 for cell in cells)
    assert len(cells) == {"train": 1, "group-size": 30, "budget": 90, "iterations": 30}[experiment]


@pytest.mark.parametrize("experiment", ["train", "group-size", "budget", "iterations"])
def test_a_tabular_policy_brings_its_task_family_and_optimiser(experiment):
    settings = composed(experiment, "model=tabular")
    assert (settings.model.family, settings.model.family_args) == ("curved", {"asymmetry": 0.4})
    assert settings.task.name == "bandit"
    validate(settings)
    cell = training.plan(settings)[0]
    assert (cell.config["optimizer"], cell.config["clip_norm"], cell.config["prompt_pool"]) == ("sgd", None, None)
    assert cell.config["replicates"] == 1000
    assert "max_new_tokens" not in cell.config
    assert cell.config["model"]["name"] == "tabular:curved(asymmetry=0.4)"
    assert composed("mse-eval", "model=tabular").model.family == "constant-norm"
    other = composed(experiment, "model=tabular", "model.family=three-actions").model
    assert (other.family, other.family_args) == ("three-actions", {})


def test_equal_runs_have_equal_ids_in_every_sweep():
    one = training.plan(GOOD)
    other = training.plan(BudgetConfig(model=BASE, task=TaskConfig(name="arithmetic"), budgets=[256, 64]))
    assert {cell.id for cell in one} < {cell.id for cell in other}
    slower = training.plan(replace(GOOD, save_seconds=5.0, results_dir="elsewhere", threads=2))
    assert [cell.id for cell in one] == [cell.id for cell in slower]
    for changes in ({"learning_rate": 2e-4}, {"schedule": "cosine"}, {"prompt_pool": 50}, {"checkpoints": [7]}):
        assert not {cell.id for cell in one} & {cell.id for cell in training.plan(replace(GOOD, **changes))}


def test_seeds_are_outermost_so_that_an_interrupted_sweep_compares():
    cells = training.plan(replace(GOOD, group_sizes=[2, 4], seeds=[5, 6]))
    assert [(c.config["seed"], c.config["group_size"]) for c in cells] == [(5, 2), (5, 4), (6, 2), (6, 4)]
    assert [c.config["predict"] for c in training.plan(replace(GOOD, group_sizes=[2], seeds=[0, 1]))] == [True, False]


@pytest.mark.parametrize(
    ("iterations", "given", "wanted"),
    [(100, None, [0, 10, 25, 50, 100]), (100, [7, 3], [3, 7, 100]), (0, None, [0]), (3, None, [0, 1, 3]), (5, [], [5])],
)
def test_checkpoints(iterations, given, wanted):
    assert training.checkpoints(replace(GOOD, iterations=iterations, checkpoints=given)) == wanted


def test_the_longest_gradient():
    assert clip_norm(GOOD) == 1.0
    assert clip_norm(replace(GOOD, clip_norm="0.5")) == 0.5
    for config in (replace(GOOD, clip_norm=None), replace(GOOD, optimizer="sgd"), EXACT):
        assert clip_norm(config) is None


def test_the_text_of_a_variant_can_be_taken_apart():
    cell = training.plan(replace(GOOD, schedule="cosine", prompt_order="epochs"))[0]
    parts = variant.parse(variant.describe(cell.config))
    assert parts["schedule"] == "cosine"
    assert (parts["pool"], parts["order"], parts["iterations"]) == ("500", "epochs", "100")
    assert variant.parse(variant.describe(training.plan(EXACT)[0].config))["pool"] == "all"


ALGORITHM_2 = {"normalize": True, "minibatches": 2, "kl_coefficient": 0.05, "kl_estimator": "k1-in-reward"}


@pytest.mark.parametrize("experiment", ["train", "group-size", "budget", "iterations"])
@pytest.mark.parametrize("model", ["bundled-base", "tabular"])
def test_every_training_command_takes_the_options_of_algorithm_2(experiment, model):
    budget = "budgets=[64]" if experiment == "budget" else "budget=64"
    common = (f"model={model}", budget, "group_sizes=[4,8]")
    typed = [f"{key}={str(value).lower()}" for key, value in ALGORITHM_2.items()]
    settings = composed(experiment, *common, *typed)
    validate(settings)
    for cell in training.plan(settings):
        assert {key: cell.config[key] for key in ALGORITHM_2} == ALGORITHM_2
        parts = variant.parse(variant.describe(cell.config))
        assert [parts[key] for key in ALGORITHM_2] == ["true", "2", "0.05", "k1-in-reward"]
    plain = composed(experiment, *common)
    ids = {cell.id for cell in training.plan(plain)}
    for key in ("normalize", "minibatches", "kl_coefficient"):
        changed = training.plan(replace(plain, **{key: ALGORITHM_2[key]}))
        assert not ids & {cell.id for cell in changed}
        assert set(changed[0].config) - set(training.plan(plain)[0].config) == {key} | (
            {"kl_estimator"} if key == "kl_coefficient" else set()
        )


def test_runs_of_algorithm_1_are_named_as_they_were_before_there_was_another():
    tabular = training.plan(EXACT)[0]
    assert tabular.id == "658cf3f8affe"
    assert variant.describe(tabular.config) == (
        "optimizer=sgd schedule=constant learning_rate=1.0 warmup=0 weight_decay=0.0 clip_norm=none pool=all order=iid "
        "iterations=100 rest=376384"
    )
    language = training.plan(GOOD)[0]
    assert not set(ALGORITHM_2) & set(language.config)
    assert variant.describe(language.config) == (
        "optimizer=adamw schedule=constant learning_rate=0.0001 warmup=0 weight_decay=0.0 clip_norm=1.0 pool=500 "
        "order=iid iterations=100 temperature=1.0 rest=29946c"
    )


@pytest.mark.parametrize("good", [GOOD, EXACT])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"normalize": True, "estimators": ["grpo", "vanilla"]},
            ["normalize=true", "[grpo,vanilla]", "normalize=false"],
        ),
        ({"normalize": True, "estimators": ["vanilla"]}, ["estimators=[vanilla]", "use estimators=[grpo]"]),
        ({"minibatches": 0}, ["minibatches=0", "1 or more"]),
        ({"minibatches": 2**25}, ["minibatches=33554432", "16777216 or less"]),
        ({"minibatches": 8}, ["minibatches=8 does not divide B=4 (N=256, G=64)", "valid m for every B: 1, 2, 4"]),
        ({"minibatches": 5, "group_sizes": [8], "budget": 96}, ["B=12 (N=96, G=8)", "every B: 1, 2, 3, 4, 6, 12"]),
        ({"kl_coefficient": -0.1}, ["kl_coefficient=-0.1", "0.0 for none"]),
        ({"kl_coefficient": math.inf}, ["kl_coefficient=inf", "finite"]),
        ({"kl_coefficient": 1e7}, ["kl_coefficient=10000000.0", "1000000 or less"]),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, ["'k1'", "k3, k1-in-reward"]),
        ({"kl_estimator": "k1-in-reward"}, ["kl_estimator=k1-in-reward means nothing", "kl_coefficient=0.01"]),
    ],
)
def test_bad_options_of_algorithm_2_are_refused_for_every_policy(good, changes, words):
    with pytest.raises(UserError) as refused:
        validate(replace(good, **changes))
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget": 100, "group_sizes": [8]}, ["G=8 does not divide N=100", "valid G: 2, 4, 5, 10, 20, 25, 50, 100"]),
        ({"budget": 1, "group_sizes": [2]}, ["valid G: none, take a larger budget"]),
        ({"budget": 0}, ["budget=0"]),
        ({"budget": 2**30}, ["budget=1073741824", "or less"]),
        ({"group_sizes": [1, 2]}, ["G=1", "'grpo'", "G >= 2"]),
        ({"group_sizes": []}, ["group_sizes is empty"]),
        ({"iterations": -1}, ["iterations=-1", "0 or more"]),
        ({"checkpoints": [101]}, ["n=101", "iterations=100"]),
        ({"checkpoints": [-1]}, ["checkpoints: n=-1"]),
        ({"checkpoints": [5, 5]}, ["more than once"]),
        ({"seeds": []}, ["seeds is empty"]),
        ({"seeds": [1, 1]}, ["more than once"]),
        ({"predict_seeds": [0, 0]}, ["predict_seeds", "more than once"]),
        ({"optimizer": "adam"}, ["'adam'", "did you mean 'adamw'"]),
        ({"schedule": "linear"}, ["'linear'", "constant, inverse, cosine"]),
        ({"learning_rate": -1.0}, ["learning_rate=-1.0"]),
        ({"learning_rate": math.nan}, ["learning_rate=nan", "finite"]),
        ({"learning_rate": 1e9}, ["learning_rate"]),
        ({"warmup": -1}, ["warmup=-1"]),
        ({"warmup": 101}, ["warmup=101", "iterations=100"]),
        ({"weight_decay": -0.1}, ["weight_decay=-0.1"]),
        ({"clip_norm": "0"}, ["clip_norm=0", "null for no clipping"]),
        ({"clip_norm": "much"}, ["clip_norm=much"]),
        ({"clip_norm": "nan"}, ["clip_norm=nan"]),
        ({"prompt_pool": 0}, ["prompt_pool=0", "1 or more"]),
        ({"prompt_pool": 5}, ["prompt_pool=5", "predict_seeds=[]"]),
        ({"prompt_order": "random"}, ["'random'", "iid, epochs"]),
        ({"eval_samples": 1}, ["eval_samples=1", "2 or more"]),
        ({"log_every": 0}, ["log_every=0"]),
        ({"save_seconds": -1.0}, ["save_seconds=-1.0"]),
        ({"estimators": ["oracle"]}, ["oracle", "model=tabular"]),
        ({"task": TaskConfig(name="arithmetic", split="train")}, ["task.split=train"]),
        ({"model": None}, ["no model is named"]),
        ({"model": replace(BASE, dtype="float16")}, ["float16", "float32"]),
        ({"replicates": 9}, ["replicates=9", "a language model"]),
        ({"temperature": 1e9}, ["temperature=1e+09", "1e3"]),
    ],
)
def test_bad_values_are_refused_with_fact_value_and_remedy(changes, words):
    with pytest.raises(UserError) as refused:
        validate(replace(GOOD, **changes))
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "adamw"}, ["optimizer=adamw", "optimizer=sgd"]),
        ({"weight_decay": 0.1}, ["weight_decay=0.1", "tabular"]),
        ({"task": TaskConfig(name="bandit", num_questions=7)}, ["task.num_questions=7", "prompt_pool"]),
        ({"task": TaskConfig(name="bandit", seed=7)}, ["task.seed=7"]),
        ({"prompt_order": "epochs"}, ["prompt_order=epochs", "prompt_pool=64"]),
        ({"eval_samples": 9}, ["eval_samples=9", "a tabular policy"]),
        ({"predict_seeds": [3]}, ["predict_seeds=[3]"]),
    ],
)
def test_what_a_tabular_policy_does_not_know_is_refused(changes, words):
    validate(EXACT)
    with pytest.raises(UserError) as refused:
        validate(replace(EXACT, **changes))
    for word in words:
        assert word in str(refused.value)


def test_budgets_of_the_budget_sweep_are_checked_one_by_one():
    good = BudgetConfig(model=BASE, task=TaskConfig(name="arithmetic"))
    validate(good)
    for budgets, words in (
        ([], "budgets is empty"),
        ([64, 64], "more than once"),
        ([64, 96], "G=64 does not divide N=96"),
    ):
        with pytest.raises(UserError, match=words):
            validate(replace(good, budgets=budgets))


def test_the_command_line_refuses_lists_in_lists_and_names_keys(grpo):
    assert "seeds=[[0]] holds [0]; give a flat list" in message(grpo("sweep", "group-size", "seeds=[[0]]"))
    assert "did you mean 'budgets'" in message(grpo("sweep", "budget", "budget=64"))
    assert "G=8 does not divide N=100" in message(grpo("train", "budget=100"))
    assert "valid m for every B: 1, 2, 4, 8" in message(grpo("sweep", "budget", "group_sizes=[8]", "minibatches=3"))


def test_a_pool_beyond_the_task_is_told_at_planning():
    with pytest.raises(UserError, match="prompt_pool=5000: .* train questions of kind"):
        training.plan(replace(GOOD, prompt_pool=5000))


def test_one_run_logs_every_iteration():
    assert TrainConfig().log_every == 1
    assert GOOD.log_every is None
