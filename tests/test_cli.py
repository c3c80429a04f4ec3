"""The command line as a user meets it: help, completion, overrides and their errors."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from house import message

from grpo_repro import config as schema

# -- help, speed, completion


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["mse-eval", "plot", "doctor", "model", "data", "Exit codes"]),
        (
            ["mse-eval"],
            ["OVERRIDES", "bundled-icl", "arithmetic", "group_sizes", "[4,8,16,32,64]", "grpo mse-eval -m"],
        ),
        (["plot"], ["FIGURE", "--results", "--out", "--format", "Example: grpo plot"]),
        (["doctor"], ["--json", "Example: grpo doctor"]),
        (["model", "list"], ["Example: grpo model list"]),
        (["model", "build"], ["NAME", "--seed", "Example: grpo model build"]),
        (["data", "check"], ["TASK", "OVERRIDES", "Example: grpo data check"]),
        (["data", "show"], ["TASK", "--number", "Example: grpo data show"]),
        (["data", "score"], ["TASK", "FILE", "Example: grpo data score"]),
    ],
)
def test_help_shows_arguments_groups_and_an_example(grpo, arguments, words):
    run = grpo(*arguments, "--help")
    assert run.returncode == 0, run.stderr
    for word in words:
        assert word in run.stdout
    assert grpo.files() == []


def modules(code):
    """The heavy modules that are loaded after some code ran."""
    heavy = "{'torch', 'hydra', 'pandas', 'omegaconf', 'transformers'}"
    tail = f"\nimport sys; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, timeout=60)
    return run.stdout.splitlines()[-1]


def test_the_command_imports_nothing_heavy():
    assert modules("import grpo_repro.cli") == "[]"
    assert modules("from grpo_repro.cli_help import complete_override; complete_override('model=')") == "[]"


def test_a_bad_override_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['grpo', 'mse-eval', 'foo=1']\n"
        "from grpo_repro.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 2"
    )
    assert "torch" not in modules(code)


def test_help_is_quick(grpo):
    def seconds(*arguments):
        """Processor time: what a user waits on an idle machine, whatever runs beside this test."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        grpo(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds("--help") for _ in range(5)) < 0.5
    assert min(seconds("mse-eval", "foo=1") for _ in range(3)) < 1.5


def complete(grpo, words, position):
    environment = {"COMP_WORDS": words, "COMP_CWORD": str(position), "_GRPO_COMPLETE": "complete_bash"}
    code = "import sys; sys.argv = ['grpo']; from grpo_repro.cli import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=grpo.environment | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return run.stdout.split()


def test_completion_of_models_and_tasks(grpo):
    bundled = ["bundled-base", "bundled-icl", "bundled-instruct"]
    tasks = ["arithmetic", "bandit", "gsm8k", "math"]
    assert complete(grpo, "grpo mse-eval model=bun", 2) == [f"model={name}" for name in bundled]
    assert complete(grpo, "grpo mse-eval task=", 2) == [f"task={name}" for name in tasks]
    # Bash itself splits at the equals sign and wants the value alone.
    assert complete(grpo, "grpo mse-eval model = bun", 4) == bundled
    assert complete(grpo, "grpo mse-eval task =", 3) == tasks
    assert complete(grpo, "grpo data show ar", 3) == ["arithmetic"]
    assert "mse-eval" in complete(grpo, "grpo ms", 1)


# -- overrides and their errors


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("foo=1", ["'foo'", "known: model, task"]),
        ("group_size=[4]", ["'group_size'", "did you mean 'group_sizes'"]),
        ("task.sed=1", ["'task.sed'", "did you mean 'task.seed'", "task.split"]),
        ("+foo=1", ["'foo'"]),
        ("model=bundledbase", ["unknown model 'bundledbase'", "did you mean 'bundled-base'", "tabular"]),
        ("task=algebra", ["unknown task 'algebra'", "known: arithmetic, bandit, gsm8k, math"]),
        ("estimators=[grpoo]", ["'grpoo'", "did you mean 'grpo'"]),
        ("replicates=many", ["replicates=many", "whole number"]),
        ("group_sizes=[4,x]", ["group_sizes=[4,x]", "whole number"]),
        ("group_sizes=4", ["group_sizes=4", "give a list"]),
        ("group_sizes=[4", ["'group_sizes=[4'", "KEY=VALUE"]),
        ("${x}=1", ["cannot read", "'${x}=1'"]),
        ("results_dir=${nothing}", ["results_dir cannot be resolved", "'nothing' not found"]),
        ("results_dir=${oc.env:NOTHING}", ["results_dir cannot be resolved", "'NOTHING' not found"]),
        ("hydra.foo=1", ["'hydra.foo'", "--cfg hydra"]),
        ("model.family_args.contexts=1,2", ["error: model.family_args.contexts=1,2 names", "'model.family_args"]),
        ("model.family_args=5", ["error: bad value model.family_args=5"]),
        ("model.path=DIR", ["no model is named", "model=hf"]),
        ("model=hf", ["model.path is empty"]),
        ("model=hf,tabular", ["--multirun"]),
        ("seeds=[0],[1]", ["--multirun"]),
        ("temperature=nan", ["temperature=nan"]),
        ("hydra/launcher=nope", ["'nope'", "basic"]),
        ("base", ["'base' is not an override", "KEY=VALUE"]),
    ],
)
def test_every_bad_override_is_one_message(grpo, override, words):
    text = message(grpo("mse-eval", override))
    for word in words:
        assert word in text
    assert grpo.files() == []


def test_a_launcher_that_is_not_installed_names_its_extra(grpo):
    if "ray" in str(grpo("mse-eval", "hydra/launcher=nope").stderr):
        pytest.skip("the ray launcher is installed")
    assert "pip install 'grpo-repro[ray]'" in message(grpo("mse-eval", "-m", "hydra/launcher=ray"))


def test_unknown_options_and_commands_are_usage_errors(grpo):
    for arguments in (["mse-eval", "--nope"], ["nope"], ["mse-eval", "--cfg", "nope"]):
        run = grpo(*arguments)
        assert (run.returncode, run.stdout) == (2, "")
        assert "nope" in run.stderr
    assert "--multirun" in message(grpo("mse-eval", "--cfg", "job", "-m"))


def test_cfg_prints_the_resolved_configuration(grpo):
    import yaml

    run = grpo("mse-eval", "--cfg", "job", "model=tabular", "model.family_args.dim=3", "seeds=[3]")
    assert run.returncode == 0, run.stderr
    printed = yaml.safe_load(run.stdout)
    assert printed["task"]["name"] == "bandit"
    assert printed["model"]["family_args"] == {"dim": 3}
    assert printed["seeds"] == [3]
    assert set(printed) == {key for key in schema.keys(schema.MseEvalConfig) if "." not in key}
    assert grpo.files() == []
