"""The checks of Lemma 1 to Corollary 5 pass for the right formulas, fail for wrong ones, and enumerate every group."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields

import numpy as np
import pytest
from enumeration import real_valued, small_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from tabular_cases import SMALL

from grpo_repro import estimators, stats, ustat
from grpo_repro.errors import UserError
from grpo_repro.policies import families
from grpo_repro.theory import baselines, exact, identities, laws
from grpo_repro.theory.finding import Work

CHECKS = {
    "lemma_1": identities.lemma_1,
    "hoeffding": identities.hoeffding,
    "theorem_2": identities.theorem_2,
    "proposition_3": identities.proposition_3,
    "corollary_4": baselines.corollary_4,
    "corollary_5": baselines.corollary_5,
}


def failed(report) -> set[str]:
    return {finding.part for finding in report.findings if not finding.passed}


# The right formulas.


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", CHECKS)
def test_check_passes(name, seed):
    report = CHECKS[name](Work(seed=seed))
    assert failed(report) == set()
    parts = [finding.part for finding in report.findings]
    assert len(parts) == len(set(parts)) and not any(":" in part for part in parts)
    keys = [(curve.panel, curve.kind, curve.name) for curve in report.curves]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", CHECKS)
def test_check_is_decided_by_its_seed_alone(name):
    first, second = (CHECKS[name](Work(seed=3, runs=400)) for _ in range(2))
    assert first.findings == second.findings


def test_exact_statements_hold_to_rounding():
    for name, check in CHECKS.items():
        for finding in check(Work(seed=4, runs=400)).findings:
            searched = {"value-best": 1e-6, "optimal-best": 1e-6}  # a numerical search finds half of the digits
            if finding.rule == "=" and finding.low is None:
                assert abs(finding.observed - finding.predicted) <= searched.get(finding.part, 1e-10), (name, finding)


# Wrong ones.


def inclusive(rewards, value, optimal_baseline):
    """The mean of all G rewards as the baseline."""
    return rewards - rewards.mean(-1, keepdims=True)


def largest_other(rewards, value, optimal_baseline):
    """Unbiased, but with the largest other reward as the baseline instead of their mean."""
    second, first = np.moveaxis(np.sort(rewards, -1)[..., -2:], -1, 0)[..., None]
    return rewards - np.where(rewards == first, second, first)


def size_for_pairs(terms, group_size, estimator):
    """G instead of G - 1."""
    right = ustat.mse(terms, group_size, estimator)
    return right if estimator != "grpo" else terms.first_order / group_size + terms.second_order / group_size**2


def no_gradient_in_remainder(terms, group_size, estimator):
    """R without ||g||^2."""
    right = ustat.mse(terms, group_size, estimator)
    return right - (estimator == "grpo") * terms.gradient_sq_norm / (group_size * (group_size - 1))


def second_moments(terms, group_size, estimator):
    """S without - ||g||^2."""
    return ustat.mse(terms, group_size, estimator) + terms.gradient_sq_norm / group_size


def without_its_factor(c1, c2, c3, num_prompts, group_size, pool=None):
    """(1/B - 1/M) without M/(M-1)."""
    factor = 1.0 if pool is None else (pool - 1) / pool
    return ustat.minibatch_mse(factor * c1, c2, c3, num_prompts, group_size, pool)


def pool_ignored(c1, c2, c3, num_prompts, group_size, pool=None):
    return ustat.minibatch_mse(c1, c2, c3, num_prompts, group_size)


def third_term_with_size(c1, c2, c3, num_prompts, group_size, pool=None):
    """G^2 instead of G (G - 1)."""
    return ustat.minibatch_mse(c1, c2, c3 * (group_size - 1) / group_size, num_prompts, group_size, pool)


def prompts_not_divided(c1, c2, c3, num_prompts, group_size, pool=None):
    """c1 as for a single prompt."""
    return ustat.minibatch_mse(c1 * num_prompts, c2, c3, num_prompts, group_size, pool)


def norm_weighted(prompt):
    """E||W|| Z / E||W||."""
    weight = prompt.probs * np.sqrt(laws.sq_norms(prompt))
    return float(weight @ prompt.rewards / weight.sum())


def not_over_others(prompt, members):
    return (members.shape[1] - 1) * identities.second_order(prompt, members)


def diagonal_too(prompt, members):
    """The double sum with i = j."""
    scores, rho = prompt.scores[members], prompt.rewards[members] - prompt.value
    size = members.shape[1]
    return -scores.sum(1) * rho.sum(1)[:, None] / (size * (size - 1))


def rewards_not_centred(prompt, members):
    """T1 with Z in the place of rho: vanilla's error."""
    return (prompt.scores[members] * prompt.rewards[members][..., None]).mean(1) - prompt.gradient


