"""The components of the error: exact unbiasedness by enumeration of pools, and brute-force recomputation."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace

import numpy as np
import pytest
from enumeration import LAWS, Law, multisets, of_context, ordered, real_valued, small_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from grpo_repro import ustat
from grpo_repro.errors import UserError
from grpo_repro.policies import tabular

FIELDS = [f.name for f in fields(ustat.Components)]
UNBIASED = [name for name in FIELDS if name != "optimal"]
every_law = pytest.mark.parametrize("law", [pytest.param(law, id=name) for name, law in LAWS.items()])


def random_pool(seed: int, size: int, dim: int = 3) -> tuple[np.ndarray, np.ndarray, ustat.Pool]:
    """Scores ``[size, dim]``, real rewards ``[size]`` and the pool of that one prompt."""
    rng = np.random.default_rng(seed)
    scores, rewards = (
        rng.normal(size=(size, dim)) * rng.gamma(1.0, size=(size, 1)),
        rng.normal(size=size) + 0.3,
    )
    return scores, rewards, ustat.Pool.from_gram((scores @ scores.T)[None], rewards[None])


def brute_force(scores: np.ndarray, rewards: np.ndarray) -> dict[str, float]:
    """Every term by averages over distinct indices, from its definition; `optimal` is the plug-in."""
    k, norm, z = len(rewards), (scores**2).sum(1), rewards
    pairs = list(itertools.permutations(range(k), 2))
    value_squared = np.mean([norm[i] * z[j] * z[m] for i, j, m in itertools.permutations(range(k), 3)])
    g2 = []
    for i, j in pairs:
        others = np.delete(z, [i, j]).mean()
        g2.append(scores[i] @ scores[j] * (z[i] - others) * (z[j] - others))
    gradient = np.mean(g2)
    second = np.mean(norm * z**2) - 2 * np.mean([norm[i] * z[i] * z[j] for i, j in pairs]) + value_squared
    return {
        "value": z.mean(),
        "score_sq_norm": norm.mean(),
        "reward_variance": np.mean([0.5 * (z[i] - z[j]) ** 2 for i, j in pairs]),
        "gradient_sq_norm": gradient,
        "vanilla": np.mean(norm * z**2) - gradient,
        "first_order": second - gradient,
        "second_order": np.mean([norm[i] * z[j] ** 2 for i, j in pairs]) - value_squared + gradient,
        "optimal": np.mean(norm * z**2) - np.mean(norm * z) ** 2 / norm.mean() - gradient,
    }


# Unbiasedness, exactly.


@every_law
def test_every_component_is_unbiased_over_every_ordered_pool_of_four(law):
    probs, index = ordered(law, 4)
    found, _ = ustat.components(law.pool(index))
    for name in UNBIASED:
        truth = getattr(law.components(), name).item()
        assert probs @ getattr(found, name) == pytest.approx(truth, rel=0, abs=1e-12 * law.scale), name


@every_law
@pytest.mark.parametrize("size", [5, 8])
def test_every_component_and_every_left_out_one_is_unbiased_over_every_multiset(law, size):
    # Real laws have 4 outcomes, 4-action laws 8: at most 6435 multisets.
    probs, index = multisets(law, size)
    assert probs.sum() == pytest.approx(1, abs=1e-12)
    found, left_out = ustat.components(law.pool(index))
    for name in UNBIASED:
        truth = getattr(law.components(), name).item()
        scale = pytest.approx(truth, rel=0, abs=1e-12 * law.scale)
        assert probs @ getattr(found, name) == scale, name
        assert probs @ getattr(left_out, name).mean(1) == scale, name


@every_law
def test_estimated_errors_are_unbiased_at_every_group_size(law):
    probs, index = multisets(law, 5)
    found, _ = ustat.components(law.pool(index))
    for name, group in itertools.product(("vanilla", "grpo", "oracle"), (2, 4, 64)):
        truth = ustat.mse(law.components(), group, name).item()
        assert probs @ ustat.mse(found, group, name) == pytest.approx(truth, rel=0, abs=1e-12 * law.scale)


def optimal_bias(law: Law, sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Exact bias of the jackknifed `optimal` and of its plug-in at each K."""
    found = []
    for size in sizes:
        probs, index = multisets(law, size)
        full, _ = ustat.components(law.pool(index))
        norm, z = (law.scores**2).sum(1)[index], law.rewards[index]
        plug_in = (norm * z**2).mean(1) - (norm * z).mean(1) ** 2 / norm.mean(1) - full.gradient_sq_norm
        truth = law.components().optimal.item()
        found.append((probs @ full.optimal - truth, probs @ plug_in - truth))
    corrected, plain = np.array(found).T
    return corrected, plain


