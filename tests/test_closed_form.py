"""The exact quantities of tabular policies, against finite differences and enumeration of every outcome."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tabular_cases import INTERIOR, SMALL, at, every_policy

from grpo_repro.policies import tabular
from grpo_repro.policies.closed_form import TabularPolicy, best_group_size
from grpo_repro.ustat import mse


def central_difference(function, theta: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The derivative of a function of theta along every coordinate, stacked along the first axis."""
    basis = step * np.eye(len(theta))
    return np.stack([(function(theta + e) - function(theta - e)) / (2 * step) for e in basis])


# Derivatives.


@every_policy
def test_scores_are_the_derivative_of_log_probabilities(policy):
    slope = central_difference(lambda theta: np.log(at(policy, theta).probs), policy.theta)
    np.testing.assert_allclose(policy.scores, np.moveaxis(slope, 0, -1), atol=1e-8)


@every_policy
def test_scores_have_mean_zero(policy):
    mean = np.einsum("xa,xad->xd", policy.probs, policy.scores)
    np.testing.assert_allclose(mean, 0, atol=1e-14)


@every_policy
def test_gradient_is_the_derivative_of_the_return(policy):
    slope = central_difference(lambda theta: at(policy, theta).expected_return, policy.theta)
    np.testing.assert_allclose(policy.gradient, slope, atol=1e-9)
    slopes = central_difference(lambda theta: at(policy, theta).value, policy.theta)
    np.testing.assert_allclose(policy.gradients, slopes.T, atol=1e-9)


@every_policy
def test_hessian_is_the_derivative_of_the_gradient(policy):
    slope = central_difference(lambda theta: at(policy, theta).gradient, policy.theta)
    np.testing.assert_allclose(policy.hessian, slope, atol=1e-9)


# Exact quantities.


@every_policy
def test_per_context_terms_equal_enumeration_of_actions_and_rewards(policy):
    for x in range(4):
        outcomes = []
        for a in range(policy.probs.shape[1]):
            for z in (0, 1):
                reward_prob = policy.reward_probs[x, a] if z else 1 - policy.reward_probs[x, a]
                outcomes.append((policy.probs[x, a] * reward_prob, policy.scores[x, a], z))
        p, w, z = (np.array(part) for part in zip(*outcomes, strict=True))
        assert math.isclose(p.sum(), 1)
        norm = (w**2).sum(1)
        value, g = p @ z, (p * z) @ w
        g2 = g @ g
        b = (p @ (norm * z)) / (p @ norm)
        truth = {
            "value": value,
            "score_sq_norm": p @ norm,
            "reward_variance": p @ (z - value) ** 2,
            "gradient_sq_norm": g2,
            "vanilla": p @ (norm * z**2) - g2,
            "first_order": p @ (norm * (z - value) ** 2) - g2,
            "second_order": (p @ norm) * (p @ (z - value) ** 2) + g2,
            "optimal": p @ (norm * (z - b) ** 2) - g2,
        }
        for name, expected in truth.items():
            assert getattr(policy.components, name)[x] == pytest.approx(expected, rel=1e-12, abs=1e-15), name
        assert policy.optimal_baseline[x] == pytest.approx(b, rel=1e-12)
        np.testing.assert_allclose(policy.gradients[x], g, atol=1e-15)


def test_grpo_mse_equals_enumeration_of_every_group():
    policy = tabular.build("softmax", dict(contexts=2, actions=3, dimension=4))
    for x, size in itertools.product(range(2), (2, 3)):
        error = 0.0
        for group in itertools.product(itertools.product(range(3), (0, 1)), repeat=size):
            actions = np.array([a for a, _ in group])
            z = np.array([float(r) for _, r in group])
            q = policy.reward_probs[x, actions]
            probability = np.prod(policy.probs[x, actions] * np.where(z == 1, q, 1 - q))
            advantages = (z - z.mean()) * size / (size - 1)
            estimate = advantages @ policy.scores[x, actions] / size
            error += probability * np.sum((estimate - policy.gradients[x]) ** 2)
        assert mse(policy.components, size, "grpo")[x] == pytest.approx(error, rel=1e-12)


