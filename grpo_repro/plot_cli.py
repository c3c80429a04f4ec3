"""`grpo plot`: from a results folder to image files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_repro.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("png", "pdf", "svg")
THEORY = "theory"
"""Stands for the figures of all checks."""

VECTOR_FONTS: Any = {"pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "grpo-repro"}
"""TrueType in PDF, outlines in SVG: printers and journals take both, and the files are reproducible."""


def draw(names: list[str], results: Path, out: Path, image_format: str, models: Sequence[str] = ()) -> list[Path]:
    """Draw figures from results.

    Args:
        names: Figures; empty means all that have data.
        results: Folder of the results.
        out: Folder of the image files.
        image_format: `png`, `pdf` or `svg`.
        models: Policies that are drawn; none means all.

    Returns:
        The files of the figures; beside each that has a caption lies `<figure>.caption.txt`, and beside some lie
        their numbers as text (`plots.TEXTS`), such as `table2.csv`.

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
    from grpo_repro import plots
    from grpo_repro.results import read_results

    theory, texts = getattr(plots, "THEORY", {}), getattr(plots, "TEXTS", {})
    figures = plots.FIGURES | theory

    unknown = [name for name in names if name not in figures and name != THEORY]
    if unknown:
        raise UserError(f"unknown figure {unknown[0]!r}; known: {', '.join([*plots.FIGURES, THEORY, *theory])}")
    rows = read_results(results)
    if rows.empty:
        state = "holds no results" if results.is_dir() else "does not exist"
        first = "theory" if names and all(name == THEORY or name in theory for name in names) else "mse-eval"
        raise UserError(f"{results} {state}; run `grpo {first}` first or name another folder with --results DIR")
    rows = _only(rows, models, results)
    wanted, empty = _wanted(names, rows, list(plots.FIGURES), list(theory))
    paths = []
    for name in wanted:
        try:
            figure = figures[name](rows)
            beside = texts[name](rows) if name in texts else {}
        except UserError as error:
            # Asked for by name it is an error; among all figures it only has no data yet.
            if name in names:
                raise
            empty.append(f"{name}: {error}")
            continue
        paths.append(_save(figure, out / f"{name}.{image_format}", beside))
    for line in empty:
        print(f"left out {line}", file=sys.stderr)
    if not paths:
        first = "theory" if names == [THEORY] else "mse-eval"
        raise UserError(f"no figure has data in {results}; run `grpo {first}` first")
    return paths


def _wanted(
    names: Sequence[str], rows: pd.DataFrame, figures: list[str], theory: list[str]
) -> tuple[list[str], list[str]]:
    """The figures to draw, and what is said of those that are not even tried.

    `theory` stands for the figures of all checks; where no check has been run one line speaks for them.
    """
    every = [name for word in names or [*figures, THEORY] for name in (theory if word == THEORY else [word])]
    if (rows["experiment"] == THEORY).any():
        return list(dict.fromkeys(every)), []
    asked = not names or THEORY in names
    line = f"{THEORY}: there are no results of a check; run `grpo theory` first"
    return list(dict.fromkeys(x for x in every if x not in theory or x in names)), [line] if asked else []


def _only(rows: pd.DataFrame, models: Sequence[str], results: Path) -> pd.DataFrame:
    """Keep some policies' rows; `tabular` names all of its families. Checks of the theory are of no policy."""
    import pandas as pd

    if not models:
        return rows
    rows = rows[rows["experiment"] != THEORY]
    if rows.empty:
        raise UserError(f"{results} holds checks of the theory only, which are of no policy; leave --model out")
    kept = pd.Series(not models, index=rows.index)
    for model in models:
        named = (rows["model"] == model) | rows["model"].str.startswith(f"{model}:")
        if not named.any():
            known = ", ".join(sorted(set(rows["model"])))
            raise UserError(f"no results of model {model!r} in {results}; there are {known}")
        kept |= named
    return rows[kept]


def _save(figure: object, path: Path, beside: dict[str, str]) -> Path:
    import matplotlib
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    # A figure's caption is its label; without a date, equal results give equal files.
    caption = str(figure.get_label())
    key = {"png": "Description", "pdf": "Subject", "svg": "Description"}[path.suffix[1:]]
    dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(path.suffix[1:], {})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(VECTOR_FONTS):
            figure.savefig(path, metadata=dates | ({key: caption} if caption else {}))
        if caption:
            path.with_suffix(".caption.txt").write_text(caption, encoding="utf-8")
        for suffix, text in beside.items():
            path.with_suffix(suffix).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another with --out DIR") from error
    finally:
        pyplot.close(figure)
    return path
