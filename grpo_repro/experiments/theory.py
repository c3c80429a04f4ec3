"""`grpo theory`: numerical checks of the paper's statements (docs/theory.md).

A cell is one check and one seed. Its identity holds a hash of the package's code: after a change of any formula a check
runs again, where other experiments keep what they measured.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd

import grpo_repro
from grpo_repro.cells import Cell, Estimate, Progress
from grpo_repro.machine import CPU, Machine
from grpo_repro.schema import TheoryConfig
from grpo_repro.theory.catalog import CHECKS

RUNS = TheoryConfig.runs


def plan(config: TheoryConfig) -> list[Cell]:
    """List the checks: one cell for each and each seed.

    Args:
        config: A validated configuration.

    Returns:
        Cells in the order of the names that were given, that of the paper by default.
    """
    values = {"confidence": config.confidence, "code": _code(), "results_dir": config.results_dir}
    return [
        Cell("theory", values | {"check": name, "seed": seed} | ({"runs": config.runs} if _simulated(name) else {}),
             name + (f" seed {seed}" if len(config.seeds) > 1 else ""))
        for seed in config.seeds
        for name in config.checks or CHECKS
    ]  # fmt: skip


def _simulated(name: str) -> bool:
    return CHECKS[name].simulated


@cache
def _code() -> str:
    """Hash of the package's modules."""
    folder = Path(grpo_repro.__file__).parent
    digest = sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def run(cell: Cell, workdir: Path, progress: Progress) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Run one check.

    Args:
        cell: One of `plan`.
        workdir: Not used: a check takes less than a minute and starts again after an interruption.
        progress: Called with (steps done, steps in all, what).

    Returns:
        Rows of the results schema (`theory.rows`) and the manifest's facts.
    """
    from grpo_repro.theory.finding import Work
    from grpo_repro.theory.rows import to_frame

    config = cell.config
    work = Work(config["seed"], config.get("runs", RUNS), config["confidence"], progress)
    report = CHECKS[config["check"]].function(config["check"])(work)
    return to_frame(config["check"], report, config["seed"], config["confidence"]), {"dtype": "float64"}


def estimate(cell: Cell, machine: Machine = CPU) -> Estimate:
    """The time that the check took on one core of a laptop, scaled to the number of runs."""
    entry = CHECKS[cell.config["check"]]
    share = max(1.0, cell.config.get("runs", RUNS) / RUNS)
    return Estimate(0, 0, entry.seconds * share, int(400_000_000 + share * 1e8))


def failures(rows: pd.DataFrame) -> dict[str, str]:
    """Message of each cell with a statement that does not hold."""
    from grpo_repro.theory.rows import from_frame

    messages = {}
    for cell, own in rows.groupby("cell_id"):
        for (check, _), report in from_frame(own).items():
            broken = [finding for finding in report.findings if not finding.passed]
            if broken:
                first = broken[0]
                more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
                messages[str(cell)] = (
                    f"{check} does not hold: {first.part}: {first.statement}: predicted {first.rule} "
                    f"{first.predicted:.6g}, observed {first.observed:.6g}{more}"
                )
    return messages


def details(rows: pd.DataFrame) -> dict[str, Any]:
    """What `--json` says beyond the cells: every statement with its verdict."""
    from grpo_repro.theory.rows import from_frame

    return {
        "checks": [
            {"check": check, "seed": seed, **asdict(finding), "passed": finding.passed}
            for (check, seed), report in from_frame(rows).items()
            for finding in report.findings
        ]
    }


def summary(rows: pd.DataFrame) -> Any:
    """One line for each statement: predicted, observed, interval or tolerance, verdict."""
    from grpo_repro.theory.table import table

    return table(rows)
