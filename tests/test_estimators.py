"""The estimators against the enumeration of every group, and the properties that define them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from enumeration import LAWS, Law, ordered, small_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from tabular_cases import SMALL

from grpo_repro import ustat
from grpo_repro.errors import UserError
from grpo_repro.estimators import ESTIMATORS, grpo, oracle, vanilla
from grpo_repro.policies import tabular

every_law = pytest.mark.parametrize("law", [pytest.param(law, id=name) for name, law in LAWS.items()])
every_estimator = pytest.mark.parametrize("name", list(ESTIMATORS))


def estimates(law: Law, size: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Probability and gradient estimate of every group."""
    probs, index = ordered(law, size)
    value, best = np.full(len(probs), law.probs @ law.rewards), np.full(len(probs), law.optimal_baseline)
    advantages = ESTIMATORS[name](law.rewards[index], value, best)
    return probs, np.einsum("ng,ngd->nd", advantages, law.scores[index]) / size


def enumerated_mse(law: Law, size: int, name: str) -> float:
    probs, found = estimates(law, size, name)
    return float(probs @ ((found - law.gradient) ** 2).sum(1))


# Enumeration.


@every_law
@every_estimator
def test_mean_and_mse_of_every_group_equal_the_closed_forms(law, name):
    for size in range(1 if name != "grpo" else 2, 6):
        probs, found = estimates(law, size, name)
        assert probs.sum() == pytest.approx(1, abs=1e-12)
        np.testing.assert_allclose(probs @ found, law.gradient, rtol=0, atol=1e-12 * law.scale)
        error = probs @ ((found - law.gradient) ** 2).sum(1)
        closed = ustat.mse(law.components(), size, name).item()
        assert error == pytest.approx(closed, rel=0, abs=1e-12 * law.scale)


@pytest.mark.parametrize("family", list(SMALL))
@every_estimator
def test_closed_forms_of_every_family_equal_enumeration(family, name):
    policy = small_policy(family)
    for x, size in itertools.product((0, 3), (2, 3, 4)):
        law = LAWS[f"{family}-{x}"]
        closed = ustat.mse(policy.components, size, name)[x]
        assert enumerated_mse(law, size, name) == pytest.approx(closed, rel=0, abs=1e-12 * law.scale)


@every_law
def test_grpo_exceeds_oracle_by_the_second_order_term_with_slope_minus_two(law):
    # R / (G (G-1)): slope -1 in log G(G-1) by enumeration, hence -2 in log G as G grows (Corollary 4).
    sizes = np.arange(2, 6)
    excess = [enumerated_mse(law, g, "grpo") - enumerated_mse(law, g, "oracle") for g in sizes]
    slope, intercept = np.polyfit(np.log(sizes * (sizes - 1)), np.log(excess), 1)
    assert slope == pytest.approx(-1, abs=1e-9)
    assert np.exp(intercept) == pytest.approx(law.components().second_order.item(), rel=1e-9)
    many = 2.0 ** np.arange(6, 11)
    terms = law.components()
    rest = [(ustat.mse(terms, int(g), "grpo") - ustat.mse(terms, int(g), "oracle")).item() for g in many]
    assert np.polyfit(np.log(many), np.log(rest), 1)[0] == pytest.approx(-2, abs=0.01)


def test_closed_slope_is_seen_in_sampled_groups():
    """The same excess at G = 8, where groups are too many to enumerate, within 4 standard errors.

    The squared errors of both estimators on the same groups are paired, which makes their difference sharp.
    """
    policy = tabular.build("constant-norm", dict(contexts=1, factors=2, dimension=3, seed=1))
    contexts, size = np.zeros(200_000, dtype=int), 8
    actions, rewards = tabular.sample(policy, contexts, size, np.random.default_rng(0))
    value, best = policy.value[contexts], policy.optimal_baseline[contexts]
    errors = []
    for name in ("grpo", "oracle"):
        advantages = ESTIMATORS[name](rewards, value, best)
        found = tabular.score_sums(policy, contexts, actions, advantages / size)
        errors.append(((found - policy.gradients[0]) ** 2).sum(1))
    excess = errors[0] - errors[1]
    standard_error = excess.std(ddof=1) / len(excess) ** 0.5
    truth = policy.second_order[0] / (size * (size - 1))
    assert abs(excess.mean() - truth) < 4 * standard_error
    assert standard_error < 0.05 * truth


# Order of the estimators: a theorem under Assumption 2, not without it.


