"""Figures from results alone: rows in, matplotlib Figure out; no model is run.

Each function of `FIGURES` takes the rows of `results.read_results` and returns a figure whose label
(`Figure.get_label`) is its caption.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure

from grpo_repro.plots import mse

FIGURES: dict[str, Callable[[pd.DataFrame], Figure]] = {"mse": mse.draw}
"""Name on the command line -> function that draws it."""
