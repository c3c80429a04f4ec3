"""Run an experiment through Hydra and collect what its jobs leave behind."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_repro.config import COMMANDS, NESTED, PAPER, MseEvalConfig, choices, conf_dir, register
from grpo_repro.errors import FULL_DISK, RunError, UserError, cannot_write
from grpo_repro.hydra_errors import explain
from grpo_repro.job_folder import discard, discard_older, job_folder, keep_logs
from grpo_repro.outcome import DONE, INTERRUPTED, Outcome, merge

OURS = (
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.mode",
    "hydra.job.chdir",
    "hydra.output_subdir",
)
"""Keys of Hydra that `grpo` sets: with others, outcomes and results would land where nobody looks."""


@dataclass(frozen=True)
class Flags:
    """Options of an experiment's command that are not overrides.

    Attributes:
        multirun: Run one job for each combination of swept values.
        dry_run: Only say what would be run.
        cfg: Only print this part of the configuration: `job`, `hydra` or `all`.
    """

    multirun: bool = False
    dry_run: bool = False
    cfg: str | None = None


def launch(experiment: str, overrides: list[str], flags: Flags) -> Outcome | None:
    """Run an experiment as one or more Hydra jobs.

    Args:
        experiment: Name of the experiment.
        overrides: Hydra overrides, as given.
        flags: Options of the command.

    Returns:
        The joint outcome of the jobs; None if `flags.cfg` asked for the configuration only.

    Raises:
        UserError: If the configuration cannot be composed or the results folder cannot be used.
        RunError: If a launcher lost a job.
        KeyboardInterrupt: If it was interrupted before any job had an outcome.
    """
    check_overrides(overrides)
    check_paper(experiment, overrides)
    # The name that a cluster's queue shows; a user's own comes later and wins.
    overrides = [f"hydra.job.name=grpo-{experiment}", *map(_free, overrides)]
    if flags.cfg is not None:
        if flags.multirun:
            raise UserError("--cfg prints one configuration and --multirun runs many; use one of the two")
        _hydra(experiment, ["--cfg", flags.cfg, "--resolve"], overrides)
        return None
    if flags.dry_run:
        # Nothing is run, so no cluster is asked.
        kept = [item for item in overrides if not _key(item).startswith(("hydra/launcher", "hydra.launcher"))]
        overrides = [*kept, "dry_run=true"]
    sweep = flags.multirun and not flags.dry_run
    with job_folder(_resolved(results_dir(overrides), experiment) if sweep else None) as folder:
        ours = [f"{key}={_quoted(str(folder))}" for key in ("hydra.run.dir", "hydra.sweep.dir")]
        interrupted = False
        try:
            _hydra(experiment, ["--multirun"] if flags.multirun else [], [*overrides, *ours])
        except KeyboardInterrupt:
            interrupted = True
            _stop_workers()
        outcomes = [Outcome(**json.loads(path.read_text())) for path in _outcome_files(folder)]
        joint = merge(outcomes) if outcomes else None
        _tidy(folder, interrupted, joint)
    if joint is None:
        raise KeyboardInterrupt if interrupted else RunError("no job has left an outcome; the same command resumes")
    if interrupted:
        joint.status = INTERRUPTED
    return joint


def _stop_workers() -> None:
    """End joblib's idle workers: after an interruption its pool may wait minutes for them to time out."""
    pool = sys.modules.get("joblib.externals.loky.reusable_executor")
    executor = getattr(pool, "_executor", None)
    if executor is not None:
        executor.shutdown(wait=False, kill_workers=True)


def _tidy(folder: Path, interrupted: bool, joint: Outcome | None) -> None:
    """Take away what nobody needs: a failure's logs are kept until a command succeeds."""
    if joint is not None and joint.status == DONE and not interrupted:
        discard(folder)
        discard_older(folder)
    elif joint is not None and joint.error and not joint.cells:
        # No configuration could be planned: nothing has run.
        discard(folder)
    elif not interrupted:
        keep_logs(folder)
    elif not (folder / ".submitit").exists():
        # Jobs that were submitted outlive an interruption, and need what lies there.
        discard(folder)


