"""What each tabular family promises: Assumption 2 or its failure, interior optima, checked arguments."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tabular_cases import INTERIOR, SMALL, at

from grpo_repro.errors import UserError
from grpo_repro.policies import tabular
from grpo_repro.policies.closed_form import TabularPolicy
from grpo_repro.policies.families import separable_return


@given(seed=st.integers(0, 2**32 - 1), factors=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_constant_norm_satisfies_assumption_2_whatever_the_rewards(seed, factors):
    built = tabular.build("constant-norm", dict(contexts=3, factors=factors, dimension=2))
    q = np.random.default_rng(seed).random(built.reward_probs.shape)
    policy = TabularPolicy(replace(built.family, reward_probs=q), built.theta)
    norm = policy.sq_norms - policy.score_sq_norm[:, None]
    np.testing.assert_allclose(norm, 0, atol=1e-13)
    assert policy.score_reward_correlation == 0
    assert np.linalg.norm(policy.gradient) > 0
    # Corollary 5, strictly: oracle is the best prompt-only baseline and vanilla is worse.
    np.testing.assert_allclose(policy.optimal, policy.first_order, atol=1e-13)
    np.testing.assert_allclose(policy.vanilla - policy.first_order, policy.score_sq_norm * policy.value**2, atol=1e-13)
    assert np.all(policy.vanilla > policy.first_order)


@pytest.mark.parametrize("family", ["softmax", "constant-norm"])
def test_values_spread_over_the_unit_interval(family):
    value = tabular.build(family).value
    counts = np.histogram(value, bins=[0, 0.2, 0.4, 0.6, 0.8, 1])[0]
    assert counts.min() >= 4


@pytest.mark.parametrize("seed", range(5))
def test_vanilla_beats_the_oracle_where_assumption_2_fails(seed):
    for name, args in (("likely-right", {}), ("three-actions", dict(gap=0.9, theta_scale=0.0))):
        policy = tabular.build(name, dict(seed=seed, **args))
        assert policy.score_reward_correlation < -0.6
        assert policy.context_probs @ policy.vanilla < 0.65 * policy.c2
    silent = tabular.build("three-actions", dict(gap=1.0, theta_scale=0.0, seed=seed))
    np.testing.assert_allclose(silent.vanilla, 0, atol=1e-15)
    assert silent.c2 > 0.01


@pytest.mark.parametrize("asymmetry", [0.0, 0.3])
@pytest.mark.parametrize("name", INTERIOR)
def test_interior_optimum(name, asymmetry):
    args = dict(contexts=6, dimension=5, rank=2, asymmetry=asymmetry, gap=0.5, theta_scale=0.0)
    policy = tabular.build(name, args)
    assert policy.suboptimality_gap == 0
    np.testing.assert_allclose(policy.gradient, 0, atol=1e-15)
    assert (policy.c1 > 1e-4) if asymmetry else (policy.c1 == 0)
    # Curvature from E[phi phi'] of the drawn features: -(2/9) gap, or -(kappa/2)(q_+ - q_-) with kappa = 1.
    phi = policy.family.features[:, -1]
    moment = np.einsum("x,xi,xj->ij", policy.context_probs, phi, phi)
    curvature = {"three-actions": 2 / 9, "curved": 1 / 2}[name] * 0.5
    np.testing.assert_allclose(policy.hessian, -curvature * moment, atol=1e-15)
    eigenvalues = np.linalg.eigvalsh(policy.hessian)
    assert np.all(eigenvalues[:2] < -1e-3) and np.all(abs(eigenvalues[2:]) < 1e-15)


@pytest.mark.parametrize("asymmetry", [0.0, 0.4])
@pytest.mark.parametrize("name", INTERIOR)
def test_no_theta_beats_the_interior_optimum_and_the_flat_directions_tie(name, asymmetry):
    policy = tabular.build(name, dict(contexts=6, dimension=4, rank=2, asymmetry=asymmetry))
    rng = np.random.default_rng(0)
    for scale in (0.01, 0.1, 1.0, 10.0, 100.0):
        for theta in scale * rng.normal(size=(40, 4)):
            assert at(policy, theta).expected_return < policy.best_return
    row_space = np.linalg.svd(policy.family.features[:, -1])[2][:2]
    flat = rng.normal(size=4)
    flat -= row_space.T @ (row_space @ flat)
    assert at(policy, 5 * flat).expected_return == pytest.approx(policy.best_return, abs=1e-15)


def test_curved_has_constant_norm_at_its_optimum_and_only_there():
    optimum = tabular.build("curved", dict(theta_scale=0.0, asymmetry=0.3))
    assert optimum.score_reward_correlation == 0
    np.testing.assert_allclose(optimum.optimal, optimum.first_order, atol=1e-15)
    assert abs(tabular.build("curved", dict(asymmetry=0.3)).score_reward_correlation) > 1e-3


@pytest.mark.parametrize("kappa", [0.5, 2.0])
def test_curved_return_is_the_closed_form(kappa):
    policy = tabular.build("curved", dict(kappa=kappa, gap=0.4, asymmetry=0.2))
    z = policy.family.features[:, -1] @ policy.theta
    low = policy.reward_probs.reshape(-1, 2, 2)[:, :, 0].mean(1)
    truth = policy.context_probs @ (low + 0.4 / (1 + np.exp(kappa * z**2)))
    assert policy.expected_return == pytest.approx(truth, rel=1e-14)


def test_separable_return_is_approached_and_unknown_otherwise():
    # More parameters than constraints: a direction in which every best action wins by one exists.
    rich = tabular.build("softmax", dict(contexts=3, actions=3, dimension=12))
    assert rich.best_return == pytest.approx(rich.reward_probs.max(1).mean())
    best = rich.reward_probs.argmax(1)
    chosen = rich.family.features[np.arange(3), best]
    margins = (chosen[:, None] - rich.family.features)[np.arange(3) != best[:, None]]
    direction = np.linalg.lstsq(margins, np.ones(len(margins)), rcond=None)[0]
    gaps = [at(rich, scale * direction).suboptimality_gap for scale in (1, 10, 20)]
    assert gaps[0] > gaps[1] > gaps[2] > 0 and gaps[2] < 3 * math.exp(-20)
    # One parameter cannot order every context.
    poor = tabular.build("softmax", dict(contexts=20, actions=3, dimension=1))
    assert poor.best_return is None and poor.suboptimality_gap is None
    # The middle of three actions on a line is never the likeliest; a curved family is not linear.
    assert separable_return(tabular.build("three-actions").family) is None
    assert separable_return(tabular.build("curved").family) is None


# Arguments.


def test_same_arguments_same_family():
    for name in tabular.FAMILIES:
        first, second, other = (tabular.build(name, dict(seed=seed)) for seed in (1, 1, 2))
        np.testing.assert_array_equal(first.reward_probs, second.reward_probs)
        np.testing.assert_array_equal(first.theta, second.theta)
        assert not np.array_equal(first.family.features, other.family.features)


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("tabbular", {}, "unknown tabular family 'tabbular'.*constant-norm"),
        (None, {}, "unknown tabular family None"),
        ("softmax", {"context": 3}, "no argument 'context'; it takes contexts"),
        ("softmax", {"contexts": 3.5}, "contexts is 3.5; give an integer"),
        ("softmax", {"contexts": True}, "contexts is True; give an integer"),
        ("softmax", {"theta_scale": "big"}, "theta_scale is 'big'; give a number"),
        ("curved", {"kappa": math.nan}, "kappa is nan; give a number"),
        ("softmax", {"seed": -1}, "seed is -1"),
        ("softmax", {"actions": 1}, "actions >= 2"),
        ("constant-norm", {"factors": 11}, "factors <= 10"),
        ("three-actions", {"gap": 0.0}, "0 < gap <= 1"),
        ("three-actions", {"contexts": 3, "asymmetry": 0.1}, "even number of contexts"),
        ("three-actions", {"rank": 9}, "rank <= dimension"),
        ("three-actions", {"asymmetry": 1.5}, "asymmetry"),
        ("curved", {"gap": 0.6, "asymmetry": 0.5}, "asymmetry"),
        ("curved", {"contexts": 2}, "rank <= contexts"),
        ("likely-right", {"right": 0.1, "wrong": 0.2}, "wrong < right"),
    ],
)
def test_bad_arguments_are_named(name, args, says):
    with pytest.raises(UserError, match=says):
        tabular.build(name, args)


def test_arrays_that_are_no_probabilities_are_refused():
    family = tabular.build("softmax", SMALL["softmax"]).family
    with pytest.raises(ValueError, match="context_probs sum to"):
        replace(family, context_probs=np.full(4, 0.5))
    with pytest.raises(ValueError, match="reward_probs lie in"):
        replace(family, reward_probs=family.reward_probs + 1)
