"""A golden run through the real command line: the whole chain from overrides to parquet gives the recorded numbers.

Recorded once by `python tests/test_golden.py`, to be recorded anew only when numbers are meant to change. The bundled
policy's numbers may differ in the last digits on another processor, hence a largest and a mean residual.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_repro.results import read_results

GOLDEN = Path(__file__).parent / "golden.json"
SMALL = ["group_sizes=[4,16]", "replicates=3", "completions_per_prompt=16"]
RUNS = {
    "tabular": ["model=tabular", "task.num_questions=50", *SMALL],
    "bundled": ["model=bundled-instruct", "task.num_questions=8", *SMALL],
}


def measure(name: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "grpo_repro.cli", "mse-eval", "--json", f"results_dir={folder}", *RUNS[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    rows = read_results(folder, "mse-eval")
    assert printed["experiment"] == "mse-eval" and printed["rows"] == len(rows)
    overall = rows[rows["prompt_id"].isna()].sort_values(["method", "metric", "estimator", "group_size"])
    columns = (overall[name].fillna("-") for name in ("method", "metric", "estimator"))
    names = zip(*columns, overall["group_size"].fillna(0), strict=True)
    return {" ".join(map(str, key)): float(value) for key, value in zip(names, overall["value"], strict=True)}


@pytest.mark.parametrize("name", RUNS)
def test_the_command_gives_the_recorded_numbers(name, tmp_path):
    expected = json.loads(GOLDEN.read_text())[name]
    found = measure(name, tmp_path)
    assert found.keys() == expected.keys()
    values, golden = (np.array(list(x.values())) for x in (found, expected))
    assert np.isfinite(golden).all()
    residual = np.abs(values - golden) / np.maximum(np.abs(golden), 1e-6)
    assert residual.max() < 1e-3 and residual.mean() < 1e-4


if __name__ == "__main__":
    import tempfile

    recorded = {}
    for run in RUNS:
        with tempfile.TemporaryDirectory() as scratch:
            recorded[run] = measure(run, Path(scratch))
    GOLDEN.write_text(json.dumps(recorded, indent=1) + "\n")
