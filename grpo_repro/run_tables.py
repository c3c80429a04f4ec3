"""Rows of training runs as a table: paired runs down, group sizes across."""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Float

from grpo_repro.errors import UserError

RUN = ["seed", "replicate"]
"""What names a run; null (a language model's replicate) is a value like any other."""


def run_table(rows: pd.DataFrame) -> tuple[Float[np.ndarray, "runs groups"], tuple[int, ...]]:
    """Arrange rows as paired runs.

    Of a sweep that is still running, group sizes with less than half as many runs as the fullest one are left out,
    then the runs that are missing at any other G.

    Args:
        rows: Rows of one metric, setting, budget and iteration (columns seed, replicate, group_size, value).

    Returns:
        Values by run (ascending seed and replicate) and group size, and the group sizes, ascending.

    Raises:
        UserError: Without rows, for a value that is not finite, for two values of one run, or where no run exists at
            every G.
    """
    if rows.empty:
        raise UserError("no rows to select a group size from; run a sweep over group_sizes first")
    plain = pd.DataFrame({name: rows[name].astype("Int64").fillna(-1).astype("int64") for name in [*RUN, "group_size"]})
    plain["value"] = rows["value"].astype(float)
    for fault, wrong, remedy in (
        ("is not finite", ~np.isfinite(plain["value"]), "leave that run out or run it again"),
        (
            "is there twice",
            plain.duplicated([*RUN, "group_size"]),
            "two cells hold different runs of that seed; move one of them away",
        ),
    ):
        if wrong.any():
            first = plain[wrong].iloc[0]
            where = ", ".join(f"{name}={int(first[name])}" for name in [*RUN, "group_size"] if first[name] >= 0)
            raise UserError(f"the value of {where} {fault} ({int(wrong.sum())} such rows); {remedy}")
    wide = plain.pivot(index=RUN, columns="group_size", values="value").sort_index(axis=0).sort_index(axis=1)
    runs = wide.notna().sum()
    common = wide.loc[:, runs >= runs.max() / 2].dropna()
    if common.empty:
        counts = ", ".join(f"G={size}: {number}" for size, number in runs.items())
        raise UserError(f"no run (seed) exists at every group size ({counts}); run the same seeds at every group size")
    return common.to_numpy(), tuple(int(size) for size in common.columns)
