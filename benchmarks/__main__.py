"""Run every benchmark, print a table, write `benchmarks/results.json`.

python -m benchmarks [sampling|score_norms|interval_width|training]...

`training` needs the extra `bench`; without it, it is left out, or is an error if it was asked for by name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import interval_width, sampling, score_norms, training
from benchmarks.common import Result, Skipped

BENCHMARKS = {
    "sampling": sampling.run, "score_norms": score_norms.run, "interval_width": interval_width.run,
    "training": training.run,
}  # fmt: skip


def main(names: list[str]) -> None:
    """Run the named benchmarks, or all."""
    torch.set_num_threads(1)  # both sides, as experiments run models of this size: timings then hold on a busy machine
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        sys.exit(f"unknown benchmark {', '.join(unknown)}; known: {', '.join(BENCHMARKS)}")
    results: list[Result] = []
    for name in names or BENCHMARKS:
        try:
            results += BENCHMARKS[name]()
        except Skipped as reason:
            print(f"{name} left out: {reason}", file=sys.stderr)
            if names:
                sys.exit(2)
    table = Table(title="ratio: theirs / ours for times, ours / theirs for memory and widths")
    for column in ("benchmark", "ours", "theirs", "ratio", "target"):
        table.add_column(column, justify="left" if column == "benchmark" else "right")
    for line in results:
        table.add_row(line.name, f"{line.ours:g}", f"{line.theirs:g}", f"{line.ratio:g}", line.target)
    Console(width=140).print(table)
    target = Path(__file__).parent / "results.json"
    if not names:
        target.write_text(json.dumps([line.as_dict() for line in results], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
