"""Algorithm 2, what production GRPO computes: its U-statistic (Lemma 11), its bias and variance (Theorem 12).

At a minibatch whose policy is theta and whose groups come from theta_old the estimate is exactly

    g_hat = C / se - kappa v_bar,    C = mean over pairs of (1/2)(W~_i - W~_j)(Z_i - Z_j),

a ratio of U-statistics (se^2 is one too, of kernel (1/2)(Z_i - Z_j)^2): se is shared by the group and
(1/(G-1)) sum_i (Z_i - mean Z) W~_i is a sample covariance. Expanding 1/se about 1/sigma gives everything below.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jaxtyping import Float64, Int

from grpo_repro import kl
from grpo_repro.theory.finding import REPORTED, Curve, Finding, Report, Work, exact
from grpo_repro.theory.sequences import (
    Advantage,
    Minibatch,
    Moments,
    Weigh,
    algorithm_2,
    estimates,
    expected,
    extrapolate,
    leave_one_out,
    limit_slope,
    minibatch,
    moments,
    sequence_level,
)

SIZES = (32, 64, 128, 256)
"""Group sizes at which every group is enumerated; limits are extrapolated from them."""

SETTING = "two-token sequences, rewards 0, .3, 1, theta != theta_old, kappa = .1"


def literal_constant(terms: Moments) -> float:
    """Limit of G E||g_hat - U||^2 for U = C/sigma - kappa v_bar.

    g_hat - U = C (1/se - 1/sigma) ~ -g~ (se^2 - sigma^2) / (2 sigma^3), and G Var(se^2) -> Var(rho^2).
    """
    spread = terms.probs @ terms.variance**2
    return float(terms.gradient @ terms.gradient * spread / (4 * terms.sigma**6))


def linear_constant(terms: Moments) -> float:
    """Limit of G^2 E||g_hat - U_lin||^2 for U_lin = U - g~ (se^2 - sigma^2) / (2 sigma^3).

    With D = C - g~ and S = se^2 - sigma^2 the remainder is -D S / (2 sigma^3) + 3 g~ S^2 / (8 sigma^5), and
    sqrt(G) (D, S) is Gaussian in the limit: E D^2 S^2 = dd ss + 2 ds^2, E D S^3 = 3 ds ss, E S^4 = 3 ss^2.
    """
    p, c, s, g = terms.probs, terms.covariance, terms.variance, terms.gradient
    dd, ds, ss = float(p @ (c**2).sum(1)), (p * s) @ c, float(p @ s**2)
    a, b = 1 / (2 * terms.sigma**3), 3 / (8 * terms.sigma**5)
    return float(a**2 * (dd * ss + 2 * ds @ ds) - 6 * a * b * ss * (g @ ds) + 3 * b**2 * ss**2 * (g @ g))


def influence(terms: Moments) -> Float64[np.ndarray, "3 dim"]:
    """First-order term psi of Algorithm 2's estimate; Sigma_1 = Cov psi.

    psi = [(W~ - E W~) rho - g~]/sigma - g~ (rho^2 - sigma^2)/(2 sigma^3) - kappa (v - E v): the delta method on C/se.
    """
    shrink = terms.variance[:, None] * terms.gradient / (2 * terms.sigma**3)
    return terms.covariance / terms.sigma - shrink - (terms.penalty - terms.mean_penalty)


def influence_sigma_known(terms: Moments) -> Float64[np.ndarray, "3 dim"]:
    """The same with sigma in place of se: the first-order term of the literal U-statistic."""
    return terms.covariance / terms.sigma - (terms.penalty - terms.mean_penalty)


def normalization_bias(terms: Moments) -> Float64[np.ndarray, " dim"]:
    """Limit of G (E g_hat - g~/sigma + kappa E v): -Cov(c, s)/(2 sigma^3) + 3 g~ Var(s)/(8 sigma^5)."""
    p, s = terms.probs, terms.variance
    return -(p * s) @ terms.covariance / (2 * terms.sigma**3) + 3 * terms.gradient * (p @ s**2) / (8 * terms.sigma**5)


# Lemma 11.


def lemma_11(
    work: Work,
    advantage: Advantage = algorithm_2,
    weigh: Weigh = kl.score_weights,
    literal: Callable[[Moments], float] = literal_constant,
    linear: Callable[[Moments], float] = linear_constant,
    literal_rate: float = -1.0,
    linear_rate: float = -2.0,
) -> Report:
    """How far Algorithm 2's estimate is from two U-statistics, over every group of up to 256.

    Args:
        work: Seed.
        advantage: Advantages of a group.
        weigh: Weights of the tokens' scores.
        literal: Limit of G E||g_hat - U||^2, se replaced by sigma.
        linear: Limit of G^2 E||g_hat - U_lin||^2, se^2 linearised.
        literal_rate: Exponent of G in the first distance.
        linear_rate: In the second.
    """
    batch = minibatch(work, "lemma-11")
    terms = moments(batch)
    found = np.array([_distances(batch, size, advantage, weigh) for size in SIZES])
    # At theta_old = 0 stopping has probability 1/2; rewarded alone it makes rho^2 constant.
    even = replace(batch, rewards=np.array([1.0, 0.0, 0.0]), old=np.zeros(2), new=batch.new - batch.old)
    half = [_distances(even, size, advantage, weigh)[0] for size in SIZES]
    findings = [
        exact("ratio", "g_hat = C / se - kappa v_bar in every group, C from all pairs",
              f"{SETTING}, G = 2..6", 0.0, _ratio_error(batch, advantage, weigh)),
        *_limits("literal", "se replaced by sigma", found[:, 0], literal(terms), literal_rate),
        *_limits("linear", "se^2 linearised about sigma^2", found[:, 1], linear(terms), linear_rate),
        exact("half", "at V = 1/2 (binary) the literal U-statistic is at E||g_hat - U||^2 ~ G^-2 too",
              "two-token sequences, stop rewarded", -2.0, limit_slope(half), 5e-3),
        Finding("equal", "probability that all rewards of a group are equal (advantage 0 by convention)",
                f"{SETTING}, G = {SIZES[0]}", 0.0, float((terms.probs ** SIZES[0]).sum()), REPORTED),
    ]  # fmt: skip
    return Report(findings, _distance_curves(found, literal(terms), literal_rate, linear(terms), linear_rate))


def _limits(
    name: str, what: str, distances: Float64[np.ndarray, " sizes"], constant: float, rate: float
) -> list[Finding]:
    """Rate of a distance and its constant at that rate, both extrapolated to G -> infinity."""
    where = f"{SETTING}, G = {SIZES[0]}..{SIZES[-1]} extrapolated"
    scaled = extrapolate((distances * np.array(SIZES, dtype=np.float64) ** -rate).tolist())
    return [
        exact(f"{name}-rate", f"E||g_hat - U||^2 ~ G^{rate:g}: U with {what}", where, rate,
              limit_slope(distances.tolist()), 3e-2),
        exact(f"{name}-constant", f"G^{-rate:g} E||g_hat - U||^2 -> its closed form: U with {what}", where, constant,
              scaled, 1e-2 * abs(constant)),
    ]  # fmt: skip


def _parts(
    terms: Moments, counts: Int[np.ndarray, "groups 3"], rewards: Float64[np.ndarray, " 3"]
) -> tuple[Float64[np.ndarray, "groups dim"], Float64[np.ndarray, " groups"], Float64[np.ndarray, "groups dim"]]:
    """C, se^2 and kappa v_bar of every group."""
    size = counts[0].sum()
    deviation = counts * (rewards - (counts @ rewards / size)[:, None]) / (size - 1)
    return deviation @ terms.weighted, deviation @ rewards, counts @ terms.penalty / size


def _distances(batch: Minibatch, size: int, advantage: Advantage, weigh: Weigh) -> tuple[float, float]:
    """E||g_hat - U||^2 of the literal and of the linearised U-statistic."""
    terms = moments(batch)
    probs, counts, found = estimates(batch, size, advantage, weigh)
    covariance, se2, penalty = _parts(terms, counts, batch.rewards)
    literal = covariance / terms.sigma - penalty
    linear = literal - (se2 - terms.sigma**2)[:, None] * terms.gradient / (2 * terms.sigma**3)
    return float(probs @ ((found - literal) ** 2).sum(1)), float(probs @ ((found - linear) ** 2).sum(1))


def _ratio_error(batch: Minibatch, advantage: Advantage, weigh: Weigh) -> float:
    """Largest difference of g_hat from C / se - kappa v_bar, C and se^2 by summing their kernels over all pairs."""
    terms, worst = moments(batch), 0.0
    for size in range(2, 7):
        _, counts, found = estimates(batch, size, advantage, weigh)
        for group, estimate in zip(counts, found, strict=True):
            member = np.repeat(np.arange(3), group)
            i, j = np.array(list(itertools.combinations(member, 2))).T
            gap = batch.rewards[i] - batch.rewards[j]
            se = np.sqrt(np.mean(gap**2) / 2)
            kernel = (terms.weighted[i] - terms.weighted[j]) * gap[:, None] / 2
            normalized = kernel.mean(0) / se if se > 0 else 0.0
            worst = max(worst, float(np.abs(estimate - normalized + terms.penalty[member].mean(0)).max()))
    return worst


def _distance_curves(
    found: Float64[np.ndarray, "sizes 2"], literal: float, literal_rate: float, linear: float, linear_rate: float
) -> list[Curve]:
    x = np.array(SIZES, dtype=np.float64)
    return [
        Curve("distance", "se replaced by sigma", "observed", x, found[:, 0]),
        Curve("distance", f"leading term, G^{literal_rate:g}", "predicted", x, literal * x**literal_rate),
        Curve("distance", "se^2 linearised", "observed", x, found[:, 1]),
        Curve("distance", f"leading term, G^{linear_rate:g}", "predicted", x, linear * x**linear_rate),
    ]


# Theorem 12.


def theorem_12(
    work: Work,
    advantage: Advantage = algorithm_2,
    weigh: Weigh = kl.score_weights,
    first_order: Callable[[Moments], np.ndarray] = influence,
    bias: Callable[[Moments], np.ndarray] = normalization_bias,
    bias_exponent: float = 2.0,
    remainder_exponent: float = -2.0,
) -> Report:
    """Squared off-policy bias O((m eta)^2), variance tr Sigma_1 / G + O(G^-2), over every group.

    Args:
        work: Seed.
        advantage: Advantages of a group.
        weigh: Weights of the tokens' scores.
        first_order: Influence function of each sequence, whose covariance is Sigma_1.
        bias: Limit of G times what normalisation adds to the mean.
        bias_exponent: Exponent of (m - 1) eta in the squared bias.
        remainder_exponent: Exponent of G in the variance's remainder.
    """
    batch = minibatch(work, "theorem-12")
    first, first_curves = _variance(batch, advantage, weigh, first_order, bias, remainder_exponent)
    second, second_curves = _off_policy(batch, advantage, weigh, bias_exponent)
    return Report(first + second, first_curves + second_curves)


def _trace(terms: Moments, psi: Float64[np.ndarray, "3 dim"]) -> float:
    """Tr Cov psi."""
    return float(terms.probs @ ((psi - terms.probs @ psi) ** 2).sum(1))


def _variance(
    batch: Minibatch, advantage: Advantage, weigh: Weigh, first_order: Callable[[Moments], np.ndarray],
    bias: Callable[[Moments], np.ndarray], exponent: float,
) -> tuple[list[Finding], list[Curve]]:  # fmt: skip
    """Mean and variance of the estimate at growing G, against their leading terms."""
    terms, sizes = moments(batch), np.array(SIZES, dtype=np.float64)
    drawn = [estimates(batch, size, advantage, weigh) for size in SIZES]
    means = np.array([probs @ found for probs, _, found in drawn])
    spread = np.array([p @ ((found - mean) ** 2).sum(1) for (p, _, found), mean in zip(drawn, means, strict=True)])
    trace, known = _trace(terms, first_order(terms)), _trace(terms, influence_sigma_known(terms))
    where = f"{SETTING}, G = {SIZES[0]}..{SIZES[-1]} extrapolated"
    shift = sizes[:, None] * (means - terms.gradient / terms.sigma + terms.mean_penalty)
    limit, claim = np.array([extrapolate(column.tolist()) for column in shift.T]), bias(terms)
    findings = [
        exact("variance", "G tr Var(g_hat) -> tr Sigma_1, with the first-order term of se", where, trace,
              extrapolate((sizes * spread).tolist()), 2e-3 * trace),
        exact("remainder", f"tr Var(g_hat) - tr Sigma_1/G ~ G^{exponent:g}", where, exponent,
              limit_slope(np.abs(spread - trace / sizes).tolist()), 2e-2),
        Finding("sigma-known", "tr Sigma_1 when se is taken for sigma, over tr Sigma_1", SETTING, 1.0,
                known / trace, REPORTED),
        exact("normalization", "G (E g_hat - g/sigma + kappa E v) -> its closed form: relative error", where, 0.0,
              float(np.linalg.norm(limit - claim) / np.linalg.norm(claim)), 5e-3),
    ]  # fmt: skip
    flat = np.ones_like(sizes)
    return findings, [
        Curve("variance", "Algorithm 2", "observed", sizes, sizes * spread),
        Curve("variance", "tr Sigma_1", "predicted", sizes, trace * flat),
        Curve("variance", "tr Sigma_1, se taken for sigma", "bound", sizes, known * flat),
    ]


def _biases(
    batch: Minibatch, advantage: Advantage, weigh: Weigh, steps: tuple[int, ...], eta: float, size: int = 8
) -> Float64[np.ndarray, " steps"]:
    """Squared norm of E_old g_hat(theta_m) - E_theta_m g_hat(theta_m) after m - 1 expected steps from theta_old."""
    found, theta = [], batch.old
    for step in range(1, max(steps) + 1):
        theta = theta + eta * expected(replace(batch, new=theta), size, advantage, weigh)
        if step in steps:
            here = replace(batch, new=theta)
            off = expected(here, size, advantage, weigh) - expected(here.on_policy(), size, advantage, weigh)
            found.append(float(off @ off))
    return np.array(found)


def _off_policy(
    batch: Minibatch, advantage: Advantage, weigh: Weigh, exponent: float
) -> tuple[list[Finding], list[Curve]]:
    """Bias of later minibatches: of Algorithm 2, and of the plain estimator with either ratio."""
    steps, rates = (1, 2, 4, 8, 16), (1e-5, 1e-4, 1e-2, 1e-1)
    plain = replace(batch, kappa=0.0)
    cases = {
        "bias": (batch, advantage, weigh),
        "token": (plain, leave_one_out, weigh),
        "sequence": (plain, leave_one_out, sequence_level(weigh)),
    }
    x = np.concatenate([np.array(steps) * eta for eta in rates])
    y = {name: np.concatenate([_biases(*case, steps, eta) for eta in rates]) for name, case in cases.items()}
    small = x < 2e-3
    slope = {name: float(np.polyfit(np.log(x[small]), np.log(y[name][small]), 1)[0]) for name in ("bias", "token")}
    where = "two-token sequences, G = 8, m = 2..17, eta = 1e-5 and 1e-4"
    findings = [
        exact("bias", f"||off-policy bias||^2 ~ ((m-1) eta)^{exponent:g}: slope in logarithms", where, exponent,
              slope["bias"], 5e-3),
        exact("sequence-ratio", "without normalisation and penalty the sequence-level ratio has no bias", where, 0.0,
              float(np.sqrt(y["sequence"].max())), 1e-12),
        exact("token-ratio", "the token-level ratio alone has one, ||bias||^2 ~ ((m-1) eta)^2 too", where, exponent,
              slope["token"], 5e-3),
    ]  # fmt: skip
    order = np.argsort(x, kind="stable")
    line = y["bias"][order[0]] * (x[order] / x[order[0]]) ** exponent
    return findings, [
        Curve("bias", "Algorithm 2", "observed", x[order], y["bias"][order]),
        Curve("bias", "token-level ratio alone", "observed", x[order], y["token"][order]),
        Curve("bias", f"slope {exponent:g}", "predicted", x[order], line),
    ]
