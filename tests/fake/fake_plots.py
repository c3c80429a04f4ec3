"""Figures for tests of `grpo plot`."""

from __future__ import annotations

from grpo_repro.errors import UserError


def draw_mse(rows):
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot(rows["group_size"].to_numpy(), rows["value"].to_numpy())
    return figure


def draw_budget(rows):
    raise UserError("no rows of the experiment 'budget'; run it first")


FIGURES = {"mse": draw_mse, "budget": draw_budget}
