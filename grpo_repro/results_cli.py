"""`grpo results`: what is done with finished results beside drawing them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

results_app = typer.Typer(name="results", help="Keep results.", no_args_is_help=True, rich_markup_mode=None)


@results_app.callback()
def _group() -> None:
    """Keep results."""


@results_app.command("pack")
def pack(
    experiments: Annotated[list[str], typer.Argument(metavar="EXPERIMENT", help="mse-eval, group-size, ...")],
    results: Annotated[Path, typer.Option("--results", help="Folder of the results.")] = Path("results"),
    out: Annotated[Path, typer.Option("--out", help="Folder of the packed results.")] = Path("results/packed"),
) -> None:
    """Write all finished cells of an experiment as one table and one file of manifests; figures read both forms.

    Example: grpo results pack group-size budget --out reference
    """
    from grpo_repro import reuse

    for experiment in experiments:
        reuse.finished(results, experiment)
    for experiment in dict.fromkeys(experiments):
        count = reuse.pack(results, out, experiment)
        print(f"{out / experiment}: {count} cells")
