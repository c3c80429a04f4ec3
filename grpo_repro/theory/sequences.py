"""Two-token sequences, where token-level and sequence-level importance ratios differ, and limits in the group size.

The first token stops or goes on; after "go" there is a second one. So there are three sequences, of one or two tokens,

    y = 0: (stop)    y = 1: (go, 0)    y = 2: (go, 1),

and a group of G is one of (G + 2)(G + 1)/2 vectors of counts, which makes Algorithm 2 exact at G = 256. The logits
are <theta, f_1> and <theta, f_2>; both tokens share theta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64, Int
from scipy.special import expit, log_expit

from grpo_repro import estimators
from grpo_repro.theory.exact import groups
from grpo_repro.theory.finding import Work

SIGN = np.array([[-1.0, 0.0], [1.0, -1.0], [1.0, 1.0]])
"""Sign of the logit in each sequence's tokens; 0 where there is no token."""

Advantage = Callable[[np.ndarray], np.ndarray]
"""Rewards ``[groups, group]`` -> advantages of that shape."""

Weigh = Callable[[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None, float], np.ndarray]
"""The signature of `kl.score_weights`: (advantage, log_probs, old, reference, coefficient) -> weights of the scores."""


def leave_one_out(rewards: Float64[np.ndarray, "groups group"]) -> Float64[np.ndarray, "groups group"]:
    """Z_i less the mean of the others."""
    nothing = np.zeros(len(rewards))
    return estimators.grpo(rewards, nothing, nothing)


def algorithm_2(rewards: Float64[np.ndarray, "groups group"]) -> Float64[np.ndarray, "groups group"]:
    """The leave-one-out advantages over se (ddof = 1), 0 in a group of equal rewards."""
    return estimators.normalized(leave_one_out(rewards), rewards)


def sequence_level(weigh: Weigh) -> Weigh:
    """The same weights with one ratio for the whole sequence."""

    def weights(
        advantage: np.ndarray,
        log_probs: np.ndarray,
        old: np.ndarray | None,
        reference: np.ndarray | None,
        coefficient: float,
    ) -> np.ndarray:
        new, before, towards = (None if x is None else x.sum(-1, keepdims=True) for x in (log_probs, old, reference))
        assert new is not None
        return np.broadcast_to(weigh(advantage, new, before, towards, coefficient), (len(advantage), *SIGN.shape))

    return weights


@dataclass(frozen=True, eq=False)
class Minibatch:
    """A minibatch of Algorithm 2: sequences sampled from pi_old that update pi, with a penalty towards pi_ref.

    Attributes:
        features: f_1 and f_2, of the two tokens' logits.
        rewards: Z of each sequence.
        old: theta_old, from which the groups are sampled.
        new: theta, at which the scores are taken.
        reference: theta_ref.
        kappa: Coefficient of the penalty.
    """

    features: Float64[np.ndarray, "2 dim"]
    rewards: Float64[np.ndarray, " 3"]
    old: Float64[np.ndarray, " dim"]
    new: Float64[np.ndarray, " dim"]
    reference: Float64[np.ndarray, " dim"]
    kappa: float

    def log_probs(self, theta: Float64[np.ndarray, " dim"]) -> Float64[np.ndarray, "3 2"]:
        """Log-probability of every sequence's tokens; 0 where there is no token."""
        return np.where(SIGN == 0, 0.0, log_expit(SIGN * (self.features @ theta)))

    @property
    def probs(self) -> Float64[np.ndarray, " 3"]:
        """pi_old(y)."""
        return np.exp(self.log_probs(self.old).sum(1))

    @property
    def scores(self) -> Float64[np.ndarray, "3 2 dim"]:
        """Score w of every token at theta: d log sigmoid(s z) / d theta = s sigmoid(-s z) f."""
        return (SIGN * expit(-SIGN * (self.features @ self.new)))[..., None] * self.features

    def on_policy(self) -> Minibatch:
        """The same update with groups sampled afresh from pi_theta."""
        return replace(self, old=self.new)


def minibatch(work: Work, name: str) -> Minibatch:
    """A minibatch whose theta, theta_old and theta_ref differ: all of Algorithm 2 at once.

    The rewards have three values, so nothing leans on their being binary. The parameters vary with the seed around
    a point with probabilities of about (.45, .23, .32): limits in G are then reached early.
    """
    rng = work.rng("sequences", name)
    features = np.array([[1.0, 0.4], [0.5, -1.0]])
    old, step, reference = np.array([0.3, -0.2]), np.array([0.25, -0.3]), np.array([-0.4, 0.5])
    old, step, reference = (x + 0.1 * rng.uniform(-1, 1, 2) for x in (old, step, reference))
    return Minibatch(features, np.array([0.0, 0.3, 1.0]), old, old + step, reference, 0.1)


