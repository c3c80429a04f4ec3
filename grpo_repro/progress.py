"""What a run says on stderr: one plan line, then bars on a terminal and sparse lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_repro.results import Estimate

SECONDS_BETWEEN_LINES = 30.0


def describe(experiment: str, total: int, estimates: Sequence[Estimate], folder: Path) -> str:
    """Return the line that comes before the work.

    Args:
        experiment: Name of the experiment.
        total: Number of cells of the plan.
        estimates: Of the cells that are still to run.
        folder: Where results go.
    """
    if not estimates:
        return f"{experiment}: all {total} cells are finished already, in {folder}"
    return f"{experiment}: {len(estimates)} of {total} cells to run, {cost(estimates)}, into {folder}"


def cost(estimates: Sequence[Estimate]) -> str:
    """Return completions, tokens, time and peak memory in words."""
    completions = sum(estimate.completions for estimate in estimates)
    tokens = sum(estimate.tokens for estimate in estimates)
    seconds = sum(estimate.seconds for estimate in estimates)
    memory = max((estimate.memory_bytes for estimate in estimates), default=0)
    sampled = f"{completions:,} completions, {tokens:,} tokens, " if completions else ""
    return f"{sampled}about {duration(seconds)}, {gib(memory)} GiB of memory"


def gib(size: int) -> str:
    """Return bytes in GiB, two digits or all before the point.

    >>> gib(2**29), gib(2**30 * 1234)
    ('0.5', '1,234')
    """
    return f"{size / 2**30:.2g}" if size < 99.5 * 2**30 else f"{size / 2**30:,.0f}"


def duration(seconds: float) -> str:
    """Return seconds as a person says them.

    >>> duration(9), duration(200), duration(9000)
    ('9 s', '3 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"


class Reporter:
    """Writes to stderr; a bar for the running cell if that is a terminal and `bars` allows it."""

    def __init__(self, bars: bool = True) -> None:
        """Make a reporter; nothing is written yet."""
        self._bars = bars and sys.stderr.isatty()
        self._display: Any = None
        self._task: Any = None
        self._label = ""
        self._last = 0.0
        if self._bars:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._display = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[what]}"),
                console=Console(stderr=True),
                transient=True,
            )

    def __enter__(self) -> Reporter:
        """Show the bar, if any."""
        if self._display is not None:
            self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._display is not None:
            self._display.stop()

    def say(self, message: str, error: bool = False) -> None:
        """Write one message at once."""
        text = f"error: {message}" if error else message
        if self._display is not None:
            self._display.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def start(self, label: str) -> None:
        """Note that a cell begins."""
        self._label, self._last = label, time.monotonic()
        if self._display is not None:
            self._clear()
            self._task = self._display.add_task(label, total=None, what="")
        else:
            self.say(f"{label}: started")

    def progress(self, done: int, total: int, what: str) -> None:
        """Note how far the cell is."""
        if self._display is not None and self._task is not None:
            self._display.update(self._task, completed=done, total=total, what=what)
        elif time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            self.say(f"{self._label}: {done}/{total} {what}")

    def finish(self, label: str, rows: int, seconds: float) -> None:
        """Note that a cell is written."""
        self._clear()
        self.say(f"{label}: done, {rows} rows, {duration(seconds)}")

    def _clear(self) -> None:
        if self._display is not None and self._task is not None:
            self._display.remove_task(self._task)
            self._task = None
