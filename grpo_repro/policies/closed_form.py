"""A tabular policy at one parameter, and everything the paper says about it in closed form, in float64.

The expectations are finite sums over contexts, actions and the two rewards, so these numbers are the truth
that estimators are tested against. Notation: W = score, Z = reward, V = value, F = E||W||^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float64
from scipy.special import softmax

from grpo_repro.errors import UserError
from grpo_repro.policies.families import Family, separable_return
from grpo_repro.ustat import Components, mse, optimal_group_size


@dataclass(frozen=True, eq=False)
class TabularPolicy:
    """The policy of a family at one parameter, with its exact per-context and overall quantities.

    Attributes:
        family: The family, which holds contexts, rewards and logits.
        theta: The parameter. Shape [dim].
    """

    family: Family
    theta: Float64[np.ndarray, " dim"]

    @property
    def context_probs(self) -> Float64[np.ndarray, " contexts"]:
        """f(x)."""
        return self.family.context_probs

    @property
    def reward_probs(self) -> Float64[np.ndarray, "contexts actions"]:
        """q(x, a) = P(Z = 1 | x, a)."""
        return self.family.reward_probs

    @cached_property
    def probs(self) -> Float64[np.ndarray, "contexts actions"]:
        """pi(a | x)."""
        return softmax(self.family.logits(self.theta), axis=1)

    @cached_property
    def scores(self) -> Float64[np.ndarray, "contexts actions dim"]:
        """W(x, a) = d log pi(a | x) / d theta: the logit's derivative less its mean under pi."""
        slope = self.family.jacobian(self.theta)
        return slope - np.einsum("xa,xad->xd", self.probs, slope)[:, None, :]

    @cached_property
    def gram_table(self) -> Float64[np.ndarray, "contexts actions actions"]:
        """<W(x, a), W(x, b)>, every inner product of scores that a group can meet."""
        return self.scores @ self.scores.transpose(0, 2, 1)

    @cached_property
    def sq_norms(self) -> Float64[np.ndarray, "contexts actions"]:
        """||W(x, a)||^2."""
        return np.einsum("xad,xad->xa", self.scores, self.scores)

    # Per-context expectations.

    @cached_property
    def value(self) -> Float64[np.ndarray, " contexts"]:
        """V(x) = E[Z | x]."""
        return _mean(self.probs, self.reward_probs)

    @cached_property
    def gradients(self) -> Float64[np.ndarray, "contexts dim"]:
        """g(x) = E[W Z | x]."""
        return np.einsum("xa,xa,xad->xd", self.probs, self.reward_probs, self.scores)

    @cached_property
    def gradient_sq_norm(self) -> Float64[np.ndarray, " contexts"]:
        """||g(x)||^2."""
        return np.einsum("xd,xd->x", self.gradients, self.gradients)

    @cached_property
    def score_sq_norm(self) -> Float64[np.ndarray, " contexts"]:
        """F(x) = E[||W||^2 | x]."""
        return _mean(self.probs, self.sq_norms)

    @cached_property
    def reward_variance(self) -> Float64[np.ndarray, " contexts"]:
        """sigma^2(x) = Var(Z | x) = V (1 - V), the reward being binary."""
        return self.value * (1 - self.value)

    @cached_property
    def first_order(self) -> Float64[np.ndarray, " contexts"]:
        """S_o(x) = E||W||^2 (Z - V)^2 - ||g||^2: G times the oracle's MSE, grpo's 1/G term (Theorem 2)."""
        return self.baseline_term(self.value)

    @cached_property
    def second_order(self) -> Float64[np.ndarray, " contexts"]:
        """R(x) = F sigma^2 + ||g||^2: grpo's 1/(G(G-1)) term (Theorem 2)."""
        return self.score_sq_norm * self.reward_variance + self.gradient_sq_norm

    @cached_property
    def vanilla(self) -> Float64[np.ndarray, " contexts"]:
        """E||W||^2 Z^2 - ||g||^2: G times vanilla's MSE."""
        return self.baseline_term(np.zeros_like(self.value))

    @cached_property
    def optimal_baseline(self) -> Float64[np.ndarray, " contexts"]:
        """b*(x) = E||W||^2 Z / E||W||^2, the best prompt-only baseline; V(x) where F(x) = 0."""
        weighted = _mean(self.probs, self.sq_norms * self.reward_probs)
        return np.divide(weighted, self.score_sq_norm, out=self.value.copy(), where=self.score_sq_norm > 0)

    @cached_property
    def optimal(self) -> Float64[np.ndarray, " contexts"]:
        """E||W||^2 (Z - b*)^2 - ||g||^2: G times the MSE under the best prompt-only baseline."""
        return self.baseline_term(self.optimal_baseline)

    @cached_property
    def components(self) -> Components:
        """The same terms as the record that `ustat.mse` takes, each of shape [contexts]."""
        return Components(
            value=self.value,
            score_sq_norm=self.score_sq_norm,
            reward_variance=self.reward_variance,
            gradient_sq_norm=self.gradient_sq_norm,
            vanilla=self.vanilla,
            first_order=self.first_order,
            second_order=self.second_order,
            optimal=self.optimal,
        )

    def baseline_term(self, baseline: Float64[np.ndarray, " contexts"]) -> Float64[np.ndarray, " contexts"]:
        """Return E||W||^2 (Z - b)^2 - ||g||^2, G times the MSE of the estimator with baseline b(x).

        Args:
            baseline: b(x), shape [contexts].
        """
        b, q = baseline[:, None], self.reward_probs
        squared = q * (1 - b) ** 2 + (1 - q) * b**2
        return _mean(self.probs, self.sq_norms * squared) - self.gradient_sq_norm

    def baseline_matrix(self, baseline: Float64[np.ndarray, " contexts"]) -> Float64[np.ndarray, "dim dim"]:
        """Return E[W W' (Z - b)^2] - E[g(X) g(X)'], the matrix whose trace is the mean of `baseline_term`.

        Args:
            baseline: b(x), shape [contexts].
        """
        b, q = baseline[:, None], self.reward_probs
        weight = self.context_probs[:, None] * self.probs * (q * (1 - b) ** 2 + (1 - q) * b**2)
        return _outer(weight, self.scores) - _outer(self.context_probs, self.gradients)

    def covariance(self, estimator: str, group_size: int, num_prompts: int) -> Float64[np.ndarray, "dim dim"]:
        """Covariance matrix of the gradient estimate of B independent prompts; its trace is the mean squared error.

        Cov g(X) / B + (E[W W' (Z - b)^2] - E g g') / (B G) for a prompt-only baseline b(x). For grpo it is the oracle's
        plus (E[sigma^2 W W'] + E g g') / (B G (G - 1)): the second-order part of its Hoeffding decomposition,
        -(1/(G(G-1))) sum_{i != j} W_i rho_j, has only the terms (i, j)(i, j) and (i, j)(j, i).

        Args:
            estimator: `vanilla`, `grpo`, `oracle` or `optimal`.
            group_size: G; at least 2 for grpo.
            num_prompts: B.

        Raises:
            UserError: For a group or a number of prompts that is too small, and an unknown estimator.
        """
        mse(self.components, group_size, estimator)  # refuses what has no error
        if num_prompts < 1:
            raise UserError(f"no estimate from {num_prompts} prompts; B >= 1")
        zero = np.zeros_like(self.value)
        baseline = {"vanilla": zero, "optimal": self.optimal_baseline}.get(estimator, self.value)
        total = self.gradient_covariance + self.baseline_matrix(baseline) / group_size
        if estimator == "grpo":
            fisher = _outer((self.context_probs * self.reward_variance)[:, None] * self.probs, self.scores)
            second = fisher + _outer(self.context_probs, self.gradients)
            total = total + second / (group_size * (group_size - 1))
        return total / num_prompts

    # Expectations over contexts.

    @cached_property
    def expected_return(self) -> float:
        """J(theta) = E Z."""
        return float(self.context_probs @ self.value)

    @cached_property
    def gradient(self) -> Float64[np.ndarray, " dim"]:
        """Gradient of J: g = E g(X)."""
        return self.context_probs @ self.gradients

    @cached_property
    def gradient_covariance(self) -> Float64[np.ndarray, "dim dim"]:
        """Cov g(X) over contexts, whose trace is c1."""
        return _outer(self.context_probs, self.gradients - self.gradient)

    @cached_property
    def hessian(self) -> Float64[np.ndarray, "dim dim"]:
        """Second derivative of J: E[(Z - V)(W W' + M)], M(x, a) being the logit's second derivative.

        From g(x) = E[W q]: differentiating pi gives E[q W W'], and W has derivative M - E M - E[W W'], whose
        last two terms turn q into q - V.
        """
        weight = self.context_probs[:, None] * self.probs * (self.reward_probs - self.value[:, None])
        total = np.einsum("xa,xai,xaj->ij", weight, self.scores, self.scores, optimize=True)
        if self.family.curvature is not None:
            total = total + np.einsum("xa,xaij->ij", weight, self.family.curvature, optimize=True)
        return (total + total.T) / 2

    @cached_property
    def best_return(self) -> float | None:
        """J* = sup of J over theta, or None where it is not known.

        Exact at the known optimum of `three-actions` and `curved`; for logits linear in theta the separable
        value (families.separable_return), which is a supremum and not attained.
        """
        if self.family.optimum is not None:
            return TabularPolicy(self.family, self.family.optimum).expected_return
        return separable_return(self.family)

    @cached_property
    def suboptimality_gap(self) -> float | None:
        """Delta = J* - J(theta), or None where J* is not known."""
        return None if self.best_return is None else self.best_return - self.expected_return

    @cached_property
    def c1(self) -> float:
        """c1 = E||g(X) - g||^2; exactly zero where it is rounding error beside E F: G* is infinite."""
        deviation = self.gradients - self.gradient
        spread = float(self.context_probs @ np.einsum("xd,xd->x", deviation, deviation))
        return spread if spread > 1e-28 * (self.context_probs @ self.score_sq_norm) else 0.0

    @cached_property
    def c2(self) -> float:
        """c2 = E S_o(X)."""
        return float(self.context_probs @ self.first_order)

    @cached_property
    def c3(self) -> float:
        """c3 = E R(X)."""
        return float(self.context_probs @ self.second_order)

    @cached_property
    def score_reward_correlation(self) -> float:
        """Assumption 2's diagnostic: correlation of ||W||^2 with Z given the context.

        E cov(||W||^2, Z | X) / sqrt(E var(||W||^2 | X) E var(Z | X)); zero where either is constant given the
        context (to rounding), since the covariance is then zero and the assumption holds.
        """
        f, norms = self.context_probs, self.sq_norms
        centred = norms - self.score_sq_norm[:, None]
        covariance = f @ _mean(self.probs, centred * self.reward_probs)
        norm_variance = f @ _mean(self.probs, centred**2)
        reward_variance = f @ self.reward_variance
        constant = norm_variance <= (1e-12 * (f @ self.score_sq_norm)) ** 2 or reward_variance <= 0
        return 0.0 if constant else float(covariance / math.sqrt(norm_variance * reward_variance))


def best_group_size(c1: float, c3: float) -> float:
    """Return the integer G >= 2 with the least MSE at fixed N = B G: the floor or the ceiling of G*.

    N times the MSE is c1 G + c2 + c3 / (G - 1), convex in G. With c1 = 0 it falls for ever: infinite.

    Args:
        c1: E||g(X) - g||^2.
        c3: E R(X).
    """
    continuous = optimal_group_size(c1, c3)
    if math.isinf(continuous):
        return continuous
    low = max(2, math.floor(continuous))
    return float(min(low, low + 1, key=lambda size: c1 * size + c3 / (size - 1)))


def _mean(
    probs: Float64[np.ndarray, "contexts actions"], values: Float64[np.ndarray, "contexts actions"]
) -> Float64[np.ndarray, " contexts"]:
    """Return the mean over actions under pi."""
    return np.einsum("xa,xa->x", probs, values)


def _outer(
    weights: Float64[np.ndarray, "*shape"], vectors: Float64[np.ndarray, "*shape dim"]
) -> Float64[np.ndarray, "dim dim"]:
    """Return the weighted sum of v v'."""
    flat = vectors.reshape(-1, vectors.shape[-1])
    return (flat * weights.reshape(-1, 1)).T @ flat
