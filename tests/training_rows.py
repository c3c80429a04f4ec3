"""Rows of made-up training sweeps, as `read_results` gives them, and how tests find what a figure shows."""

from __future__ import annotations

import hashlib

import numpy as np
import pandas as pd
import pyarrow as pa

from grpo_repro.experiments import variant
from grpo_repro.results import SCHEMA

SIZES = (4, 8, 16)
SETTINGS = {
    "optimizer": "adamw", "schedule": "constant", "learning_rate": 3e-4, "warmup": 0, "clip_norm": 1.0,
    "prompt_pool": 500, "prompt_order": "iid", "iterations": 40,
}  # fmt: skip


def frame(rows):
    """Rows as `read_results` gives them."""
    table = pa.Table.from_pandas(pd.DataFrame(rows).reindex(columns=SCHEMA.names), schema=SCHEMA, preserve_index=False)
    return table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)


def cell_id(place):
    """One id for each run, the same whichever experiment holds it and whatever n."""
    apart = {key: value for key, value in place.items() if key not in ("experiment", "iteration")}
    return hashlib.sha256(repr(sorted(apart.items())).encode()).hexdigest()[:12]


def runs(best=8, budgets=(64,), steps=(20, 40), seeds=6, sizes=SIZES, noise=0.01, tabular=0, **settings):
    """Rows of a sweep whose gap is lowest at G = best."""
    named = {key: settings.pop(key) for key in ("experiment", "model", "task") if key in settings}
    common = {"experiment": "budget", "model": "bundled-base", "task": "arithmetic"} | named
    common |= {"estimator": "grpo", "method": variant.describe(SETTINGS | settings)}
    rng, rows = np.random.default_rng(0), []
    for budget, size, n in [(b, g, n) for b in budgets for g in sizes for n in (0, *steps)]:
        place = common | {"budget": budget, "group_size": size, "num_prompts": budget // size, "iteration": n}
        mean = 0.5 - 0.005 * n + 0.05 * np.log2(size / best) ** 2
        for seed in range(seeds):
            cell = cell_id(place | {"seed": seed})
            for replicate in range(tabular) if tabular else (None,):
                value = mean + noise * rng.standard_normal()
                run = place | {"seed": seed, "replicate": replicate, "count": 100, "cell_id": cell}
                rows.append(run | {"metric": "suboptimality_gap", "value": value})
                if not tabular:
                    rows.append(run | {"metric": "accuracy", "value": 0.9 - value, "ci_level": 0.95})
                    rows.append(run | {"metric": "greedy_accuracy", "value": 0.95 - value})
        star = {"metric": "optimal_group_size", "seed": 0, "cell_id": cell_id(place | {"seed": 0})}
        star |= {"ci_low": 4.5 + n / 20, "ci_high": 7.5 + n / 20}
        rows.append(place | star | {"value": 6.0 + n / 20 + np.log2(size / 8)})
    return frame(rows)


def artist(ax, gid):
    found = [child for child in ax.get_children() if child.get_gid() == gid]
    assert len(found) == 1, (gid, len(found))
    return found[0]


def gids(ax):
    return {child.get_gid() for child in ax.get_children()} - {None}


def values(rows, metric, n, size, budget=64):
    chosen = rows[(rows["metric"] == metric) & (rows["iteration"] == n) & (rows["group_size"] == size)]
    return chosen[chosen["budget"] == budget]["value"].to_numpy(dtype=float)
