"""k1, k2, k3: the check holds, and wrong claims about them are found out."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_repro import kl
from grpo_repro.theory import divergence
from grpo_repro.theory.divergence import GRADIENTS, Pair, kl_estimators
from grpo_repro.theory.finding import Report, Work


def failed(report: Report) -> set[str]:
    return {finding.part for finding in report.findings if not finding.passed}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_statements_hold(seed):
    report = kl_estimators(Work(seed=seed))
    assert failed(report) == set()
    exact = [f for f in report.findings if f.part.startswith(("value-k1", "value-k3", "gradient", "k1", "inverted"))]
    assert len(exact) == 7
    assert all(abs(finding.observed) < 1e-12 for finding in exact)


def estimates(**changed):
    return kl.ESTIMATES | changed


WRONG = {
    "inverted-ratio": (dict(estimates=estimates(k3=(kl.k3, divergence.inverted_weight))), {"gradient-k3"}),
    "inverted-value": (
        dict(estimates=estimates(k3=(lambda ratio: np.exp(ratio) - 1 - ratio, kl.k3_weight))),
        {"value-k3"},
    ),
    "k2-without-half": (dict(estimates=estimates(k2=(kl.k2, lambda ratio: 2 * ratio))), {"gradient-k2"}),
    "k3-other-direction": (dict(gradients=dict(GRADIENTS) | {"k3": divergence.towards_reference}), {"gradient-k3"}),
    "k1-penalises": (dict(gradients=dict(GRADIENTS) | {"k1": divergence.towards_reference}), {"gradient-k1"}),
    "k2-other-direction": (dict(gradients=dict(GRADIENTS) | {"k2": divergence.from_reference}), {"gradient-k2"}),
    "k2-instead-of-k3": (dict(estimates=estimates(k3=(kl.k2, kl.k2_weight))), {"value-k3", "k3-direction"}),
    "self-inclusive-mean": (dict(penalty=lambda ratio: ratio - ratio.mean(-1, keepdims=True)), {"k1-in-reward"}),
    "inverted-is-right": (dict(inverted=divergence.from_reference), {"inverted"}),
}


@pytest.mark.parametrize(("wrong", "parts"), list(WRONG.values()), ids=list(WRONG))
def test_wrong_claims_fail(wrong, parts):
    assert parts <= failed(kl_estimators(Work(), **wrong))


@pytest.mark.parametrize(
    "named", [divergence.towards_reference, divergence.from_reference, divergence.minus_half_chi_square]
)
def test_gradients_are_those_of_differences(named):
    rng = np.random.default_rng(0)
    pair = Pair(rng.normal(size=4), rng.normal(size=4))
    found = [
        (Pair(pair.logits + h, pair.reference).value(named) - Pair(pair.logits - h, pair.reference).value(named)) / 2e-6
        for h in 1e-6 * np.eye(4)
    ]
    np.testing.assert_allclose(pair.gradient(named), found, atol=1e-8)


def test_the_printed_ratio_drives_the_policy_off_its_reference():
    """Near the reference, descent along the weight 1 - pi/pi_ref raises both divergences."""
    rng = np.random.default_rng(1)
    reference = rng.normal(size=5)
    near = Pair(reference + 1e-3 * rng.normal(size=5), reference)
    printed, true = near.mean_gradient(divergence.inverted_weight), near.gradient(divergence.from_reference)
    assert printed @ true / (np.linalg.norm(printed) * np.linalg.norm(true)) == pytest.approx(-1, abs=1e-4)
