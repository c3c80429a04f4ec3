"""Figures of training runs show what the rows hold: means, intervals, the best G, predictions."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from training_rows import SIZES, artist, gids, runs, values

from grpo_repro import plot_cli, selection, stats
from grpo_repro.cells import Cell
from grpo_repro.errors import UserError
from grpo_repro.plots import FIGURES, accuracy, gap, size_grid, training_data
from grpo_repro.results import ResultsWarning, write_cell

TRAINED = [name for name in FIGURES if name != "mse"]


# -- gap and accuracy


@pytest.mark.parametrize(("name", "metric"), [("gap", "suboptimality_gap"), ("accuracy", "accuracy")])
def test_points_are_means_and_bars_their_student_intervals(name, metric):
    rows = runs()
    figure = FIGURES[name](rows)
    assert [ax.get_title() for ax in figure.axes] == ["$n$ = 20", "$n$ = 40"]
    for ax, n in zip(figure.axes, (20, 40), strict=True):
        intervals = [stats.mean_interval(values(rows, metric, n, size), 0.95) for size in SIZES]
        expected = [(size, each.value) for size, each in zip(SIZES, intervals, strict=True)]
        np.testing.assert_allclose(artist(ax, "means").get_xydata(), expected, rtol=1e-12)
        bars = np.array(artist(ax, "bars").get_segments())
        np.testing.assert_allclose(bars[:, :, 1], [(each.low, each.high) for each in intervals], rtol=1e-12)
        dots = artist(ax, "runs").get_xydata()
        found = [(size, value) for size in SIZES for value in values(rows, metric, n, size)]
        np.testing.assert_allclose(sorted(map(tuple, dots)), sorted(found), rtol=1e-12)
        (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
        assert ((left < dots[:, 0]) & (dots[:, 0] < right) & (bottom < dots[:, 1]) & (dots[:, 1] < top)).all()


@pytest.mark.parametrize(("name", "sign"), [("gap", 1), ("accuracy", -1)])
@pytest.mark.parametrize("noise", [0.001, 0.2])
def test_marks_are_the_selection_of_the_run_table(name, sign, noise):
    rows = runs(noise=noise)
    metric = {"gap": "suboptimality_gap", "accuracy": "accuracy"}[name]
    for ax, n in zip(FIGURES[name](rows).axes, (20, 40), strict=True):
        table = np.column_stack([values(rows, metric, n, size) for size in SIZES])
        chosen = selection.select(sign * table, SIZES)
        assert list(artist(ax, "best").get_xdata()) == [chosen.best]
        assert list(artist(ax, "best interval").get_xdata()) == [chosen.best_low, chosen.best_high]
        marked = {gid: set(artist(ax, gid).get_xdata()) for gid in ("equal", "worse") if gid in gids(ax)}
        assert marked.get("equal", set()) == set(chosen.indistinguishable) - {chosen.best}
        assert marked.get("worse", set()) == set(SIZES) - set(chosen.indistinguishable) - {chosen.best}
        if noise < 0.1:
            assert chosen.best == 8 and marked == {"worse": {4, 16}}
        else:
            assert marked["equal"]


def test_predictions_are_medians_on_the_axis_of_g_or_arrows_beyond_it():
    first, last = FIGURES["gap"](runs()).axes
    for ax, now in ((first, 7.0), (last, 8.0)):
        # Values at G = 4, 8, 16 are one below, at and one above the middle.
        assert artist(ax, "predicted start").get_xdata()[0] == 6.0
        assert artist(ax, "predicted now").get_xdata()[0] == now
        band = artist(ax, "band now")
        assert (band.get_x(), band.get_x() + band.get_width()) == (now - 1.5, now + 1.5)
    rows = runs()
    rows.loc[(rows["metric"] == "optimal_group_size") & (rows["iteration"] == 0), "value"] = np.inf
    (ax, _) = FIGURES["gap"](rows).axes
    assert "predicted start" not in gids(ax)
    assert artist(ax, "predicted beyond start").get_marker() == ">"
    assert "predicted G* at the initial policy ∞ [4.50, 7.50]" in FIGURES["gap"](rows).get_label()


def test_exact_replicates_have_no_dots_and_no_band():
    rows = runs(model="tabular", task="bandit", seeds=1, tabular=40, optimizer="sgd", learning_rate=2.0)
    exact = rows["metric"] == "optimal_group_size"
    for end in ("ci_low", "ci_high"):
        rows.loc[exact, end] = rows.loc[exact, "value"].median()
    figure = FIGURES["gap"](rows)
    assert not {"runs", "band start", "band now"} & gids(figure.axes[0])
    assert "(40 runs)" in figure.get_label() and "tabular, bandit, N = 64: sgd, constant 2" in figure.get_label()
    with pytest.raises(UserError, match="no accuracy of trained policies.*draw `gap` instead"):
        FIGURES["accuracy"](rows)


def test_caption_holds_every_number_and_greedy_accuracy_is_a_line():
    rows = runs()
    text = gap.draw(rows).get_label()
    assert FIGURES["gap"](rows).get_label() == text
    each = stats.mean_interval(values(rows, "suboptimality_gap", 40, 8), 0.95)
    for part in (
        f"G = 8: {each.value:.3f} [{each.low:.3f}, {each.high:.3f}]", "n = 20 (6 runs)", "best G = 8 [8, 8]",
        "told from all others", "at the initial policy 6.00 [4.50, 7.50]", "at n = 40 8.00 [6.50, 9.50]",
        "bundled-base, arithmetic, N = 64: adamw, constant 3e-4, pool 500 (i.i.d.).",
    ):  # fmt: skip
        assert part in text, part
    figure = FIGURES["accuracy"](rows)
    means = [values(rows, "greedy_accuracy", 20, size).mean() for size in SIZES]
    np.testing.assert_allclose(artist(figure.axes[0], "lighter").get_ydata(), means)
    assert f"greedy {means[0]:.3f} at G = 4" in figure.get_label() == accuracy.draw(rows).get_label()
    assert "at G = 32 for n = 300, 400, 600, 800 and the last n, but not for n = 200" in figure.get_label()


def test_one_run_has_no_interval_and_one_group_size_is_enough():
    ax = FIGURES["gap"](runs(seeds=1)).axes[0]
    assert len(artist(ax, "bars").get_segments()) == 0 and len(artist(ax, "means").get_xdata()) == 3
    for name in TRAINED:
        FIGURES[name](runs(sizes=(8,), steps=(5,))).canvas.draw()
    assert list(artist(FIGURES["gap"](runs(sizes=(8,))).axes[0], "best").get_xdata()) == [8]


def test_the_axis_is_logarithmic_when_the_means_span_a_decade():
    rows = runs(noise=0.0)
    assert FIGURES["gap"](rows).axes[0].get_yscale() == "linear"
    wide = rows.assign(value=rows["value"].where(rows["group_size"] != 8, rows["value"] / 50))
    assert FIGURES["gap"](wide).axes[0].get_yscale() == "log"


def test_rows_beyond_six_are_left_out_by_runs_and_named():
    rows = pd.concat([runs(seeds=2 + (k > 0), learning_rate=0.01 * (k + 1), steps=(5,)) for k in range(7)])
    found = size_grid.grid(training_data.choices(rows))
    assert len(found.rows) == 6 and ["constant 0.01," in title for title in found.left_out] == [True]
    assert "Left out for lack of space, 1 with the fewest runs: " + found.left_out[0] in gap.draw(rows).get_label()
    steps = tuple(range(5, 45, 5))
    (row,) = size_grid.grid(training_data.choices(runs(steps=steps))).rows
    assert len(row) == 6 and (row[0].iteration, row[-1].iteration) == (5, 40)
    assert "Not all checkpoints are shown" in gap.draw(runs(steps=steps)).get_label()


def test_a_run_held_by_two_experiments_counts_once_and_single_runs_do_not():
    rows = pd.concat([runs(), runs(experiment="iterations"), runs(experiment="train", best=4)])
    pd.testing.assert_frame_equal(training_data.training_rows(rows), runs())
    assert gap.draw(rows).get_label() == gap.draw(runs()).get_label()


def test_runs_that_form_no_table_are_left_out_with_a_warning_or_an_error():
    rows = runs()
    apart = (rows["iteration"] == 20) & ((rows["seed"] < 3) != (rows["group_size"] == 8))
    with pytest.warns(ResultsWarning, match="N = 64, n = 20: no run .seed. exists at every group size"):
        (choice,) = training_data.choices(rows[~apart])
    assert (choice.iteration, choice.runs) == (40, tuple((seed, -1) for seed in range(6)))
    with pytest.raises(UserError, match="n = 20: no run .seed. exists at every group size"):
        training_data.choices(rows[~apart & (rows["iteration"] < 40)])
    # A run that one group size still lacks is left out at all of them.
    (_, last) = training_data.choices(rows[(rows["seed"] < 5) | (rows["group_size"] != 16) | (rows["iteration"] < 40)])
    assert last.selection.runs == 5 and last.runs == tuple((seed, -1) for seed in range(5))


def test_titles_say_what_tells_settings_apart():
    titles = size_grid.grid(
        training_data.choices(pd.concat([runs(steps=(5,)), runs(steps=(5,), clip_norm=None)]))
    ).titles
    start = "bundled-base, arithmetic, N = 64: adamw, constant 3e-4, pool 500 (i.i.d.), clip norm "
    assert titles == [start + "1.0", start + "none"]
    with_oracle = runs(steps=(5,)).assign(estimator="oracle")
    (title,) = size_grid.grid(training_data.choices(with_oracle)).titles
    assert title.endswith("pool 500 (i.i.d.), oracle estimator")


# -- errors, files


def test_without_training_runs_the_message_names_the_command():
    for name in TRAINED:
        with pytest.raises(UserError, match="run `grpo sweep group-size`"):
            FIGURES[name](runs(experiment="train"))
    with pytest.raises(UserError, match="no suboptimality_gap of trained policies"):
        FIGURES["gap"](runs(steps=()))


def test_files_lie_beside_the_figures(tmp_path):
    rows = runs(steps=(5, 10)).drop(columns=["experiment", "cell_id"])
    write_cell(tmp_path / "results", Cell("budget", {"x": 1}, "x"), rows, {})
    paths = plot_cli.draw([], tmp_path / "results", tmp_path / "out", "png")
    assert [path.stem for path in paths] == TRAINED
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {f"{name}{end}" for name in TRAINED for end in (".png", ".caption.txt")} | {
        "table2.csv", "table2.tex", "table2.txt", "universality.txt",
    }  # fmt: skip


def texts_of(figure):
    """Every text outside panels and every tick label, by its place."""
    found = [text for ax in figure.axes for text in (ax.title, ax.xaxis.label, ax.yaxis.label)]
    found += [label for ax in figure.axes for label in ax.get_xticklabels()]
    found += [legend for ax in figure.axes if (legend := ax.get_legend())] + list(figure.legends)
    parts = list(figure.subfigs)
    for part in parts:
        found += [part._suptitle] if part._suptitle else []
        found += part.legends
        parts += part.subfigs
    return [text.get_window_extent() for text in found if not hasattr(text, "get_text") or text.get_text()]


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("kind", ["one", "several", "many"])
def test_no_text_leaves_the_figure_or_covers_other_text(name, kind):
    rows = {
        "one": lambda: runs(sizes=(8, 128), steps=(5,)),
        "several": lambda: runs(budgets=(128, 256, 1024), steps=(5, 10, 15, 20, 25), sizes=(2, 4, 8, 16, 32, 64)),
        "many": lambda: pd.concat([
            runs(prompt_pool=pool, learning_rate=rate, prompt_order=order, budgets=(64, 128))
            for pool, order in ((50, "epochs"), (500, "iid"), (None, "iid")) for rate in (0.01, 3e-4)
        ]),
    }[kind]()  # fmt: skip
    figure = FIGURES[name](rows)
    figure.canvas.draw()
    boxes = texts_of(figure)
    assert len(boxes) >= 4
    for place, box in enumerate(boxes):
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        assert not any(box.overlaps(other) for other in boxes[place + 1 :])


def test_different_runs_of_one_setting_are_never_merged():
    """Two cells with a run of the same seed and G: which of them counts must not be left to chance."""
    rows, other = runs(), runs()
    other["cell_id"] = other["cell_id"].str[::-1]
    with pytest.raises(UserError, match="is there twice.*two cells hold different runs"):
        training_data.choices(pd.concat([rows, other]))
    longer = runs(best=4)
    longer["method"] = longer["method"].str.replace("rest=", "rest=f")  # trained with another max_new_tokens, say
    longer["cell_id"] = longer["cell_id"].str[::-1]
    found = training_data.choices(pd.concat([rows, longer]))
    assert [choice.selection.best for choice in found] == [8, 8, 4, 4]


@pytest.mark.parametrize(
    "options", [{"normalize": True}, {"minibatches": 4}, {"kl_coefficient": 0.1, "kl_estimator": "k3"}]
)
def test_options_of_algorithm_2_are_named_and_its_runs_have_no_prediction(options):
    """G* is that of Algorithm 1's gradient."""
    figure = FIGURES["gap"](runs(**options))
    label = figure.get_label()
    for name, value in options.items():
        assert f"{name.replace('_', ' ')} {str(value).lower()}" in label
    assert "predicted" not in label
    assert not [gid for ax in figure.axes for gid in gids(ax) if gid and gid.startswith("predicted")]
