"""Finite laws of (score, reward) and the exact enumeration of every group that can be drawn from them.

A group matters only by how often each outcome occurs in it, so a group of G from K outcomes is one of
C(G + K - 1, K - 1) vectors of counts: 48,000 for G = 64 and K = 4, which makes expectations at real group sizes exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int
from scipy.special import gammaln

from grpo_repro.policies.closed_form import TabularPolicy


@dataclass(frozen=True, eq=False)
class Law:
    """One prompt: outcome k has probability `probs[k]`, score `scores[k]` and reward `rewards[k]`."""

    probs: Float64[np.ndarray, " outcomes"]
    scores: Float64[np.ndarray, "outcomes dim"]
    rewards: Float64[np.ndarray, " outcomes"]

    @property
    def value(self) -> float:
        """V = E Z."""
        return float(self.probs @ self.rewards)

    @property
    def gradient(self) -> Float64[np.ndarray, " dim"]:
        """The gradient g = E W Z."""
        return (self.probs * self.rewards) @ self.scores


def law(policy: TabularPolicy, context: int) -> Law:
    """The law of a context: outcomes are (action, reward) of positive probability."""
    q = policy.reward_probs[context]
    probs = (policy.probs[context, :, None] * np.stack([1 - q, q], 1)).ravel()
    seen = probs > 0
    return Law(probs[seen], np.repeat(policy.scores[context], 2, 0)[seen], np.tile([0.0, 1.0], len(q))[seen])


def groups(
    probs: Float64[np.ndarray, " outcomes"], size: int
) -> tuple[Float64[np.ndarray, " groups"], Int[np.ndarray, "groups outcomes"]]:
    """Every group of `size` up to order: its multinomial probability and its counts."""
    counts = _compositions(size, len(probs))
    log_ways = gammaln(size + 1) - gammaln(counts + 1).sum(1)
    return np.exp(log_ways + counts @ np.log(probs)), counts


def _compositions(total: int, parts: int) -> Int[np.ndarray, "groups parts"]:
    """Every way to write `total` as an ordered sum of `parts` integers >= 0."""
    rows = np.arange(total + 1)[:, None]
    for _ in range(parts - 2):
        left = total - rows.sum(1)
        repeated = np.repeat(rows, left + 1, axis=0)
        start = np.repeat(np.cumsum(left + 1) - (left + 1), left + 1)
        rows = np.concatenate([repeated, (np.arange(len(repeated)) - start)[:, None]], 1)
    if parts == 1:
        return np.full((1, 1), total)
    return np.concatenate([rows, total - rows.sum(1, keepdims=True)], 1)
