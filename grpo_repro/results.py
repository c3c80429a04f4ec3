"""Results on disk: cells and their identity, one schema, atomic writes, tolerant reads.

    results/<experiment>/<cell_id>/{config.yaml, manifest.json, metrics.parquet}

A cell becomes visible in one rename and is never overwritten. Names that begin with a dot are working
state: `.work/<cell_id>` is kept over interruptions, `.locks/<cell_id>` dies with its process,
`.tmp-<cell_id>-*` is a write that was cut off.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_repro.cells import SEED_DERIVATION, Cell, Estimate, Progress, canonical_json, cell_rng
from grpo_repro.errors import ResultsError, cannot_write

__all__ = [
    "METRICS",
    "SCHEMA",
    "SEED_DERIVATION",
    "Cell",
    "Estimate",
    "Progress",
    "ResultsWarning",
    "canonical_json",
    "cell_path",
    "cell_rng",
    "finished_cells",
    "is_finished",
    "make_work_folder",
    "prepare",
    "read_results",
    "to_table",
    "work_path",
    "write_cell",
    "write_table",
]

SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("experiment", "cell_id", "model", "task", "estimator", "method")]
    + [(name, pa.int64()) for name in ("group_size", "budget", "num_prompts", "iteration", "seed", "replicate")]
    + [(name, pa.string()) for name in ("prompt_id", "metric")]
    + [(name, pa.float64()) for name in ("value", "ci_low", "ci_high", "ci_level")]
    + [("count", pa.int64())]
)
"""Columns of `metrics.parquet`; null where one does not apply."""

METRICS: dict[str, str] = {
    "mse": "mean squared error of the estimated gradient, E||g_hat - g||^2",
    "baseline_error_mse": "what the error of an estimated baseline adds to the mse, on average",
    "gradient_sq_norm": "squared norm of the true gradient, ||g||^2",
    "c1": "E||g(X) - g||^2, variance of the gradient over prompts",
    "c2": "E S_o(X), the oracle's error for one completion",
    "c3": "E R(X), coefficient of the second-order term, R = F sigma^2 + ||g(x)||^2",
    "vanilla_variance": "E[E||W||^2 Z^2 - ||g(X)||^2], vanilla's error for one completion",
    "optimal_variance": "error for one completion of the best prompt-only baseline b*",
    "score_sq_norm": "F = E||W||^2, expected squared norm of the score",
    "reward_variance": "sigma^2 = Var(Z | X), averaged over prompts",
    "optimal_group_size": "G* = 1 + sqrt(c3 / c1)",
    "value": "V = E[Z]",
    "suboptimality_gap": "Delta = max J - J",
    "accuracy": "fraction of right answers to the test questions, sampled",
    "greedy_accuracy": "fraction of right answers to the test questions, the likeliest token at every step",
    "reward_mean": "mean reward of the completions of training iterations",
    "zero_variance_fraction": "fraction of groups whose rewards are all equal",
    "gradient_norm": "||g_hat|| before clipping, averaged over iterations",
    "score_reward_correlation": "correlation of ||W||^2 with Z given the prompt (Assumption 2 says 0)",
    "predicted": "a check of the theory: the value of its formula",
    "upper_bound": "the same where the formula is an upper bound",
    "lower_bound": "the same where the formula is a lower bound",
    "reference": "the same where nothing is decided",
    "observed": "a check of the theory: what was enumerated or simulated",
    "tolerance": "largest difference of the two that is rounding",
    "passed": "1 where the statement holds, else 0",
    "curve_x": "abscissa of a point of a check's figure",
    "curve_y": "its ordinate",
    "kl_divergence": "KL(pi || pi_ref) from the initial policy, in nats per completion",
    "sampler_log_prob_difference": "mean of |log mu - log pi| of sampled tokens, vLLM's against the trainer's, in nats",
    "sampler_log_prob_difference_max": "the largest of them",
    "completion_length": "mean number of tokens of a completion, its EOS token included",
    "truncated_fraction": "fraction of training completions that were cut off before an answer",
    "error_fraction": "fraction of training completions on which the verifier failed or ran out of time",
    "outcome_right": "number of graded completions (count: of all) whose answer is right",
    "outcome_wrong": "number of those with another answer",
    "outcome_no_answer": "number of those that ended without an answer",
    "outcome_truncated": "number of those that were cut off by the length limit before an answer",
    "outcome_error": "number of those on which the verifier failed or ran out of time; not paid, and not wrong",
    "outcome_gold_unparsable": "number of those whose question's gold answer cannot be read; not paid",
    "questions_excluded": "number of questions (count: of those looked at) not asked, their gold being unreadable",
}
"""Every metric and what it means."""

CELL_ID = re.compile(r"[0-9a-f]{12}")
_FILES = ("config.yaml", "manifest.json", "metrics.parquet")
PACKED = "cells.parquet"
"""All cells of an experiment in one table, see `reuse.pack`."""

_APART = {"reference", "packed", "figures"}


class ResultsWarning(UserWarning):
    """Something in the results folder is not a result."""


def cell_path(results_dir: str | Path, cell: Cell) -> Path:
    """Return the folder of a cell, finished or not."""
    return Path(results_dir) / cell.experiment / cell.id


def work_path(results_dir: str | Path, cell: Cell) -> Path:
    """Return the folder of a cell's partial state, which outlives interruptions."""
    return Path(results_dir) / cell.experiment / ".work" / cell.id


