"""The task functions that Hydra runs, undecorated and importable, so that every launcher can pickle them."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_repro.config import EXPERIMENTS, typed
from grpo_repro.errors import UserError
from grpo_repro.validation import validate

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from grpo_repro.outcome import Outcome

OUTCOME_FILE = "outcome.json"


def mse_eval(config: DictConfig) -> None:
    """Run the cells of Figure 4."""
    run_task("mse-eval", config)


def train(config: DictConfig) -> None:
    """Run one training run."""
    run_task("train", config)


def group_size(config: DictConfig) -> None:
    """Run the cells of Figure 5."""
    run_task("group-size", config)


def budget(config: DictConfig) -> None:
    """Run the cells of Table 2."""
    run_task("budget", config)


def iterations(config: DictConfig) -> None:
    """Run the cells behind the best G against n."""
    run_task("iterations", config)


def theory(config: DictConfig) -> None:
    """Run checks of the paper's statements."""
    run_task("theory", config)


def run_task(experiment: str, config: DictConfig) -> None:
    """Run one job and leave its outcome in its output folder, where the command line collects it.

    Nothing is raised for a bad configuration, since Hydra would add lines of its own; an interruption goes
    on, so that the jobs that would follow do not start.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from grpo_repro.outcome import BAD_CONFIGURATION, FAILED, INTERRUPTED, Outcome

    hydra = HydraConfig.get()
    results_dir = str(OmegaConf.to_container(config)["results_dir"])  # type: ignore[call-overload,index]
    try:
        with _heeding_termination():
            outcome = execute(experiment, config, bars=hydra.mode == RunMode.RUN)
    except UserError as error:
        outcome = Outcome(experiment, results_dir, status=BAD_CONFIGURATION, error=str(error))
    except KeyboardInterrupt:
        outcome = Outcome(experiment, results_dir, status=INTERRUPTED)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        outcome = Outcome(experiment, results_dir, status=FAILED, error=f"{type(error).__name__}: {error}")
    path = Path(hydra.runtime.output_dir) / OUTCOME_FILE
    try:
        # In one rename: a worker may be stopped at any moment.
        path.with_suffix(".tmp").write_text(json.dumps(asdict(outcome)))
        os.replace(path.with_suffix(".tmp"), path)
    except FileNotFoundError:
        # The command was interrupted and has taken the folder away: nobody waits for the outcome.
        if outcome.status != INTERRUPTED:
            raise
    if outcome.status == INTERRUPTED:
        raise KeyboardInterrupt


@contextmanager
def _heeding_termination() -> Iterator[None]:
    """Take SIGTERM for an interruption in workers of launchers too, unless the launcher has plans for it."""
    main = threading.current_thread() is threading.main_thread()
    ours = main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def execute(experiment: str, config: DictConfig, bars: bool) -> Outcome:
    """Check a configuration, then plan it and run what is missing.

    Args:
        experiment: Name of the experiment.
        config: What Hydra composed.
        bars: Whether progress bars may be shown.

    Returns:
        The outcome.

    Raises:
        UserError: If the configuration, the plan or the results folder cannot be used.
    """
    from omegaconf.errors import OmegaConfBaseException

    from grpo_repro.hydra_errors import explain

    try:
        settings = typed(config)
    except OmegaConfBaseException as error:
        raise UserError(explain(error, experiment)) from error
    validate(settings)
    from grpo_repro import runner
    from grpo_repro.progress import Reporter

    module: Any = importlib.import_module(EXPERIMENTS[experiment])
    if settings.dry_run:
        return runner.dry_run(module, experiment, settings)
    if hasattr(settings, "device"):
        _check_device(settings)
    if settings.threads is not None:
        import torch

        torch.set_num_threads(settings.threads)
    return runner.run_plan(module, experiment, settings, Reporter(bars))


def _check_device(settings: Any) -> None:
    """Refuse a GPU that is not there before any cell starts; a tabular policy needs none."""
    if settings.device.startswith("cuda") and not (settings.model and settings.model.kind == "tabular"):
        from grpo_repro.policies.causal_lm import device_of

        device_of(settings.device)