@pytest.mark.parametrize("seed", range(4))
def test_bias_of_the_optimal_term_is_of_order_one_over_k_squared(seed):
    """The only biased term, from every pool of K = 32 and 64: K^2 times its bias settles.

    Of its plug-in it is K times. Measured at K = 64, largest of the four laws: 2.4e-5 of the scale E||W||^2
    (1 + max Z^2), and 0.035 of the plug-in's bias.
    """
    law, sizes = real_valued(seed, outcomes=3), np.array([32, 64])
    corrected, plain = optimal_bias(law, sizes.tolist())
    np.testing.assert_allclose(np.divide(*(sizes**2 * corrected)), 1, atol=0.15)
    np.testing.assert_allclose(np.divide(*(sizes * plain)), 1, atol=0.05)
    assert abs(corrected[1]) < min(0.05 * abs(plain[1]), 1e-4 * law.scale)


def test_bias_of_the_optimal_term_on_a_policy():
    law = of_context(tabular.build("softmax", dict(contexts=1, actions=2, dimension=3)), 0)
    corrected, plain = optimal_bias(law, [8, 16, 24])
    assert np.polyfit(np.log([8, 16, 24]), np.log(np.abs(corrected)), 1)[0] == pytest.approx(-2, abs=0.25)
    assert np.polyfit(np.log([8, 16, 24]), np.log(np.abs(plain)), 1)[0] == pytest.approx(-1, abs=0.1)


# Recomputation by brute force.


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(4, 7), dim=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_components_and_left_out_ones_equal_brute_force(seed, size, dim):
    scores, rewards, pool = random_pool(seed, size, dim)
    found, left_out = ustat.components(pool)
    scale = 1e-11 * float((scores**2).sum(1).max() * (1 + (rewards**2).max()))
    whole = brute_force(scores, rewards)
    for name in UNBIASED:
        assert getattr(found, name)[0] == pytest.approx(whole[name], rel=0, abs=scale), name
    out = [brute_force(np.delete(scores, i, 0), np.delete(rewards, i)) for i in range(size)]
    for name in FIELDS:
        expected = [values[name] for values in out]
        np.testing.assert_allclose(getattr(left_out, name)[0], expected, rtol=0, atol=scale, err_msg=name)
    ratio = size * (whole["optimal"] + whole["gradient_sq_norm"]) - (size - 1) * np.mean(
        [values["optimal"] + values["gradient_sq_norm"] for values in out]
    )
    assert found.optimal[0] == pytest.approx(ratio - whole["gradient_sq_norm"], rel=0, abs=size * scale)


@given(seed=st.integers(0, 2**32 - 1), shift=st.floats(-20, 20))
@settings(max_examples=25, deadline=None)
def test_a_shift_of_rewards_leaves_what_baselines_remove(seed, shift):
    scores, rewards, pool = random_pool(seed, 6)
    moved = ustat.Pool.from_gram((scores @ scores.T)[None], rewards[None] + shift)
    first, second = ustat.components(pool)[0], ustat.components(moved)[0]
    scale = 1e-12 * float((scores**2).sum(1).max()) * (1 + shift**2 + (rewards**2).max())
    for name in (
        "score_sq_norm",
        "reward_variance",
        "gradient_sq_norm",
        "first_order",
        "second_order",
        "optimal",
    ):
        np.testing.assert_allclose(getattr(second, name), getattr(first, name), rtol=0, atol=10 * scale, err_msg=name)
    assert second.value[0] == pytest.approx(first.value[0] + shift, rel=0, abs=1e-12 * (1 + abs(shift)))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_the_order_of_the_pool_changes_nothing(seed):
    scores, rewards, pool = random_pool(seed, 6)
    order = np.random.default_rng(seed).permutation(6)
    moved = ustat.Pool.from_gram((scores[order] @ scores[order].T)[None], rewards[order][None])
    first, out = ustat.components(pool)
    second, out_moved = ustat.components(moved)
    scale = 1e-12 * float((scores**2).sum(1).max()) * (1 + (rewards**2).max())
    for name in FIELDS:
        np.testing.assert_allclose(getattr(second, name), getattr(first, name), rtol=0, atol=scale)
        np.testing.assert_allclose(getattr(out_moved, name), getattr(out, name)[:, order], rtol=0, atol=scale)