def with_table(**changed):
    return {"table": estimators.ESTIMATORS | changed}


WRONG = [
    ("lemma_1", {"estimator": inclusive}, {"binary", "real", "unbiased"}),
    ("lemma_1", {"estimator": largest_other}, {"binary", "real"}),
    ("lemma_1", {"estimator": estimators.vanilla}, {"binary", "real"}),
    ("hoeffding", {"estimator": inclusive}, {"decomposition"}),
    ("hoeffding", {"second": not_over_others}, {"decomposition", "second-order"}),
    ("hoeffding", {"second": diagonal_too}, {"decomposition", "orthogonal", "degenerate", "second-order"}),
    ("hoeffding", {"first": rewards_not_centred}, {"decomposition", "first-order"}),
    ("theorem_2", {"formula": size_for_pairs}, {"grpo"}),
    ("theorem_2", {"formula": no_gradient_in_remainder}, {"grpo"}),
    ("theorem_2", {"formula": second_moments}, {"vanilla", "grpo", "oracle", "optimal"}),
    ("theorem_2", with_table(grpo=inclusive), {"grpo", "difference-slope"}),
    ("theorem_2", with_table(grpo=largest_other), {"grpo", "difference-slope"}),
    ("theorem_2", with_table(optimal=estimators.oracle), {"optimal"}),
    ("proposition_3", {"formula": without_its_factor}, {"pool"}),
    ("proposition_3", {"formula": pool_ignored}, {"pool", "pool-simulated"}),
    ("proposition_3", {"formula": third_term_with_size}, {"independent", "pool"}),
    (
        "proposition_3",
        {"formula": prompts_not_divided},
        {"independent", "pool", "independent-simulated", "pool-simulated"},
    ),
    ("corollary_4", {"formula": lambda terms, size: baselines.error_ratio(terms, size + 1)}, {"ratio"}),
    ("corollary_4", {"ratio_rate": -2.0}, {"ratio-slope"}),
    ("corollary_4", {"difference_rate": -1.0}, {"difference-slope"}),
    ("corollary_4", {"difference_rate": -1.5}, {"difference-slope"}),
    ("corollary_4", {"estimator": inclusive}, {"ratio", "ratio-slope", "difference-slope"}),
    ("corollary_4", {"estimator": largest_other}, {"ratio", "ratio-slope", "difference-slope"}),
    ("corollary_5", {"optimal_baseline": norm_weighted}, {"optimal-best", "none-better"}),
    ("corollary_5", {"optimal_baseline": baselines.value}, {"optimal-best", "none-better"}),
    ("corollary_5", {"value_baseline": lambda prompt: 0.5}, {"value-best"}),
    ("corollary_5", {"value_baseline": lambda prompt: 0.0}, {"value-best", "vanilla-worse"}),
]


@pytest.mark.parametrize(
    ("name", "wrong", "parts"),
    [pytest.param(*case, id=f"{case[0]}-{i}") for i, case in enumerate(WRONG)],
)
def test_check_fails_for_a_wrong_formula(name, wrong, parts):
    assert failed(CHECKS[name](Work(seed=0), **wrong)) == parts