def check_overrides(overrides: list[str]) -> None:
    """Refuse arguments that are no overrides, and those that Hydra would take but not as they are meant.

    Raises:
        UserError: If an argument is not KEY=VALUE, removes a key, or sets what `grpo` sets itself.
    """
    for item in overrides:
        key, equals, value = _key(item), *item.partition("=")[1:]
        if item.startswith("~"):
            raise UserError(f"{item!r} removes a key, and every key is needed; set it: {key or 'KEY'}=VALUE")
        if not equals or not key:
            raise UserError(f"{item!r} is not an override; write KEY=VALUE, for example group_sizes=[4,8]")
        if any(f"{ours}.".startswith(f"{key}.") for ours in OURS):
            raise UserError(f"{key} is set by grpo itself; use results_dir=DIR and --multirun")
        if key == "results_dir" and value.startswith("~"):
            raise UserError(f"{item!r}: only a shell knows ~; write results_dir=$HOME{value[1:]}")
        if key == "results_dir" and "," in value and value[0] not in "'\"":
            raise UserError(f"{item!r} names several folders; one run writes to one: results_dir=DIR")
        if key in NESTED and (item.startswith("+") or value in ("", "null") or value.startswith(("[", "{"))):
            known = ", ".join(choices(key))
            how = f"{key}=NAME, known: {known}" if known else f"{key}.KEY=VALUE"
            raise UserError(f"{item!r} names no {key}; write {how}")


def check_paper(experiment: str, overrides: list[str]) -> None:
    """Refuse the settings of a figure that another command draws.

    Raises:
        UserError: With the command that they are of.
    """
    for item in overrides:
        name = item.partition("=")[2]
        if _key(item) == "paper" and name in PAPER and experiment not in PAPER[name]:
            command = COMMANDS.get(PAPER[name][0], PAPER[name][0])
            raise UserError(f"paper={name} is of `grpo {command} +paper={name}`; use that, or leave it out")


def results_dir(overrides: list[str]) -> str:
    """Return the results folder that overrides name, or the default."""
    named = [item.partition("=")[2] for item in overrides if _key(item) == "results_dir"]
    return named[-1].strip("'\"") if named else MseEvalConfig.results_dir


def _resolved(text: str, experiment: str) -> str:
    """Resolve a results folder such as ${oc.env:HOME}/x, which a sweep needs before Hydra has composed it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return str(OmegaConf.create({"results_dir": text})["results_dir"])
    except OmegaConfBaseException as error:
        raise UserError(explain(error, experiment)) from error


def _key(item: str) -> str:
    return item.partition("=")[0].lstrip("+~")


def _free(item: str) -> str:
    """Let a family's arguments be set like any other key, though the schema does not know their names.

    The paper's settings are a group that every experiment has; that they are added on top is what +paper=NAME says.
    """
    if item.startswith("+paper="):
        return item[1:]
    return "++" + item if item.startswith(("model.family_args.", "model.family_args=")) else item


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _outcome_files(folder: Path) -> list[Path]:
    """Return the outcome of the only job, or those of a sweep in the order of its jobs."""
    from grpo_repro.app import OUTCOME_FILE

    alone = folder / OUTCOME_FILE
    found = [path for path in folder.glob(f"*/{OUTCOME_FILE}") if path.parent.name.isdigit()]
    return [alone] if alone.exists() else sorted(found, key=lambda path: int(path.parent.name))


def _hydra(experiment: str, flags: list[str], overrides: list[str]) -> None:
    """Call Hydra's own entry point, flags first, and explain what it refuses."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from grpo_repro import app

    register()
    task = getattr(app, experiment.replace("-", "_"))
    entry = hydra.main(config_path=str(conf_dir()), config_name=f"experiment/{experiment}", version_base="1.3")
    with _arguments([f"grpo {COMMANDS.get(experiment, experiment)}", *flags, *overrides]):
        try:
            entry(task)()
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise UserError(explain(error, experiment)) from error
        except OSError as error:
            if error.errno in FULL_DISK:
                raise cannot_write(results_dir(overrides), error) from error
            raise _died(error) from error
        except Exception as error:
            # The task functions raise nothing, so this is a launcher whose worker died.
            raise _died(error) from error


def _died(error: Exception) -> RunError:
    reason = (str(error).strip() or "no reason given").splitlines()[0]
    return RunError(f"a job died: {type(error).__name__}: {reason}; the same command resumes")


@contextmanager
def _arguments(arguments: list[str]) -> Iterator[None]:
    """Set what Hydra reads, and have it raise its errors instead of printing them."""
    saved, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = arguments, "1"
    try:
        yield
    finally:
        sys.argv = saved
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full
