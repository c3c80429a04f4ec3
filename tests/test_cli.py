"""The command line as a user meets it: real processes, exit codes, streams, launchers, completion."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_repro import app as application
from grpo_repro import config as schema
from grpo_repro import data_cli, doctor
from grpo_repro.errors import RunError, UserError
from grpo_repro.job_folder import discard_older, job_folder, keep_logs
from grpo_repro.launch import Flags, launch

TRACEBACK = "Traceback (most recent call last)"


def message(run):
    """The one message of a command that refused its arguments."""
    assert run.returncode == 2, run
    assert run.stdout == ""
    assert TRACEBACK not in run.stderr
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


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
    assert complete(grpo, "grpo mse-eval model=bun", 2) == [f"model={name}" for name in bundled]
    assert complete(grpo, "grpo mse-eval task=", 2) == ["task=arithmetic", "task=bandit"]
    # Bash itself splits at the equals sign and wants the value alone.
    assert complete(grpo, "grpo mse-eval model = bun", 4) == bundled
    assert complete(grpo, "grpo mse-eval task =", 3) == ["arithmetic", "bandit"]
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
        ("task=gsm8k", ["unknown task 'gsm8k'", "known: arithmetic, bandit"]),
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


# -- runs


def test_json_is_one_object_and_all_else_is_on_stderr(grpo):
    run = grpo("mse-eval", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert list(found) == ["experiment", "cells", "rows", "results_dir"]
    assert (found["experiment"], len(found["cells"]), found["rows"]) == ("mse-eval", 3, 15)
    assert found["results_dir"] == "results"
    assert "3 of 3 cells to run" in run.stderr
    again = grpo("mse-eval", "--json")
    assert json.loads(again.stdout) == found
    # Only results: nothing of Hydra's, no locks, no temporary files.
    assert grpo.files() == sorted(
        f"results/mse-eval/{cell}/{name}"
        for cell in found["cells"]
        for name in ("config.yaml", "manifest.json", "metrics.parquet")
    )


def test_a_run_prints_the_summary_on_stdout(grpo):
    run = grpo("mse-eval", "model=tabular", "group_sizes=[2,4]")
    assert run.returncode == 0, run.stderr
    assert [line.split(":")[0] for line in run.stdout.splitlines()] == ["tabular G=2", "tabular G=4"]


def test_a_dry_run_runs_and_writes_nothing(grpo):
    run = grpo("mse-eval", "--dry-run")
    assert run.returncode == 0, run.stderr
    assert "bundled-icl seed 0" in run.stdout
    assert "to run: 3 of 3 cells, 300 completions, 2,400 tokens, about 6 s, 0.5 GiB" in run.stdout
    found = json.loads(grpo("mse-eval", "--dry-run", "--json", "-m", "seeds=[0],[1]").stdout)
    assert (len(found["cells"]), found["rows"]) == (6, 0)
    assert sum(entry["completions"] for entry in found["plan"]) == 600
    assert list(grpo.folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_multirun_really_runs_and_prints_one_object(grpo, launcher):
    arguments = ["mse-eval", "-m", "--json", "model=bundled-base,tabular", "seeds=[0],[1]"]
    run = grpo(*arguments, f"hydra/launcher={launcher}")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (len(found["cells"]), found["rows"]) == (4, 20)
    assert len(grpo.files()) == 12, grpo.files()
    assert sorted(path.name for path in (grpo.folder / "results").iterdir()) == ["mse-eval"]
    plain = grpo("mse-eval", "--json", "model=bundled-base", "seeds=[0,1]", "results_dir=other")
    for cell in json.loads(plain.stdout)["cells"]:
        parts = [grpo.folder / where / "mse-eval" / cell / "metrics.parquet" for where in ("results", "other")]
        assert parts[0].read_bytes() == parts[1].read_bytes()


def test_failures_have_status_1_and_the_rest_goes_on(grpo):
    run = grpo("mse-eval", "--json", FAKE_FAIL="bundled-icl")
    assert run.returncode == 1
    assert TRACEBACK not in run.stderr
    found = json.loads(run.stdout)
    assert (found["rows"], list(found["failures"].values())) == (10, ["RuntimeError: it broke"])
    sweep = grpo("mse-eval", "-m", "hydra/launcher=submitit_local", FAKE_FAIL="bundled-icl")
    assert sweep.returncode == 1
    assert "failed: RuntimeError: it broke" in sweep.stderr
    assert grpo("mse-eval").returncode == 0


def test_a_sweep_with_one_bad_job_runs_the_good_ones(grpo):
    run = grpo("mse-eval", "-m", "--json", "model=tabular", "seeds=[0],[-1]")
    assert run.returncode == 2
    assert json.loads(run.stdout)["rows"] == 5
    assert "seeds=[-1]" in run.stderr


@pytest.mark.parametrize("multirun", [[], ["-m"]])
def test_a_results_folder_that_cannot_be_used(grpo, multirun):
    (grpo.folder / "file").write_text("")
    for folder in ("file", "/proc/results"):
        text = message(grpo("mse-eval", *multirun, f"results_dir={folder}"))
        assert folder in text
        assert "results_dir=DIR" in text


@pytest.mark.parametrize("arguments", [[], ["-m"], ["-m", "hydra/launcher=joblib"]])
def test_control_c_then_the_same_command_resumes(grpo, arguments):
    log = grpo.folder / "log"
    log.touch()
    process = grpo.start("mse-eval", *arguments, FAKE_SECONDS="0.3", FAKE_LOG=str(log))
    while len(log.read_text().splitlines()) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert TRACEBACK not in err
    # A worker of joblib may be stopped before it can count.
    counted = "interrupted; 1 of 3 cells finished; the same command resumes"
    lines = [line for line in err.splitlines() if line.startswith("interrupted; ")]
    assert counted in lines or ("hydra/launcher=joblib" in arguments and lines), err
    assert all(line.endswith("the same command resumes") for line in lines)
    again = grpo("mse-eval", *arguments, "--json")
    assert json.loads(again.stdout)["rows"] == 15
    assert sorted(path.name for path in (grpo.folder / "results").iterdir()) == ["mse-eval"]


def test_termination_is_an_interruption(grpo):
    log = grpo.folder / "log"
    log.touch()
    process = grpo.start("mse-eval", FAKE_SECONDS="0.3", FAKE_LOG=str(log))
    while len(log.read_text().splitlines()) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert TRACEBACK not in err
    assert err.splitlines()[-1] == "interrupted; 1 of 3 cells finished; the same command resumes"


def test_control_c_before_any_work_is_130_too(grpo):
    process = grpo.start("mse-eval")
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if "cells to run" not in err:
        assert out == ""
    assert process.returncode in (130, -signal.SIGINT), err


def test_a_worker_that_dies_is_one_message_and_the_command_resumes(grpo):
    arguments = ["mse-eval", "-m", "seeds=[0],[1]", "hydra/launcher=joblib"]
    log = grpo.folder / "log"
    log.touch()
    process = grpo.start(*arguments, FAKE_SECONDS="0.5", FAKE_LOG=str(log))
    while not log.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.kill(int(log.read_text().split()[1]), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert TRACEBACK not in err
    assert "error: a job died" in err
    assert json.loads(grpo(*arguments, "--json").stdout)["rows"] == 30


def test_arguments_of_a_family_can_be_set_together(grpo):
    run = grpo("mse-eval", "model=tabular", "model.family_args={contexts:4}", "--cfg", "job")
    assert "family_args:\n    contexts: 4\n" in run.stdout, run.stderr


@pytest.mark.parametrize("arguments", [["foo=1"], ["base"], ["-m", "model=hf"], ["device=gpu"]])
def test_json_has_the_error_in_every_case(grpo, arguments):
    run = grpo("mse-eval", "--json", *arguments)
    found = json.loads(run.stdout)
    assert run.returncode == 2
    assert found["experiment"] == "mse-eval"
    assert run.stderr == f"error: {found['error']}\n"


def test_a_sweep_that_succeeds_takes_the_logs_of_failed_ones_away(tmp_path, monkeypatch):
    with job_folder(str(tmp_path)) as failed:
        (failed / "log").touch()
        keep_logs(failed)
    with job_folder(str(tmp_path)) as submitted:
        (submitted / ".submitit").mkdir()
    assert failed.exists()
    with job_folder(str(tmp_path)) as alive:
        (alive / "log").touch()
        with job_folder(str(tmp_path)) as folder:
            discard_older(folder)
        assert alive.exists()
    left = sorted(path.name for path in (tmp_path / ".launch").iterdir())
    assert left == sorted(f"{path.name}{end}" for path in (alive, submitted) for end in ("", ".lock"))


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (errno.ENOSPC, UserError, "cannot write results to results: No space left on device; free space"),
        (errno.EPIPE, RunError, "a job died: BrokenPipeError"),
    ],
)
def test_a_job_that_meets_a_full_disk_is_a_message_about_the_disk(tmp_path, monkeypatch, code, kind, words):
    def full(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(application, "mse_eval", full)
    with pytest.raises(kind, match=words):
        launch("mse-eval", ["model=tabular"], Flags(multirun=True))


def test_a_bad_sweep_leaves_no_folder(grpo):
    message(grpo("mse-eval", "-m", "foo=1,2"))
    message(grpo("mse-eval", "-m", "model=hf"))
    message(grpo("mse-eval", "-m", "results_dir=${nothing}"))
    assert list(grpo.folder.iterdir()) == []


def test_foreign_files_get_one_warning_and_stay(grpo):
    assert grpo("mse-eval", "model=tabular").returncode == 0
    for name in ("junk.parquet", "notes.txt"):
        (grpo.folder / "results" / "mse-eval" / name).write_text("junk")
    run = grpo("mse-eval", "model=tabular")
    assert run.returncode == 0
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("warning: ")]
    assert "junk.parquet" in line and "notes.txt" in line and "Move it" in line
    assert (grpo.folder / "results" / "mse-eval" / "junk.parquet").read_text() == "junk"


# -- the other commands


def test_plot_without_results_says_what_to_do(grpo):
    for folder in ("nowhere", "."):
        text = message(grpo("plot", "--results", folder, FAKE_PLOTS="1"))
        assert "run `grpo mse-eval` first" in text
    assert "known: mse, budget" in message(grpo("plot", "nope", "--results", "nowhere", FAKE_PLOTS="1"))
    assert "png, pdf, svg" in message(grpo("plot", "--format", "gif"))
    (grpo.folder / "file").write_text("")
    assert "is a file" in message(grpo("plot", "--results", "file"))


def test_plot_draws_without_a_display_and_prints_what_it_wrote(grpo):
    assert grpo("mse-eval").returncode == 0
    headless = {"FAKE_PLOTS": "1", "MPLBACKEND": "QtAgg", "DISPLAY": ""}
    run = grpo("plot", **headless)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "results/figures/mse.png\n"
    assert "left out budget: no rows" in run.stderr
    run = grpo("plot", "mse", "mse", "--format", "svg", "--out", "drawn", "--json", **headless)
    assert json.loads(run.stdout) == {"figures": ["drawn/mse.svg"]}
    assert "<svg" in (grpo.folder / "drawn" / "mse.svg").read_text()
    assert "run it first" in message(grpo("plot", "budget", **headless))
    (grpo.folder / "file").write_text("")
    assert "--out DIR" in message(grpo("plot", "mse", "--out", "file", **headless))
    # Figures inside the results folder are not taken for results.
    assert "warning" not in grpo("plot", "mse", **headless).stderr


def test_data_commands(grpo):
    found = json.loads(grpo("data", "check", "arithmetic", "num_questions=50", "--json").stdout)
    assert (found["questions"], found["problems"]) == (50, [])
    assert sum(found["kinds"].values()) == 50
    lines = grpo("data", "show", "arithmetic", "-n", "3").stdout.splitlines()
    assert len(lines) == 3
    name, _, _, answer = lines[0].split("\t")
    path = grpo.folder / "completions.jsonl"
    entries = [{"id": name, "completion": answer}, {"id": name, "completion": "no idea"}]
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    scored = json.loads(grpo("data", "score", "arithmetic", path, "--json").stdout)
    assert (scored["count"], scored["reward_mean"]) == (2, 0.5)


def test_data_errors(grpo):
    path = grpo.folder / "bad.jsonl"
    path.write_text('{"id": "nope", "completion": "1"}\n')
    assert "known: arithmetic, bandit" in message(grpo("data", "show", "gsm8k"))
    assert "'nope' is no question" in message(grpo("data", "score", "arithmetic", path))
    path.write_text("{}\n")
    assert "bad.jsonl:1" in message(grpo("data", "score", "arithmetic", path))
    assert "No such file" in message(grpo("data", "score", "arithmetic", "nowhere"))
    assert "did you mean 'seed'" in message(grpo("data", "show", "arithmetic", "sed=1"))
    assert "whole number" in message(grpo("data", "show", "arithmetic", "seed=x"))
    assert "'dev'" in message(grpo("data", "show", "arithmetic", "split=dev"))
    assert "seed=-1" in message(grpo("data", "show", "arithmetic", "seed=-1"))
    assert "too large" in message(grpo("data", "show", "arithmetic", "operand_max=99999999999"))
    assert "KEY=VALUE" in message(grpo("data", "show", "arithmetic", "num_questions={a"))
    assert "KEY=VALUE" in message(grpo("data", "show", "arithmetic", "="))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"id": "1", "completion": "\xff"}', "is not UTF-8"),
        (b'{"id": "1", "completion": null}', "completion null is no text"),
        (b'{"id": "1", "completion": NaN}', "completion NaN is no text"),
        (b'{"id": "1", "completion": true}', "completion true is no text"),
        (b'{"id": "1", "completion": ["9"]}', "is no text"),
    ],
)
def test_completions_that_cannot_be_scored(tmp_path, monkeypatch, line, words):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(line)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line)))
    for name in (str(path), "-"):
        with pytest.raises(UserError, match=words):
            list(data_cli._read(name))


def test_a_byte_order_mark_is_no_part_of_a_completion(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_text('{"id": "1", "completion": "2"}', encoding="utf-8-sig")
    assert list(data_cli._read(str(path))) == [(1, "1", "2")]


def test_model_commands(grpo):
    found = json.loads(grpo("model", "list", "--no-accuracy", "--json").stdout)["models"]
    assert [entry["name"] for entry in found] == schema.choices("model")
    assert "known: base, instruct" in message(grpo("model", "build", "nope"))
    assert "instruct with examples" in message(grpo("model", "build", "bundled-icl"))
    assert "not overwritten" in message(grpo("model", "build", "base", "--out", "."))
    (grpo.folder / "broken").symlink_to("nowhere")
    assert "not overwritten" in message(grpo("model", "build", "base", "--out", "broken"))
    assert grpo("model", "build", "base", "--seed", "9" * 20).returncode == 2


def test_doctor_reports_every_check(grpo):
    run = grpo("doctor", "--json")
    found = json.loads(run.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert run.returncode == (0 if found["ok"] else 1)
    for name in ("python", "torch", "transformers", "conf", "results folder", "disk", "matplotlib"):
        assert checks[name]["ok"], checks[name]
    assert {"bundled models", "launchers", "vllm", "hub"} <= set(checks)
    (grpo.folder / "broken").symlink_to("nowhere")
    for folder in ("/proc/results", "broken"):
        assert not doctor._writable(Path(folder) if folder[0] == "/" else grpo.folder / folder).ok
    assert doctor._disk(grpo.folder / "broken").detail.endswith("GiB free")
    assert "Loading weights" not in run.stderr
