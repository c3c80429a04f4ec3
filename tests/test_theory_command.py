"""`grpo theory` around its checks: verdicts, rows and back, exit codes, figures."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from house import message
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from grpo_repro import results, runner
from grpo_repro.errors import UserError
from grpo_repro.experiments import theory
from grpo_repro.plot_cli import draw
from grpo_repro.plots import theory as figures
from grpo_repro.progress import Reporter
from grpo_repro.report import as_dict
from grpo_repro.schema import TheoryConfig
from grpo_repro.stats import Interval
from grpo_repro.theory import catalog
from grpo_repro.theory.finding import AT_LEAST, AT_MOST, EQUAL, REPORTED, Curve, Finding, Report, Work, exact, simulated
from grpo_repro.theory.rows import from_frame, to_frame

VERDICTS = [
    (exact("a", "s", "x", 1.0, 1.0 + 1e-11), True),
    (exact("a", "s", "x", 1.0, 1.0 + 1e-9), False),
    (exact("a", "s", "x", 1.0, 0.5, rule=AT_MOST), True),
    (exact("a", "s", "x", 1.0, 1.5, rule=AT_MOST), False),
    (exact("a", "s", "x", 1.0, 1.5, rule=AT_LEAST), True),
    (exact("a", "s", "x", 1.0, 0.5, rule=AT_LEAST), False),
    (exact("a", "s", "x", 1.0, 9.0, rule=REPORTED), True),
    (exact("a", "s", "x", 1.0, math.nan), False),
    (exact("a", "s", "x", math.nan, 1.0), False),
    (simulated("a", "s", "x", 1.0, Interval(1.1, 0.9, 1.3)), True),
    (simulated("a", "s", "x", 1.0, Interval(1.1, 1.05, 1.3)), False),
    (simulated("a", "s", "x", 1.0, Interval(1.1, 0.9, 1.3), AT_MOST), True),
    (simulated("a", "s", "x", 1.0, Interval(1.1, 1.05, 1.3), AT_MOST), False),
    (simulated("a", "s", "x", 1.0, Interval(0.9, 0.8, 0.95), AT_LEAST), False),
    (simulated("a", "s", "x", 1.0, Interval(math.nan, math.nan, math.nan)), False),
]


@pytest.mark.parametrize(("finding", "passed"), VERDICTS)
def test_a_statement_fails_when_the_observation_contradicts_it(finding, passed):
    assert finding.passed is passed


numbers = st.floats(-1e6, 1e6)
texts = st.text(st.characters(codec="utf-8", exclude_characters="|", exclude_categories=("Cs", "Cc")), min_size=1)
ends = st.one_of(st.none(), st.tuples(numbers, numbers).map(sorted))


@st.composite
def reports(draw):
    rules = st.sampled_from([EQUAL, AT_MOST, AT_LEAST, REPORTED])
    findings = []
    for i in range(draw(st.integers(1, 4))):
        low, high = draw(ends) or (None, None)
        tolerance = draw(numbers) if low is None else None
        words = f"part{i}", draw(texts), draw(texts)
        findings.append(Finding(*words, draw(numbers), draw(numbers), draw(rules), low, high, tolerance))
    curves = []
    for i in range(draw(st.integers(0, 2))):
        y = np.array(draw(st.lists(numbers, min_size=1, max_size=3)))
        spread = (None, None) if draw(st.booleans()) else (y - 1, y + 1)
        estimator = draw(st.sampled_from([None, "grpo"]))
        curves.append(Curve("panel", f"name{i} {draw(texts)}", "observed", y * 2, y, *spread, estimator))
    return Report(findings, curves)


@settings(max_examples=40, deadline=None)
@given(report=reports())
def test_rows_hold_all_of_a_report(report, tmp_path_factory):
    cell = theory.plan(TheoryConfig(checks=["lemma-1"]))[0]
    path = tmp_path_factory.mktemp("rows") / "metrics.parquet"
    results.write_table(results.to_table(cell, to_frame("lemma-1", report, 3, 0.99)), path)
    (((check, seed), found),) = from_frame(pd.read_parquet(path)).items()
    assert (check, seed, found.findings) == ("lemma-1", 3, report.findings)
    for one, other in zip(found.curves, report.curves, strict=True):
        assert (one.panel, one.name, one.kind, one.estimator) == (other.panel, other.name, other.kind, other.estimator)
        for key in ("x", "y", "low", "high"):
            np.testing.assert_array_equal(getattr(one, key), getattr(other, key))


def broken(work: Work) -> Report:
    x = np.array([2.0, 4.0])
    curves = [Curve("mse", "formula", "predicted", x, 1 / x), Curve("mse", "seen", "observed", x, 2 / x, 1 / x, 3 / x)]
    wrong = simulated("rate", "the rate is 2", "anywhere", 2.0, Interval(3.0, 2.5, 3.5))
    return Report([exact("sum", "one and one is two", "here", 2.0, 2.0), wrong], curves)


@pytest.fixture
def outcome(tmp_path, monkeypatch, capsys):
    entry = catalog.Entry("a statement", "identities", 1.0)
    monkeypatch.setattr(catalog.Entry, "function", lambda self, name: broken)
    monkeypatch.setitem(catalog.CHECKS, "lemma-1", entry)
    config = TheoryConfig(checks=["lemma-1"], results_dir=str(tmp_path))
    found = [runner.run_plan(theory, "theory", config, Reporter()) for _ in range(2)]
    assert capsys.readouterr().err.count("lemma-1 does not hold: rate") == 2
    return found


def test_a_check_that_fails_fails_the_command_whenever_it_is_asked(outcome):
    """The second run finds the cell finished and still says that it failed."""
    for found in outcome:
        assert found.status == 1
        assert found.rows
        (text,) = found.failures.values()
        assert text == "lemma-1 does not hold: rate: the rate is 2: predicted = 2, observed 3"


def test_json_and_the_table_hold_every_statement(outcome):
    first, second = as_dict(outcome[0])["checks"]
    assert (first["check"], first["part"], first["passed"], first["tolerance"]) == ("lemma-1", "sum", True, 1e-10)
    assert (second["rule"], second["low"], second["high"], second["passed"]) == ("=", 2.5, 3.5, False)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(theory.summary(results.read_results(outcome[0].results_dir)))
    text = console.export_text()
    assert "1 of 2 FAIL; 0 reported without a verdict; 1 are decided by an interval of level 0.9999" in text
    (line,) = [line for line in text.splitlines() if "the rate is 2" in line]
    assert line.split()[-5:] == ["2", "3", "[2.5,", "3.5]", "FAILS"]


def test_figures_show_the_points(outcome, tmp_path):
    rows = results.read_results(tmp_path)
    (axes,) = figures.draw(rows, "lemma-1").axes
    line, points = axes.lines[0], axes.containers[0]
    np.testing.assert_array_equal(line.get_xydata(), [[2, 0.5], [4, 0.25]])
    np.testing.assert_array_equal(points.lines[0].get_xydata(), [[2, 1.0], [4, 0.5]])
    np.testing.assert_array_equal([s[:, 1] for s in points.lines[2][0].get_segments()], [[0.5, 1.5], [0.25, 0.75]])
    assert (
        "the rate is 2 (anywhere): predicted 2, observed 3 [2.5, 3.5]: FAILS."
        in figures.draw(rows, "lemma-1").get_label()
    )
    assert [path.name for path in draw(["theory"], tmp_path, tmp_path / "out", "png")] == ["theory-lemma-1.png"]
    other = rows.assign(cell_id="0" * 12)
    assert "FAILS" in figures.draw(pd.concat([other, rows]), "lemma-1").get_label()  # that of this version
    with pytest.raises(UserError, match="2 results of lemma-1, of other versions"):
        figures.draw(pd.concat([other, other.assign(cell_id="1" * 12)]), "lemma-1")
    with pytest.raises(UserError, match="leave --model out"):
        draw(["theory"], tmp_path, tmp_path / "out", "png", ["tabular"])
    with pytest.raises(UserError, match="no results of lemma-6"):
        draw(["theory-lemma-6"], tmp_path, tmp_path / "out", "png")


def test_a_change_of_the_code_runs_a_check_again(monkeypatch):
    (cell,) = theory.plan(TheoryConfig(checks=["lemma-1"]))
    monkeypatch.setattr(theory, "_code", lambda: "other")
    assert theory.plan(TheoryConfig(checks=["lemma-1"]))[0].id != cell.id


def test_cells_depend_on_the_runs_only_where_they_are_simulated():
    one, other = (theory.plan(TheoryConfig(runs=runs)) for runs in (2000, 3000))
    changed = [a.label for a, b in zip(one, other, strict=True) if a.id != b.id]
    assert changed == [name for name, entry in catalog.CHECKS.items() if entry.simulated]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["lemma-12"], "unknown check 'lemma-12'; did you mean 'lemma-1"),
        (["lemma-1", "lemma-1"], "names [lemma-1] more than once"),
        (["lemma-1", "checks=[lemma-6]"], "checks are named twice"),
        (["runs=5"], "runs=5 is too small; use 2000 or more"),
        (["seeds=[]"], "seeds is empty"),
        (["confidence=1"], "confidence=1.0 is not between 0 and 1"),
        (["model=tabular"], "unknown key 'model'; known: checks, runs"),
        (["checks=[]"], "checks is empty"),
    ],
)
def test_what_cannot_be_checked_is_refused(grpo, words, text):
    assert text in message(grpo("theory", *words))


def test_the_command_runs_checks_by_name(grpo):
    run = grpo("theory", "lemma-1", "kl-estimators", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert {entry["check"] for entry in found["checks"]} == {"lemma-1", "kl-estimators"}
    assert all(entry["passed"] for entry in found["checks"])
    assert "all 2 cells are finished already" in grpo("theory", "lemma-1", "kl-estimators").stderr


def test_every_check_has_a_function():
    for name, entry in catalog.CHECKS.items():
        assert callable(entry.function(name))
