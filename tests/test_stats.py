"""Intervals: coverage of exact values over simulated pools, and the formulas behind them."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from enumeration import of_context, ordered
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student_t

from grpo_repro import stats, ustat
from grpo_repro.policies import tabular
from grpo_repro.policies.closed_form import TabularPolicy
from grpo_repro.stats import Interval, PromptGroups

PROMPTS, GROUP_SIZES, ESTIMATORS = 100, (4, 64), ("vanilla", "grpo", "oracle", "optimal")

# Coverage.


class Coverage:
    """How often intervals hold the truth."""

    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self.tries: Counter[str] = Counter()

    def add(self, name: str, interval: Interval, truth: float) -> None:
        self.tries[name] += 1
        self.hits[name] += interval.low <= truth <= interval.high

    def __getitem__(self, name: str) -> float:
        return self.hits[name] / self.tries[name]


def part(terms: ustat.Components, rows: slice) -> ustat.Components:
    return ustat.Components(**{f.name: getattr(terms, f.name)[rows] for f in fields(terms)})


def add_prompt_intervals(
    found: Coverage,
    policy: TabularPolicy,
    groups: PromptGroups,
    terms: ustat.Components,
    estimate: np.ndarray,
) -> None:
    """The intervals over prompts of one pool, under names that end in the number of groups."""
    count = len(groups.sq_norms)
    c1 = stats.between_prompt_variance(groups, terms.gradient_sq_norm, estimate)
    c2, c3 = (groups.left_out_means(x) for x in (terms.first_order, terms.second_order))
    for name, pair in {"c1": c1, "c2": c2, "c3": c3}.items():
        found.add(f"{name} {count}", stats.jackknife(*pair, 0.95), getattr(policy, name))
    best = stats.optimal_group_size_interval(c1, c3, 0.95)
    found.add(f"G* {count}", best, ustat.optimal_group_size(policy.c1, policy.c3))
    overall = stats.mean_gradient_sq_norm(groups, estimate)
    found.add(f"norm {count}", stats.jackknife(*overall, 0.95), float(policy.gradient @ policy.gradient))


def simulate(family: str, pools: int, size: int, over_prompts: bool = True, seed: int = 0) -> Coverage:
    """Coverage over pools of `size` completions for each of 100 prompts that are drawn anew in every pool."""
    policy, rng, found, at_once = tabular.build(family), np.random.default_rng(seed), Coverage(), 50
    for _ in range(pools // at_once):
        contexts = tabular.sample_contexts(policy, at_once * PROMPTS, rng)
        actions, rewards = tabular.sample(policy, contexts, size, rng)
        pool = tabular.pool(policy, contexts, actions, rewards)
        terms, left_out = ustat.components(pool)
        gradients = tabular.score_sums(policy, contexts, actions, ustat.group_gradient_weights(rewards))
        estimate = ustat.gradient_estimate_sq_norm(pool)
        rows = [slice(i * PROMPTS, (i + 1) * PROMPTS) for i in range(at_once)]
        for group, name in itertools.product(GROUP_SIZES, ESTIMATORS):
            values, truth = ustat.mse(terms, group, name), ustat.mse(policy.components, group, name)[contexts]
            variances = ustat.pool_variance(ustat.mse(left_out, group, name))
            for row in rows:
                interval = stats.fixed_set_mean(values[row], variances[row], 0.95, 1 / PROMPTS)
                found.add(f"{name} {group}", interval, truth[row].mean() / PROMPTS)
        for row, count in itertools.product(rows if over_prompts else (), (PROMPTS, PROMPTS // 2)):
            index = np.arange(PROMPTS) * count // PROMPTS
            sums = np.zeros((count, gradients.shape[1]))
            np.add.at(sums, index, gradients[row])
            groups = PromptGroups.from_sums(index, sums)
            add_prompt_intervals(found, policy, groups, part(terms, row), estimate[row])
            if count == PROMPTS:
                correlation = stats.score_reward_correlation(pool.sq_norms[row], rewards[row], 0.95)
                found.add("correlation", correlation, policy.score_reward_correlation)
    return found


def outside(found: Coverage, exceptions: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Every coverage that is not in its band, 93-97% if no other is named."""
    bands = {name: exceptions.get(name, (0.93, 0.97)) for name in found.tries}
    return {name: found[name] for name, (low, high) in bands.items() if not low <= found[name] <= high}