def test_identical_rewards_and_zero_scores_are_no_accident():
    scores, _, _ = random_pool(0, 5)
    gram, flat = (scores @ scores.T)[None], np.full((1, 5), 1.0)
    found, left_out = ustat.components(ustat.Pool.from_gram(gram, flat))
    for name in ("reward_variance", "gradient_sq_norm", "first_order", "second_order", "optimal"):
        np.testing.assert_allclose(getattr(found, name), 0, atol=1e-12 * np.trace(gram[0]))
        np.testing.assert_allclose(getattr(left_out, name), 0, atol=1e-12 * np.trace(gram[0]))
    still = ustat.Pool.from_gram(np.zeros((1, 5, 5)), np.array([[1.0, 0, 0, 1, 1]]))
    found, left_out = ustat.components(still)
    for name in set(FIELDS) - {"value", "reward_variance"}:
        assert getattr(found, name).tolist() == [0.0] and not getattr(left_out, name).any(), name
    assert ustat.optimal_baseline(still).tolist() == [0.6]


# Variances over completions.


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(4, 20))
@settings(max_examples=25, deadline=None)
def test_pool_variance_of_a_mean_is_the_textbook_one(seed, size):
    _, rewards, pool = random_pool(seed, size)
    _, left_out = ustat.components(pool)
    assert ustat.pool_variance(left_out.value)[0] == pytest.approx(rewards.var(ddof=1) / size, rel=1e-9)


@every_law
def test_pool_variance_is_conservative_by_the_efron_stein_inequality(law):
    """E[jackknife variance at K] >= (K-1)/K Var of the statistic at K - 1, exactly, for every term.

    This one-sidedness, larger at small K where the second order of the Hoeffding decomposition matters, is
    why intervals over completions cover a little more than their level.
    """
    probs, index = multisets(law, 6)
    _, left_out = ustat.components(law.pool(index))
    probs_less, index_less = multisets(law, 5)
    less, _ = ustat.components(law.pool(index_less))
    for name, group in itertools.product(("vanilla", "grpo", "oracle"), (4, 64)):
        statistic = ustat.mse(less, group, name)
        variance = probs_less @ statistic**2 - (probs_less @ statistic) ** 2
        expected = probs @ ustat.pool_variance(ustat.mse(left_out, group, name))
        assert expected >= 5 / 6 * variance * (1 - 1e-9)


# The pool and what is read from it.


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(2, 8), dim=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_pool_and_gradient_norm_equal_vectors(seed, size, dim):
    scores, rewards, pool = random_pool(seed, size, dim)
    for i in range(size):
        others = [j for j in range(size) if j != i]
        for name, power in (("cross", 0), ("cross_rewards", 1), ("cross_sq_rewards", 2)):
            expected = scores[i] @ (scores[others] * rewards[others, None] ** power).sum(0)
            tolerance = 1e-12 * (scores**2).sum() * (1 + (rewards**2).max())
            assert getattr(pool, name)[0, i] == pytest.approx(expected, rel=0, abs=tolerance)
    np.testing.assert_allclose(pool.sq_norms[0], (scores**2).sum(1), rtol=1e-12)
    gradient = np.mean(
        [0.5 * (scores[i] - scores[j]) * (rewards[i] - rewards[j]) for i, j in itertools.combinations(range(size), 2)],
        axis=0,
    )
    tolerance = 1e-12 * (scores**2).sum() * (1 + (rewards**2).max())
    assert ustat.gradient_estimate_sq_norm(pool)[0] == pytest.approx(gradient @ gradient, rel=0, abs=tolerance)
    weighted = (scores**2).sum(1)
    assert ustat.optimal_baseline(pool)[0] == pytest.approx(weighted @ rewards / weighted.sum(), rel=1e-12)


@pytest.mark.parametrize("family", ["softmax", "constant-norm", "curved"])
def test_tabular_pools_equal_those_from_gram_matrices_and_give_the_gradients(family):
    policy, rng = small_policy(family), np.random.default_rng(1)
    contexts = tabular.sample_contexts(policy, 50, rng)
    actions, rewards = tabular.sample(policy, contexts, 12, rng)
    pool = tabular.pool(policy, contexts, actions, rewards)
    from_gram = ustat.Pool.from_gram(tabular.gram(policy, contexts, actions), rewards)
    for f in fields(ustat.Pool):
        np.testing.assert_allclose(getattr(pool, f.name), getattr(from_gram, f.name), rtol=0, atol=1e-12)
    vectors = tabular.score_sums(policy, contexts, actions, ustat.group_gradient_weights(rewards))
    np.testing.assert_allclose(ustat.gradient_estimate_sq_norm(pool), (vectors**2).sum(1), rtol=0, atol=1e-12)