@every_policy
def test_overall_terms_are_means_over_contexts(policy):
    f = policy.context_probs
    g = sum(f[x] * policy.gradients[x] for x in range(4))
    assert policy.c1 == pytest.approx(sum(f[x] * np.sum((policy.gradients[x] - g) ** 2) for x in range(4)))
    assert policy.c2 == pytest.approx(sum(f[x] * policy.first_order[x] for x in range(4)))
    assert policy.c3 == pytest.approx(sum(f[x] * policy.second_order[x] for x in range(4)))


@every_policy
def test_optimal_baseline_is_the_best_of_a_grid_and_never_worse_than_oracle(policy):
    grid = [policy.baseline_term(np.full(4, b)) for b in np.linspace(-0.5, 1.5, 401)]
    assert np.all(policy.optimal <= np.min(grid, axis=0) + 1e-15)
    assert np.all(np.min(grid, axis=0) <= policy.optimal + policy.score_sq_norm * 0.0025**2 * 1.001)
    assert np.all(policy.optimal <= policy.first_order + 1e-15)


def test_optimal_baseline_of_a_constant_policy_is_its_value():
    family = tabular.build("softmax", SMALL["softmax"]).family
    flat = replace(family, features=np.zeros_like(family.features))
    policy = TabularPolicy(flat, flat.theta)
    np.testing.assert_array_equal(policy.optimal_baseline, policy.value)
    assert policy.score_reward_correlation == 0


def test_score_reward_correlation_equals_that_of_a_large_sample():
    policy = tabular.build("likely-right", SMALL["likely-right"])
    rng = np.random.default_rng(3)
    contexts = tabular.sample_contexts(policy, 400_000, rng)
    actions, rewards = tabular.sample(policy, contexts, 1, rng)
    norm = policy.sq_norms[contexts, actions[:, 0]] - policy.score_sq_norm[contexts]
    z = rewards[:, 0] - policy.value[contexts]
    measured = np.mean(norm * z) / np.sqrt(np.mean(norm**2) * np.mean(z**2))
    assert measured == pytest.approx(policy.score_reward_correlation, abs=4 / np.sqrt(400_000))


# Group size.


@given(c1=st.floats(1e-6, 1e3), c3=st.floats(1e-6, 1e3))
def test_best_group_size_is_the_best_of_all(c1, c3):
    best = best_group_size(c1, c3)
    sizes = np.arange(2, int(best) + 50)
    cost = c1 * sizes + c3 / (sizes - 1)
    assert c1 * best + c3 / (best - 1) == pytest.approx(cost.min(), rel=1e-12)


def test_best_group_size_at_the_ends():
    assert best_group_size(0.0, 1.0) == math.inf
    assert best_group_size(1.0, 0.0) == 2
    assert best_group_size(1.0, 9.0) == 4


# Invariances.


@given(shift=st.floats(-50, 50), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_a_constant_added_to_every_logit_of_a_context_changes_nothing(shift, seed):
    policy = tabular.build("softmax", dict(seed=seed, **SMALL["softmax"]))
    offset = policy.family.offset + shift * np.arange(1, 5)[:, None]
    assert_same(policy, TabularPolicy(replace(policy.family, offset=offset), policy.theta))


@given(order=st.permutations(range(4)), seed=st.integers(0, 1000), name=st.sampled_from(INTERIOR))
@settings(max_examples=20, deadline=None)
def test_permuting_actions_changes_nothing(order, seed, name):
    policy = tabular.build(name, dict(seed=seed, **SMALL[name]))
    family = policy.family
    order = [a for a in order if a < family.reward_probs.shape[1]]
    permuted = replace(
        family,
        reward_probs=family.reward_probs[:, order],
        offset=family.offset[:, order],
        features=family.features[:, order],
        curvature=None if family.curvature is None else family.curvature[:, order],
    )
    assert_same(policy, TabularPolicy(permuted, policy.theta))


def assert_same(first: TabularPolicy, second: TabularPolicy) -> None:
    for name in ("expected_return", "gradient", "hessian", "c1", "c2", "c3", "score_reward_correlation"):
        np.testing.assert_allclose(getattr(first, name), getattr(second, name), rtol=1e-9, atol=1e-12)
    for name in ("vanilla", "optimal", "optimal_baseline"):
        np.testing.assert_allclose(getattr(first, name), getattr(second, name), rtol=1e-9, atol=1e-12)