@dataclass(frozen=True, eq=False)
class Moments:
    """What the limits of Algorithm 2's estimate are made of, under pi_old; one row for each sequence.

    With W~ = sum_t ratio_t w_t, rho = Z - E Z and v = sum_t (1 - pi_ref/pi)_t w_t,

    Attributes:
        weighted: W~.
        penalty: kappa v.
        rho: Z - E Z.
        gradient: g~ = Cov(W~, Z), the mean of the estimate without normalisation and penalty.
        covariance: c = (W~ - E W~) rho - g~, the first-order term of the sample covariance.
        variance: s = rho^2 - sigma^2, the first-order term of se^2.
        sigma: The reward's standard deviation.
        probs: pi_old(y).
    """

    weighted: Float64[np.ndarray, "3 dim"]
    penalty: Float64[np.ndarray, "3 dim"]
    rho: Float64[np.ndarray, " 3"]
    gradient: Float64[np.ndarray, " dim"]
    covariance: Float64[np.ndarray, "3 dim"]
    variance: Float64[np.ndarray, " 3"]
    sigma: float
    probs: Float64[np.ndarray, " 3"]

    @property
    def mean_penalty(self) -> Float64[np.ndarray, " dim"]:
        """Kappa E v."""
        return self.probs @ self.penalty


def moments(batch: Minibatch) -> Moments:
    """The moments of a minibatch, from their definitions rather than from `kl.score_weights`."""
    p, new = batch.probs, batch.log_probs(batch.new)
    ratio = np.exp(new - batch.log_probs(batch.old))
    penalty = batch.kappa * (1 - np.exp(batch.log_probs(batch.reference) - new))
    weighted, towards = (np.einsum("yt,ytd->yd", x, batch.scores) for x in (ratio, penalty))
    rho = batch.rewards - p @ batch.rewards
    gradient, sigma2 = (p * rho) @ weighted, float(p @ rho**2)
    covariance = (weighted - p @ weighted) * rho[:, None] - gradient
    return Moments(weighted, towards, rho, gradient, covariance, rho**2 - sigma2, float(np.sqrt(sigma2)), p)


def outcome_advantages(
    counts: Int[np.ndarray, "groups outcomes"], rewards: Float64[np.ndarray, " outcomes"], advantage: Advantage
) -> Float64[np.ndarray, "groups outcomes"]:
    """The advantage that an outcome's members have in each group; anything where a group has none."""
    size = int(counts[0].sum())
    members = np.repeat(np.tile(rewards, len(counts)), counts.ravel()).reshape(-1, size)
    first = np.minimum(counts.cumsum(1) - counts, size - 1)
    return np.take_along_axis(advantage(members), first, axis=1)


def estimates(
    batch: Minibatch, size: int, advantage: Advantage, weigh: Weigh
) -> tuple[Float64[np.ndarray, " groups"], Int[np.ndarray, "groups 3"], Float64[np.ndarray, "groups dim"]]:
    """Probability, counts and gradient estimate of every group of `size` (Algorithm 2).

    g_hat = (1/G) sum_i sum_t [ratio_it A_i - kappa (1 - pi_ref/pi)_it] w_it
    """
    probs, counts = groups(batch.probs, size)
    own = outcome_advantages(counts, batch.rewards, advantage)[:, :, None]
    new, old, reference = (batch.log_probs(theta) for theta in (batch.new, batch.old, batch.reference))
    weights = weigh(own, new[None], old[None], reference[None], batch.kappa)
    return probs, counts, np.einsum("ny,nyt,ytd->nd", counts / size, weights, batch.scores, optimize=True)


def expected(batch: Minibatch, size: int, advantage: Advantage, weigh: Weigh) -> Float64[np.ndarray, " dim"]:
    """E g_hat under pi_old."""
    probs, _, found = estimates(batch, size, advantage, weigh)
    return probs @ found


def extrapolate(values: Sequence[float]) -> float:
    """The limit of f(G) = limit + a/G + b/G^2 + ... from its values at G, 2G, 4G, ... (Richardson)."""
    table, order = np.asarray(values, dtype=np.float64), 1
    while len(table) > 1:
        table, order = (2**order * table[1:] - table[:-1]) / (2**order - 1), order + 1
    return float(table[0])


def limit_slope(values: Sequence[float]) -> float:
    """Exponent r of f(G) ~ G^r: the limit of the local slopes log2 f(2G)/f(G) of values at G, 2G, 4G, ..."""
    return extrapolate(np.diff(np.log2(np.asarray(values))).tolist())
