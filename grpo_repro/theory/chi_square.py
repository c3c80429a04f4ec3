"""The limit of n times the suboptimality gap (Theorem 8): the law of sum_k w_k chi^2_1, and its weights.

Near an optimum with Hessian -Q Lambda Q' (r nonzero eigenvalues; the optimum may be a flat set) the steps beta / i make
z = Q'(theta - theta*) the recursion z_i = (1 - beta Lambda / i) z_{i-1} + (beta / i) noise. Its covariance is
Sigma / n with (beta Lambda - I/2) Sigma + Sigma (beta Lambda - I/2) = beta^2 Q' Gamma Q, Gamma being that of the
gradient estimate. The gap is z' Lambda z / 2, so n times it tends to sum_k w_k chi^2_1 with w the eigenvalues of
(1/2) Sigma^(1/2) Lambda Sigma^(1/2).

The law's characteristic function is prod_k (1 - 2 i w_k t)^(-1/2), which Imhof inverts in real arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Float64
from scipy.integrate import quad
from scipy.interpolate import CubicSpline

Weights = Float64[np.ndarray, " terms"]
Points = Float[np.ndarray, "*shape"]
Matrix = Float64[np.ndarray, "dim dim"]


def spectrum(hessian: Matrix) -> tuple[Float64[np.ndarray, " rank"], Float64[np.ndarray, "dim rank"]]:
    """The nonzero eigenvalues lambda of -H and their directions Q, ascending."""
    values, vectors = np.linalg.eigh(-hessian)
    kept = np.abs(values) > 1e-9 * np.abs(values).max()
    return values[kept], vectors[:, kept]


def limit_covariance(hessian: Matrix, noise: Matrix, beta: float) -> Float64[np.ndarray, "rank rank"]:
    """Sigma_kl = beta^2 (Q' Gamma Q)_kl / (beta (lambda_k + lambda_l) - 1): the integral of Theorem 8 done.

    Args:
        hessian: Of J at the optimum.
        noise: Gamma, the covariance of the gradient estimate there.
        beta: Learning rate; beta lambda > 1/2.
    """
    values, directions = spectrum(hessian)
    return beta**2 * (directions.T @ noise @ directions) / (beta * (values[:, None] + values) - 1)


def limit_weights(hessian: Matrix, noise: Matrix, beta: float) -> Weights:
    """w_k of Theorem 8, ascending: the eigenvalues of (1/2) Lambda^(1/2) Sigma Lambda^(1/2).

    They are those of (1/2) Sigma^(1/2) Lambda Sigma^(1/2), since A A' and A' A have the same nonzero ones.
    """
    root = np.sqrt(spectrum(hessian)[0])
    return np.linalg.eigvalsh(0.5 * root[:, None] * limit_covariance(hessian, noise, beta) * root)


def mean(weights: Weights) -> float:
    """Return sum_k w_k."""
    return float(_checked(weights).sum())


def cdf(weights: Weights, x: float) -> float:
    """Return P(sum_k w_k chi^2_1 <= x) by Imhof's inversion.

    P(Q > x) = 1/2 + (1/pi) int_0^inf sin(a(u) - x u / 2) / (u r(u)) du with a(u) = (1/2) sum_k arctan(w_k u) and
    r(u) = prod_k (1 + w_k^2 u^2)^(1/4). Beyond the first periods the integrand is split by
    sin(a - b) = sin(a) cos(b) - cos(a) sin(b), b = x u / 2, into two Fourier integrals of slowly varying functions.

    Args:
        weights: w, positive.
        x: Where; 0 at and below zero.

    Raises:
        ValueError: If a weight is not positive and finite.

    Source: J. P. Imhof, Computing the distribution of quadratic forms in normal variables, Biometrika 48 (1961).

    >>> from scipy.stats import chi2
    >>> bool(abs(cdf(np.ones(2), 3.0) - chi2.cdf(3.0, 2)) < 1e-9)
    True
    """
    w = _checked(weights)
    if x <= 0:
        return 0.0
    scale = w.sum()
    w, half = w / scale, 0.5 * x / scale

    # Without annotations: tests check the types of every annotated function at each of its many calls.
    phase = lambda u: 0.5 * np.arctan(w * u).sum()  # noqa: E731
    damping = lambda u: u * np.prod((1 + (w * u) ** 2) ** 0.25)  # noqa: E731
    split = min(2 * np.pi / half, 1e3)  # one period of the oscillation
    options = {"epsabs": 1e-11, "limit": 400, "full_output": 1}  # 1: no warnings where x is far below all weights
    start = quad(lambda u: np.sin(phase(u) - half * u) / damping(u), 0, split, epsrel=1e-11, **options)[0]
    even = quad(lambda u: np.sin(phase(u)) / damping(u), split, np.inf, weight="cos", wvar=half, **options)[0]
    odd = quad(lambda u: np.cos(phase(u)) / damping(u), split, np.inf, weight="sin", wvar=half, **options)[0]
    return float(np.clip(0.5 - (start + even - odd) / np.pi, 0.0, 1.0))


def interpolated(weights: Weights, nodes: int = 100) -> Callable[[Points], Points]:
    """Return the distribution function as a fast function of arrays, within 1e-6 of `cdf`.

    A cubic spline in sqrt(x): near zero P(Q <= x) goes as x^(r/2) with r terms, which is smooth in sqrt(x) for every r.
    Beyond the last node less than 1e-9 is left: P(Q > x) <= P(max_k w_k chi^2_r > x), and chi^2_r exceeds
    r + 2 sqrt(21 r) + 42 with probability exp(-21) at most (Laurent and Massart).

    Args:
        weights: w, positive.
        nodes: Number of exact values.
    """
    w = _checked(weights)
    last = float(w.max()) * (len(w) + 2 * np.sqrt(21 * len(w)) + 42)
    roots = np.sqrt(last) * np.linspace(0, 1, nodes) ** 2  # dense near zero: weights may differ by a factor of 100
    spline = CubicSpline(roots, [cdf(w, float(root**2)) for root in roots])

    def evaluate(x: Points) -> Points:
        inside = spline(np.sqrt(np.clip(x, 0.0, last)))
        return np.where(x >= last, 1.0, np.clip(inside, 0.0, 1.0))

    return evaluate


def _checked(weights: Weights) -> Weights:
    """Return the weights if they are positive and finite."""
    if len(weights) == 0 or not (np.isfinite(weights).all() and (weights > 0).all()):
        raise ValueError(f"weights are {weights!r}; give positive numbers")
    return weights
