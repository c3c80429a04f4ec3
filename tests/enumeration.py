"""Finite laws of (score, reward) and the enumeration of every group that can be drawn from them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from tabular_cases import SMALL, uneven

from grpo_repro.policies import tabular
from grpo_repro.policies.closed_form import TabularPolicy
from grpo_repro.ustat import Components, Pool


@dataclass(frozen=True)
class Law:
    """One prompt: outcome k has probability `probs[k]`, score `scores[k]` and reward `rewards[k]`."""

    probs: np.ndarray
    scores: np.ndarray
    rewards: np.ndarray

    @property
    def gradient(self) -> np.ndarray:
        return (self.probs * self.rewards) @ self.scores

    @property
    def scale(self) -> float:
        """E||W||^2 (1 + max Z^2): the size of an error's terms, against which rounding is judged."""
        return float(self.probs @ (self.scores**2).sum(1)) * (1 + float(np.max(self.rewards**2)))

    def components(self) -> Components:
        """The terms by their definitions, independently of the code under test; each of shape [1]."""
        p, w, z = self.probs, self.scores, self.rewards
        norm, value, g2 = (w**2).sum(1), p @ z, self.gradient @ self.gradient
        best = (p @ (norm * z)) / (p @ norm)
        variance = p @ (z - value) ** 2
        terms = (
            value, p @ norm, variance, g2, p @ (norm * z**2) - g2, p @ (norm * (z - value) ** 2) - g2,
            (p @ norm) * variance + g2, p @ (norm * (z - best) ** 2) - g2,
        )  # fmt: skip
        return Components(*(np.array([term]) for term in terms))

    @property
    def optimal_baseline(self) -> float:
        norm = (self.scores**2).sum(1)
        return float((self.probs @ (norm * self.rewards)) / (self.probs @ norm))

    def pool(self, index: np.ndarray) -> Pool:
        """The pool of each row of outcomes ``[n, size]``."""
        gram = self.scores @ self.scores.T
        return Pool.from_gram(gram[index[:, :, None], index[:, None, :]], self.rewards[index])


def of_context(policy: TabularPolicy, x: int) -> Law:
    """Context x of a tabular policy: outcomes are (action, reward) of positive probability."""
    q = policy.reward_probs[x]
    probs = (policy.probs[x, :, None] * np.stack([1 - q, q], 1)).ravel()
    scores = np.repeat(policy.scores[x], 2, axis=0)
    rewards = np.tile([0.0, 1.0], len(q))
    seen = probs > 0
    return Law(probs[seen], scores[seen], rewards[seen])


def real_valued(seed: int, outcomes: int = 4, dim: int = 3) -> Law:
    """A law with real rewards of either sign and scores of mean zero, which no policy class restricts."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(outcomes, 2.0))
    scores = rng.normal(size=(outcomes, dim)) * rng.gamma(2.0, size=(outcomes, 1))
    return Law(probs, scores - probs @ scores, 0.5 + rng.normal(size=outcomes))


def ordered(law: Law, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Every ordered group: probabilities ``[n]`` and outcomes ``[n, size]``."""
    index = np.array(list(itertools.product(range(len(law.probs)), repeat=size)))
    return law.probs[index].prod(1), index


def multisets(law: Law, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Every group up to order: multinomial probabilities ``[n]`` and sorted outcomes ``[n, size]``."""
    index = np.array(list(itertools.combinations_with_replacement(range(len(law.probs)), size)))
    counts = np.stack([(index == k).sum(1) for k in range(len(law.probs))], 1)
    factorial = np.array([math.lgamma(k + 1) for k in range(size + 1)])
    log_ways = factorial[size] - factorial[counts].sum(1)
    return np.exp(log_ways + counts @ np.log(law.probs)), index


def small_policy(name: str) -> TabularPolicy:
    """The small policy of a family that other tests use too, with unequal contexts."""
    return uneven(tabular.build(name, SMALL[name]))


LAWS: dict[str, Law] = {f"{name}-{x}": of_context(small_policy(name), x) for name in SMALL for x in (0, 3)} | {
    f"real-{seed}": real_valued(seed) for seed in range(3)
}
"""Laws of several families (contexts 0 and 3), and some that are none's."""
