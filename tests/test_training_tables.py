"""The table N x G beside the paper's, and the comparisons of the best G over n, N, schedule and pool."""

from __future__ import annotations

import csv
import io
import re

import numpy as np
import pandas as pd
import pytest
from training_rows import SIZES, artist, gids, runs, values

from grpo_repro import paper, selection, stats, ustat
from grpo_repro.plots import FIGURES, TEXTS, comparisons, table2, training_data, universality
from grpo_repro.plots.training_data import predicted_sizes
from grpo_repro.stats import Interval

# -- table 2


def test_heat_map_holds_the_last_means_and_frames_the_best():
    rows = runs(budgets=(64, 128), noise=0.001)
    own, published = FIGURES["table2"](rows).axes
    expected = [[values(rows, "accuracy", 40, size, budget).mean() for size in SIZES] for budget in (64, 128)]
    np.testing.assert_allclose(own.images[0].get_array(), expected)
    assert published.images[0].get_array().tolist() == [list(line) for line in paper.TABLE2_ACCURACY.values()]
    boxes = {patch.get_gid(): patch.get_x() + 0.47 for patch in own.patches if patch.get_gid()}
    assert boxes == pytest.approx({"best 64": 1, "best 128": 1})
    cells = [text.get_text() for text in own.texts]
    each = stats.mean_interval(values(rows, "accuracy", 40, 8), 0.95)
    assert f"{each.value:.4f}\n±{each.value - each.low:.4f}\n(6)" in cells
    tabular = runs(model="tabular", task="bandit", seeds=1, tabular=40)
    assert "Final suboptimality gap" in table2.draw(tabular).get_label()
    with_missing = rows[(rows["budget"] != 64) | (rows["group_size"] != 16)]
    assert np.isnan(np.ma.filled(FIGURES["table2"](with_missing).axes[0].images[0].get_array(), np.nan)[0, 2])


def test_the_paper_has_standard_errors_of_six_thousandths_and_its_own_sets():
    accuracies = np.array(list(paper.TABLE2_ACCURACY.values()))
    np.testing.assert_allclose(paper.binomial_standard_error(accuracies, 5000), 0.006, atol=2e-4)
    text = table2.draw(runs()).get_label()
    for budget, line in paper.TABLE2_ACCURACY.items():
        chosen = selection.binomial_selection(np.array(line), paper.TABLE2.group_sizes, 5000)
        assert paper.TABLE2.group_sizes[int(np.argmax(line))] == chosen.best
        assert f"N = {budget} (1 run): best G = {chosen.best} [" in text
        others = ", ".join(str(size) for size in chosen.indistinguishable if size != chosen.best)
        assert f"not told from it: {others}." in text