def test_intervals_cover_the_truth_on_a_softmax_policy():
    """93-97% over 1,000 pools of K = 32, 100 prompts each, in 100 groups and in 50.

    Over 4,000 pools: mse of vanilla .949, grpo .956 (G = 4) and .959 (G = 64), oracle .958, optimal .952; in 100
    groups c1 .937, c2 .948, c3 .951, G* .939, ||g||^2 .965; in 50 groups .936, .944, .951, .940, .965;
    correlation .948.
    """
    assert outside(simulate("softmax", 1000, 32), {}) == {}


def test_intervals_cover_the_truth_under_constant_norms():
    """The same, but c1, c2, c3 cover 92-95%: 100 prompts are few for means of such skewed quantities.

    Over 4,000 pools: mse of vanilla .949, grpo .955 and .957, oracle .958, optimal .950; in 100 groups c1 .931,
    c2 .934, c3 .936, G* .951, ||g||^2 .967. Here ||W||^2 = 3 ||phi(x)||^2 is a chi-square over prompts; the t
    interval of 100 *exact* values falls short as much (next test), so completions are not the cause. The
    correlation is zero, exactly, the norms being constant.
    """
    few = {f"{name} {count}": (0.915, 0.95) for name in ("c1", "c2", "c3") for count in (100, 50)}
    found = simulate("constant-norm", 1000, 32)
    assert outside(found, few | {"correlation": (1, 1)}) == {}