# Enumeration.


@pytest.mark.parametrize(("outcomes", "size"), [(1, 3), (2, 1), (2, 4), (3, 3), (4, 2), (5, 3)])
def test_groups_are_those_of_itertools(outcomes, size):
    probs = np.random.default_rng(outcomes).dirichlet(np.ones(outcomes))
    expected: dict[tuple[int, ...], float] = {}
    for members in itertools.product(range(outcomes), repeat=size):
        key = tuple(members.count(k) for k in range(outcomes))
        expected[key] = expected.get(key, 0.0) + math.prod(probs[list(members)])
    found_probs, counts = exact.groups(probs, size)
    found = {tuple(int(n) for n in row): float(p) for row, p in zip(counts, found_probs, strict=True)}
    assert len(found) == len(counts) == math.comb(size + outcomes - 1, size)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("size", [16, 64])
def test_probabilities_of_large_groups_sum_to_one(size):
    probs, counts = exact.groups(np.array([0.5, 0.3, 0.2]), size)
    assert probs.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(probs @ counts, size * np.array([0.5, 0.3, 0.2]), rtol=1e-12)


@pytest.mark.parametrize("name", SMALL)
def test_law_of_a_context_is_its_closed_form(name):
    policy = small_policy(name)
    for context in range(4):
        prompt = exact.law(policy, context)
        terms = laws.components(prompt)
        for field in fields(terms):
            closed = getattr(policy.components, field.name)[context]
            assert getattr(terms, field.name) == pytest.approx(closed, rel=1e-10, abs=1e-13), field.name
        assert laws.optimal_baseline(prompt) == pytest.approx(policy.optimal_baseline[context], rel=1e-12)
        assert prompt.value == pytest.approx(policy.value[context], rel=1e-12)
        np.testing.assert_allclose(prompt.gradient, policy.gradients[context], rtol=1e-10, atol=1e-14)


def brute_force(prompt, size, estimate):
    """E||estimate - g||^2 over every ordered group, one at a time."""
    total = 0.0
    for members in itertools.product(range(len(prompt.probs)), repeat=size):
        index = list(members)
        error = estimate(prompt.scores[index], prompt.rewards[index]) - prompt.gradient
        total += math.prod(prompt.probs[index]) * error @ error
    return total


def kernel_mean(scores, rewards):
    pairs = list(itertools.combinations(range(len(rewards)), 2))
    return sum(0.5 * (scores[i] - scores[j]) * (rewards[i] - rewards[j]) for i, j in pairs) / len(pairs)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_enumerated_errors_are_those_of_every_ordered_group(seed, size):
    drawn = real_valued(seed, outcomes=3)
    prompt = exact.Law(drawn.probs, drawn.scores, drawn.rewards)
    expected = {
        "vanilla": brute_force(prompt, size, lambda w, z: (w * z[:, None]).mean(0)),
        "oracle": brute_force(prompt, size, lambda w, z: (w * (z - prompt.value)[:, None]).mean(0)),
        "grpo": brute_force(prompt, size, kernel_mean),
    }
    for name, error in expected.items():
        assert laws.mse(prompt, size, estimators.ESTIMATORS[name]) == pytest.approx(error, rel=1e-10)
        assert ustat.mse(laws.components(prompt), size, name) == pytest.approx(error, rel=1e-10)


def test_second_order_part_is_its_double_sum():
    prompt = laws.real_law(0)
    _, members = laws.every_group(prompt, 4)
    rho = prompt.rewards - prompt.value
    for group, part in zip(members, identities.second_order(prompt, members), strict=True):
        pairs = itertools.permutations(group, 2)
        np.testing.assert_allclose(part, -sum(prompt.scores[i] * rho[j] for i, j in pairs) / 12, atol=1e-13)


# A finite pool.


