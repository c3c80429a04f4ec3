"""The table of `grpo theory`: one line for each statement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpo_repro.theory.catalog import CHECKS
from grpo_repro.theory.finding import AT_LEAST, AT_MOST, EQUAL, REPORTED, Finding
from grpo_repro.theory.rows import from_frame

WIDE = 150
"""Columns of a terminal from which the table is readable."""
SIGNS = {EQUAL: "", AT_MOST: "<= ", AT_LEAST: ">= ", REPORTED: ""}


def table(rows: pd.DataFrame) -> Group:
    """Return the printable table and its last line.

    Args:
        rows: Rows of the experiment `theory`.
    """
    reports = from_frame(rows)
    names = list(CHECKS)
    shown = Table(title="numerical checks of the paper's statements", title_justify="left", box=SIMPLE, pad_edge=False)
    shown.add_column("check", no_wrap=True)
    shown.add_column("statement", ratio=3)
    shown.add_column("setting", ratio=2)
    for column in ("predicted", "observed", "interval or tolerance"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    several = len({seed for _, seed in reports}) > 1
    for (check, seed), report in sorted(reports.items(), key=lambda item: (names.index(item[0][0]), item[0][1])):
        for i, finding in enumerate(report.findings):
            name = check + (f" seed {seed}" if several else "") if i == 0 else ""
            shown.add_row(
                Text(name), *(Text(cell) for cell in _cells(finding)), end_section=finding is report.findings[-1]
            )
    lines = [f"{check}: {in_words(x)}" for (check, _), report in reports.items() for x in report.findings]
    return Group(
        _Fitting(shown, lines),
        _last_line([finding for report in reports.values() for finding in report.findings], rows),
    )


def in_words(finding: Finding) -> str:
    """One finding as a sentence, for captions and narrow terminals."""
    statement, setting, predicted, observed, margin, verdict = _cells(finding)
    verdict = "reported" if finding.rule == REPORTED else verdict
    held = "reference" if finding.rule == REPORTED else "predicted"
    return f"{statement} ({setting}): {held} {predicted}, observed {observed}{' ' * bool(margin)}{margin}: {verdict}."


@dataclass(frozen=True)
class _Fitting:
    """A table where there is room for it, else its lines as sentences."""

    table: Table
    lines: list[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self.table if options.max_width >= WIDE else Group(*(Padding(Text(x), (0, 0, 1, 0)) for x in self.lines))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.table)


def _cells(finding: Finding) -> tuple[str, str, str, str, str, str]:
    predicted = SIGNS[finding.rule] + f"{finding.predicted:.6g}"
    if finding.low is not None and finding.high is not None:
        margin = f"[{finding.low:.5g}, {finding.high:.5g}]"
    else:
        margin = "" if not finding.tolerance or finding.rule == REPORTED else f"within {finding.tolerance:.2g}"
    verdict = "-" if finding.rule == REPORTED else "holds" if finding.passed else "FAILS"
    return finding.statement, finding.setting, predicted, f"{finding.observed:.6g}", margin, verdict


def _last_line(findings: list[Finding], rows: pd.DataFrame) -> Text:
    decided = [finding for finding in findings if finding.rule != REPORTED]
    failed = sum(not finding.passed for finding in decided)
    chance = sum(finding.low is not None for finding in decided)
    levels = ", ".join(f"{level:.6g}" for level in sorted(rows["ci_level"].dropna().unique()))
    verdict = f"{failed} of {len(decided)} FAIL" if failed else f"all {len(decided)} hold"
    by_chance = f"; {chance} are decided by an interval of level {levels}" if chance else ""
    return Text(f"{verdict}; {len(findings) - len(decided)} reported without a verdict{by_chance}")
