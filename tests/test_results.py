"""Identity, atomicity and tolerance of results on disk."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_repro import results
from grpo_repro.cells import NOT_IDENTITY
from grpo_repro.errors import ResultsError
from grpo_repro.locks import cell_lock, clean_up
from grpo_repro.manifest import build_manifest, git_sha
from grpo_repro.results import SCHEMA, Cell, cell_rng, read_results, write_cell

ROWS = pd.DataFrame({"model": "m", "group_size": [4, 8], "metric": "mse", "value": [0.5, 0.25], "estimator": "grpo"})


def make_cell(**changes):
    return Cell("mse-eval", {"model": {"name": "m"}, "seed": 0, "group_sizes": [4, 8]} | changes, "m")


def write(folder, cell, rows=ROWS):
    return write_cell(folder, cell, rows, build_manifest(cell, 1.0, {"tokens": 3}))


# -- identity


def test_cell_ids_do_not_change_between_releases():
    # If this fails, every results folder out there is orphaned: change the identity only with a migration.
    assert make_cell().id == "0b509691c6b8"


def test_what_cannot_change_the_numbers_is_not_in_the_id():
    plain = make_cell().id
    same = dict.fromkeys(NOT_IDENTITY, "x")
    assert make_cell(**same).id == plain
    assert {"results_dir", "threads", "device", "dry_run"} <= set(same)
    assert make_cell(seed=1).id != plain
    assert make_cell(group_sizes=[8, 4]).id != plain
    assert make_cell(model={"name": "m", "device": "x"}).id != plain


@given(st.permutations(["a", "b", "c", "d"]))
def test_the_order_of_keys_is_not_in_the_id(order):
    assert Cell("e", {key: 1 for key in order}, "").id == Cell("e", dict.fromkeys("abcd", 1), "other").id


def test_configurations_that_have_no_identity_are_refused():
    with pytest.raises(ValueError, match="JSON compliant"):
        make_cell(temperature=float("nan")).id  # noqa: B018
    with pytest.raises(TypeError):
        make_cell(temperature=object()).id  # noqa: B018


def test_randomness_depends_on_seed_cell_and_replicate_only():
    def draw(*arguments):
        return np.random.default_rng(cell_rng(*arguments)).random(4)

    assert (draw(0, "a", 0) == draw(0, "a", 0)).all()
    others = [draw(1, "a", 0), draw(0, "b", 0), draw(0, "a", 1)]
    assert all((draw(0, "a", 0) != other).all() for other in others)
    assert cell_rng(0, "a", 0).generate_state(1)[0] == 1146356220


# -- writing


def test_a_cell_comes_back_as_it_was_written(tmp_path):
    cell = make_cell()
    path = write(tmp_path, cell)
    assert sorted(item.name for item in path.iterdir()) == ["config.yaml", "manifest.json", "metrics.parquet"]
    assert pq.read_schema(path / "metrics.parquet").equals(SCHEMA)
    rows = read_results(tmp_path, "mse-eval")
    assert list(rows.columns) == SCHEMA.names
    assert rows["value"].tolist() == [0.5, 0.25]
    assert rows["group_size"].tolist() == [4, 8]
    assert rows["cell_id"].unique().tolist() == [cell.id]
    assert rows["budget"].isna().all()
    assert [item.name for item in path.parent.iterdir()] == [cell.id]


def test_the_manifest_says_where_numbers_come_from(tmp_path):
    manifest = json.loads((write(tmp_path, make_cell()) / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert manifest["tokens"] == 3
    assert manifest["completions"] is None
    assert manifest["git_sha"] == git_sha()
    assert {"python", "torch", "numpy", "pyarrow"} <= set(manifest["packages"])
    assert manifest["hardware"]["cores"] >= 1
    assert {"wall_time_s", "seed_derivation", "dtype", "data_hash", "model_revision"} <= set(manifest)


def test_nothing_is_overwritten(tmp_path):
    path = write(tmp_path, make_cell())
    before = (path / "manifest.json").read_bytes()
    with pytest.raises(ResultsError, match="not overwritten"):
        write(tmp_path, make_cell(), ROWS.assign(value=9.0))
    assert (path / "manifest.json").read_bytes() == before


def test_rows_outside_the_schema_are_refused(tmp_path):
    with pytest.raises(ValueError, match="columns"):
        write(tmp_path, make_cell(), ROWS.assign(extra=1))
    with pytest.raises(ValueError, match="METRICS"):
        write(tmp_path, make_cell(), ROWS.assign(metric="msee"))
    with pytest.raises(ValueError, match="no rows"):
        write(tmp_path, make_cell(), ROWS.head(0))
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("where", ["fsync", "rename"])
def test_a_full_or_read_only_disk_is_one_message_and_leaves_nothing(tmp_path, monkeypatch, code, where):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(results.os, where, refuse)
    with pytest.raises(ResultsError) as refused:
        write(tmp_path, make_cell())
    assert os.strerror(code) in str(refused.value)
    assert "results_dir=DIR" in str(refused.value)
    assert list((tmp_path / "mse-eval").iterdir()) == []


def test_a_file_in_place_of_the_folder_is_one_message(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(ResultsError, match="Not a directory"):
        results.prepare(tmp_path / "results", "mse-eval")
    with pytest.raises(ResultsError, match="/proc"):
        results.prepare("/proc/results", "mse-eval")


KILLED = """
import sys, pandas as pd
from pathlib import Path
from grpo_repro.locks import cell_lock
from grpo_repro.results import Cell, write_cell
rows = pd.DataFrame({"metric": ["mse"] * 20000, "value": 1.5, "prompt_id": [str(i) for i in range(20000)]})
folder = Path(sys.argv[1]); (folder / "mse-eval").mkdir(exist_ok=True)
for number in range(int(sys.argv[2]), 10**9, 100):
    cell = Cell("mse-eval", {"number": number}, "")
    with cell_lock(folder / "mse-eval", cell.id):
        write_cell(folder, cell, rows, {"status": "complete"})
    print("written", flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_nothing_half_visible(tmp_path):
    folder = tmp_path / "mse-eval"
    leftovers, attempt = 0, 0
    while attempt < 12 or (leftovers == 0 and attempt < 60):
        attempt += 1
        process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path, str(attempt)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(0.013 * (attempt % 12))
        process.send_signal(signal.SIGKILL)
        process.wait()
        leftovers += len(list(folder.glob(".tmp-*")))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows = read_results(tmp_path)
        assert (rows.groupby("cell_id").size() == 20000).all()
        clean_up(folder)
        assert not list(folder.glob(".tmp-*"))
    assert read_results(tmp_path)["cell_id"].nunique() > 0
    assert leftovers > 0, "no kill hit a write: the test has lost its point"


# -- locks


def test_a_lock_excludes_and_leaves_no_file(tmp_path):
    with cell_lock(tmp_path, "a" * 12) as mine:
        assert mine
        with cell_lock(tmp_path, "a" * 12) as other:
            assert not other
        with cell_lock(tmp_path, "b" * 12) as different:
            assert different
    assert list((tmp_path / ".locks").iterdir()) == []
    with cell_lock(tmp_path, "a" * 12) as again:
        assert again


@pytest.mark.parametrize("place", [".locks", ".locks/0123456789ab"])
def test_something_else_in_place_of_a_lock_is_one_message(tmp_path, place):
    if place == ".locks":
        (tmp_path / place).write_text("")
    else:
        (tmp_path / place).mkdir(parents=True)
    with pytest.raises(ResultsError, match=r"cannot lock .*0123456789ab: .* move away"):
        with cell_lock(tmp_path, "0123456789ab"):
            pass


def test_a_lock_dies_with_its_process(tmp_path):
    code = (
        "import sys, time, pathlib; from grpo_repro.locks import cell_lock\n"
        "with cell_lock(pathlib.Path(sys.argv[1]), 'a' * 12): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    process.stdout.readline()
    with cell_lock(tmp_path, "a" * 12) as held:
        assert not held
    process.kill()
    process.wait()
    with cell_lock(tmp_path, "a" * 12) as held:
        assert held


def test_cleaning_leaves_what_a_live_process_writes(tmp_path):
    (tmp_path / f".tmp-{'a' * 12}-x").mkdir()
    (tmp_path / ".tmp-notours").mkdir()
    with cell_lock(tmp_path, "a" * 12):
        clean_up(tmp_path)
        assert (tmp_path / f".tmp-{'a' * 12}-x").exists()
    clean_up(tmp_path)
    assert not (tmp_path / f".tmp-{'a' * 12}-x").exists()
    assert (tmp_path / ".tmp-notours").exists()


# -- reading


def test_foreign_files_are_named_once_and_left_alone(tmp_path):
    good = make_cell()
    write(tmp_path, good)
    folder = tmp_path / "mse-eval"
    (tmp_path / "notes.txt").write_text("hello")
    (folder / "junk.parquet").write_bytes(b"junk")
    for number, content in enumerate((b"PAR1 not really", None)):
        broken = folder / f"{number:012x}"
        broken.mkdir()
        for name in ("config.yaml", "manifest.json"):
            (broken / name).write_text("{}")
        if content is None:
            pq.write_table(pa.table({"value": [1.0]}), broken / "metrics.parquet")
        else:
            (broken / "metrics.parquet").write_bytes(content)
    (folder / ("f" * 12)).mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.warns(results.ResultsWarning) as caught:
        rows = read_results(tmp_path)
    assert len(caught) == 1
    message = str(caught[0].message)
    for words in (
        "notes.txt",
        "junk.parquet",
        "unreadable",
        "another schema",
        "config.yaml is missing",
        "Move",
    ):
        assert words in message
    assert rows["cell_id"].unique().tolist() == [good.id]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_or_empty_folder_has_no_rows(tmp_path):
    assert read_results(tmp_path / "nowhere").empty
    assert list(read_results(tmp_path).columns) == SCHEMA.names


def test_reference_results_and_working_state_are_not_read(tmp_path):
    write(tmp_path / "reference", make_cell())
    (tmp_path / "mse-eval" / ".work" / "x").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_results(tmp_path).empty
        assert len(read_results(tmp_path / "reference")) == 2


def test_a_truncated_cell_in_place_of_another_is_not_taken_for_finished(tmp_path):
    cell = make_cell()
    path = write(tmp_path, cell)
    assert results.is_finished(tmp_path, cell)
    (path / "metrics.parquet").write_bytes((path / "metrics.parquet").read_bytes()[:-7])
    with pytest.raises(ResultsError, match="unreadable.*move it away"):
        results.is_finished(tmp_path, cell)
