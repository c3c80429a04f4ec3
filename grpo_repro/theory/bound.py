"""Lemma 6's bound of the suboptimality gap: its recursion, its limits, its constants, and the group size it prefers.

Notation: L, mu and M = smoothness, Polyak-Lojasiewicz constant and largest mean squared error; b = learning rate.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from grpo_repro.policies.closed_form import TabularPolicy
from grpo_repro.policies.families import Family
from grpo_repro.theory.chi_square import Matrix, spectrum

Numbers = Float[np.ndarray, " cases"]


@dataclass(frozen=True)
class Constants:
    """L, mu and M over a region of parameters."""

    smooth: float
    pl: float
    error: float


def bound_step(gap: float, rate: float, at: Constants) -> float:
    """One step of Lemma 6: a_n = (1 - 2 mu b + L mu b^2) a_{n-1} + L b^2 M / 2, for b <= 2 / L.

    By J(theta') >= J + b <g, g_hat> - L b^2 ||g_hat||^2 / 2 and E||g_hat||^2 <= ||g||^2 + M, with ||g||^2 >= 2 mu gap.
    """
    return (1 - 2 * at.pl * rate + at.smooth * at.pl * rate**2) * gap + at.smooth * rate**2 * at.error / 2


def noise_floor(rate: float, at: Constants) -> float:
    """The bound's limit at a constant rate: L b^2 M / (4 mu b - 2 L mu b^2)."""
    return at.smooth * rate**2 * at.error / (4 * at.pl * rate - 2 * at.smooth * at.pl * rate**2)


def inverse_limit(rate: float, at: Constants) -> float:
    """The limit of n times the bound with rates beta / i: L beta^2 M / (4 mu beta - 2)."""
    return at.smooth * rate**2 * at.error / (4 * at.pl * rate - 2)


def constants(family: Family, radius: float, group_size: int, num_prompts: int, points: int = 41) -> Constants:
    """L, mu and M of grpo where every |theta_k| <= radius, on a grid that holds the corners and the optimum 0."""
    axis = np.linspace(-radius, radius, points)
    smooth, pl, error = [], [], []
    for theta in itertools.product(axis, repeat=len(family.theta)):
        policy = TabularPolicy(family, np.array(theta))
        curvature = np.linalg.eigvalsh(-policy.hessian)
        smooth.append(float(np.abs(curvature).max()))
        gap = policy.suboptimality_gap or 0.0
        centre = gap < 1e-12  # there the ratio's least limit is the least curvature
        pl.append(float(curvature.min()) if centre else float(policy.gradient @ policy.gradient) / (2 * gap))
        error.append(float(np.trace(policy.covariance("grpo", group_size, num_prompts))))
    return Constants(max(smooth), min(pl), max(error))


def minimisers(
    c1: Numbers, c2: Numbers, c3: Numbers, sizes: Int[np.ndarray, " sizes"]
) -> Float[np.ndarray, "cases settings"]:
    """Best integer G by Lemma 6's recursion, with L = 1, mu = 0.7 and a start of 0.1."""
    found = []
    for total, schedule in itertools.product((64, 1024), ("constant", "inverse")):
        error = (c1[:, None] * sizes + c2[:, None] + c3[:, None] / (sizes - 1)) / total  # minibatch_mse at B = N/G
        bound = np.full_like(error, 0.1)
        for n in range(1, 101):
            rate = 0.4 if schedule == "constant" else 1.2 / n
            bound = (1 - 1.4 * rate + 0.7 * rate**2) * bound + rate**2 * error / 2
            if n in (1, 10, 100):
                found.append(sizes[bound.argmin(1)])
    return np.stack(found, 1).astype(float)


def own_group_size(best: TabularPolicy, beta: float) -> float:
    """The minimiser of the gap: 1 + sqrt(sum a_k c3_k / sum a_k c1_k), a_k = lambda_k / (2 beta lambda_k - 1).

    Args:
        best: The policy at its optimum.
        beta: Learning rate.
    """
    values, directions = spectrum(best.hessian)
    a = values / (2 * beta * values - 1)
    second = 2 * (best.covariance("grpo", 2, 1) - best.covariance("oracle", 2, 1))

    def along(matrix: Matrix) -> float:
        return float(a @ np.einsum("ik,ij,jk->k", directions, matrix, directions))

    return 1 + math.sqrt(along(second) / along(best.gradient_covariance))
