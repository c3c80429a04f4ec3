"""Width of the 95% intervals of the MSE: one pool (`components`) against replicates, at equal completions."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.common import Result, smaller
from grpo_repro.config import MseEvalConfig, load_choice
from grpo_repro.experiments import mse_eval

QUESTIONS, REPLICATES = 40, 8


def run() -> list[Result]:
    """All five group sizes: 124 completions for each replicate and question, and a pool of as many."""
    config = MseEvalConfig(
        model=load_choice("model", "bundled-base"),
        task=replace(load_choice("task", "arithmetic"), num_questions=QUESTIONS),
        replicates=REPLICATES,
    )
    config.completions_per_prompt = REPLICATES * sum(config.group_sizes)
    widths = {}
    for cell in mse_eval.plan(config):
        with tempfile.TemporaryDirectory() as folder:
            rows, _ = mse_eval.run(cell, Path(folder), lambda done, total, what: None)
        errors = rows[rows["metric"] == "mse"].set_index(["estimator", "group_size"])
        widths[cell.config["method"]] = errors["ci_high"] - errors["ci_low"]
    ratios = widths["components"] / widths["monte_carlo"]
    results = []
    for group in config.group_sizes:
        ours, theirs = (widths[m].xs(group, level="group_size") for m in ("components", "monte_carlo"))
        name = f"interval width of the MSE at G = {group}, mean of the estimators, vs monte_carlo"
        results.append(smaller(name, float(ours.mean()), float(theirs.mean()), "<= 0.333"))
    worst = float(np.max(ratios))
    results.append(Result("the widest ratio of any estimator and G", worst, 1.0, round(worst, 3), "reported"))
    return results