@given(
    c1=st.floats(0, 10), c2=st.floats(0, 10), c3=st.floats(0, 10), group=st.integers(2, 64), prompts=st.integers(1, 64)
)
@settings(max_examples=50, deadline=None)
def test_pool_of_prompts_between_a_fixed_set_and_independent_ones(c1, c2, c3, group, prompts):
    def error(pool: int | None) -> float:
        return ustat.minibatch_mse(c1, c2, c3, prompts, group, pool)

    within = (c2 / group + c3 / (group * (group - 1))) / prompts
    assert error(prompts) == pytest.approx(within, rel=1e-12)
    assert error(2**50) == pytest.approx(error(None), rel=1e-12)
    assert error(prompts) <= error(prompts + 1) <= error(None)
    m = prompts + 5
    assert error(m) == pytest.approx(c1 * (1 / prompts - 1 / m) * m / (m - 1) + within, rel=1e-9, abs=1e-15)


def test_pool_must_hold_the_minibatch():
    with pytest.raises(UserError, match="no 4 different prompts in a pool of 3"):
        ustat.minibatch_mse(1.0, 1.0, 1.0, 4, 2, pool=3)


def test_whole_pool_has_the_error_of_a_fixed_set():
    policy = laws.at_theta(families.softmax(contexts=5, actions=3, dimension=4))
    fixed = ustat.mse(policy.components, 4, "grpo").sum() / 25
    assert ustat.minibatch_mse(policy.c1, policy.c2, policy.c3, 5, 4, pool=5) == pytest.approx(fixed, rel=1e-12)


# The slope.


def test_slope_and_its_interval_cover_the_truth():
    """Of 2000 simulated slopes the 95% interval misses 5% +- 4 standard errors."""
    rng, x = np.random.default_rng(0), np.array([2.0, 4.0, 8.0, 16.0])
    truth, standard_error = 3 * x**-2, 0.03 * x**-1.7
    found = [laws.log_slope(x, truth + standard_error * rng.normal(size=4), standard_error, 0.95) for _ in range(2000)]
    missed = np.mean([not interval.low <= -2 <= interval.high for interval in found])
    assert abs(missed - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 2000)
    assert laws.log_slope(x, truth, standard_error, 0.95).value == pytest.approx(-2, abs=1e-12)


def test_slope_of_a_difference_that_is_not_positive_is_not_a_number():
    found = laws.log_slope(np.array([1.0, 2.0]), np.array([1.0, -1.0]), np.ones(2), 0.95)
    assert isinstance(found, stats.Interval) and np.isnan([found.value, found.low, found.high]).all()


# The curves.


def test_drawn_errors_are_the_enumerated_ones():
    curves = {(c.panel, c.name): c for c in identities.theorem_2(Work(runs=400)).curves}
    prompt = laws.every_law(0)["softmax"]
    for name in ("vanilla", "grpo", "oracle"):
        line, points = curves["mse", f"{name}, formula"], curves["mse", name]
        assert points.estimator == line.estimator == name
        at = [line.x.tolist().index(x) for x in points.x]
        np.testing.assert_allclose(points.y, line.y[at], rtol=1e-10)
        assert points.y[1] == pytest.approx(laws.mse(prompt, 3, estimators.ESTIMATORS[name]), rel=1e-12)
    simulated = curves["difference", "simulated"]
    assert ((simulated.low <= simulated.y) & (simulated.y <= simulated.high)).all()


def test_drawn_order_has_its_named_baselines_on_the_curves():
    curves = {curve.name: curve for curve in baselines.corollary_5(Work()).curves}
    for place, family in enumerate(("constant-norm", "likely-right")):
        line = curves[family]
        for name in ("vanilla", "oracle", "optimal"):
            x, y = curves[name].x[place], curves[name].y[place]
            assert np.polyval(np.polyfit(line.x, line.y, 2), x) == pytest.approx(y, abs=1e-9)
        assert curves["oracle"].y[place] == pytest.approx(1, abs=1e-12)
        assert curves["optimal"].y[place] <= line.y.min() + 1e-12
