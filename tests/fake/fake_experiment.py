"""A tiny experiment for tests of the house around experiments: one cell per model and seed.

It resumes from its folder, and its behaviour is steered by the environment, which launchers hand on:
FAKE_LOG (file that gets a line per started cell), FAKE_SECONDS (per step), FAKE_FAIL (models that fail).
"""

from __future__ import annotations

import os
from dataclasses import asdict
from time import sleep

import pandas as pd

from grpo_repro.config import BUNDLED_MODELS, ModelConfig
from grpo_repro.errors import UserError
from grpo_repro.results import Cell, Estimate, cell_rng

STEPS = 4


def plan(config):
    models = [config.model] if config.model else [ModelConfig(name=name) for name in BUNDLED_MODELS]
    cells = []
    for model in models:
        for seed in config.seeds:
            identity = asdict(config) | {"model": asdict(model), "seed": seed}
            del identity["seeds"]
            cells.append(Cell("mse-eval", identity, f"{model.name} seed {seed}"))
    return cells


def estimate(cell, machine):
    return Estimate(completions=100, tokens=800, seconds=2.0, memory_bytes=2**29)


def run(cell, workdir, progress):
    name = cell.config["model"]["name"]
    if os.environ.get("FAKE_LOG"):
        with open(os.environ["FAKE_LOG"], "a") as log:
            log.write(f"{cell.id} {os.getpid()}\n")
    if name in os.environ.get("FAKE_FAIL", "").split(","):
        raise RuntimeError("it broke")
    if name in os.environ.get("FAKE_USER_ERROR", "").split(","):
        raise UserError(f"model {name} has no tokenizer; save one beside it")
    for step in range(STEPS):
        part = workdir / f"part{step}"
        if not part.exists():
            sleep(float(os.environ.get("FAKE_SECONDS", "0")))
            part.write_text(str(os.getpid()))
        progress(step + 1, STEPS, "steps")
    draw = float(cell_rng(cell.config["seed"], cell.id).generate_state(1)[0])
    sizes = cell.config["group_sizes"]
    rows = pd.DataFrame({"model": name, "group_size": sizes, "metric": "mse", "value": draw, "count": 4})
    return rows, {
        "completions": 100,
        "tokens": 800,
        "dtype": "float32",
        "data_hash": "abc",
        "weights_hash": "def",
    }


def summary(rows):
    return "\n".join(f"{row.model} G={row.group_size}: {row.value:.0f}" for row in rows.itertuples())
