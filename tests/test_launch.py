"""Experiments as real processes: exit codes, streams, launchers, interruptions."""

from __future__ import annotations

import errno
import json
import os
import signal
import time

import pytest
from house import TRACEBACK, message

from grpo_repro import app as application
from grpo_repro.errors import RunError, UserError
from grpo_repro.job_folder import discard_older, job_folder, keep_logs
from grpo_repro.launch import Flags, launch

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
    process = grpo.start("mse-eval", *arguments, FAKE_SECONDS="0.6", FAKE_LOG=str(log))
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
    process = grpo.start("mse-eval", FAKE_SECONDS="0.6", FAKE_LOG=str(log))
    while len(log.read_text().splitlines()) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert TRACEBACK not in err
    assert err.splitlines()[-1] == "interrupted; 1 of 3 cells finished; the same command resumes"


def test_control_c_before_any_work_is_130_too(grpo):
    # Whatever it has come to after half a second, a step of the first cell ends much later.
    process = grpo.start("mse-eval", FAKE_SECONDS="60")
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
