"""What the figures show is what the results hold."""

from __future__ import annotations

import os
import subprocess
import sys

import matplotlib
import numpy as np
import pandas as pd
import pytest

from grpo_repro import plot_cli
from grpo_repro.cells import Cell
from grpo_repro.errors import UserError
from grpo_repro.plots import FIGURES, mse, style
from grpo_repro.plots.mse_panels import panels
from grpo_repro.results import SCHEMA, read_results, to_table, write_cell

SIZES = (4, 8, 16, 32, 64)
NAMES = ("vanilla", "grpo", "oracle", "optimal")
SCALE = {"vanilla": 3.0, "grpo": 1.2, "oracle": 1.0, "optimal": 0.9}
FACTS = {
    "value": (0.25, 0.2, 0.3),
    "score_reward_correlation": (-0.24, -0.34, -0.14),
    "c1": (2.0, 1.0, 3.0),
    "c2": (4.0, 3.0, 5.0),
    "c3": (8.0, 6.0, 10.0),
    "optimal_group_size": (3.0, 2.4, np.inf),
}


def cell(model="bundled-base", method="components", seed=0, factor=1.0, half=0.1, **settings):
    """Rows of one cell with errors factor * SCALE/G and intervals of that relative half-width."""
    sizes, names = settings.pop("sizes", SIZES), settings.pop("names", NAMES)
    task, questions = settings.pop("task", "arithmetic"), settings.pop("questions", 40)
    count = settings.pop("count", 64 if method == "components" else 32)
    half = 0.0 if method == "exact" else half
    rows = []
    for name in names:
        for size in sizes:
            value = factor * SCALE[name] / size
            row = {"metric": "mse", "estimator": name, "group_size": size, "value": value}
            rows.append(row | {"ci_low": value * (1 - half), "ci_high": value * (1 + half)})
    if method != "monte_carlo":
        rows += [
            {"metric": metric, "value": value, "ci_low": low, "ci_high": high}
            for metric, (value, low, high) in FACTS.items()
        ]
        rows += [{"metric": "value", "value": 0.9, "ci_low": 0.8, "ci_high": 1.0, "prompt_id": "q1"}]
    common = {
        "model": model, "task": task, "method": method, "seed": seed, "count": count,
        "num_prompts": questions, "ci_level": settings.pop("level", 0.95),
    }  # fmt: skip
    config = common | {"sizes": list(sizes), "names": list(names), "factor": factor} | settings
    table = to_table(Cell("mse-eval", config, model), pd.DataFrame([common | row for row in rows]))
    return table.to_pandas(types_mapper={SCHEMA.field("seed").type: pd.Int64Dtype()}.get)


def both(model="bundled-base", **settings):
    return pd.concat([cell(model, **settings), cell(model, "monte_carlo", **settings)])


def artist(ax, gid):
    found = [child for child in ax.get_children() if child.get_gid() == gid]
    assert len(found) == 1, (gid, len(found))
    return found[0]


def gids(ax):
    return {child.get_gid() for child in ax.get_children()} - {None}


def errors(rows, name, method="components"):
    chosen = rows[(rows["metric"] == "mse") & (rows["estimator"] == name) & (rows["method"] == method)]
    columns = ["group_size", "value", "ci_low", "ci_high"]
    return chosen.sort_values("group_size")[columns].to_numpy(dtype=float)


def vertices(ax, gid):
    (path,) = artist(ax, gid).get_paths()
    return {tuple(vertex) for vertex in path.vertices}


def test_lines_bands_and_markers_are_the_rows():
    rows = both(half=0.3)
    (ax,) = FIGURES["mse"](rows).axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    for place, name in enumerate(NAMES):
        size, value, low, high = errors(rows, name).T
        line = artist(ax, f"line {name}")
        np.testing.assert_array_equal(line.get_xydata(), np.column_stack([size, value]))
        assert line.get_color() == style.ESTIMATORS[name].color
        corners = vertices(ax, f"band {name}")
        assert set(zip(size, low, strict=True)) | set(zip(size, high, strict=True)) == corners
        size, value, low, high = errors(rows, name, "monte_carlo").T
        shifted = size * mse.OFFSET ** (place - 1.5)
        points = artist(ax, f"points {name}").get_xydata()
        np.testing.assert_allclose(points, np.column_stack([shifted, value]), rtol=1e-14)
        bars = np.array(artist(ax, f"bars {name}").get_segments())
        np.testing.assert_allclose(bars[:, 0], np.column_stack([shifted, low]), rtol=1e-14)
        np.testing.assert_allclose(bars[:, 1], np.column_stack([shifted, high]), rtol=1e-14)


