"""Figures from results alone: rows in, matplotlib Figure out; no model is run.

Each function of `FIGURES` takes the rows of `results.read_results` and returns a figure whose label
(`Figure.get_label`) is its caption. Those of `TEXTS` return the files that lie beside a figure.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure

from grpo_repro.plots import accuracy, gap, mse, table2, table2_text, theory, universality, universality_text

FIGURES: dict[str, Callable[[pd.DataFrame], Figure]] = {
    "mse": mse.draw,
    "gap": gap.draw,
    "accuracy": accuracy.draw,
    "table2": table2.draw,
    "universality": universality.draw,
}
"""Name on the command line -> function that draws it."""

THEORY: dict[str, Callable[[pd.DataFrame], Figure]] = theory.figures()
"""The same for the checks of the theory; the name `theory` stands for all of them."""

TEXTS: dict[str, Callable[[pd.DataFrame], dict[str, str]]] = {
    "table2": table2_text.texts,
    "universality": universality_text.texts,
}
"""Figure -> function that returns its companion files: suffix (`.csv`) -> text."""
