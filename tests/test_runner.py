"""The runner: every cell exactly once, whatever fails, is interrupted or runs beside it."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import fake_experiment
import pandas as pd
import pytest

from grpo_repro import results, runner
from grpo_repro.config import ModelConfig, MseEvalConfig, TaskConfig
from grpo_repro.errors import ResultsError, UserError
from grpo_repro.outcome import Outcome, merge
from grpo_repro.progress import Reporter


@pytest.fixture
def settings(tmp_path):
    return MseEvalConfig(task=TaskConfig(name="arithmetic"), results_dir=str(tmp_path / "results"))


@pytest.fixture
def log(tmp_path, monkeypatch):
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("FAKE_LOG", str(path))
    return path


def go(settings):
    return runner.run_plan(fake_experiment, "mse-eval", settings, Reporter())


def rows(settings):
    return results.read_results(settings.results_dir).sort_values(["cell_id", "group_size"], ignore_index=True)


def test_a_repeated_run_runs_only_what_is_missing(settings, log, capsys):
    first = go(settings)
    assert (first.status, len(first.cells), sum(first.rows.values())) == (0, 3, 15)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3 of 3 cells to run, 300 completions" in captured.err
    second = go(replace(settings, seeds=[0, 1]))
    assert len(second.cells) == 6
    assert "3 of 6 cells to run" in capsys.readouterr().err
    assert len(log.read_text().splitlines()) == 6
    assert go(settings).rows == first.rows
    assert "all 3 cells are finished" in capsys.readouterr().err
    assert len(log.read_text().splitlines()) == 6


def test_a_dry_run_writes_nothing(settings, log, tmp_path):
    outcome = runner.dry_run(fake_experiment, "mse-eval", settings)
    assert [entry["finished"] for entry in outcome.plan] == [False] * 3
    assert outcome.plan[0]["completions"] == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]
    go(settings)
    assert all(entry["finished"] for entry in runner.dry_run(fake_experiment, "mse-eval", settings).plan)


def test_a_failing_cell_is_reported_and_the_others_go_on(settings, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_FAIL", "bundled-base")
    outcome = go(settings)
    assert outcome.status == 1
    assert list(outcome.failures.values()) == ["RuntimeError: it broke"]
    assert len(outcome.rows) == 2
    error = capsys.readouterr().err
    assert "error: bundled-base seed 0" in error
    assert error.index("it broke") < error.index("bundled-instruct seed 0: started")
    (trace,) = results.prepare(settings.results_dir, "mse-eval").glob(".work/*/error.txt")
    assert "RuntimeError: it broke" in trace.read_text()
    monkeypatch.delenv("FAKE_FAIL")
    assert go(settings).status == 0
    assert not trace.exists()


def test_a_users_mistake_in_one_cell_is_status_2(settings, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_USER_ERROR", "bundled-icl")
    monkeypatch.setenv("FAKE_FAIL", "bundled-base")
    assert go(settings).status == 2
    assert "has no tokenizer; save one beside it\n" in capsys.readouterr().err


def test_something_else_in_place_of_a_cell_fails_that_cell_only(settings, capsys):
    cell = fake_experiment.plan(settings)[0]
    results.cell_path(settings.results_dir, cell).mkdir(parents=True)
    outcome = go(settings)
    assert outcome.status == 2
    assert list(outcome.failures) == [cell.id]
    assert len(outcome.rows) == 2
    assert capsys.readouterr().err.count("move it away to measure it again") == 1


def test_something_else_in_place_of_partial_work_is_one_message(settings):
    cell = fake_experiment.plan(settings)[0]
    path = results.work_path(settings.results_dir, cell)
    path.parent.mkdir(parents=True)
    path.write_text("")
    with pytest.raises(ResultsError, match="is not a folder .* move it away"):
        go(settings)
    assert path.read_text() == ""


def test_a_plan_that_memory_cannot_hold_is_refused(settings, log):
    settings = replace(settings, device="cpu", device_memory_gib=0.25)
    words = r"bundled-base seed 0 needs about 0\.5 GiB .* has 0\.25; lower .*micro_batch"
    with pytest.raises(UserError, match=words):
        go(settings)
    # A dry run refuses the same, and shows the plan.
    planned = runner.dry_run(fake_experiment, "mse-eval", settings)
    assert (len(planned.plan), planned.status) == (3, 2)
    assert re.search(words, planned.error)
    assert log.read_text() == ""
    assumed = runner.dry_run(fake_experiment, "mse-eval", replace(settings, device="auto", assumed_gpu="H100"))
    assert planned.error.replace("this machine", "H100") == assumed.error
    enough = replace(settings, device_memory_gib=0.6)
    assert runner.dry_run(fake_experiment, "mse-eval", enough).error is None
    assert go(enough).status == 0


def test_what_is_wrong_with_a_model_is_said_once(settings, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_USER_ERROR", "bundled-icl")
    outcome = go(replace(settings, seeds=[0, 1]))
    assert (outcome.status, len(outcome.failures)) == (2, 2)
    assert capsys.readouterr().err.count("has no tokenizer") == 1


def test_the_clock_survives_a_kill(settings, monkeypatch):
    monkeypatch.setattr(runner, "SECONDS_BETWEEN_CLOCKS", 0.0)
    # A process that is killed saves nothing on its way out.
    monkeypatch.setenv("FAKE_FAIL", "bundled-instruct,bundled-icl")
    seen = []
    original = runner._save_seconds
    monkeypatch.setattr(
        runner, "_save_seconds", lambda clock, seconds: (seen.append(seconds), original(clock, seconds))
    )
    go(settings)
    assert len(seen) == fake_experiment.STEPS + 2
    assert sorted(seen[: fake_experiment.STEPS]) == seen[: fake_experiment.STEPS]


def test_a_full_disk_stops_the_run_with_one_message_and_loses_nothing(settings, monkeypatch):
    go(replace(settings, seeds=[1]))
    with monkeypatch.context() as patch:

        def refuse(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(results.os, "rename", refuse)
        with pytest.raises(ResultsError, match="No space left"):
            go(settings)
    folder = results.prepare(settings.results_dir, "mse-eval")
    assert not list(folder.glob(".tmp-*"))
    assert len(list(folder.glob(".work/*/part3"))) == 1
    assert len(rows(settings)) == 15
    assert go(replace(settings, seeds=[0, 1])).status == 0
    assert len(rows(settings)) == 30


def test_an_interruption_keeps_partial_work_and_resumes(settings, log, monkeypatch, capsys):
    original = time.sleep
    naps = []

    def interrupted(seconds):
        naps.append(seconds)
        if len(naps) == 7:
            raise KeyboardInterrupt
        original(0)

    monkeypatch.setattr(fake_experiment, "sleep", interrupted)
    outcome = go(settings)
    assert outcome.status == 130
    message = "interrupted; 1 of 3 cells finished; the same command resumes"
    assert capsys.readouterr().err.splitlines()[-1] == message
    folder = results.prepare(settings.results_dir, "mse-eval")
    assert sorted(path.name for path in folder.glob(".work/*/part*")) == ["part0", "part1"]
    assert go(settings).status == 0
    # Seven naps before, of which the last came to nothing, and the six steps that were missing.
    assert len(naps) == 7 + 6
    assert list(folder.glob(".work/*")) == []
    assert not list(folder.glob(".locks/*"))
    uninterrupted = replace(settings, results_dir=settings.results_dir + "2")
    go(uninterrupted)
    pd.testing.assert_frame_equal(rows(settings), rows(uninterrupted))


RUN = """
import sys, fake_experiment
from grpo_repro import runner
from grpo_repro.config import MseEvalConfig, TaskConfig
from grpo_repro.progress import Reporter
settings = MseEvalConfig(task=TaskConfig(name="arithmetic"), results_dir=sys.argv[1], seeds=[0, 1, 2])
outcome = runner.run_plan(fake_experiment, "mse-eval", settings, Reporter())
assert len(outcome.rows) == 9, outcome
sys.exit(outcome.status)
"""


def start(settings, log, seconds):
    environment = os.environ | {
        "PYTHONPATH": os.path.dirname(fake_experiment.__file__),
        "FAKE_LOG": str(log),
        "FAKE_SECONDS": str(seconds),
    }
    command = [sys.executable, "-c", RUN, settings.results_dir]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_two_runners_on_one_folder_run_each_cell_once(settings, log):
    processes = [start(settings, log, 0.2) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    started = [line.split() for line in log.read_text().splitlines()]
    assert Counter(cell for cell, _ in started) == dict.fromkeys({cell for cell, _ in started}, 1)
    assert len(started) == 9
    assert len({process for _, process in started}) == 2, "the work was not shared"
    assert len(rows(settings)) == 45


def test_a_killed_runner_leaves_its_cell_to_the_next(settings, log):
    process = start(settings, log, 0.3)
    while len(log.read_text().splitlines()) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished = len(rows(settings)) // 5
    again = start(settings, log, 0)
    assert again.communicate(timeout=60) and again.returncode == 0
    assert len(log.read_text().splitlines()) == 9 - finished + 2
    assert len(rows(settings)) == 45


def test_another_process_is_waited_for(settings, log, capsys, monkeypatch):
    other = start(settings, log, 0.5)
    while not log.read_text():
        time.sleep(0.02)
    first = replace(settings, model=ModelConfig(name="bundled-base"))
    assert fake_experiment.plan(first)[0].id in log.read_text()
    outcome = go(first)
    assert (outcome.status, len(outcome.rows)) == (0, 1)
    assert "another process is running it; waiting for it" in capsys.readouterr().err
    other.kill()
    other.communicate()


def test_outcomes_of_jobs_join(settings):
    one = Outcome("e", "r", ["a", "b"], {"a": 5}, 1, {"b": "no"})
    two = Outcome("e", "r", ["b", "c"], {"c": 7}, 0)
    joint = merge([one, two])
    assert joint == Outcome("e", "r", ["a", "b", "c"], {"a": 5, "c": 7}, 1, {"b": "no"})