def test_everything_drawn_lies_inside_the_axes_and_the_ticks_are_the_group_sizes():
    (ax,) = FIGURES["mse"](both(half=0.5)).axes
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["4", "8", "16", "32", "64"]
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    for line in ax.lines:
        x, y = np.asarray(line.get_xydata()).T
        assert ((left < x) & (x < right) & (bottom < y) & (y < top)).all(), line.get_gid()


def test_neighbouring_markers_do_not_share_a_place():
    (ax,) = FIGURES["mse"](both()).axes
    places = np.concatenate([artist(ax, f"points {name}").get_xdata() for name in NAMES])
    assert len(set(places)) == len(NAMES) * len(SIZES)


def test_the_reference_has_slope_minus_one_below_all_estimates():
    rows = both()
    (ax,) = FIGURES["mse"](rows).axes
    x, y = artist(ax, "slope").get_xydata().T
    assert np.diff(np.log(y)) / np.diff(np.log(x)) == pytest.approx(-1, abs=1e-12)
    found = rows[rows["metric"] == "mse"]
    assert (found["value"].to_numpy() * found["group_size"].to_numpy(dtype=float) > y[0] * x[0]).all()


def test_title_and_text_say_accuracy_diagnostic_and_best_group_size():
    (ax,) = FIGURES["mse"](cell()).axes
    assert ax.get_title() == "bundled-base\naccuracy 25.0% [20.0, 30.0]"
    text = artist(ax, "diagnostics").get_text()
    assert "−0.24 [−0.34, −0.14]" in text and "3.0 [2.4, ∞]" in text
    assert "squared score norm, dimensionless" in ax.get_ylabel()
    assert "completions per prompt" in ax.get_xlabel()


def test_caption_holds_the_numbers_and_is_the_label_of_the_figure():
    rows = both()
    text = mse.caption(rows)
    assert FIGURES["mse"](rows).get_label() == text
    for part in ("accuracy of sampled completions 25.0% [20.0, 30.0]", "c1 = 2 [1, 3]", "c3 = 8 [6, 10]",
                 "3.00 [2.40, ∞]", "vanilla 3.00 at G = 4", "K = 64, R = 32", "40 questions"):  # fmt: skip
        assert part in text, part


def test_tabular_shows_exact_lines_with_the_pools_band():
    rows = pd.concat([
        cell("tabular", method, task="bandit", factor=factor)
        for method, factor in (("exact", 1.0), ("components", 1.05), ("monte_carlo", 0.95))
    ])  # fmt: skip
    (ax,) = FIGURES["mse"](rows).axes
    for name in NAMES:
        exact = errors(rows, name, "exact")
        np.testing.assert_array_equal(artist(ax, f"line {name}").get_xydata(), exact[:, :2])
        pooled = errors(rows, name)
        assert set(map(tuple, pooled[:, [0, 2]])) <= vertices(ax, f"band {name}")
    assert ax.get_title() == "tabular\nmean reward 25.0% [20.0, 30.0]"


@pytest.mark.parametrize(("method", "kinds"), [
    ("exact", {"line"}), ("components", {"line", "band"}), ("monte_carlo", {"points", "bars"}),
])  # fmt: skip
def test_one_method_and_two_estimators_are_enough(method, kinds):
    (ax,) = FIGURES["mse"](cell(method=method, names=("grpo", "oracle"))).axes
    drawn = {f"{kind} {name}" for kind in kinds for name in ("grpo", "oracle")}
    assert gids(ax) == drawn | {"slope", "diagnostics"}
    assert ("accuracy not measured" in ax.get_title()) == (method == "monte_carlo")


def test_one_group_size_shows_a_point_and_no_slope():
    (ax,) = FIGURES["mse"](cell(sizes=(8,))).axes
    assert "slope" not in gids(ax)
    assert artist(ax, "line grpo").get_marker() == "o"


def test_lower_ends_below_zero_are_drawn_to_the_edge_of_the_axis():
    rows = both(half=1.5)
    figure = FIGURES["mse"](rows)
    (ax,) = figure.axes
    bottom = ax.get_ylim()[0]
    bars = np.array(artist(ax, "bars grpo").get_segments())
    assert (bars[:, 0, 1] == bottom).all()
    assert {(float(size), bottom) for size in SIZES} <= vertices(ax, "band grpo")
    np.testing.assert_array_equal(artist(ax, "line grpo").get_xydata(), errors(rows, "grpo")[:, :2])
    assert "end at the lower edge" in figure.get_label()
    assert "end at the lower edge" not in mse.caption(both())


def test_infinite_intervals_end_at_the_edges():
    rows = cell(method="monte_carlo").assign(ci_low=-np.inf, ci_high=np.inf)
    (ax,) = FIGURES["mse"](rows).axes
    for bar in artist(ax, "bars oracle").get_segments():
        assert tuple(bar[:, 1]) == ax.get_ylim()