def exact_coverage(policy: TabularPolicy, prompts: int, repeats: int = 4000) -> dict[str, float]:
    """Coverage of the jackknife over prompts when every prompt's gradient and terms are known exactly."""
    rng, hits, at_once = np.random.default_rng(1), Counter(), 200
    t = student_t.ppf(0.975, prompts - 1)
    for _ in range(repeats // at_once):
        x = tabular.sample_contexts(policy, at_once * prompts, rng).reshape(at_once, prompts)
        g, n, rest = policy.gradients[x], policy.gradient_sq_norm[x], prompts - 1
        total, own = g.sum(1), n.sum(1, keepdims=True)
        c1 = own[:, 0] / prompts - ((total**2).sum(1) - own[:, 0]) / (prompts * rest)
        without = ((total[:, None] - g) ** 2).sum(2) - (own - n)
        c1_out = (own - n) / rest - without / (rest * (rest - 1))
        errors = {"c1": (c1, np.sqrt(rest * c1_out.var(1)))}
        for name, values in (("c2", policy.first_order[x]), ("c3", policy.second_order[x])):
            errors[name] = values.mean(1), values.std(1, ddof=1) / prompts**0.5
        for name, (value, error) in errors.items():
            hits[name] += int((np.abs(value - getattr(policy, name)) <= t * error).sum())
    return {name: hits[name] / repeats for name in ("c1", "c2", "c3")}


def test_shortfall_of_few_skewed_prompts_is_there_without_completions_and_goes_with_more_prompts():
    """Exact values of 100 prompts cover c1 .932, c2 .932, c3 .936; of 400 prompts .944, .948, .947."""
    policy = tabular.build("constant-norm")
    few, many = exact_coverage(policy, 100), exact_coverage(policy, 400)
    assert all(0.915 <= share <= 0.945 for share in few.values()), few
    assert all(0.935 <= share <= 0.965 for share in many.values()), many
    assert all(many[name] > few[name] for name in few)


def test_small_pools_cover_more_than_their_level():
    """Jackknife variances are biased upwards (Efron-Stein), by a share of order 1/K: at K = 8 the mse covers 96-99.5%.

    Vanilla's error is a mean over completions less ||g||^2 and stays near its level.
    """
    found = simulate("constant-norm", 500, 8, over_prompts=False)
    for name, group in itertools.product(("grpo", "oracle"), GROUP_SIZES):
        assert 0.955 <= found[f"{name} {group}"] <= 0.995, (name, group, found[f"{name} {group}"])
    for group in GROUP_SIZES:
        assert 0.93 <= found[f"vanilla {group}"] <= 0.98


def test_intervals_of_optimal_fall_short_where_actions_rarer_than_one_in_k_carry_the_norm():
    """On `curved` away from its optimum, K = 32: .82, the other estimators .94.

    There actions of probability 1e-4 to 1e-2 have norms a thousand times the usual ones. A pool without them puts
    b* elsewhere, and the jackknife, which never saw them, removes 3/4 of the ratio's bias only: -3% of the term,
    0.7 standard errors of the mean over 100 prompts. Other terms have no ratio and no bias.
    """
    found = simulate("curved", 500, 32, over_prompts=False)
    for group in GROUP_SIZES:
        assert 0.76 <= found[f"optimal {group}"] <= 0.87
        for name in ("vanilla", "grpo", "oracle"):
            assert 0.91 <= found[f"{name} {group}"] <= 0.97


# Unbiasedness over prompts, by enumeration.


@pytest.fixture(scope="module")
def two_contexts() -> TabularPolicy:
    family = tabular.build("softmax", dict(contexts=2, actions=2, dimension=3)).family
    return TabularPolicy(replace(family, context_probs=np.array([0.3, 0.7])), family.theta)


def every_prompt(policy: TabularPolicy, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probability, gradient estimate and ||g(x)||^2 estimate of every prompt with every pool."""
    probs, vectors, norms = [], [], []
    for x, f in enumerate(policy.context_probs):
        law = of_context(policy, x)
        p, index = ordered(law, size)
        pool = law.pool(index)
        probs.append(f * p)
        vectors.append(np.einsum("nk,nkd->nd", ustat.group_gradient_weights(pool.rewards), law.scores[index]))
        norms.append(ustat.components(pool)[0].gradient_sq_norm if size >= 4 else np.zeros(len(p)))
    return np.concatenate(probs), np.concatenate(vectors), np.concatenate(norms)


def test_mean_gradient_norm_is_unbiased_over_every_pair_of_prompts(two_contexts):
    probs, vectors, _ = every_prompt(two_contexts, 2)
    total = weight = 0.0
    for i, j in itertools.combinations_with_replacement(range(len(probs)), 2):
        pair = vectors[[i, j]]
        groups = PromptGroups.from_sums(np.arange(2), pair)
        found, left_out = stats.mean_gradient_sq_norm(groups, (pair**2).sum(1))
        chance = probs[i] * probs[j] * (1 if i == j else 2)
        total, weight = total + chance * found, weight + chance
        assert np.isnan(left_out).all()  # a single prompt is left
    assert weight == pytest.approx(1, abs=1e-12)
    assert total == pytest.approx(two_contexts.gradient @ two_contexts.gradient, rel=1e-11)


def test_between_prompt_variance_is_unbiased(two_contexts):
    """E over every pair of prompts, each with every pool of four; pair by pair in closed sums, then by the code.

    The code is called on 400 random pairs and must equal the closed sum of each, whose mean is exact.
    """
    probs, vectors, norms = every_prompt(two_contexts, 4)
    first = norms[:, None] / 2 + norms[None] / 2 - vectors @ vectors.T
    assert probs @ first @ probs == pytest.approx(two_contexts.c1, rel=1e-10)
    rng = np.random.default_rng(0)
    for i, j in rng.integers(len(probs), size=(400, 2)):
        groups = PromptGroups.from_sums(np.arange(2), vectors[[i, j]])
        squared = (vectors[[i, j]] ** 2).sum(1)
        found, _ = stats.between_prompt_variance(groups, norms[[i, j]], squared)
        assert found == pytest.approx(first[i, j], rel=0, abs=1e-12)


@given(seed=st.integers(0, 2**32 - 1), prompts=st.integers(4, 12), count=st.integers(2, 12))
@settings(max_examples=40, deadline=None)
def test_left_out_values_equal_recomputation_without_the_group(seed, prompts, count):
    count = min(count, prompts // 2) if count < prompts else prompts
    rng = np.random.default_rng(seed)
    vectors, norms = rng.normal(size=(prompts, 3)), rng.normal(size=prompts)
    index = rng.permutation(np.arange(prompts) * count // prompts)
    squared = (vectors**2).sum(1)

    def whole(keep: np.ndarray) -> tuple[float, float]:
        kept = vectors[keep]
        pairs = [kept[i] @ kept[j] for i, j in itertools.permutations(range(len(kept)), 2)]
        overall = float(np.mean(pairs)) if pairs else float("nan")
        return overall, float(norms[keep].mean()) - overall

    sums = np.stack([vectors[index == j].sum(0) for j in range(count)])
    groups = PromptGroups.from_sums(index, sums)
    overall, overall_out = stats.mean_gradient_sq_norm(groups, squared)
    c1, c1_out = stats.between_prompt_variance(groups, norms, squared)
    assert (overall, c1) == pytest.approx(whole(np.full(prompts, True)), abs=1e-12)
    for j in range(count):
        expected = whole(index != j)
        assert (overall_out[j], c1_out[j]) == pytest.approx(expected, abs=1e-12, nan_ok=True)
    mean, mean_out = groups.left_out_means(norms)
    assert mean == pytest.approx(norms.mean(), abs=1e-14)
    np.testing.assert_allclose(mean_out, [norms[index != j].mean() for j in range(count)], atol=1e-13)


# Formulas.


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 40), level=st.sampled_from([0.5, 0.9, 0.95, 0.99]))
@settings(max_examples=40, deadline=None)
def test_jackknife_of_a_mean_is_the_textbook_t_interval(seed, count, level):
    values = np.random.default_rng(seed).normal(size=count) + 3
    groups = PromptGroups.from_sums(np.arange(count), np.zeros((count, 1)))
    found = stats.jackknife(*groups.left_out_means(values), level)
    half = student_t.ppf((1 + level) / 2, count - 1) * values.std(ddof=1) / count**0.5
    assert (found.value, found.low, found.high) == pytest.approx(
        (values.mean(), values.mean() - half, values.mean() + half)
    )
    direct = stats.mean_interval(values, level)
    assert (direct.low, direct.high) == pytest.approx((found.low, found.high))


def test_jackknife_covariance_of_two_means_is_the_textbook_one():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 25)) @ rng.normal(size=(25, 25))
    out = [(values.sum() - values) / 24 for values in (first, second)]
    assert stats.jackknife_cov(*out) == pytest.approx(np.cov(first, second)[0, 1] / 25)


def test_fixed_set_has_the_standard_error_of_independent_prompts():
    found = stats.fixed_set_mean(np.array([1.0, 3.0]), np.array([4.0, 5.0]), 0.95, scale=0.5)
    half = 0.5 * 1.959963984540054 * 3 / 2
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1.0 - half, 1.0 + half))


def test_one_value_says_nothing_of_its_spread():
    assert stats.mean_interval(np.array([2.0]), 0.95) == Interval(2.0, -np.inf, np.inf)
    assert stats.quantile(0.95, 0) == np.inf
    assert stats.quantile(0.95, np.inf) == pytest.approx(1.959963984540054)


# Ratios.


def draws(mean: tuple[float, float], spread: float, seed: int = 0, count: int = 30) -> list[tuple[float, np.ndarray]]:
    """Two means with their left-out values."""
    values = np.random.default_rng(seed).normal(size=(2, count)) * spread + np.array(mean)[:, None]
    return [(float(v.mean()), (v.sum() - v) / (count - 1)) for v in values]


@given(seed=st.integers(0, 10_000), top=st.floats(-3, 3), spread=st.floats(0.01, 3))
@settings(max_examples=60, deadline=None)
def test_fieller_holds_just_the_ratios_that_a_t_test_accepts(seed, top, spread):
    numerator, denominator = draws((top, 2.0), spread, seed)
    found = stats.fieller(numerator, denominator, 0.95)
    (a, a_out), (b, b_out) = numerator, denominator
    t = student_t.ppf(0.975, 29)

    def accepted(ratio: float) -> bool:
        difference = a_out - ratio * b_out
        return abs(a - ratio * b) <= t * np.sqrt(stats.jackknife_cov(difference, difference)) * (1 + 1e-9)

    if np.isinf(found.low):
        assert abs(b) <= t * np.sqrt(stats.jackknife_cov(b_out, b_out)) * (1 + 1e-9)
        assert np.isinf(found.high)
        return
    assert found.value == pytest.approx(a / b)
    assert found.low <= found.value <= found.high
    width = found.high - found.low
    for share in (0.001, 0.3, 0.7, 0.999):
        assert accepted(found.low + share * width)
    assert not accepted(found.low - 0.01 * width) and not accepted(found.high + 0.01 * width)


def test_fieller_of_a_precise_ratio_is_the_delta_method():
    (a, a_out), (b, b_out) = draws((1.0, 2.0), 1e-4)
    found = stats.fieller((a, a_out), (b, b_out), 0.95)
    spread = np.sqrt(stats.jackknife_cov(a_out - a / b * b_out, a_out - a / b * b_out)) / b
    assert (found.high - found.low) / 2 == pytest.approx(student_t.ppf(0.975, 29) * spread, rel=1e-6)


def test_fieller_without_a_denominator_is_unbounded():
    numerator, denominator = draws((1.0, 0.0), 1.0)
    found = stats.fieller(numerator, denominator, 0.95)
    assert (found.low, found.high) == (-np.inf, np.inf)
    nothing = stats.fieller((1.0, np.ones(5)), (0.0, np.zeros(5)), 0.95)
    assert np.isnan(nothing.value) and (nothing.low, nothing.high) == (-np.inf, np.inf)


def test_fieller_of_constants_is_a_point():
    found = stats.fieller((3.0, np.full(6, 3.0)), (2.0, np.full(6, 2.0)), 0.95)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_interval_of_the_best_group_size_is_fiellers_turned_over():
    c1, c3 = draws((1.0, 4.0), 0.05)
    ratio, found = stats.fieller(c1, c3, 0.95), stats.optimal_group_size_interval(c1, c3, 0.95)
    assert found.value == pytest.approx(1 + np.sqrt(c3[0] / c1[0]))
    assert found.low == pytest.approx(1 + ratio.high**-0.5) and found.high == pytest.approx(1 + ratio.low**-0.5)


def test_interval_of_the_best_group_size_knows_infinity_and_ignorance():
    c1, c3 = draws((0.01, 4.0), 0.5)
    open_ = stats.optimal_group_size_interval(c1, c3, 0.95)
    assert np.isfinite(open_.low) and open_.high == np.inf
    none = stats.optimal_group_size_interval((-1.0, np.full(6, -1.0)), (2.0, np.full(6, 2.0)), 0.95)
    assert (none.value, none.low, none.high) == (np.inf, np.inf, np.inf)
    nothing = stats.optimal_group_size_interval((0.0, np.zeros(6)), (0.0, np.zeros(6)), 0.95)
    assert np.isnan([nothing.value, nothing.low, nothing.high]).all()
    negative = stats.optimal_group_size_interval((-1.0, np.full(6, -1.0)), (-1.0, np.full(6, -1.0)), 0.95)
    assert np.isnan([negative.value, negative.low, negative.high]).all()


def test_wilson_is_the_set_of_shares_that_a_score_test_keeps():
    found = stats.wilson(7, 20, 0.95)
    for bound in (found.low, found.high):
        assert abs(7 / 20 - bound) == pytest.approx(1.959964 * np.sqrt(bound * (1 - bound) / 20), rel=1e-5)
    assert stats.wilson(0, 20, 0.95).low == 0 and 0.1 < stats.wilson(0, 20, 0.95).high < 0.2


# The diagnostic of Assumption 2.


@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 10), shift=st.floats(-5, 5))
@settings(max_examples=30, deadline=None)
def test_correlation_is_pearsons_within_prompts_and_knows_no_units(seed, scale, shift):
    rng = np.random.default_rng(seed)
    norms, rewards = rng.gamma(2.0, size=(5, 7)), (rng.random((5, 7)) < 0.5).astype(float)
    found = stats.score_reward_correlation(norms, rewards, 0.95)
    a, z = norms - norms.mean(1, keepdims=True), rewards - rewards.mean(1, keepdims=True)
    assert found.value == pytest.approx(np.corrcoef(a.ravel(), z.ravel())[0, 1], abs=1e-12)
    moved = norms * scale + rng.normal(size=(5, 1))
    again = stats.score_reward_correlation(moved, rewards + shift, 0.95)
    assert (again.value, again.low, again.high) == pytest.approx((found.value, found.low, found.high), abs=1e-9)
    flipped = stats.score_reward_correlation(norms, -rewards, 0.95)
    assert flipped.value == pytest.approx(-found.value, abs=1e-12)


def test_correlation_of_a_constant_is_zero_as_in_the_closed_form():
    rewards = np.tile([0.0, 1.0], (3, 2))
    rounded = 7.0 + 1e-7 * np.random.default_rng(0).random((3, 4))
    assert stats.score_reward_correlation(rounded, rewards, 0.95) == Interval(0.0, 0.0, 0.0)
    varying = np.random.default_rng(0).random((3, 4))
    assert stats.score_reward_correlation(varying, rewards * 0, 0.95) == Interval(0.0, 0.0, 0.0)
