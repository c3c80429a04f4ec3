"""Finished cells in other places: the same run under another experiment, and many cells packed into one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_repro.cells import Cell
from grpo_repro.errors import ResultsError, UserError
from grpo_repro.results import PACKED, SCHEMA, cell_path, finished_cells, is_finished, write_cell, write_table

MANIFESTS = "manifests.jsonl"


def adopt(results_dir: str | Path, cell: Cell, experiments: Sequence[str]) -> int | None:
    """Take a cell over from an experiment that has run it: equal ids are equal numbers.

    Args:
        results_dir: Folder of the results.
        cell: What is to be run; the caller holds its lock.
        experiments: Experiments whose cells are the same runs.

    Returns:
        The number of rows, or None if none of them has finished it.
    """
    for experiment in experiments:
        twin = replace(cell, experiment=experiment)
        try:
            if experiment == cell.experiment or not is_finished(results_dir, twin):
                continue
        except ResultsError:
            continue
        path = cell_path(results_dir, twin)
        rows = pq.read_table(path / "metrics.parquet", schema=SCHEMA).to_pandas(types_mapper=_nullable)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest |= {"experiment": cell.experiment, "copied_from": f"{experiment}/{cell.id}"}
        write_cell(results_dir, cell, rows, manifest)
        return len(rows)
    return None


def _nullable(kind: pa.DataType) -> Any:
    import pandas as pd

    return pd.Int64Dtype() if kind == pa.int64() else None


def pack(results_dir: Path, out: Path, experiment: str) -> int:
    """Write all finished cells of an experiment as one table and one file of manifests, for keeping.

    Args:
        results_dir: Folder of the results.
        out: Folder that gets `<experiment>/cells.parquet` and `<experiment>/manifests.jsonl`; the figures read it.
        experiment: Name of the experiment.

    Returns:
        Number of cells.

    Raises:
        UserError: If there are none, or the files cannot be written.
    """
    paths = finished(results_dir, experiment)
    table = pa.concat_tables([pq.read_table(path / "metrics.parquet", schema=SCHEMA) for path in paths])
    lines = [json.dumps(json.loads((path / "manifest.json").read_text()) | _config(path)) for path in paths]
    folder = out / experiment
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFESTS).write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot write {folder}: {error.strerror or error}; name another folder with --out DIR"
        ) from error
    write_table(table, folder / PACKED)
    return len(paths)


def finished(results_dir: Path, experiment: str) -> list[Path]:
    """Return the folders of an experiment's finished cells.

    Raises:
        UserError: If there are none.
    """
    paths = finished_cells(results_dir, experiment)
    if not paths:
        raise UserError(f"no finished cells of {experiment} in {results_dir}; run it first, or name another folder")
    return paths


def _config(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
    assert isinstance(config, dict)
    return {"config": {key: value for key, value in config.items() if key != "results_dir"}}