def test_estimates_that_are_not_positive_are_marked_and_named():
    rows = cell()
    place = (rows["estimator"] == "oracle") & (rows["group_size"] == 64)
    rows.loc[place, ["value", "ci_low", "ci_high"]] = (-0.002, -0.01, 0.006)
    figure = FIGURES["mse"](rows)
    (ax,) = figure.axes
    marks = artist(ax, "not positive oracle")
    assert len(marks.get_xdata()) == 1
    assert np.isnan(artist(ax, "line oracle").get_ydata()[-1])
    assert (64.0, 0.006) in vertices(ax, "band oracle")
    assert "bundled-base oracle at G = 64 (pools): −0.002" in figure.get_label()
    assert "estimate ≤ 0" in [text.get_text() for text in figure.legends[0].get_texts()]
    FIGURES["mse"](rows.assign(value=-1.0, ci_low=-2.0, ci_high=-0.5)).canvas.draw()


@pytest.mark.parametrize(("count", "grid"), [(1, (1, 1)), (3, (1, 3)), (4, (2, 2)), (5, (2, 3))])
def test_panels_are_laid_out_in_rows_the_bundled_policies_first(count, grid):
    models = ["a", "bundled-icl", "bundled-base", "bundled-instruct", "z"][-count:]
    figure = FIGURES["mse"](pd.concat([both(model) for model in models]))
    assert len(figure.axes) == count
    assert figure.axes[0].get_gridspec().get_geometry() == grid
    order = [ax.get_title().split("\n")[0] for ax in figure.axes]
    known = ["bundled-base", "bundled-instruct", "bundled-icl", "a", "z"]
    assert order == [name for name in known if name in models]
    assert figure.get_size_inches()[0] <= style.TEXT_WIDTH
    assert len(figure.legends) == 1


def test_axes_are_shared_unless_errors_are_far_apart():
    near = FIGURES["mse"](pd.concat([both("a"), both("b", factor=10)])).axes
    assert near[0].get_ylim() == near[1].get_ylim()
    far = FIGURES["mse"](pd.concat([both("a"), both("b", factor=1e6)])).axes
    assert far[0].get_ylim()[1] < far[1].get_ylim()[0]


def test_no_text_leaves_the_figure_or_covers_other_text():
    figure = FIGURES["mse"](pd.concat([both(m) for m in ("bundled-base", "bundled-instruct", "bundled-icl")]))
    figure.canvas.draw()
    boxes = []
    for ax in figure.axes:
        texts = [ax.title, ax.xaxis.label, artist(ax, "diagnostics")]
        boxes += [text.get_window_extent() for text in texts]
        inner = artist(ax, "diagnostics").get_window_extent()
        for name in NAMES:
            assert not any(inner.contains(*point) for point in ax.transData.transform(
                artist(ax, f"points {name}").get_xydata()
            ))  # fmt: skip
    boxes += [figure.axes[0].yaxis.label.get_window_extent(), figure.legends[0].get_window_extent()]
    for place, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[place + 1 :])


# -- which rows belong together


def test_seeds_are_averaged_errors_as_independent_facts_without_narrowing():
    rows = pd.concat([cell(seed=0), cell(seed=1, factor=2.0), cell(method="monte_carlo")])
    (panel,) = panels(rows)
    found = panel.errors.query("method == 'components' and estimator == 'oracle' and group_size == 4").iloc[0]
    assert found["value"] == pytest.approx((0.25 + 0.5) / 2)
    half = np.hypot(0.025, 0.05) / 2
    assert found["ci_low"] == pytest.approx(0.375 - half)
    assert found["ci_high"] == pytest.approx(0.375 + half)
    assert (panel.facts["value"].low, panel.facts["value"].high) == pytest.approx((0.2, 0.3))
    assert "combined as independent" in mse.caption(rows) and "2 seeds (pools)" in mse.caption(rows)


@pytest.mark.parametrize(("first", "second", "labels"), [
    ({"questions": 40}, {"questions": 500}, {"40 questions", "500 questions"}),
    ({"task": "arithmetic"}, {"task": "bandit"}, {"arithmetic", "bandit"}),
    ({"level": 0.9}, {"level": 0.95}, {"90% intervals", "95% intervals"}),
    ({"count": 64}, {"count": 128}, {"K = 64", "K = 128"}),
])  # fmt: skip
def test_runs_that_differ_are_drawn_apart_and_named(first, second, labels):
    rows = pd.concat([cell(**first), cell(**second, factor=2.0)])
    assert {panel.label for panel in panels(rows)} == labels
    for ax in FIGURES["mse"](rows).axes:
        assert ax.get_title().split("\n")[1] in labels


