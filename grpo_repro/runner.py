"""Run the cells of a plan: only what is missing, each under its lock, each written as soon as it is done."""

from __future__ import annotations

import shutil
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pandas as pd
import pyarrow.parquet as pq

from grpo_repro.errors import ResultsError, UserError
from grpo_repro.fit import check_fit
from grpo_repro.locks import cell_lock, clean_up
from grpo_repro.machine import Machine, machine_for
from grpo_repro.manifest import build_manifest
from grpo_repro.outcome import BAD_CONFIGURATION, FAILED, INTERRUPTED, Outcome
from grpo_repro.progress import Reporter, describe
from grpo_repro.results import (
    Cell,
    Estimate,
    Progress,
    cell_path,
    is_finished,
    make_work_folder,
    prepare,
    read_results,
    write_cell,
)
from grpo_repro.reuse import adopt

SECONDS_BETWEEN_CLOCKS = 30.0


@runtime_checkable
class Experiment(Protocol):
    """The four functions that a module of `grpo_repro.experiments` offers.

    It may offer two more: `failures(rows)`, the message of each cell that fails by what it measured, and
    `details(rows)`, what `--json` says of them.
    """

    def plan(self, config: Any) -> list[Cell]:
        """Return the cells of a configuration."""

    def run(self, cell: Cell, workdir: Path, progress: Progress) -> tuple[pd.DataFrame, dict[str, Any]]:
        """Measure a cell; partial state goes to `workdir`."""

    def estimate(self, cell: Cell, machine: Machine) -> Estimate:
        """Return what a cell will cost on a machine."""

    def summary(self, rows: pd.DataFrame) -> Any:
        """Return a short table that rich can print."""


def dry_run(module: Experiment, experiment: str, config: Any) -> Outcome:
    """Say what a plan would cost, and write nothing.

    Returns:
        The outcome with its plan; with an error and status 2 if what is to run does not fit into memory.

    Raises:
        UserError: If the configuration cannot be planned.
    """
    machine = machine_for(config, planning=True)
    outcome = Outcome(experiment, config.results_dir, device=machine.describe(), on_gpu=machine.on_gpu)
    for cell in module.plan(config):
        outcome.cells.append(cell.id)
        finished = is_finished(config.results_dir, cell)
        estimate = module.estimate(cell, machine)
        outcome.plan.append({"cell": cell.id, "label": cell.label, "finished": finished, **asdict(estimate)})
        try:
            if not finished:
                check_fit(cell, estimate, machine)
        except UserError as error:
            outcome.status, outcome.error = BAD_CONFIGURATION, outcome.error or str(error)
    return outcome


def run_plan(module: Experiment, experiment: str, config: Any, reporter: Reporter) -> Outcome:
    """Run what is missing of a plan.

    A cell that another process is running is left to the end and then waited for. A cell that fails is
    reported at once and the others go on. An interruption keeps the partial work of the running cell.

    Args:
        module: The experiment.
        experiment: Its name.
        config: Typed configuration, with `results_dir`.
        reporter: Where progress and messages go.

    Returns:
        The outcome; its status is 0, 1 (a cell failed), 2 (one is the user's to mend) or 130.

    Raises:
        UserError: If the plan or the results folder cannot be used at all.
    """
    cells = module.plan(config)
    outcome = Outcome(experiment, config.results_dir, [cell.id for cell in cells])
    folder = prepare(config.results_dir, experiment)
    clean_up(folder)
    todo = [cell for cell in cells if not _checked(cell, outcome, reporter)]
    todo = [cell for cell in todo if cell.id not in outcome.failures]
    machine = machine_for(config)
    estimates = [module.estimate(cell, machine) for cell in todo]
    for cell, estimate in zip(todo, estimates, strict=True):
        check_fit(cell, estimate, machine)
    reporter.say(describe(experiment, len(cells) - len(outcome.failures), estimates, folder))
    try:
        with reporter:
            busy = [cell for cell in todo if not _run_cell(module, cell, outcome, reporter, wait=False)]
            for cell in busy:
                reporter.say(f"{cell.label}: another process is running it; waiting for it")
                _run_cell(module, cell, outcome, reporter, wait=True)
    except KeyboardInterrupt:
        outcome.status = INTERRUPTED
    finished = [cell for cell in cells if _exists(config.results_dir, cell)]
    outcome.rows = {cell.id: _count_rows(config.results_dir, cell) for cell in finished}
    _judge(module, config.results_dir, finished, outcome, reporter)
    if outcome.status == INTERRUPTED:
        reporter.say(f"interrupted; {len(finished)} of {len(cells)} cells finished; the same command resumes")
    return outcome


