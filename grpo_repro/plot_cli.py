"""`grpo plot`: from a results folder to image files."""

from __future__ import annotations

import sys
from pathlib import Path

from grpo_repro.errors import UserError

FORMATS = ("png", "pdf", "svg")


def draw(names: list[str], results: Path, out: Path, image_format: str) -> list[Path]:
    """Draw figures from results.

    Args:
        names: Figures; empty means all that have data.
        results: Folder of the results.
        out: Folder of the image files.
        image_format: `png`, `pdf` or `svg`.

    Returns:
        The files written.

    Raises:
        UserError: If a figure, the format or the results cannot be used.
    """
    if image_format not in FORMATS:
        raise UserError(f"unknown format {image_format!r}; use one of {', '.join(FORMATS)}")
    if results.exists() and not results.is_dir():
        raise UserError(f"{results} is a file; name the folder of the results with --results DIR")
    import matplotlib

    # Figures are files: no display is needed, whatever MPLBACKEND says.
    matplotlib.use("Agg")
    from grpo_repro.plots import FIGURES
    from grpo_repro.results import read_results

    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise UserError(f"unknown figure {unknown[0]!r}; known: {', '.join(FIGURES)}")
    rows = read_results(results)
    if rows.empty:
        state = "holds no results" if results.is_dir() else "does not exist"
        raise UserError(
            f"{results} {state}; run `grpo mse-eval` first or name another folder with --results DIR"
        )
    paths, empty = [], []
    for name in names or list(FIGURES):
        try:
            figure = FIGURES[name](rows)
        except UserError as error:
            # Asked for by name it is an error; among all figures it only has no data yet.
            if names:
                raise
            empty.append(f"{name}: {error}")
            continue
        paths.append(_save(figure, out / f"{name}.{image_format}"))
    for line in empty:
        print(f"left out {line}", file=sys.stderr)
    if not paths:
        raise UserError(f"no figure has data in {results}; run `grpo mse-eval` first")
    return paths


def _save(figure: object, path: Path) -> Path:
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another with --out DIR") from error
    finally:
        pyplot.close(figure)
    return path