def is_finished(results_dir: str | Path, cell: Cell) -> bool:
    """Tell whether a cell is there.

    Raises:
        ResultsError: If something else stands in its place, which is never removed.
    """
    path = cell_path(results_dir, cell)
    if not path.exists() and not path.is_symlink():
        return False
    missing = [name for name in _FILES if not (path / name).is_file()]
    problem = f"{missing[0]} is missing" if missing else _table_problem(path / "metrics.parquet")
    if problem:
        raise ResultsError(f"{path} is not a finished cell ({problem}); move it away to measure it again")
    return True


def to_table(cell: Cell, rows: pd.DataFrame) -> pa.Table:
    """Return a cell's rows in `SCHEMA`, absent columns filled with nulls.

    Raises:
        ValueError: If a column or a metric is unknown, or there are no rows.
    """
    unknown = sorted(set(rows.columns) - set(SCHEMA.names))
    if unknown:
        raise ValueError(f"columns {unknown} are not in the schema of results")
    if rows.empty:
        raise ValueError(f"cell {cell.id} has no rows")
    strange = sorted(set(rows["metric"].dropna()) - set(METRICS))
    if strange:
        raise ValueError(f"metrics {strange} are not named in results.METRICS")
    rows = rows.reindex(columns=SCHEMA.names)
    rows = rows.assign(experiment=cell.experiment, cell_id=cell.id)
    return pa.Table.from_pandas(rows, schema=SCHEMA, preserve_index=False)


def prepare(results_dir: str | Path, experiment: str) -> Path:
    """Make the folder of an experiment and check that it can be written.

    Returns:
        The folder `results_dir/experiment`.

    Raises:
        ResultsError: If it is a file, read-only, or on a full disk.
    """
    folder = Path(results_dir) / experiment
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as error:
        raise cannot_write(folder, error) from error
    return folder


