"""Reports as rows of the results schema and back, so that tables and figures need the parquet alone.

Of a finding, `task` is the check, `method` is `part: statement`, `model` the setting; the prediction's metric says how
it is held against the observation: `predicted` (=), `upper_bound` (<=), `lower_bound` (>=), `reference` (no verdict).
Of a curve, `method` is `panel|kind|name`, and point i has the rows `curve_x` and `curve_y` with `replicate` = i.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from grpo_repro.theory.finding import AT_LEAST, AT_MOST, EQUAL, REPORTED, Curve, Finding, Report

RULES = {EQUAL: "predicted", AT_MOST: "upper_bound", AT_LEAST: "lower_bound", REPORTED: "reference"}


def to_frame(check: str, report: Report, seed: int, confidence: float) -> pd.DataFrame:
    """Rows of one check.

    Args:
        check: Its name.
        report: What it found.
        seed: Its seed.
        confidence: Level of its intervals.
    """
    rows = [row for finding in report.findings for row in _finding_rows(finding, confidence)]
    rows += [row for curve in report.curves for row in _curve_rows(curve, confidence)]
    return pd.DataFrame(rows).assign(task=check, seed=seed).astype({"replicate": "Int64"})


def _finding_rows(finding: Finding, confidence: float) -> list[dict[str, Any]]:
    common = {"model": finding.setting, "method": f"{finding.part}: {finding.statement}", "replicate": None}
    observed: dict[str, Any] = {"metric": "observed", "value": finding.observed}
    if finding.low is not None:
        observed |= {"ci_low": finding.low, "ci_high": finding.high, "ci_level": confidence}
    rows = [{"metric": RULES[finding.rule], "value": finding.predicted}, observed]
    if finding.tolerance is not None:
        rows.append({"metric": "tolerance", "value": finding.tolerance})
    rows.append({"metric": "passed", "value": float(finding.passed)})
    return [common | row for row in rows]


def _curve_rows(curve: Curve, confidence: float) -> list[dict[str, Any]]:
    common = {"method": f"{curve.panel}|{curve.kind}|{curve.name}", "estimator": curve.estimator}
    rows = []
    for i, (x, y) in enumerate(zip(curve.x, curve.y, strict=True)):
        ordinate = {"metric": "curve_y", "value": float(y), "replicate": i}
        if curve.low is not None and curve.high is not None:
            ordinate |= {"ci_low": float(curve.low[i]), "ci_high": float(curve.high[i]), "ci_level": confidence}
        rows += [common | {"metric": "curve_x", "value": float(x), "replicate": i}, common | ordinate]
    return rows


def from_frame(rows: pd.DataFrame) -> dict[tuple[str, int], Report]:
    """Reports by (check, seed), in the order of the rows; the inverse of `to_frame`."""
    found: dict[tuple[str, int], Report] = {}
    for check, seed in rows[["task", "seed"]].drop_duplicates().itertuples(index=False):
        own = rows[(rows["task"] == check) & (rows["seed"] == seed)]
        curves = own["metric"].isin(["curve_x", "curve_y"])
        findings = [_finding(part) for _, part in own[~curves].groupby("method", sort=False)]
        drawn = [_curve(str(name), part) for name, part in own[curves].groupby("method", sort=False)]
        found[str(check), int(seed)] = Report(findings, drawn)
    return found


def _finding(rows: pd.DataFrame) -> Finding:
    records: dict[str, dict[Any, Any]] = {str(record["metric"]): record for record in rows.to_dict("records")}
    rule = next(rule for rule, metric in RULES.items() if metric in records)
    observed, tolerance = records["observed"], records.get("tolerance")
    part, _, statement = observed["method"].partition(": ")
    return Finding(
        part,
        statement,
        setting=observed["model"],
        predicted=records[RULES[rule]]["value"],
        observed=observed["value"],
        rule=rule,
        low=None if pd.isna(observed["ci_low"]) else observed["ci_low"],
        high=None if pd.isna(observed["ci_high"]) else observed["ci_high"],
        tolerance=None if tolerance is None else tolerance["value"],
    )


def _curve(method: str, rows: pd.DataFrame) -> Curve:
    panel, kind, name = method.split("|", 2)
    x, y = (rows[rows["metric"] == axis].sort_values("replicate") for axis in ("curve_x", "curve_y"))
    low, high = (y[side].to_numpy(float) for side in ("ci_low", "ci_high"))
    bare = bool(np.isnan(low).all())
    estimator = rows["estimator"].iloc[0]
    return Curve(
        panel,
        name,
        kind,
        x=x["value"].to_numpy(float),
        y=y["value"].to_numpy(float),
        low=None if bare else low,
        high=None if bare else high,
        estimator=None if pd.isna(estimator) else str(estimator),
    )
