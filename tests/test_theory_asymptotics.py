"""Theorem 8, Corollaries 9 and 10: the checks pass, wrong formulas fail them, and what they are built on is exact."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from scipy.linalg import solve_continuous_lyapunov
from scipy.stats import chi2, gamma

from grpo_repro.policies import tabular_runs
from grpo_repro.policies.closed_form import TabularPolicy
from grpo_repro.policies.families import build_family
from grpo_repro.theory import ascent, asymptotics, chi_square
from grpo_repro.theory.asymptotics import corollary_9, corollary_10, theorem_8
from grpo_repro.theory.chi_square import limit_covariance, limit_weights, spectrum
from grpo_repro.theory.exact import groups, law
from grpo_repro.theory.finding import Report, Work

RUNS = 2000
simulate = asymptotics._scaled_gaps


@cache
def simulated(seed: int, beta: float, name: str) -> np.ndarray:
    """The same runs serve every formula."""
    return simulate(Work(seed=seed, runs=RUNS), asymptotics._curved(), beta, name, 0)


@pytest.fixture(autouse=True)
def reuse(monkeypatch):
    monkeypatch.setattr(
        asymptotics, "_scaled_gaps", lambda work, family, beta, name, place: simulated(work.seed, beta, name)
    )


def failed(report: Report) -> set[str]:
    assert len({finding.part for finding in report.findings}) == len(report.findings)
    return {finding.part for finding in report.findings if not finding.passed}


# The law.


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("terms", [1, 2, 3, 6])
def test_equal_weights_give_chi_square_and_gamma(terms, scale):
    w, x = np.full(terms, scale), np.array([1e-3, 0.1, 0.7, 2.0, 5.0, 12.0, 30.0])
    found = [chi_square.cdf(w, float(scale * at)) for at in x]
    np.testing.assert_allclose(found, chi2.cdf(x, terms), atol=1e-10)
    np.testing.assert_allclose(found, gamma.cdf(scale * x, terms / 2, scale=2 * scale), atol=1e-10)
    assert chi_square.mean(w) == pytest.approx(terms * scale)
    assert chi_square.cdf(w, 0.0) == chi_square.cdf(w, -1.0) == 0


def test_unequal_weights_agree_with_a_convolution():
    w = np.array([0.3, 1.0, 2.5])
    nodes, weights = np.polynomial.legendre.leggauss(400)
    for x in (0.2, 1.0, 4.0, 15.0):
        # P(w1 Z1^2 + w2 Z2^2 + w3 Z3^2 <= x) over angles and radii of (Z1, Z2), in closed form in Z3
        angle, share = np.pi * (nodes + 1) / 4, weights * np.pi / 4  # a quarter turn
        scale = w[0] * np.cos(angle) ** 2 + w[1] * np.sin(angle) ** 2
        top = x / (2 * scale)[:, None]  # radius^2 / 2, exponential
        half = top * ((nodes + 1) / 2) ** 2  # squared: the square root at the end is smooth in the other variable
        left = np.clip(x - 2 * scale[:, None] * (top - half), 0, None)
        inner = np.exp(-(top - half)) * chi2.cdf(left / w[2], 1) * top * (nodes + 1) / 2 * weights
        found = (inner.sum(1) * share).sum() * 2 / np.pi
        assert chi_square.cdf(w, x) == pytest.approx(found, abs=1e-9)


@pytest.mark.parametrize("w", [[1.0], [2.0, 2.0], [0.002, 0.0015], [1.0, 0.1, 0.01]])
def test_the_interpolation_is_close_monotone_and_ends_at_one(w):
    w = np.array(w)
    fast, x = chi_square.interpolated(w), w.sum() * np.linspace(0, 80, 20_000)
    values = fast(x)
    assert (np.diff(values) > -1e-9).all() and values[0] == 0 and values[-1] == 1
    some = x[[3, 40, 400, 1000, 3000]]
    np.testing.assert_allclose(fast(some), [chi_square.cdf(w, float(at)) for at in some], atol=2e-6)


@pytest.mark.parametrize("w", [[], [1.0, -0.1], [0.0], [np.nan]])
def test_weights_that_no_law_has_are_refused(w):
    with pytest.raises(ValueError, match="give positive numbers"):
        chi_square.cdf(np.array(w), 1.0)


def test_the_covariance_solves_lyapunovs_equation_and_the_weights_are_the_papers():
    rng = np.random.default_rng(0)
    root, noise = rng.normal(size=(4, 3)), rng.normal(size=(4, 4))
    hessian, noise = -root @ root.T, noise @ noise.T
    values, q = spectrum(hessian)
    assert len(values) == 3
    beta = 1.3 / values[0]
    drift = beta * np.diag(values) - np.eye(3) / 2
    sigma = limit_covariance(hessian, noise, beta)
    np.testing.assert_allclose(sigma, solve_continuous_lyapunov(drift, beta**2 * q.T @ noise @ q), rtol=1e-10)
    own, vectors = np.linalg.eigh(sigma)
    half = (vectors * np.sqrt(own)) @ vectors.T
    wanted = np.linalg.eigvalsh(0.5 * half @ np.diag(values) @ half)
    np.testing.assert_allclose(limit_weights(hessian, noise, beta), wanted, rtol=1e-10)


# The covariance of the estimate.


@pytest.mark.parametrize("name", ["vanilla", "grpo", "oracle", "optimal"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_covariance_is_that_of_every_group(name, size):
    family = build_family("softmax", {"contexts": 3, "actions": 3, "dimension": 2})
    policy = TabularPolicy(family, family.theta)
    second = np.zeros((2, 2))
    for x, share in enumerate(policy.context_probs):
        outcome = law(policy, x)
        chances, counts = groups(outcome.probs, size)
        constant = {"oracle": policy.value[x], "optimal": policy.optimal_baseline[x]}.get(name, 0.0)
        pairs = counts.reshape(len(counts), -1, 2)
        advantages = tabular_runs.action_weights(pairs, name, np.full(len(counts), constant))
        estimate = advantages @ policy.scores[x] / size
        second += share * np.einsum("g,gi,gj->ij", chances, estimate, estimate)
    wanted = second - np.outer(policy.gradient, policy.gradient)
    np.testing.assert_allclose(policy.covariance(name, size, 1), wanted, atol=1e-12)
    np.testing.assert_allclose(policy.covariance(name, size, 5), wanted / 5, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "size", "prompts"), [("grpo", 1, 1), ("vanilla", 0, 1), ("best", 4, 1), ("oracle", 4, 0)]
)
def test_estimates_that_do_not_exist_have_no_covariance(name, size, prompts):
    family = build_family("softmax", {"contexts": 3, "actions": 3, "dimension": 2})
    with pytest.raises(Exception, match="no mean squared error|unknown estimator|B >= 1"):
        TabularPolicy(family, family.theta).covariance(name, size, prompts)


# The families.


def test_the_optima_are_optima():
    rng = np.random.default_rng(3)
    phi, tilt = rng.normal(size=(2, 2)), np.array([0.2, 0.1])
    for family in (asymptotics._curved(), ascent.three_actions(phi, 0.8, tilt), ascent.two_directions()):
        best = TabularPolicy(family, family.optimum)
        np.testing.assert_allclose(best.gradient, 0, atol=1e-15)
        assert np.linalg.eigvalsh(best.hessian).max() < 1e-12
        for scale in (0.1, 1.0, 10.0):
            assert all(
                TabularPolicy(family, scale * rng.normal(size=len(family.theta))).suboptimality_gap > 0
                for _ in range(50)
            )


# The checks.


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_theorem_8_passes(seed):
    report = theorem_8(Work(seed=seed, runs=RUNS))
    assert failed(report) == set() and len(report.findings) == 7
    assert {curve.panel for curve in report.curves} == {"law", "convergence"}


def beta_once(hessian, noise, beta):
    return limit_weights(hessian, noise, beta) / beta


def without_half(hessian, noise, beta):
    values, q = spectrum(hessian)
    sigma = beta**2 * (q.T @ noise @ q) / (beta * (values[:, None] + values))
    return np.linalg.eigvals(0.5 * sigma @ np.diag(values)).real


def every_dimension(hessian, noise, beta):
    w = limit_weights(hessian, noise, beta)
    return np.full(len(hessian), w.mean())


def all_noise(hessian, noise, beta):
    """Least eigenvalues instead of nonzero ones: Sigma of the flat direction is negative."""
    values = -np.linalg.eigvalsh(hessian)[::-1] + 1e-6
    return np.diag(noise) * beta**2 * values / (2 * (2 * beta * values - 1))


@pytest.mark.parametrize("wrong", [beta_once, without_half, every_dimension, all_noise])
def test_wrong_weights_fail_theorem_8(wrong):
    expected = {f"{name}-{part}" for name in ("vanilla", "grpo", "oracle") for part in ("law", "mean")}
    assert failed(theorem_8(Work(runs=RUNS), weights=wrong)) >= expected


def test_the_law_fails_where_only_its_mean_is_right():
    def one_term(hessian, noise, beta):
        return limit_weights(hessian, noise, beta).sum(keepdims=True)

    bad = failed(theorem_8(Work(runs=RUNS), weights=one_term))
    assert {"vanilla-law", "grpo-law", "oracle-law"} <= bad and not any(part.endswith("mean") for part in bad)


@pytest.mark.parametrize("check", [corollary_9, corollary_10])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_corollaries_hold(check, seed):
    report = check(Work(seed=seed, runs=100))
    assert failed(report) == set() and report.curves


def test_a_term_in_one_over_g_fails_corollary_9():
    def first_order(policy, name, size, prompts):
        extra = policy.covariance("grpo", size, 1) - policy.covariance("oracle", size, 1)
        return policy.covariance("oracle", size, prompts) + (extra * (size - 1) if name == "grpo" else 0)

    assert failed(corollary_9(Work(), covariance=first_order)) == {"slope", "limit", "sum"}


def test_g_squared_and_a_missing_term_fail_corollary_9():
    def squared(policy, name, size, prompts):
        extra = policy.covariance("grpo", size, 1) - policy.covariance("oracle", size, 1)
        return policy.covariance("oracle", size, prompts) + (extra * (size - 1) / size if name == "grpo" else 0)

    def without_gradient(policy, name, size, prompts):
        own = np.einsum("x,xi,xj->ij", policy.context_probs, policy.gradients, policy.gradients)
        return policy.covariance(name, size, prompts) - (own / (size * (size - 1)) if name == "grpo" else 0)

    assert failed(corollary_9(Work(), covariance=squared)) == {"sum"}
    assert failed(corollary_9(Work(), covariance=without_gradient)) == {"limit", "sum"}


@pytest.mark.parametrize("shift", [-0.3, 0.05])
def test_another_best_baseline_fails_corollary_10(shift):
    assert "baselines" in failed(corollary_10(Work(), best=lambda policy: policy.value + shift))


def test_the_order_turns_round_with_the_condition():
    found = {finding.part: finding for finding in corollary_10(Work()).findings}
    assert found["reversed"].observed < 0.5 and found["matrix"].observed < 0.9
    assert found["baselines"].observed == pytest.approx(1, abs=1e-3)
    assert found["exclusion"].observed < -0.01
    assert TabularPolicy(ascent.two_directions(), np.zeros(2)).score_reward_correlation == 0
