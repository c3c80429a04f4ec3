"""Lemma 11, Theorem 12 and Proposition 13: they hold, and wrong formulas are found out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from grpo_repro import kl
from grpo_repro.theory import fixed_point, production, sequences
from grpo_repro.theory.finding import REPORTED, Report, Work

SHORT = Work(runs=1600)  # 20 runs of training: what is wrong shows without long simulations


def failed(report: Report) -> set[str]:
    return {finding.part for finding in report.findings if not finding.passed}


def population_deviation(rewards):
    """se with ddof = 0."""
    deviation = rewards.std(-1, keepdims=True)
    equal = (rewards == rewards[..., :1]).all(-1, keepdims=True)
    return np.divide(sequences.leave_one_out(rewards), deviation, out=np.zeros_like(rewards), where=~equal)


def self_inclusive_mean(rewards):
    size = rewards.shape[-1]
    return sequences.algorithm_2(rewards) * (size - 1) / size


def inverted_importance(advantage, log_probs, old, reference, coefficient):
    return kl.score_weights(advantage, log_probs, None if old is None else 2 * log_probs - old, reference, coefficient)


def inverted_penalty(advantage, log_probs, old, reference, coefficient):
    """1 - pi/pi_ref, as the paper prints it."""
    plain = kl.score_weights(advantage, log_probs, old, None, 0.0)
    return plain if reference is None else plain - coefficient * (1 - np.exp(log_probs - reference))


# They hold.


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("check", [production.lemma_11, production.theorem_12, fixed_point.proposition_13])
def test_the_statements_hold(check, seed):
    report = check(Work(seed=seed))
    assert failed(report) == set()
    decided = [finding for finding in report.findings if finding.rule != REPORTED]
    assert len({finding.part for finding in report.findings}) == len(report.findings)
    assert 5 <= len(decided) <= 8
    assert all(np.isfinite(curve.y).all() for curve in report.curves)


# Wrong formulas.

WRONG_LEMMA_11 = {
    "population": (dict(advantage=population_deviation), {"ratio", "linear-constant"}),
    "self-inclusive": (dict(advantage=self_inclusive_mean), {"ratio", "linear-constant"}),
    "no-normalisation": (dict(advantage=sequences.leave_one_out), {"ratio", "literal-rate", "linear-rate"}),
    "importance": (dict(weigh=inverted_importance), {"ratio", "literal-rate", "linear-rate"}),
    "penalty": (dict(weigh=inverted_penalty), {"ratio", "literal-rate", "linear-rate"}),
    "literal-as-linear": (dict(literal_rate=-2.0), {"literal-rate", "literal-constant"}),
    "linear-as-literal": (dict(linear_rate=-1.0), {"linear-rate", "linear-constant"}),
    "constant": (dict(literal=lambda terms: 4 * production.literal_constant(terms)), {"literal-constant"}),
}


@pytest.mark.parametrize(("wrong", "parts"), list(WRONG_LEMMA_11.values()), ids=list(WRONG_LEMMA_11))
def test_wrong_forms_of_lemma_11_fail(wrong, parts):
    assert parts <= failed(production.lemma_11(Work(), **wrong))


WRONG_THEOREM_12 = {
    "population": (dict(advantage=population_deviation), {"normalization"}),
    "importance": (dict(weigh=inverted_importance), {"sequence-ratio", "variance", "normalization"}),
    "penalty": (dict(weigh=inverted_penalty), {"variance", "normalization"}),
    "sigma-known": (dict(first_order=production.influence_sigma_known), {"variance", "remainder"}),
    "slope-one": (dict(bias_exponent=1.0), {"bias", "token-ratio"}),
    "remainder": (dict(remainder_exponent=-1.0), {"remainder"}),
    "unbiased": (dict(bias=lambda terms: 1e-9 * production.normalization_bias(terms)), {"normalization"}),
}


@pytest.mark.parametrize(("wrong", "parts"), list(WRONG_THEOREM_12.values()), ids=list(WRONG_THEOREM_12))
def test_wrong_forms_of_theorem_12_fail(wrong, parts):
    assert parts <= failed(production.theorem_12(Work(), **wrong))


def only_sequence_ratio(advantage, log_probs, old, reference, coefficient):
    return sequences.sequence_level(kl.score_weights)(advantage, log_probs, old, reference, coefficient)


def test_the_sequence_level_ratio_leaves_no_token_level_bias_to_see():
    assert "token-ratio" in failed(production.theorem_12(Work(), weigh=only_sequence_ratio))


WRONG_PROPOSITION_13 = {
    "population-slope": (
        dict(slope=lambda v, g: fixed_point.normalized_slope(v, g) * np.sqrt((g - 1) / g)),
        {"factor", "limit", "step"},
    ),
    "population-advantage": (dict(advantage=population_deviation), {"factor", "step"}),
    "value-as-target": (dict(slope=lambda v, g: np.ones_like(v)), {"factor", "limit", "step", "training"}),
    "value-as-objective": (dict(objective=lambda v: v), {"limit", "fixed-point", "apart"}),
    "limit-at-finite-g": (dict(slope=lambda v, g: 1 / np.sqrt(v * (1 - v))), {"factor", "limit", "step", "training"}),
    "arcsine-halved": (dict(objective=lambda v: np.arcsin(np.sqrt(v))), {"limit", "fixed-point"}),
    "no-correction": (dict(bias=np.zeros_like), {"limit"}),
    "no-normalisation": (dict(advantage=sequences.leave_one_out), {"factor", "step", "training"}),
    "penalty": (dict(weigh=inverted_penalty), {"step", "training"}),
}


@pytest.mark.parametrize(("wrong", "parts"), list(WRONG_PROPOSITION_13.values()), ids=list(WRONG_PROPOSITION_13))
def test_wrong_forms_of_proposition_13_fail(wrong, parts):
    assert parts <= failed(fixed_point.proposition_13(SHORT, **wrong))


def test_training_without_normalisation_ends_at_the_optimum_of_the_value():
    """The same loop with the plain estimator, so that the difference is the normalisation's alone."""
    problem = fixed_point.Problem()
    step = fixed_point.Step(problem, sequences.leave_one_out, kl.score_weights)
    target = problem.argmax(lambda value: value)
    assert step.mean(target) == pytest.approx(0, abs=1e-8)


