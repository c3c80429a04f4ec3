"""What an experiment's command prints on stdout: a short table, or one JSON object."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from grpo_repro.config import EXPERIMENTS
from grpo_repro.outcome import INTERRUPTED, Outcome


def print_outcome(outcome: Outcome, as_json: bool, sweep: bool = False) -> None:
    """Print the outcome of a run, or the plan of a dry run.

    Args:
        outcome: Joint outcome of all jobs.
        as_json: Whether to print exactly one JSON object instead of a table.
        sweep: Whether jobs ran elsewhere, so that their failures have to be said here.
    """
    if outcome.error is not None:
        print(f"error: {outcome.error}", file=sys.stderr)
    if sweep:
        cells: dict[str, list[str]] = {}
        for cell, message in outcome.failures.items():
            cells.setdefault(message, []).append(cell)
        for message, failed in cells.items():
            which = f"cell{'s' if len(failed) > 1 else ''} {', '.join(failed)}"
            print(f"error: {which} failed: {message}", file=sys.stderr)
    if as_json:
        print(json.dumps(as_dict(outcome)))
    elif outcome.plan:
        _print(_plan_table(outcome))
    elif outcome.rows:
        _print(_summary(outcome))


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Return the JSON object of an outcome; with the plan of a dry run, and failures where there are any."""
    found: dict[str, Any] = {
        "experiment": outcome.experiment,
        "cells": outcome.cells,
        "rows": sum(outcome.rows.values()),
        "results_dir": outcome.results_dir,
    }
    if outcome.plan:
        found |= {"device": outcome.device, "plan": outcome.plan}
    module = importlib.import_module(EXPERIMENTS[outcome.experiment])
    if outcome.rows and hasattr(module, "details"):
        found |= module.details(_rows(outcome))
    if outcome.failures:
        found["failures"] = outcome.failures
    if outcome.error is not None:
        found["error"] = outcome.error
    elif outcome.status == INTERRUPTED:
        found["error"] = "interrupted; the same command resumes"
    return found


def _print(renderable: Any) -> None:
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    if not sys.stdout.isatty():
        # A pipe has no width: rich's 80 columns would cut numbers off, and one line is easier to search than three.
        console = Console(width=10_000)
        console = Console(width=max(160, Measurement.get(console, console.options, renderable).maximum))
    console.print(renderable)


def _plan_table(outcome: Outcome) -> Any:
    from rich.table import Table

    from grpo_repro.progress import cost, duration, gib
    from grpo_repro.results import Estimate

    names = ("completions", "tokens", "seconds", "memory_bytes")
    table = Table(title=f"{outcome.experiment}: plan, nothing was run")
    for column in ("cell", "label", "state"):
        table.add_column(column)
    for column in ("completions", "tokens", "time", "memory (GiB)"):
        table.add_column(column, justify="right")
    for entry in outcome.plan:
        table.add_row(
            entry["cell"],
            entry["label"],
            "finished" if entry["finished"] else "to run",
            f"{entry['completions']:,}",
            f"{entry['tokens']:,}",
            duration(entry["seconds"]),
            gib(entry["memory_bytes"]),
        )
    to_run = [Estimate(*(entry[name] for name in names)) for entry in outcome.plan if not entry["finished"]]
    hours = sum(estimate.seconds for estimate in to_run) / 3600
    lines = [f"to run: {len(to_run)} of {len(outcome.plan)} cells, {cost(to_run)}"]
    if outcome.on_gpu:
        lines.append(f"{hours:,.{0 if hours >= 100 else 2}f} GPU hours, cells one after the other or on a GPU each")
    table.caption = "\n".join([*lines, *_assumptions(outcome)])
    return table


def _assumptions(outcome: Outcome) -> list[str]:
    """What a plan's time and memory rest on: the device, the parts of the largest cell, sizes and lengths."""
    largest = max(outcome.plan, key=lambda entry: entry["memory_bytes"])
    lines = [f"device: {outcome.device}"]
    parts = sorted(largest["parts"].items(), key=lambda item: -item[1])
    if parts:
        listed = ", ".join(f"{name} {size / 2**30:.3g}" for name, size in parts if size)
        lines.append(f"memory of {largest['label']} (GiB): {listed}")
    return lines + list(dict.fromkeys(note for entry in outcome.plan for note in entry["notes"]))


def _summary(outcome: Outcome) -> Any:
    return importlib.import_module(EXPERIMENTS[outcome.experiment]).summary(_rows(outcome))


def _rows(outcome: Outcome) -> Any:
    from grpo_repro.results import read_results

    rows = read_results(outcome.results_dir, outcome.experiment)
    return rows[rows["cell_id"].isin(outcome.cells)]
