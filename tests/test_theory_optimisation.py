"""Lemma 6 and Theorem 7: the checks pass, wrong formulas fail them, and what they are built on is exact."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from grpo_repro import ustat
from grpo_repro.policies.closed_form import TabularPolicy, best_group_size
from grpo_repro.theory import ascent, bound, optimisation
from grpo_repro.theory.bound import Constants, bound_step, inverse_limit, noise_floor, own_group_size
from grpo_repro.theory.finding import Report, Work
from grpo_repro.theory.optimisation import lemma_6, predicted_sums, theorem_7

RUNS = 8000
simulate = optimisation._gaps


@cache
def simulated(seed: int, name: str) -> np.ndarray:
    """The same runs serve every formula."""
    family, start, beta, n = optimisation._settings()[name]
    return simulate(Work(seed=seed, runs=RUNS), name, family, start, beta, n)


@pytest.fixture(autouse=True)
def reuse(monkeypatch):
    monkeypatch.setattr(optimisation, "_gaps", lambda work, name, *rest: simulated(work.seed, name))


def failed(report: Report) -> set[str]:
    assert len({finding.part for finding in report.findings}) == len(report.findings)
    return {finding.part for finding in report.findings if not finding.passed}


# Lemma 6.


def test_the_recursion_is_solved_by_the_papers_closed_form_less_a_term():
    at, rate, start = Constants(0.8, 0.5, 0.03), 0.5, 0.7
    path = list(itertools.accumulate(range(200), lambda gap, _: bound_step(gap, rate, at), initial=start))
    factor, floor = 1 - 2 * 0.5 * rate + 0.8 * 0.5 * rate**2, noise_floor(rate, at)
    n = np.arange(201)
    np.testing.assert_allclose(path, factor**n * (start - floor) + floor, rtol=1e-12)
    assert (np.array(path) <= factor**n * start + floor + 1e-15).all()


def test_constants_of_a_quadratic_return_are_its_curvature():
    family = ascent.curved(np.array([[0.5]]), np.ones(1), gap=0.8, asymmetry=np.array([0.05]))
    at = bound.constants(family, 1e-3, 4, 8, points=5)
    best = TabularPolicy(family, np.zeros(1))
    assert (at.smooth, at.pl) == pytest.approx((-best.hessian[0, 0],) * 2, rel=1e-5)
    mse = ustat.minibatch_mse(best.c1, best.c2, best.c3, 8, 4)
    assert at.error == pytest.approx(mse, rel=1e-5) and at.error >= mse
    wide = bound.constants(family, 1.0, 4, 8)
    assert wide.pl < at.pl <= at.smooth <= wide.smooth and wide.error >= at.error


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lemma_6_passes(seed):
    report = lemma_6(Work(seed=seed, runs=RUNS))
    assert failed(report) == set() and len(report.findings) == 7
    assert {curve.panel for curve in report.curves} == {"constant", "inverse"}


def half_noise(gap, rate, at):
    return bound_step(gap, rate, Constants(at.smooth, at.pl, at.error / 2))


def double_noise(gap, rate, at):
    return bound_step(gap, rate, Constants(at.smooth, at.pl, at.error * 2))


def rate_once(gap, rate, at):
    return bound_step(gap, rate, at) + at.smooth * at.error / 2 * (rate - rate**2)


def fast(gap, rate, at):
    return bound_step(gap, rate, at) - 2 * at.pl * rate * gap


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        (half_noise, {"constant", "inverse", "constant-form", "inverse-form"}),
        (double_noise, {"constant-tight", "inverse-tight", "constant-form", "inverse-form"}),
        (rate_once, {"constant", "constant-form", "inverse-form"}),
        (fast, {"constant", "constant-form"}),
    ],
)
def test_wrong_recursions_fail_lemma_6(wrong, parts):
    assert parts <= failed(lemma_6(Work(runs=RUNS), step=wrong))


def test_wrong_closed_forms_fail_lemma_6():
    assert failed(lemma_6(Work(runs=1000), floor=lambda b, at: 2 * noise_floor(b, at))) == {"constant-form"}
    assert failed(lemma_6(Work(runs=1000), limit=lambda b, at: inverse_limit(b, at) * (1 - 0.5 / (at.pl * b)))) == {
        "inverse-form"
    }


def test_runs_that_leave_the_region_fail_lemma_6(monkeypatch):
    monkeypatch.setattr(optimisation, "RADIUS", 0.25)
    assert "region" in failed(lemma_6(Work(runs=1000)))


# Theorem 7.


def test_the_minimisers_are_those_of_the_minibatch_error():
    c1, c2, c3 = np.array([0.2, 1.0]), np.array([1.0, 0.5]), np.array([3.0, 7.0])
    found = bound.minimisers(c1, c2, c3, np.arange(2, 50))
    assert (found == np.array([[best_group_size(*pair)] for pair in zip(c1, c3, strict=True)])).all()
    for size in (2, 4, 8):
        direct = (c1[0] * size + c2[0] + c3[0] / (size - 1)) / 64
        assert direct == pytest.approx(ustat.minibatch_mse(0.2, 1.0, 3.0, 64 // size, size), rel=1e-14)


@pytest.mark.parametrize("name", ["curved", "three-actions", "flat-direction"])
def test_the_gaps_own_size_minimises_the_sum_of_weights(name, monkeypatch):
    family, start, beta, _ = optimisation._settings()[name]
    best = TabularPolicy(family, np.zeros_like(start))
    monkeypatch.setattr(optimisation, "TOTAL", 2 * 3 * 4 * 5 * 6 * 7 * 8 * 9 * 10 * 11)
    monkeypatch.setattr(optimisation, "SIZES", tuple(range(2, 12)))
    least = 2 + int(predicted_sums(best, beta).argmin())
    assert abs(least - own_group_size(best, beta)) < 1
    star = ustat.optimal_group_size(best.c1, best.c3)
    assert own_group_size(best, beta) == pytest.approx(star, rel=1e-9) or (
        name == "flat-direction" and star > 2 * least
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_theorem_7_passes(seed):
    report = theorem_7(Work(seed=seed, runs=RUNS))
    assert failed(report) == set() and len(report.findings) == 7
    assert {curve.panel for curve in report.curves} == {"curved", "three-actions", "flat-direction"}
    ratio = report.findings[-1]
    assert ratio.low > 1 and ratio.predicted > 1.4  # the gap is worse at the bound's G


def paper(c1, c3):
    return float(np.sqrt(c3 / c1))


def upside_down(c1, c3):
    return 1 + float(np.sqrt(c1 / c3))


def no_root(c1, c3):
    return 1 + c3 / c1


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        (paper, {"integer"}),
        (upside_down, {"integer", "curved-best", "three-actions-best"}),
        (no_root, {"integer", "three-actions-best"}),
    ],
)
def test_wrong_sizes_fail_theorem_7(wrong, parts):
    assert parts <= failed(theorem_7(Work(runs=RUNS), formula=wrong))
    assert failed(theorem_7(Work(runs=RUNS), formula=best_group_size)) == set()
