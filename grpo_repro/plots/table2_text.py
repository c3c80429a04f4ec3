"""`table2` as text: caption, CSV, LaTeX and plain text."""

from __future__ import annotations

import csv
import io
import math

import pandas as pd

from grpo_repro import paper
from grpo_repro.plots import training_names as names
from grpo_repro.plots.table2_data import CONFIDENCE, Line, Table, tables

COLUMNS = (
    "source", "model", "task", "estimator", "method", "metric", "iteration", "budget", "group_size", "runs",
    "mean", "ci_low", "ci_high", "ci_level", "standard_error", "best", "indistinguishable", "best_low", "best_high",
)  # fmt: skip
ESCAPES = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip


def texts(rows: pd.DataFrame) -> dict[str, str]:
    """Return the files beside the figure: suffix -> text.

    Args:
        rows: Rows of the results schema.

    Raises:
        UserError: If there are no trained policies.
    """
    found = tables(rows)
    return {".csv": as_csv(found), ".tex": as_latex(found), ".txt": as_text(found)}


def decimals(table: Table) -> int:
    """Decimals of means and half-widths: as the paper's four, more where a gap is smaller than .01."""
    means = [abs(mean.value) for line in table.lines for mean in line.selection.means if mean.value]
    return min(8, max(4, 2 - math.floor(math.log10(min(means))))) if means else 4


def error(line: Line, place: int, digits: int, scale: float = 1.0) -> str:
    """Write the half-width of an interval, or the standard error of a published accuracy."""
    mean = line.selection.means[place]
    if line.iteration is None:
        return names.short(scale * line.standard_error[place], digits)
    return names.short(scale * (mean.value - mean.low), digits) if math.isfinite(mean.low) else "none"


def describe(found: list[Table]) -> str:
    """Return the caption: what the cells hold, then the choice of each line."""
    metric = names.METRIC_NAMES[found[0].metric]
    level = f"{CONFIDENCE:.0%}"
    text = [
        f"Final {metric} for each budget N (completions per update) and group size G. Cells of our runs: mean ± "
        f"half-width of the {level} Student t interval over runs (none for one run), in brackets the number of runs.",
        "The paper's Table 2 as published, one run each: ± is one binomial standard error √(p(1−p)/5000) over its "
        "5,000 test questions; the spread between training runs, which single runs do not show, comes on top.",
        "Framed: the best G of each line; dots: group sizes not told from it. Darker is better, within each table.",
    ]
    if found[0].metric == "suboptimality_gap":
        text.append("Tabular policies have no test accuracy: their gap J* − J is exact, and smaller is better.")
    paragraphs = [" ".join(text)]
    for table in found:
        paragraphs.append("\n".join([f"{table.title}.", *(_choice(line) for line in table.lines)]))
    return "\n\n".join(paragraphs) + "\n"


def _choice(line: Line) -> str:
    n = "" if line.iteration is None else f", n = {line.iteration}"
    runs = f"{line.runs} runs" if line.runs > 1 else "1 run"
    return f"N = {line.budget}{n} ({runs}): {names.best(line.selection)}."


def as_csv(found: list[Table]) -> str:
    """Return one line for each cell, numbers in full precision; an unknown one is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for table in found:
        setting = table.setting
        what = (
            ["here", setting.model, setting.task, setting.estimator, setting.method]
            if setting
            else ["paper", paper.TABLE2.model, paper.TABLE2.task, "grpo", ""]
        )
        for line in table.lines:
            chosen = line.selection
            for place, (size, mean) in enumerate(zip(chosen.group_sizes, chosen.means, strict=True)):
                numbers = (mean.value, mean.low, mean.high, CONFIDENCE, line.standard_error[place])
                writer.writerow([
                    *what, table.metric, "" if line.iteration is None else line.iteration, line.budget, size,
                    line.runs, *(repr(float(x)) if math.isfinite(x) else "" for x in numbers),
                    int(size == chosen.best), int(size in chosen.indistinguishable),
                    chosen.best_low, chosen.best_high,
                ])  # fmt: skip
    return out.getvalue()


def as_latex(found: list[Table]) -> str:
    """Return one `tabular` for each table; they need the package booktabs and nothing else."""
    parts = [
        "% Needs \\usepackage{booktabs}. Bold: best G of the line; asterisk: not told from it.",
        f"% Our runs: mean and half-width of the {CONFIDENCE:.0%} interval over runs;",
        "% the paper's: accuracy and binomial standard error, one run each.",
    ]
    for table in found:
        sizes, digits = table.group_sizes, decimals(table)
        head = " & ".join(["$N$", *(f"$G={size}$" for size in sizes), "runs"])
        body = [
            " & ".join([str(line.budget), *(_latex_cell(line, size, digits) for size in sizes), str(line.runs)])
            + r" \\"
            for line in table.lines
        ]
        columns = len(sizes) + 2
        title = "".join(ESCAPES.get(letter, letter) for letter in table.title)
        parts += [
            "", rf"\begin{{tabular}}{{r{'c' * len(sizes)}r}}", r"\toprule",
            rf"\multicolumn{{{columns}}}{{l}}{{{title}}} \\", r"\midrule", rf"{head} \\", r"\midrule", *body,
            r"\bottomrule", r"\end{tabular}",
        ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _latex_cell(line: Line, size: int, digits: int) -> str:
    chosen = line.selection
    if size not in chosen.group_sizes:
        return "--"
    place = chosen.group_sizes.index(size)
    value, half = names.short(chosen.means[place].value, digits), error(line, place, digits)
    value = value.replace("−", "-")
    number = rf"\mathbf{{{value}}}" if size == chosen.best else value
    star = r"^{\ast}" if size in chosen.indistinguishable and size != chosen.best else ""
    return f"${number}{star}$" if half == "none" else rf"${number}{star} \pm {half}$"


def as_text(found: list[Table]) -> str:
    """Return the tables in columns of fixed width, the best G of a line marked `*`, those not told from it `.`."""
    parts = [describe(found)]
    parts.append("Below: * the best G of a line, . not told from it.\n")
    for table in found:
        digits = decimals(table)
        lines = [["N", *(f"G = {size}" for size in table.group_sizes), "runs"]]
        for line in table.lines:
            cells = [_text_cell(line, size, digits) for size in table.group_sizes]
            lines.append([str(line.budget), *cells, str(line.runs)])
        widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
        shown = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        parts.append("\n".join([table.title, *shown]) + "\n")
    return "\n".join(parts)


def _text_cell(line: Line, size: int, digits: int) -> str:
    chosen = line.selection
    if size not in chosen.group_sizes:
        return "- "
    place = chosen.group_sizes.index(size)
    mark = "*" if size == chosen.best else "." if size in chosen.indistinguishable else " "
    half = error(line, place, digits)
    value = names.short(chosen.means[place].value, digits)
    return f"{value} ± {half}{mark}" if half != "none" else f"{value}{mark}"