def test_order_under_assumption_2():
    """||W||^2 constant: V is the best prompt-only baseline and vanilla is strictly worse (Corollary 5)."""
    for x in (0, 3):
        law = LAWS[f"constant-norm-{x}"]
        for size in (2, 3, 4, 5):
            error = {name: enumerated_mse(law, size, name) for name in ESTIMATORS}
            assert error["optimal"] == pytest.approx(error["oracle"], rel=1e-12)
            assert error["oracle"] < error["grpo"]
            assert error["oracle"] < error["vanilla"]


def test_order_reverses_where_right_answers_have_small_scores():
    reversed_at = [x for x in (0, 3) if enumerated_mse(LAWS[f"likely-right-{x}"], 4, "vanilla")
                   < enumerated_mse(LAWS[f"likely-right-{x}"], 4, "oracle")]  # fmt: skip
    assert reversed_at
    for law in LAWS.values():
        assert (
            enumerated_mse(law, 3, "optimal")
            <= min(enumerated_mse(law, 3, "oracle"), enumerated_mse(law, 3, "vanilla")) + 1e-13 * law.scale
        )


# Lemma 1 and other properties.


def drawn(seed: int, size: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(size, dim)) * 10 ** rng.uniform(-2, 2), rng.normal(size=size)


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(2, 9), dim=st.integers(1, 7), binary=st.booleans())
@settings(max_examples=100, deadline=None)
def test_lemma_1_the_leave_one_out_gradient_is_a_u_statistic(seed, size, dim, binary):
    scores, rewards = drawn(seed, size, dim)
    rewards = (rewards > 0).astype(float) if binary else rewards
    others = np.array([np.delete(rewards, i).mean() for i in range(size)])
    np.testing.assert_allclose(grpo(rewards, np.zeros(()), np.zeros(())), rewards - others, atol=1e-14)
    found = grpo(rewards, np.zeros(()), np.zeros(())) @ scores / size
    pairs = [
        0.5 * (scores[i] - scores[j]) * (rewards[i] - rewards[j]) for i, j in itertools.combinations(range(size), 2)
    ]
    tolerance = 1e-13 * np.abs(scores).max()
    np.testing.assert_allclose(found, np.mean(pairs, axis=0), rtol=0, atol=tolerance)
    weights = ustat.group_gradient_weights(rewards[None])[0]
    np.testing.assert_allclose(weights @ scores, found, rtol=0, atol=tolerance)


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(2, 9), shift=st.floats(-100, 100))
@settings(max_examples=60, deadline=None)
def test_a_shift_of_rewards_moves_only_vanilla(seed, size, shift):
    _, rewards = drawn(seed, size, 1)
    none = np.zeros(())
    np.testing.assert_allclose(grpo(rewards + shift, none, none), grpo(rewards, none, none), atol=1e-12)
    value = np.array(0.3)
    np.testing.assert_allclose(
        oracle(rewards + shift, np.array(value + shift), none), oracle(rewards, value, none), atol=1e-12
    )
    np.testing.assert_array_equal(vanilla(rewards + shift, none, none), rewards + shift)
    assert grpo(rewards, none, none).sum() == pytest.approx(0, abs=1e-12)


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(2, 9), name=st.sampled_from(list(ESTIMATORS)))
@settings(max_examples=60, deadline=None)
def test_a_permutation_of_the_group_permutes_the_advantages(seed, size, name):
    scores, rewards = drawn(seed, size, 3)
    order = np.random.default_rng(seed).permutation(size)
    value, best = np.array(0.4), np.array(0.2)
    advantages = ESTIMATORS[name](rewards, value, best)
    permuted = ESTIMATORS[name](rewards[order], value, best)
    np.testing.assert_allclose(permuted, advantages[order], rtol=0, atol=1e-14)
    np.testing.assert_allclose(
        permuted @ scores[order], advantages @ scores, rtol=1e-12, atol=1e-12 * np.abs(scores).max()
    )


@every_estimator
def test_groups_of_several_prompts_do_not_touch(name):
    rng = np.random.default_rng(0)
    rewards, value, best = rng.normal(size=(4, 3, 5)), rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    together = ESTIMATORS[name](rewards, value, best)
    for i, j in itertools.product(range(4), range(3)):
        alone = ESTIMATORS[name](rewards[i, j], np.array(value[i, j]), np.array(best[i, j]))
        np.testing.assert_array_equal(together[i, j], alone)


def test_grpo_refuses_a_single_completion_by_name():
    with pytest.raises(UserError, match="grpo.*got 1"):
        grpo(np.zeros((3, 1)), np.zeros(3), np.zeros(3))
    for name in set(ESTIMATORS) - {"grpo"}:
        assert ESTIMATORS[name](np.ones((3, 1)), np.zeros(3), np.zeros(3)).tolist() == [[1.0]] * 3


def test_names_are_those_of_the_configuration():
    from grpo_repro import schema

    assert tuple(ESTIMATORS) == schema.ESTIMATORS
