"""What became of a run, in plain data: it travels between processes as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DONE, FAILED, BAD_CONFIGURATION, INTERRUPTED = 0, 1, 2, 130
"""Exit codes of a run."""


@dataclass
class Outcome:
    """What became of a plan.

    Attributes:
        experiment: Name of the experiment.
        results_dir: Folder of the results.
        cells: Ids of the plan's cells, in its order.
        rows: Number of rows of each cell that is finished, by id.
        status: Exit code.
        failures: Message of each cell that failed, by id.
        error: Message that stopped the whole plan, if one did.
        plan: Label, state and estimate of each cell, for a dry run.
        device: What the plan's time and memory are of, in words.
        on_gpu: Whether that is a GPU.
    """

    experiment: str
    results_dir: str
    cells: list[str] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    status: int = DONE
    failures: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    plan: list[dict[str, Any]] = field(default_factory=list)
    device: str = ""
    on_gpu: bool = False


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """Join the outcomes of several jobs into one; a cell in two of them is counted once.

    Args:
        outcomes: At least one.

    Returns:
        The joint outcome.
    """
    first = outcomes[0]
    joint = Outcome(first.experiment, first.results_dir, device=first.device, on_gpu=first.on_gpu)
    for outcome in outcomes:
        fresh = [cell for cell in outcome.cells if cell not in joint.cells]
        joint.cells += fresh
        joint.plan += [entry for entry in outcome.plan if entry["cell"] in fresh]
        joint.rows |= outcome.rows
        joint.failures |= outcome.failures
        joint.status = max(joint.status, outcome.status)
        joint.error = joint.error or outcome.error
    return joint
