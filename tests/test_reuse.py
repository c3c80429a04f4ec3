"""Cells that another experiment has run, and packed results."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest

from grpo_repro import results, reuse
from grpo_repro.cells import Cell
from grpo_repro.errors import UserError

ROWS = pd.DataFrame({"model": "m", "metric": "value", "value": [0.5, 0.25], "group_size": [2, 4], "seed": 1})
MANIFEST = {"status": "complete", "experiment": "group-size", "wall_time_s": 3.0}
KIN = ("group-size", "budget")


def cell(experiment="group-size", seed=1):
    return Cell(experiment, {"seed": seed, "results_dir": "here", "iterations": 3}, f"seed {seed}")


def test_a_cell_of_another_experiment_is_taken_over_with_its_rows(tmp_path):
    results.write_cell(tmp_path, cell(), ROWS, MANIFEST)
    twin = cell("budget")
    assert reuse.adopt(tmp_path, twin, KIN) == 2
    assert results.is_finished(tmp_path, twin)
    first, second = (results.read_results(tmp_path, name) for name in KIN)
    assert set(second["experiment"]) == {"budget"}
    pd.testing.assert_frame_equal(first.drop(columns="experiment"), second.drop(columns="experiment"))
    manifest = json.loads((results.cell_path(tmp_path, twin) / "manifest.json").read_text())
    assert manifest["copied_from"] == f"group-size/{twin.id}"
    assert (manifest["experiment"], manifest["wall_time_s"]) == ("budget", 3.0)


def test_other_runs_and_broken_ones_are_not_taken_over(tmp_path):
    results.write_cell(tmp_path, cell(), ROWS, MANIFEST)
    assert reuse.adopt(tmp_path, cell("budget", seed=2), KIN) is None
    assert reuse.adopt(tmp_path, cell("budget"), ()) is None
    assert reuse.adopt(tmp_path, cell(), KIN) is None  # itself
    (results.cell_path(tmp_path, cell()) / "metrics.parquet").write_bytes(b"cut off")
    assert reuse.adopt(tmp_path, cell("budget"), KIN) is None


def test_packed_results_read_like_the_cells_they_came_from(tmp_path):
    for seed in (1, 2, 3):
        results.write_cell(tmp_path / "whole", cell(seed=seed), ROWS.assign(seed=seed), MANIFEST)
    assert reuse.pack(tmp_path / "whole", tmp_path / "kept", "group-size") == 3
    keys = ["seed", "group_size"]
    whole, kept = (
        results.read_results(tmp_path / name).sort_values(keys, ignore_index=True) for name in ("whole", "kept")
    )
    pd.testing.assert_frame_equal(whole, kept)
    lines = [json.loads(line) for line in (tmp_path / "kept/group-size" / reuse.MANIFESTS).read_text().splitlines()]
    assert sorted(line["config"]["seed"] for line in lines) == [1, 2, 3]
    assert all("results_dir" not in line["config"] and line["status"] == "complete" for line in lines)


def test_a_packed_file_that_is_no_result_is_left_out_with_a_warning(tmp_path):
    folder = tmp_path / "group-size"
    folder.mkdir()
    (folder / results.PACKED).write_bytes(b"nothing")
    with pytest.warns(results.ResultsWarning, match="unreadable"):
        assert results.read_results(tmp_path).empty


def test_nothing_to_pack_is_one_message(tmp_path):
    with pytest.raises(UserError, match="no finished cells of budget"):
        reuse.pack(tmp_path, tmp_path / "kept", "budget")


def test_the_runner_takes_over_what_is_there(tmp_path, capsys):
    """A sweep over n after one over G: nothing is run again."""
    from grpo_repro import runner
    from grpo_repro.config import TaskConfig
    from grpo_repro.progress import Reporter
    from grpo_repro.schema import GroupSizeConfig

    class Module:
        SHARE_CELLS = KIN
        ran = 0

        def __init__(self, experiment):
            self.experiment = experiment

        def plan(self, config):
            return [replace(cell(self.experiment, seed), label=f"seed {seed}") for seed in (1, 2)]

        def run(self, cell, workdir, progress):
            Module.ran += 1
            return ROWS.assign(seed=cell.config["seed"]), {}

        def estimate(self, cell, machine):
            return results.Estimate(1, 1, 1.0, 1)

        def summary(self, rows):
            return ""

    config = GroupSizeConfig(task=TaskConfig(name="arithmetic"), results_dir=str(tmp_path))
    for experiment in KIN:
        outcome = runner.run_plan(Module(experiment), experiment, config, Reporter())
        assert (outcome.status, sum(outcome.rows.values())) == (0, 4)
    assert Module.ran == 2
    assert "taken from an experiment that has run it" in capsys.readouterr().err