def test_csv_and_latex_hold_the_numbers():
    rows = runs(model="my_model", noise=0.02)
    files = TEXTS["table2"](rows)
    assert set(files) == {".csv", ".tex", ".txt"}
    lines = list(csv.DictReader(io.StringIO(files[".csv"])))
    here = [line for line in lines if line["source"] == "here"]
    assert len(here) == 3 and len(lines) == 3 + 18
    for line, size in zip(here, SIZES, strict=True):
        found = values(rows, "accuracy", 40, size)
        each = stats.mean_interval(found, 0.95)
        numbers = [float(line[key]) for key in ("mean", "ci_low", "ci_high", "standard_error")]
        error = found.std(ddof=1) / np.sqrt(6)
        assert numbers == pytest.approx([each.value, each.low, each.high, error], rel=1e-12)
        assert (line["group_size"], line["runs"], line["iteration"]) == (str(size), "6", "40")
        assert line["best"] == str(int(size == 8)) and line["method"].startswith("optimizer=adamw")
    paper_line = next(line for line in lines if line["source"] == "paper" and line["best"] == "1")
    assert (paper_line["model"], paper_line["group_size"], paper_line["mean"]) == ("Qwen2.5-Math-7B", "64", "0.7817")
    assert float(paper_line["standard_error"]) == pytest.approx(np.sqrt(0.7817 * 0.2183 / 5000))
    tex = files[".tex"]
    assert r"my\_model" in tex and rf"$\mathbf{{{float(here[1]['mean']):.4f}}} \pm " in tex
    assert r"\mathbf{0.7817} \pm 0.0058" in tex
    for name in ("toprule", "bottomrule", "begin{tabular}", "end{tabular}"):
        assert tex.count("\\" + name) == 2
    used = set(re.findall(r"\\([a-zA-Z]+)", re.sub(r"(?m)^%.*", "", tex)))
    assert used == {"begin", "end", "toprule", "midrule", "bottomrule", "multicolumn", "mathbf", "pm"} | (
        {"ast"} if r"^{\ast}" in tex else set()
    )
    for part in tex.split(r"\begin{tabular}")[1:]:
        body = [line for line in part.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
        assert {line.count("&") for line in body} == {len(part.split("}")[0]) - 2}
    assert "Qwen2.5-Math-7B" in files[".txt"] and "0.7817 ± 0.0058*" in files[".txt"]


# -- universality


def compared():
    return pd.concat([
        runs(budgets=(64, 128)), runs(budgets=(64,), schedule="inverse", learning_rate=0.01),
        runs(budgets=(64,), prompt_pool=50, prompt_order="epochs", best=16), runs(budgets=(64,), prompt_pool=None),
    ])  # fmt: skip


def test_settings_are_compared_where_they_differ_in_one_respect():
    found = comparisons.comparisons(training_data.choices(compared()))
    assert [(one.aspect, one.series, one.levels) for one in found if one.aspect not in ("n", "N")] == [
        ("schedule", "N = 64, n = 40", ("constant 3e-4", "inverse 0.01")),
        ("pool", "N = 64, n = 40", ("pool 50 (epochs)", "pool 500 (i.i.d.)", "all prompts (i.i.d.)")),
    ]
    assert [one.levels for one in found if one.aspect == "N"] == [("64", "128")]
    assert [one.levels for one in found if one.aspect == "n"] == [("20", "40")] * 5
    pool = next(one for one in found if one.aspect == "pool")
    assert [choice.selection.best for choice in pool.choices] == [16, 8, 8]
    assert pool.title == "bundled-base, arithmetic: adamw, constant 3e-4"
    assert pool.shift is not None and pool.shift.verdict == "moved"
    same = [one.shift for one in found if one.aspect != "pool"]
    assert "moved" not in {shift.verdict for shift in same}


def test_sentences_are_in_the_caption_and_in_the_file():
    rows = compared()
    figure = FIGURES["universality"](rows)
    shifts = comparisons.universality(rows)
    assert len(shifts) == 8
    for shift in shifts:
        assert shift.sentence in figure.get_label() and shift.sentence in TEXTS["universality"](rows)[".txt"]
    assert universality.draw(rows).get_label() == figure.get_label()
    for ax in figure.axes:
        for gid in gids(ax):
            if str(gid).startswith("best "):
                series = artist(ax, gid)
                assert set(series.get_ydata()) <= set(SIZES)
    over_n = figure.axes[0]
    assert list(artist(over_n, "best N = 64").get_ydata()) == [8, 8]
    np.testing.assert_allclose(artist(over_n, "predicted N = 64").get_ydata(), [7.0, 8.0])
    assert artist(over_n, "predicted initial").get_ydata()[0] == 6.0


def test_nothing_to_compare_is_said():
    text = universality.draw(runs(steps=(40,))).get_label()
    assert "No test: it needs results at two checkpoints" in text and comparisons.universality(runs(steps=(40,))) == []


@pytest.mark.parametrize(
    ("star", "named"),
    [
        ((3.0, 3.0, 3.0), (4,)),
        ((2.2, 2.0, 2.4), (2,)),
        ((6.0, 3.0, np.inf), (4, 8, 16)),
        ((5.0, 1.0, np.inf), (2, 4, 8, 16)),
    ],
)
def test_the_prediction_names_the_least_error_of_the_grid(star, named):
    """G* = 3: c3 = 4 c1, so that N times the error is 2 + 4 = 6, 4 + 4/3, 8 + 4/7, ... c1."""
    assert predicted_sizes(Interval(*star), (2, 4, 8, 16)) == named
    for size in (2, 4, 8, 16):
        c1, c3 = 1.0, (star[0] - 1) ** 2
        best = min((2, 4, 8, 16), key=lambda g: ustat.minibatch_mse(c1, 0.0, c3, 64 // g, g))
        assert (size == best) == (size in predicted_sizes(Interval(star[0], star[0], star[0]), (2, 4, 8, 16)))


def test_a_prediction_is_the_median_and_an_unknown_end_is_no_exact_one():
    rows = pd.DataFrame({"value": [3.0, 4.0, 90.0], "ci_low": [2.0, 3.0, np.nan], "ci_high": [4.0, 5.0, np.nan]})
    assert training_data.predicted(rows) == Interval(4.0, 2.0, 5.0)
    assert training_data.predicted(rows[2:]) == Interval(90.0, 1.0, np.inf)
    assert training_data.predicted(rows[:0]) is None