def _judge(module: Experiment, results_dir: str, finished: list[Cell], outcome: Outcome, reporter: Reporter) -> None:
    """Fail cells whose measured rows contradict what they check, also those that an earlier command has run."""
    judge = getattr(module, "failures", None)
    if judge is None or not finished:
        return
    rows = read_results(results_dir, outcome.experiment)
    for cell, message in judge(rows[rows["cell_id"].isin([cell.id for cell in finished])]).items():
        outcome.failures[cell] = message
        outcome.status = max(outcome.status, FAILED)
        reporter.say(message, error=True)


def _checked(cell: Cell, outcome: Outcome, reporter: Reporter) -> bool:
    """Tell whether a cell is finished; whatever else is in its place fails that cell only."""
    try:
        return is_finished(outcome.results_dir, cell)
    except ResultsError as error:
        _fail(cell, error, outcome, reporter)
        return False


def _exists(results_dir: str, cell: Cell) -> bool:
    try:
        return is_finished(results_dir, cell)
    except ResultsError:
        return False


def _count_rows(results_dir: str, cell: Cell) -> int:
    return int(pq.read_metadata(cell_path(results_dir, cell) / "metrics.parquet").num_rows)


def _run_cell(module: Experiment, cell: Cell, outcome: Outcome, reporter: Reporter, wait: bool) -> bool:
    """Run one cell under its lock; return False if another process holds it."""
    folder = cell_path(outcome.results_dir, cell).parent
    with cell_lock(folder, cell.id, wait) as held:
        if not held:
            return False
        if _checked(cell, outcome, reporter) or cell.id in outcome.failures:
            return True
        workdir = make_work_folder(outcome.results_dir, cell)
        try:
            copied = adopt(outcome.results_dir, cell, getattr(module, "SHARE_CELLS", ()))
            if copied is not None:
                reporter.say(f"{cell.label}: taken from an experiment that has run it, {copied} rows")
                shutil.rmtree(workdir, ignore_errors=True)
                return True
            _measure(module, cell, outcome.results_dir, workdir, reporter)
        except ResultsError:
            raise
        except Exception as error:
            if type(error).__name__ == "UncompletedJobError":
                raise  # a cluster's time limit: submitit raises it wherever the work is, and the cell is not to blame
            _fail(cell, error, outcome, reporter, workdir)
    return True


def _measure(module: Experiment, cell: Cell, results_dir: str, workdir: Path, reporter: Reporter) -> None:
    clock = workdir / ".wall_time_s"
    before = _seconds(clock)
    start = saved = time.monotonic()

    def progress(done: int, total: int, what: str) -> None:
        # Now and then, so that a process that is killed loses little of the time that it took.
        nonlocal saved
        if time.monotonic() - saved >= SECONDS_BETWEEN_CLOCKS:
            saved = time.monotonic()
            _save_seconds(clock, before + saved - start)
        reporter.progress(done, total, what)

    reporter.start(cell.label)
    try:
        rows, extras = module.run(cell, workdir, progress)
        wall_time = before + time.monotonic() - start
        write_cell(results_dir, cell, rows, build_manifest(cell, wall_time, extras))
    except BaseException:
        _save_seconds(clock, before + time.monotonic() - start)
        raise
    shutil.rmtree(workdir, ignore_errors=True)
    reporter.finish(cell.label, len(rows), wall_time)


def _seconds(clock: Path) -> float:
    try:
        return float(clock.read_text())
    except (OSError, ValueError):
        return 0.0


def _save_seconds(clock: Path, seconds: float) -> None:
    try:
        clock.write_text(repr(seconds))
    except OSError:
        # A full disk must not hide the error that is on its way.
        return


def _fail(cell: Cell, error: Exception, outcome: Outcome, reporter: Reporter, workdir: Path | None = None) -> None:
    """Report a cell's failure at once; an unexpected one leaves its traceback beside the partial work."""
    expected = isinstance(error, UserError)
    message = str(error) if expected else f"{type(error).__name__}: {error}"
    # What is wrong with a model or a task is wrong in each of its cells: it is said once.
    said = expected and message in outcome.failures.values()
    outcome.failures[cell.id] = message
    outcome.status = BAD_CONFIGURATION if expected else max(outcome.status, FAILED)
    if not expected and workdir is not None:
        try:
            log = workdir / "error.txt"
            log.write_text(traceback.format_exc())
            message += f" (traceback in {log})"
        except OSError:
            message += "\n" + traceback.format_exc()
    if not said:
        reporter.say(f"{cell.label} ({cell.id}): {message}", error=True)