# The policy of two tokens.


def test_scores_are_derivatives_of_the_log_probabilities():
    batch = sequences.minibatch(Work(), "test")
    for k in range(2):
        up, down = (batch.log_probs(batch.new + sign * 1e-6 * np.eye(2)[k]) for sign in (1, -1))
        np.testing.assert_allclose((up - down) / 2e-6, batch.scores[..., k], atol=1e-9)
    assert batch.probs.sum() == pytest.approx(1, abs=1e-15)


def test_moments_follow_from_the_definitions():
    batch = replace(sequences.minibatch(Work(), "test"), kappa=0.0)
    fresh = sequences.moments(batch.on_policy())
    np.testing.assert_allclose(fresh.probs @ fresh.weighted, 0, atol=1e-15)
    np.testing.assert_allclose(fresh.gradient, (fresh.probs * batch.rewards) @ fresh.weighted, atol=1e-15)
    np.testing.assert_allclose(fresh.probs @ fresh.covariance, 0, atol=1e-15)
    np.testing.assert_allclose(fresh.probs @ production.influence(fresh), 0, atol=1e-14)


def test_limits_are_extrapolated_from_doubled_sizes():
    sizes = np.array([8.0, 16.0, 32.0, 64.0])
    assert sequences.extrapolate((2 + 3 / sizes - 5 / sizes**2 + 7 / sizes**3).tolist()) == pytest.approx(2, abs=1e-12)
    assert sequences.limit_slope((4 / sizes**2 + 1 / sizes**3).tolist()) == pytest.approx(-2, abs=1e-3)