def write_cell(results_dir: str | Path, cell: Cell, rows: pd.DataFrame, manifest: dict[str, Any]) -> Path:
    """Write a finished cell, visible in one rename; the caller holds the cell's lock.

    Args:
        results_dir: Folder of the results.
        cell: What was run.
        rows: Its rows, columns of `SCHEMA`.
        manifest: How they came about, see `grpo_repro.manifest`.

    Returns:
        The folder of the cell.

    Raises:
        ResultsError: If the cell is there already or cannot be written; nothing half-written stays.
    """
    from omegaconf import OmegaConf

    table = to_table(cell, rows)
    final = cell_path(results_dir, cell)
    if final.exists():
        raise ResultsError(f"{final} exists already and is not overwritten; move it away first")
    temporary: Path | None = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{cell.id}-", dir=final.parent))
        temporary.chmod(0o755)
        _write(temporary / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(cell.config)).encode())
        _write(temporary / "manifest.json", (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode())
        pq.write_table(table, temporary / "metrics.parquet")
        for path in (temporary / "metrics.parquet", temporary):
            _sync(path)
        os.rename(temporary, final)
        _sync(final.parent)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise cannot_write(final.parent, error) from error
        raise
    return final


def write_table(table: pa.Table, path: Path) -> None:
    """Write rows in one rename, so that a reader sees the old file or the new one.

    Raises:
        ResultsError: If they cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        pq.write_table(table, temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path.parent, error) from error


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_work_folder(results_dir: str | Path, cell: Cell) -> Path:
    """Make the folder of a cell's partial state, or return the one that an interruption left.

    Raises:
        ResultsError: If something else stands in its place, or it cannot be written.
    """
    path = work_path(results_dir, cell)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ResultsError(
            f"{path} is not a folder ({error.strerror}), and partial work belongs there; move it away"
        ) from error
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def read_results(results_dir: str | Path, experiment: str | None = None) -> pd.DataFrame:
    """Read every finished cell; what is not one is named in a single warning and left alone.

    Args:
        results_dir: Folder of the results; it may be missing.
        experiment: Only this experiment's, else all.

    Returns:
        Rows of `SCHEMA`; integer columns are pandas' nullable Int64. Shape [rows, 19].

    Warns:
        ResultsWarning: If files or folders there are not results.
    """
    tables, problems = [], []
    for path, problem in _entries(Path(results_dir), experiment):
        if problem is None:
            tables.append(pq.read_table(path if path.is_file() else path / "metrics.parquet", schema=SCHEMA))
        else:
            problems.append(f"{path} ({problem})")
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        warnings.warn(
            ResultsWarning(f"left out, not a result: {shown}. Move it elsewhere to be rid of this warning"),
            stacklevel=2,
        )
    table = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
    return table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)


def _entries(results_dir: Path, experiment: str | None) -> Iterable[tuple[Path, str | None]]:
    """Yield each cell folder with None, and everything else with what is wrong with it."""
    folders: list[Path] = []
    for path in _listed(results_dir):
        if experiment is not None and path.name != experiment:
            continue
        if not path.is_dir():
            yield path, "a file outside any experiment"
        elif path.name not in _APART:
            folders.append(path)
    for folder in folders:
        for path in _listed(folder):
            if path.name == PACKED:
                yield path, _table_problem(path)
            elif not (path.name == "manifests.jsonl" and (folder / PACKED).is_file()):
                yield path, _cell_problem(path)


def finished_cells(results_dir: Path, experiment: str) -> list[Path]:
    """Return the folders of an experiment's finished cells, in the order of their ids."""
    return [path for path, problem in _entries(results_dir, experiment) if problem is None and path.is_dir()]


def _listed(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _cell_problem(path: Path) -> str | None:
    if not path.is_dir() or not CELL_ID.fullmatch(path.name):
        return "not the folder of a cell"
    for name in _FILES:
        if not (path / name).is_file():
            return f"{name} is missing"
    return _table_problem(path / "metrics.parquet")


def _table_problem(path: Path) -> str | None:
    """Return why a file is not readable rows of the schema, or None."""
    with suppress(OSError, pa.ArrowException):
        parquet = pq.ParquetFile(path)
        if not parquet.schema_arrow.equals(SCHEMA):
            return "metrics.parquet has another schema"
        parquet.read(columns=["metric", "value"])
        return None
    return "metrics.parquet is unreadable"
