"""The best group size from runs: levels of the sets over simulated tables, exact small cases, and rows to tables."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import brentq
from scipy.stats import multivariate_normal, norm, ttest_rel

from grpo_repro import selection, stats
from grpo_repro.errors import UserError
from grpo_repro.run_tables import run_table
from grpo_repro.selection import binomial_selection, may_be_best, select
from grpo_repro.shift import shift

SIZES = (2, 4, 8, 16, 32, 64)
QUIET = np.array([0.05, 1, 1, 1, 1, 1])  # differences to the first G are all but independent
NOISY = np.array([3.0, 1, 1, 1, 1, 1])  # they are all but equal
BEST = [0.0, 0.02, 0.02, 0.02, 0.02, 0.02]


def slack(level: float, tries: int) -> float:
    """Three standard errors of a frequency."""
    return 3 * float(np.sqrt(level * (1 - level) / tries))


def losses(rng: np.random.Generator, runs: int, spread: np.ndarray) -> np.ndarray:
    """Normal losses of equal mean, with noise that all G of a run share."""
    return rng.standard_normal((runs, len(spread))) * spread + rng.standard_normal((runs, 1))


# The set.


def kept(runs: int, spread: np.ndarray, tries: int) -> float:
    """How often the first G is in the set when all are equally good, the least favourable case."""
    rng = np.random.default_rng(runs)
    return float(np.mean([selection._column_stays(losses(rng, runs, spread), 0, 0.95) for _ in range(tries)]))


@pytest.mark.parametrize("spread", [np.ones(6), QUIET], ids=["alike", "quiet"])
@pytest.mark.parametrize("runs", [2, 5, 20])
def test_the_set_holds_the_best(runs, spread):
    assert kept(runs, spread, 1000) >= 0.95 - slack(0.95, 1000)


def test_with_many_runs_the_set_is_as_small_as_their_correlation_allows():
    share = kept(60, NOISY, 2000)  # Bonferroni's would be 0.98
    assert abs(share - 0.95) <= slack(0.95, 2000)


@pytest.mark.parametrize("runs", [5, 40])
def test_a_group_size_that_is_clearly_worse_leaves(runs):
    table = losses(np.random.default_rng(0), runs, np.ones(6)) + [0, 0, 8, 0, 0, 8]
    assert not {8, 64} & set(may_be_best(table, SIZES, 0.95))


@pytest.mark.parametrize("runs", [2, 5, 50])
def test_two_group_sizes_are_a_one_sided_paired_t_test(runs):
    rng, left = np.random.default_rng(runs), 0
    for _ in range(100):
        table = losses(rng, runs, np.array([1.0, 2.0])) + [0, 5 / runs]
        p = [float(ttest_rel(*pair, alternative="greater").pvalue) for pair in (table.T, table.T[::-1])]
        expected = tuple(size for size, value in zip((4, 8), p, strict=True) if value >= 0.05)
        assert may_be_best(table, (4, 8), 0.95) == expected
        left += len(expected) < 2
    assert 0 < left < 100


def test_by_hand():
    # Differences 1, 2, 3: mean 2, standard error 1/sqrt(3), t = 3.46 against t_2(0.95) = 2.92 and t_2(0.99) = 6.96.
    table = np.array([[1.0, 0.0], [5.0, 3.0], [3.0, 0.0]])
    assert may_be_best(table, (4, 8), 0.95) == (8,)
    found = select(table, (4, 8), 0.99)
    assert (found.indistinguishable, found.best, found.runs, found.confidence) == ((4, 8), 8, 3, 0.99)
    assert found.means == tuple(stats.mean_interval(table[:, k], 0.99) for k in range(2))


def test_the_critical_value_is_the_quantile_of_the_maximum():
    covariance = np.array([[1.0, 0.8, 0.3], [0.8, 1.0, 0.5], [0.3, 0.5, 1.0]])
    law = multivariate_normal(np.zeros(3), covariance)
    critical = brentq(lambda c: law.cdf(np.full(3, c)) - 0.95, 1.6, 2.4)
    assert 1.645 < critical - 0.03 and critical + 0.03 < norm.ppf(1 - 0.05 / 3)
    for scale in (np.ones(3), np.array([0.1, 1.0, 7.0])):
        scaled = covariance * np.outer(scale, scale)
        assert selection._stays(scale * [0.0, critical - 0.03, 0.0], scaled, np.inf, 0.95)
        assert not selection._stays(scale * [0.0, critical + 0.03, 0.0], scaled, np.inf, 0.95)


def test_differences_that_are_equal_in_all_runs_are_known():
    runs = np.array([[0.1], [0.7], [0.35]])
    assert may_be_best(runs + [0.0, 0.3, 0.0], (2, 4, 8), 0.95) == (2, 8)
    assert may_be_best(np.array([[0.1, (0.1 + 0.2) - 0.2]] * 4), (2, 4), 0.95) == (2, 4)  # equal up to rounding
    noisy = np.hstack([runs + [0.0, 0.3], [[0.0], [1.0], [0.2]]])
    assert may_be_best(noisy, (2, 4, 8), 0.95) == (2, 8)


def test_one_run_tells_nothing():
    found = select(np.array([[3.0, 1.0, 2.0]]), (4, 8, 16))
    assert (found.best, found.best_low, found.best_high, found.indistinguishable) == (8, 4, 16, (4, 8, 16))
    assert all((mean.low, mean.high) == (-np.inf, np.inf) for mean in found.means)
    for runs in (1, 5):  # nor do runs of one G
        found = select(np.arange(float(runs))[:, None], (8,))
        assert (found.best, found.best_low, found.best_high, found.indistinguishable) == (8, 8, 8, (8,))


# The bootstrap.


def test_bootstrap_interval_is_that_of_all_resamples():
    # Weights of the 27 resamples: G = 2 wins one (run 0 thrice), G = 16 three, so that 10% ends skip G = 2 alone.
    table = np.array([[0.0, 0.2, 1.0, 3.0], [3.0, 1.0, 0.4, 2.0], [3.0, 1.0, 1.2, 0.1]])
    sizes = np.array([2, 4, 8, 16])
    winners = [sizes[table[list(rows)].mean(0).argmin()] for rows in itertools.product(range(3), repeat=3)]
    intervals = set()
    for confidence in (0.8, 0.9, 0.95):
        ends = np.quantile(winners, [(1 - confidence) / 2, (1 + confidence) / 2], method="inverted_cdf")
        found = select(table, sizes.tolist(), confidence, draws=20_000)
        assert (found.best_low, found.best_high) == tuple(ends)
        intervals.add(tuple(ends))
    assert len(intervals) > 1
    few = [select(table, sizes.tolist(), draws=3, seed=seed) for seed in range(20)]
    assert {end for one in few for end in (one.best_low, one.best_high)} <= set(sizes.tolist())


def test_bootstrap_of_many_runs_follows_the_normal_law():
    rng, runs = np.random.default_rng(3), 5000
    gap = rng.standard_normal(runs)
    gap += 0.5 * gap.std() / np.sqrt(runs) - gap.mean()
    table = np.stack([np.zeros(runs), gap], 1)[:, None]
    best = selection.resampled_best(table, 2000, np.random.default_rng(0))  # in ten chunks
    assert best.shape == (2000, 1) and abs((best == 0).mean() - norm.cdf(0.5)) <= slack(0.69, 2000)


# Does it move?


@pytest.mark.parametrize("common", [False, True], ids=["independent", "common noise"])
def test_equal_curves_seldom_move(common):
    rng, moved = np.random.default_rng(5), 0
    for _ in range(200):
        shared = losses(rng, 5, np.ones(6))
        levels = {name: shared * common + 0.3 * losses(rng, 5, np.ones(6)) + BEST for name in "ab"}
        moved += shift(levels, SIZES, "iterations n", draws=20).verdict == "moved"
    assert moved / 200 <= 0.05 + slack(0.05, 200)


@pytest.mark.parametrize("runs", [2, 10])
def test_a_move_that_noise_hides_is_seldom_denied(runs):
    # The levels share their noise, so their argmins agree in nearly every resample although the truth moves.
    rng, denied, steady = np.random.default_rng(runs), 0, 0
    for _ in range(200):
        noise = losses(rng, runs, np.ones(6))
        found = shift({"a": noise + BEST, "b": noise + BEST[::-1]}, SIZES, "iterations n", draws=100)
        denied += found.verdict == "not moved"
        steady += 0.5 <= found.factor.low and found.factor.high <= 2
    assert denied / 200 <= 0.05 + slack(0.05, 200)
    assert steady / 200 > 0.3  # the bootstrap alone would deny it


@pytest.mark.parametrize("paired", [True, False])
def test_a_large_move_is_found(paired):
    rng = np.random.default_rng(0)
    curves = {"64": [0, 5, 9, 12, 15, 18], "1024": [18, 15, 12, 0, 12, 15]}
    found = shift({n: losses(rng, 5, np.ones(6) / 2) + c for n, c in curves.items()}, SIZES, "budget N", paired=paired)
    assert (found.verdict, found.factor, found.levels) == ("moved", stats.Interval(8.0, 8.0, 8.0), tuple(curves))
    assert found.sentence == (
        "The best G moves with budget N: no G may be best both at 64 and at 1024 (wrong in at most 5% of cases). "
        "Best G at 1024 over best G at 64: 8, 95% bootstrap interval 8 to 8. "
        "Best by level: 64: G = 2 of 5 runs, may be 2; 1024: G = 16 of 5 runs, may be 16."
    )


def test_a_sharp_minimum_of_many_runs_does_not_move():
    rng = np.random.default_rng(0)
    levels = {str(n): losses(rng, 400, np.ones(6)) + [3, 2, 0, 0.01, 2, 3] for n in (10, 20, 40)}
    found = shift(levels, SIZES, "iterations n")
    assert found.verdict == "not moved" and "by more than a factor of two" in found.sentence


def test_levels_share_the_error():
    # As in the case by hand: each set has one G at 95%, both at 97.5% (t_2 is 4.30).
    table = np.array([[1.0, 0.0], [5.0, 3.0], [3.0, 0.0]])
    levels = {"a": table, "b": table[:, ::-1]}
    assert shift(levels, (4, 16), "n").verdict == "not enough runs"
    assert shift(levels, (4, 16), "n", confidence=0.90).verdict == "moved"


def test_one_strange_run_of_a_hundred():
    # t = 1.994 against t_99(0.975) = 1.984, so G = 16 leaves, but it wins wherever that run is drawn thrice (8%).
    plain = np.zeros((100, 2)) + [0.0, 1.0]
    strange = np.vstack([plain[1:], [0.0, -32.4]])
    assert may_be_best(strange, (4, 16), 0.975) == may_be_best(plain, (4, 16), 0.975) == (4,)
    found = shift({"a": plain, "b": strange}, (4, 16), "schedule")
    assert found.verdict == "not enough runs" and found.factor.high == 4


@pytest.mark.parametrize("runs", [1, 3])
def test_a_few_noisy_runs_are_not_enough(runs):
    rng = np.random.default_rng(0)
    found = shift({name: losses(rng, runs, np.ones(6)) for name in "ab"}, SIZES, "schedule")
    assert found.verdict == "not enough runs" and found.sentence.startswith("The runs are not enough to tell")
    if runs == 1:
        assert (found.factor.low, found.factor.high) == (1 / 32, 32)


def test_paired_levels_are_resampled_jointly():
    table = losses(np.random.default_rng(0), 8, np.ones(6))
    joint = shift({"a": table, "b": table}, SIZES, "iterations n").factor
    apart = [
        shift({"a": table, "b": table}, SIZES, "n", paired=False),
        shift({"a": table, "b": table[:-1]}, SIZES, "n"),
    ]
    assert (joint.low, joint.high) == (1, 1)
    assert all(one.factor.low < 1 < one.factor.high for one in apart)


@pytest.mark.parametrize("levels", [{"a": np.ones((3, 2))}, {"a": np.ones((3, 2)), "b": np.ones((3, 3))}])
def test_levels_that_cannot_be_compared(levels):
    with pytest.raises(UserError, match="run the same group sizes at every level"):
        shift(levels, (2, 4), "schedule")


# Single runs.


def test_table_2_does_not_identify_the_best():
    sizes = (4, 8, 16, 32, 64, 128)
    rows = [
        ([0.7677, 0.7491, 0.7753, 0.7627, 0.7817, 0.7743], (4, 16, 64, 128)),
        ([0.7703, 0.7679, 0.7697, 0.7793, 0.7819, 0.7665], sizes),
        ([0.7691, 0.7713, 0.7701, 0.7673, 0.7703, 0.7757], sizes),
    ]
    for accuracies, kept_sizes in rows:
        found = binomial_selection(np.array(accuracies), sizes, 5000)
        assert found.indistinguishable == kept_sizes and found.best == sizes[int(np.argmax(accuracies))]
        assert found.best_low < found.best_high and found.means[0].value == pytest.approx(1 - accuracies[0])


def test_binomial_sets_hold_the_best():
    rng = np.random.default_rng(0)
    drawn = rng.binomial(500, 0.77, (1000, 6)) / 500
    share = np.mean([2 in binomial_selection(row, SIZES, 500, draws=1).indistinguishable for row in drawn])
    assert share >= 0.95 - slack(0.95, 1000)


def test_binomial_extremes():
    assert binomial_selection(np.array([0.0, 1.0]), (2, 4), 1).indistinguishable == (2, 4)
    assert binomial_selection(np.array([0.0, 1.0]), (2, 4), 100).indistinguishable == (4,)
    assert binomial_selection(np.array([0.5]), (2,), 100).indistinguishable == (2,)


# Rows to tables.


def rows_of(entries: list[tuple], **columns) -> pd.DataFrame:
    """Rows (seed, replicate, group_size, value) in an order that is not sorted."""
    frame = pd.DataFrame(entries[::-1], columns=["seed", "replicate", "group_size", "value"])
    return frame.astype({"seed": "Int64", "replicate": "Int64", "group_size": "Int64"}).assign(**columns)


def grid(sizes: tuple[int, ...], seeds: range, replicates: list) -> list[tuple]:
    return [(s, r, g, 100.0 * s + 10 * (r or 0) + g) for s in seeds for r in replicates for g in sizes]


def test_run_table_aligns_runs():
    for replicates, expected in (([0, 1], [[2, 8], [12, 18], [102, 108], [112, 118]]), ([None], [[2, 8], [102, 108]])):
        values, sizes = run_table(rows_of(grid((2, 8), range(2), replicates)))
        assert sizes == (2, 8) and np.array_equal(values, expected)


def test_run_table_of_a_sweep_that_still_runs():
    entries = [e for e in grid((2, 4, 8), range(5), [None]) if (e[0], e[2]) not in {(1, 4), (2, 2)}]
    values, sizes = run_table(rows_of(entries))
    assert sizes == (2, 4, 8) and np.array_equal(values[:, 0], [2, 302, 402])
    values, sizes = run_table(rows_of([e for e in entries if e[2] != 8 or e[0] < 1]))  # G = 8 has one run
    assert sizes == (2, 4) and np.array_equal(values, [[2, 4], [302, 304], [402, 404]])


def test_run_table_refuses():
    good = grid((2, 4), range(2), [None])
    for entries, message in (
        ([*good, (7, None, 4, np.nan)], r"seed=7, group_size=4 is not finite \(1 such rows\)"),
        ([*good, (1, None, 4, 0.0)], r"seed=1, group_size=4 is there twice"),
        ([(0, None, 2, 1.0), (1, None, 4, 1.0)], r"every group size \(G=2: 1, G=4: 1\); run the same seeds"),
        ([], "no rows"),
    ):
        with pytest.raises(UserError, match=message):
            run_table(rows_of(entries))


def test_the_quantile_is_that_of_t_and_every_pair_of_levels_must_be_close():
    """Largest of five independent t_30: the 95% quantile is 2.44 (of five normals 2.32)."""
    for first, stays in ((2.38, True), (2.50, False)):
        assert selection._stays(np.array([first, 0, 0, 0, 0]), np.eye(5), 30, 0.95) is stays
    rng = np.random.default_rng(3)
    sharp = rng.normal(size=(40, 4)) * 0.01 + np.array([1.0, 0.0, 1.0, 2.0])
    noisy = rng.normal(size=(40, 4)) * 9
    assert shift({"a": sharp, "b": sharp, "c": noisy}, (2, 4, 8, 16), "n").verdict == "not enough runs"