def test_runs_whose_difference_the_rows_do_not_show_are_named_by_their_cells():
    hot, cold = cell(temperature=1.0), cell(temperature=0.7, factor=2.0)
    found = panels(pd.concat([hot, cold, cell(method="monte_carlo")]))
    runs = {f"run {part['cell_id'].iloc[0][:6]}" for part in (hot, cold)}
    assert len(found) == 3
    assert {panel.label for panel in found} == {f"pools; {run}" for run in runs} | {"Monte Carlo"}
    values = sorted(panel.errors["value"].max() for panel in found)
    assert values == [0.75, 0.75, 1.5]


def test_one_pool_is_shown_beside_each_number_of_replicates():
    rows = pd.concat([cell(), cell(method="monte_carlo", count=4), cell(method="monte_carlo", count=32)])
    found = panels(rows)
    assert {panel.label for panel in found} == {"R = 4", "R = 32"}
    assert all(panel.methods == ["components", "monte_carlo"] for panel in found)


def test_monte_carlo_at_fewer_group_sizes_shares_the_panel():
    (panel,) = panels(pd.concat([cell(), cell(method="monte_carlo", sizes=(4, 64))]))
    assert panel.methods == ["components", "monte_carlo"]


def test_no_row_of_the_errors_is_lost():
    rows = pd.concat([
        cell(), cell(factor=2.0), cell(count=128), cell(method="monte_carlo", count=4),
        cell(sizes=(128, 256)), cell(method="monte_carlo", sizes=(2, 128)),
        both("other", seed=3), both("other", seed=4, level=0.9),
    ])  # fmt: skip
    shown = set().union(*(set(panel.rows["cell_id"]) for panel in panels(rows)))
    assert shown == set(rows["cell_id"])


def test_a_panel_alone_goes_onto_given_axes():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    assert mse.plot_mse(both(), ax) is ax
    assert "line grpo" in gids(mse.plot_mse(both()))
    with pytest.raises(UserError, match="rows hold 2 panels: bundled-base, other"):
        mse.plot_mse(pd.concat([both(), both("other")]))


@pytest.mark.parametrize("rows", [
    SCHEMA.empty_table().to_pandas(),
    cell()[lambda rows: rows["metric"] != "mse"],
    cell().assign(experiment="budget"),
])  # fmt: skip
def test_nothing_to_draw_says_what_to_run(rows):
    for function in (FIGURES["mse"], mse.caption, mse.plot_mse):
        with pytest.raises(UserError, match="run `grpo mse-eval` first"):
            function(rows)


def test_an_unknown_estimator_is_named():
    rows = cell(names=("grpo",))
    rows.loc[rows["estimator"] == "grpo", "estimator"] = "median"
    with pytest.raises(UserError, match="estimator 'median' has no colour"):
        FIGURES["mse"](rows)


# -- style and files


def test_estimators_differ_in_colour_marker_and_line():
    looks = list(style.ESTIMATORS.values())
    for key in ("color", "marker"):
        assert len({getattr(look, key) for look in looks}) == len(looks)
    assert len({(look.line, look.width) for look in looks}) == len(looks)


def test_global_settings_do_not_enter_and_do_not_change():
    before = dict(matplotlib.rcParams)
    plain = FIGURES["mse"](both())
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context({"font.size": 30, "lines.markersize": 20}):
        other = FIGURES["mse"](both())
    for one, two in zip(plain.axes, other.axes, strict=True):
        assert one.title.get_fontsize() == two.title.get_fontsize() <= 9
        assert artist(one, "points grpo").get_markersize() == artist(two, "points grpo").get_markersize()


@pytest.fixture
def results(tmp_path):
    for method in ("components", "monte_carlo"):
        rows = cell(method=method)
        write_cell(tmp_path / "results", Cell("mse-eval", {"method": method}, method), rows.drop(
            columns=["experiment", "cell_id"]), {})  # fmt: skip
    return tmp_path / "results"


@pytest.mark.parametrize("kind", plot_cli.FORMATS)
def test_files_hold_the_caption_and_equal_results_give_equal_files(results, tmp_path, kind):
    first, second = (plot_cli.draw(["mse"], results, tmp_path / name, kind)[0] for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    text = (tmp_path / "a" / "mse.caption.txt").read_text(encoding="utf-8")
    assert text == mse.caption(read_results(results))
    if kind == "pdf":
        assert b"/Type3" not in first.read_bytes() and b"/Type /Font" in first.read_bytes()
    if kind == "svg":
        assert "accuracy of sampled completions" in first.read_text(encoding="utf-8")


def test_draws_in_a_process_without_display_or_backend(results, tmp_path):
    code = (
        "import sys; from grpo_repro.results import read_results; from grpo_repro.plots import FIGURES;"
        "FIGURES['mse'](read_results(sys.argv[1])).savefig(sys.argv[2]);"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules"
    )
    display = ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND")
    environment = {key: value for key, value in os.environ.items() if key not in display}
    path = tmp_path / "mse.png"
    command = [sys.executable, "-c", code, str(results), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert path.read_bytes().startswith(b"\x89PNG")