# Several prompts.


def prompt_estimates(policy, x: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Probability and grpo estimate of every group of one context."""
    law = of_context(policy, x)
    probs, index = ordered(law, group)
    z = law.rewards[index]
    return probs, np.einsum("ng,ngd->nd", (z - z.mean(1, keepdims=True)) / (group - 1), law.scores[index])


@pytest.mark.parametrize(("batch", "group"), [(1, 2), (1, 3), (1, 4), (2, 2), (2, 3)])
def test_minibatch_error_equals_enumeration_of_every_minibatch(batch, group):
    family = tabular.build("softmax", dict(contexts=2, actions=2, dimension=3)).family
    policy = tabular.TabularPolicy(replace(family, context_probs=np.array([0.3, 0.7])), family.theta)
    parts = [prompt_estimates(policy, x, group) for x in range(2)]
    probs = np.concatenate([f * p for f, (p, _) in zip(policy.context_probs, parts, strict=True)])
    found = np.concatenate([estimate for _, estimate in parts])
    for _ in range(batch - 1):  # the mean of two independent prompts, every pair
        probs, found = np.outer(probs, probs).ravel(), (found[:, None] + found[None]).reshape(-1, 3) / 2
    assert probs.sum() == pytest.approx(1, abs=1e-12)
    error = probs @ ((found - policy.gradient) ** 2).sum(1)
    closed = ustat.minibatch_mse(policy.c1, policy.c2, policy.c3, batch, group)
    assert error == pytest.approx(closed, rel=1e-12)


def test_error_of_a_fixed_set_equals_enumeration():
    policy = small_policy("softmax")
    parts = [prompt_estimates(policy, x, 2) for x in (0, 3)]
    probs = np.outer(parts[0][0], parts[1][0])
    found = (parts[0][1][:, None] + parts[1][1][None]) / 2
    truth = policy.gradients[[0, 3]].mean(0)
    error = np.sum(probs[..., None] * (found - truth) ** 2)
    assert error == pytest.approx(ustat.mse(policy.components, 2, "grpo")[[0, 3]].sum() / 4, rel=1e-12)


@given(c1=st.floats(1e-4, 1e3), c2=st.floats(0, 1e3), c3=st.floats(1e-3, 1e4), budget=st.integers(64, 4096))
@settings(max_examples=60, deadline=None)
def test_best_group_size_minimises_the_error_at_a_fixed_budget(c1, c2, c3, budget):
    best = ustat.optimal_group_size(c1, c3)

    def error(log_excess: float) -> float:
        group = 1 + math.exp(log_excess)
        return (c1 * group + c3 / (group - 1)) / math.sqrt(c1 * c3)

    found = minimize_scalar(error, bracket=(-1.0, 1.0), tol=1e-10)
    assert 1 + math.exp(found.x) == pytest.approx(best, rel=1e-4)
    assert error(math.log(best - 1)) <= found.fun * (1 + 1e-12)
    grid = np.arange(2, min(int(best) + 20, 20_000))
    errors = [ustat.minibatch_mse(c1, c2, c3, 1, int(g)) * g / budget for g in grid[:500]]
    nearest = {max(2, math.floor(best)), max(2, math.ceil(best))}
    if best < 480:
        assert min(errors) == pytest.approx(
            min(ustat.minibatch_mse(c1, c2, c3, 1, g) * g / budget for g in nearest), rel=1e-12
        )


def test_best_group_size_at_the_ends():
    assert ustat.optimal_group_size(0.0, 1.0) == ustat.optimal_group_size(-1.0, 1.0) == math.inf
    assert ustat.optimal_group_size(1.0, 0.0) == ustat.optimal_group_size(1.0, -3.0) == 1.0


# Refusals.


def test_what_has_no_answer_is_refused():
    terms = LAWS["softmax-0"].components()
    for group, name in ((1, "grpo"), (0, "grpo"), (0, "vanilla"), (-3, "oracle")):
        with pytest.raises(UserError, match=f"{name}.*group size {group}"):
            ustat.mse(terms, group, name)
    with pytest.raises(UserError, match="unknown estimator 'best'.*vanilla"):
        ustat.mse(terms, 4, "best")
    with pytest.raises(UserError, match="at least 4 completions per prompt, got 3"):
        ustat.components(ustat.Pool(*(np.ones((2, 3)) for _ in range(5))))
