"""Every YAML composes, and every bad value is refused with its remedy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hydra import compose, initialize_config_dir

from grpo_repro import config as schema
from grpo_repro.config import ModelConfig, MseEvalConfig, TaskConfig
from grpo_repro.errors import UserError
from grpo_repro.launch import check_overrides
from grpo_repro.validation import MOST_THREADS, validate


def composed(*overrides):
    schema.register()
    with initialize_config_dir(str(schema.conf_dir()), version_base="1.3"):
        return schema.typed(compose("experiment/mse-eval", overrides=list(overrides)))


@pytest.mark.parametrize("name", schema.choices("model"))
def test_every_model_composes(name):
    settings = composed(f"model={name}", "model.path=somewhere") if name == "hf" else composed(f"model={name}")
    assert settings.model.name == name
    assert settings.task.name == ("bandit" if name == "tabular" else "arithmetic")
    validate(settings)


@pytest.mark.parametrize("name", schema.choices("task"))
def test_every_task_composes(name):
    reader = ["model=hf", "model.path=DIR"]
    models = {"bandit": ["model=tabular"], "gsm8k": reader, "math": reader}
    settings = composed(f"task={name}", *models.get(name, []))
    assert settings.task.name == name
    validate(settings)


@pytest.mark.parametrize("name", schema.choices("experiment"))
def test_every_experiment_composes(name):
    schema.register()
    with initialize_config_dir(str(schema.conf_dir()), version_base="1.3"):
        validate(schema.typed(compose(f"experiment/{name}")))
    assert name in schema.EXPERIMENTS


def test_yaml_leaves_the_defaults_of_the_schema_alone():
    assert composed() == MseEvalConfig(task=TaskConfig(name="arithmetic"))
    assert composed().model is None


def test_no_yaml_instantiates_code():
    for path in schema.conf_dir().rglob("*.yaml"):
        assert "_target_" not in path.read_text(), path


def test_bundled_models_are_choices():
    assert set(schema.BUNDLED_MODELS) <= set(schema.choices("model"))


def test_a_tabular_model_keeps_a_task_that_is_named():
    assert composed("model=tabular", "task=arithmetic").task.name == "arithmetic"


def test_keys_that_were_added_are_refused():
    with pytest.raises(UserError, match=r"unknown key 'foo'"):
        composed("+foo=1")
    with pytest.raises(UserError, match=r"unknown key 'task\.foo'"):
        composed("+task.foo=1")
    assert composed("model=tabular", "++model.family_args.dim=3").model.family_args == {"dim": 3}


GOOD = MseEvalConfig(task=TaskConfig(name="arithmetic"))
LANGUAGE = ModelConfig(name="mine", path="somewhere")
TABULAR = ModelConfig(name="tabular", kind="tabular", family="curved")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"estimators": []}, ["estimators is empty", "grpo"]),
        ({"estimators": ["grpoo"]}, ["'grpoo'", "did you mean 'grpo'", "oracle"]),
        ({"estimators": ["grpo", "grpo"]}, ["more than once"]),
        ({"methods": ["montecarlo"]}, ["'montecarlo'", "monte_carlo"]),
        ({"sampler": "tpu"}, ["'tpu'", "torch"]),
        ({"device": "gpu"}, ["'gpu'", "cuda:N"]),
        ({"group_sizes": []}, ["group_sizes is empty"]),
        ({"group_sizes": [4, 4]}, ["[4,4]", "more than once"]),
        ({"group_sizes": [0]}, ["G=0", "1 or more"]),
        ({"group_sizes": [-2]}, ["G=-2"]),
        ({"group_sizes": [1, 4]}, ["G=1", "'grpo'", "vanilla"]),
        ({"completions_per_prompt": 3}, ["completions_per_prompt=3", "4 or more"]),
        ({"replicates": 1}, ["replicates=1", "3 or more"]),
        ({"seeds": []}, ["seeds is empty"]),
        ({"seeds": [1, 1]}, ["more than once"]),
        ({"seeds": [0, -1]}, ["negative -1"]),
        ({"confidence": 0.0}, ["confidence=0.0"]),
        ({"confidence": 1.0}, ["confidence=1.0"]),
        ({"confidence": math.nan}, ["confidence=nan", "finite"]),
        ({"temperature": 0.0}, ["temperature=0.0", "positive"]),
        ({"temperature": math.inf}, ["temperature=inf", "finite"]),
        ({"max_new_tokens": 0}, ["max_new_tokens=0"]),
        ({"micro_batch": 0}, ["micro_batch=0"]),
        ({"gradient_memory_gib": 0.0}, ["gradient_memory_gib=0.0"]),
        ({"threads": 0}, ["threads=0"]),
        ({"results_dir": " "}, ["results_dir is empty"]),
        ({"task": TaskConfig()}, ["no task"]),
        ({"task": TaskConfig(name="arithmetic", num_questions=1)}, ["num_questions=1", "3 or more"]),
        ({"task": TaskConfig(name="arithmetic", split="dev")}, ["'dev'", "train, test"]),
        ({"task": TaskConfig(name="bandit")}, ["task=bandit", "model=tabular"]),
        ({"group_sizes": [10**10]}, ["G=10000000000", "1048576 or less"]),
        ({"completions_per_prompt": 10**12}, ["completions_per_prompt=1000000000000", "10000000 or less"]),
        ({"replicates": 10**12}, ["replicates=1000000000000", "1000000 or less"]),
        ({"seeds": [2**63]}, [f"seeds={2**63}", f"{2**63 - 1} or less"]),
        ({"max_new_tokens": 10**12}, ["max_new_tokens=1000000000000"]),
        ({"micro_batch": 10**12}, ["micro_batch=1000000000000"]),
        ({"gradient_memory_gib": 1e300}, ["gradient_memory_gib=1e+300", "100000 or less"]),
        ({"threads": 10**11}, ["threads=100000000000", f"{MOST_THREADS} or less"]),
        ({"task": TaskConfig(name="arithmetic", num_questions=10**9)}, ["task.num_questions=1000000000"]),
        ({"task": TaskConfig(name="arithmetic", seed=2**63)}, ["task.seed="]),
        ({"task": TaskConfig(name="arithmetic", operand_max=5_000_000)}, ["task.operand_max=5000000"]),
        ({"task": TaskConfig(name="arithmetic", factor_max=10**21)}, ["task.factor_max=1000000000000000000000"]),
        ({"task": TaskConfig(name="arithmetic", path="x")}, ["task.path", "task=arithmetic", "leave it out"]),
        ({"model": TABULAR, "task": TaskConfig(name="bandit", operand_max=9)}, ["task.operand_max", "num_questions"]),
        ({"model": replace(TABULAR, path="x"), "task": TaskConfig(name="bandit")}, ["model.path", "tabular"]),
        ({"model": replace(LANGUAGE, family="curved")}, ["model.family", "'mine'", "template"]),
        ({"model": replace(LANGUAGE, family_args={"dim": 3})}, ["model.family_args"]),
        ({"model": replace(LANGUAGE, path="bundled:base", revision="main")}, ["model.revision", "bundled:base"]),
        ({"methods": ["exact"]}, ["exact", "model=tabular"]),
        ({"model": LANGUAGE, "methods": ["exact"]}, ["'exact'", "'mine'"]),
        ({"model": LANGUAGE, "task": TaskConfig(name="bandit")}, ["task=bandit", "'mine'"]),
        ({"model": TABULAR}, ["task=arithmetic", "task=bandit"]),
        ({"model": replace(LANGUAGE, path=None)}, ["model.path is empty", "model=hf model.path=DIR"]),
        ({"model": replace(LANGUAGE, template="?")}, ["'?'", "{question}"]),
        ({"model": replace(LANGUAGE, dtype="int8")}, ["'int8'", "bfloat16"]),
        ({"model": replace(LANGUAGE, kind="rnn")}, ["'rnn'", "causal_lm"]),
        ({"model": replace(LANGUAGE, name="")}, ["no model is named"]),
        ({"model": replace(TABULAR, family=None), "task": TaskConfig(name="bandit")}, ["model.family"]),
    ],
)
def test_bad_values_are_refused_with_fact_value_and_remedy(changes, words):
    with pytest.raises(UserError) as refused:
        validate(replace(GOOD, **changes))
    for word in words:
        assert word in str(refused.value)


def test_good_values_pass():
    tabular = replace(GOOD, model=TABULAR, task=TaskConfig(name="bandit"), methods=["exact"])
    single = replace(GOOD, group_sizes=[1, 2], estimators=["vanilla", "oracle", "optimal"])
    for good in (GOOD, single, tabular, replace(GOOD, device="cuda:3", threads=2, seeds=[0, 7])):
        before = replace(good)
        validate(good)
        assert good == before  # accepted, and left as it was


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("name", "KEY=VALUE"),
        ("=1", "KEY=VALUE"),
        ("~seeds=[0]", "removes a key"),
        ("~task", "removes a key"),
        ("hydra.job.chdir=true", "set by grpo itself"),
        ("++hydra.job={chdir:true}", "set by grpo itself"),
        ("results_dir=~/x", "results_dir=$HOME/x"),
        ("hydra.run.dir=x", "results_dir=DIR"),
        ("results_dir=a,b", "one run writes to one"),
        ("model=", "bundled-base"),
        ("model=null", "bundled-base"),
        ("+model=hf", "write model=NAME"),
        ("task=[arithmetic,bandit]", "write task=NAME"),
    ],
)
def test_arguments_that_hydra_would_misread_are_refused(override, words):
    with pytest.raises(UserError) as refused:
        check_overrides([override])
    assert words in str(refused.value)


def test_a_choice_can_be_read_without_hydra():
    task = schema.load_choice("task", "arithmetic", ["num_questions=7"])
    assert task == TaskConfig(name="arithmetic", num_questions=7)
    with pytest.raises(UserError, match=r"unknown task 'algebra'; known: arithmetic, bandit, gsm8k, math"):
        schema.load_choice("task", "algebra")
