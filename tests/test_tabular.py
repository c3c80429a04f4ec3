"""Sampling from tabular policies and inner products of their scores."""

from __future__ import annotations

import inspect

import numpy as np
from scipy import stats
from tabular_cases import SMALL, every_policy, uneven

from grpo_repro.policies import tabular
from grpo_repro.ustat import Pool


def test_sampling_frequencies_follow_the_exact_law():
    policy = uneven(tabular.build("softmax", SMALL["softmax"]))
    rng = np.random.default_rng(0)
    contexts = tabular.sample_contexts(policy, 50_000, rng)
    drawn = np.bincount(contexts, minlength=4)
    assert stats.chisquare(drawn, 50_000 * policy.context_probs).pvalue > 1e-3
    actions, rewards = tabular.sample(policy, contexts, 4, rng)
    assert actions.shape == rewards.shape == (50_000, 4)
    assert set(np.unique(rewards)) == {0.0, 1.0}
    for x in range(4):
        a, z = actions[contexts == x].ravel(), rewards[contexts == x].ravel()
        observed = np.bincount(2 * a + z.astype(int), minlength=6)
        q = policy.reward_probs[x]
        expected = len(a) * policy.probs[x, :, None] * np.stack([1 - q, q], axis=1)
        assert stats.chisquare(observed, expected.ravel()).pvalue > 1e-3


def test_members_of_a_group_are_independent():
    policy = tabular.build("softmax", dict(contexts=1, actions=3, dimension=4))
    contexts = np.zeros(50_000, dtype=int)
    actions, _ = tabular.sample(policy, contexts, 2, np.random.default_rng(1))
    pairs = np.bincount(3 * actions[:, 0] + actions[:, 1], minlength=9)
    expected = 50_000 * np.outer(policy.probs[0], policy.probs[0]).ravel()
    assert stats.chisquare(pairs, expected).pvalue > 1e-3


def test_sampling_inverts_the_distribution_function_exactly():
    # A generator of known uniforms: action k is drawn exactly on [cdf(k-1), cdf(k)).
    policy = tabular.build("softmax", SMALL["softmax"])
    ends = np.cumsum(policy.probs[2])

    class Grid:
        def __init__(self):
            self.calls = [np.array([[0.0, np.nextafter(ends[0], 0), ends[0], ends[1]]]), np.ones((1, 4))]

        def random(self, shape):
            return self.calls.pop(0)

    actions, rewards = inspect.unwrap(tabular.sample)(policy, np.array([2]), 4, Grid())
    assert actions.tolist() == [[0, 0, 1, 2]]
    assert not rewards.any()


def test_same_generator_same_sample():
    policy = tabular.build("curved")
    contexts = np.arange(32)
    first, second = (tabular.sample(policy, contexts, 5, np.random.default_rng(7)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@every_policy
def test_look_ups_equal_inner_products_of_the_scores(policy):
    rng = np.random.default_rng(5)
    contexts = tabular.sample_contexts(policy, 20, rng)
    actions, rewards = tabular.sample(policy, contexts, 6, rng)
    weights = rng.normal(size=actions.shape)
    scores = policy.scores[contexts[:, None], actions]
    truth = np.einsum("mid,mjd->mij", scores, scores)
    gram = tabular.gram(policy, contexts, actions)
    np.testing.assert_allclose(gram, truth, atol=1e-13)
    sums = tabular.gram_row_sums(policy, contexts, actions, weights)
    np.testing.assert_allclose(sums, np.einsum("mij,mj->mi", truth, weights), atol=1e-12)
    total = tabular.score_sums(policy, contexts, actions, weights)
    np.testing.assert_allclose(total, np.einsum("mi,mid->md", weights, scores), atol=1e-12)
    pool, expected = tabular.pool(policy, contexts, actions, rewards), Pool.from_gram(truth, rewards)
    for name in ("rewards", "sq_norms", "cross", "cross_rewards", "cross_sq_rewards"):
        np.testing.assert_allclose(getattr(pool, name), getattr(expected, name), atol=1e-12)
