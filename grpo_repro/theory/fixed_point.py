"""What normalised advantages maximise (Proposition 13): E[2 arcsin sqrt V(X)] - kappa KL instead of E V - kappa KL.

With binary rewards E[W | Z = 1] = g/V and E[W | Z = 0] = -g/(1 - V), so given the group's rewards the sample
covariance of (W, Z) has the mean se^2 g/(V (1 - V)), and the estimate, which divides it by se, has exactly the mean

    E g_hat(x) = Phi_G'(V) g(x),    Phi_G'(V) = E[se]/(V (1 - V)) -> 1/sqrt(V (1 - V)) = d/dV 2 arcsin sqrt V.

Training therefore stops where E[Phi_G'(V) grad V] = kappa grad KL, at every G; k3's divergence is KL(pi_ref || pi).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import binom

from grpo_repro import kl
from grpo_repro.policies import families, tabular_runs
from grpo_repro.policies.closed_form import TabularPolicy
from grpo_repro.policies.families import Family
from grpo_repro.stats import Interval, mean_interval
from grpo_repro.theory.exact import groups, law
from grpo_repro.theory.finding import AT_LEAST, REPORTED, Curve, Finding, Report, Work, exact, simulated
from grpo_repro.theory.sequences import Advantage, Weigh, algorithm_2, extrapolate, limit_slope, outcome_advantages

Slope = Callable[[np.ndarray, int], np.ndarray]
"""(V, G) -> Phi_G'(V)."""

Objective = Callable[[np.ndarray], np.ndarray]
"""V -> the limiting objective; it must take complex numbers, which differentiate it without cancellation."""

ARCSINE, VALUE = "argmax E[2 arcsin sqrt V] - kappa KL", "argmax E V - kappa KL"


def normalized_slope(value: Float64[np.ndarray, " n"], size: int) -> Float64[np.ndarray, " n"]:
    """Phi_G'(V) = E[se]/(V (1 - V)), se^2 = R (G - R)/(G (G - 1)) with R ~ Binomial(G, V) right completions."""
    right = np.arange(size + 1)
    se = np.sqrt(right * (size - right) / (size * (size - 1)))
    return binom.pmf(right, size, value[:, None]) @ se / (value * (1 - value))


def arcsine(value: np.ndarray) -> np.ndarray:
    """2 arcsin sqrt V, the variance-stabilising transform of a proportion."""
    return 2 * np.arcsin(np.sqrt(value))


def next_order(value: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """The b of Phi_G' = (1 + b/G + ...)/sqrt(V (1 - V)): -(1 - 2V)^2/(8 V (1 - V)).

    E se = sigma (1 - Var(se^2)/(8 sigma^4) + ...) as E se^2 = sigma^2, and G Var(se^2) -> sigma^2 (1 - 2V)^2.
    """
    return -((1 - 2 * value) ** 2) / (8 * value * (1 - value))


def proposition_13(
    work: Work,
    slope: Slope = normalized_slope,
    objective: Objective = arcsine,
    bias: Callable[[np.ndarray], np.ndarray] = next_order,
    advantage: Advantage = algorithm_2,
    weigh: Weigh = kl.score_weights,
) -> Report:
    """Which objective normalised GRPO maximises: its mean step by enumeration, and where training goes.

    Args:
        work: Seed, runs and confidence.
        slope: Phi_G'(V), the claimed factor of g(x).
        objective: Its limit's antiderivative.
        bias: The claimed 1/G correction of the factor.
        advantage: Advantages of a group, those under test.
        weigh: Weights of the scores, with k3's penalty.
    """
    value, rate = np.array([0.15, 0.3, 0.5, 0.8]), (512, 1024, 2048, 4096)
    scaled = [g * (slope(value, g) / _derivative(objective, value) - 1) for g in rate]
    limit = np.array([extrapolate(column.tolist()) for column in np.transpose(scaled)])
    findings = [
        exact("factor", "binary rewards: E g_hat(x) = E[se]/(V(1-V)) g(x) at every G: largest relative error",
              "softmax, 3 contexts, 3 actions, G = 2, 3, 4, 8, 16", 0.0, _factor_error(work, slope, advantage)),
        exact("limit", "E[se]/(V(1-V)) = (1 + b/G + ...) d/dV 2 arcsin sqrt V: largest error of b",
              f"V = .15, .3, .5, .8; G = {rate[0]}..{rate[-1]} extrapolated", 0.0,
              float(np.abs(limit - bias(value)).max()), 1e-4),
    ]  # fmt: skip
    problem = Problem()
    optima, optimum_findings = _optima(problem, slope, objective)
    trained = _train(work, step := Step(problem, advantage, weigh))
    findings += optimum_findings + _training_findings(step, slope, optima, trained)
    return Report(findings, _objective_curves(problem, objective, optima) + _training_curves(trained, optima))


def _derivative(objective: Objective, value: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Derivative by a complex step, exact to rounding."""
    return objective(value + 1e-30j).imag / 1e-30


def _factor_error(work: Work, slope: Slope, advantage: Advantage) -> float:
    """Largest relative difference of E g_hat(x), over every group, from Phi_G'(V) g(x)."""
    family = families.softmax(3, 3, 4, seed=int(work.rng("proposition-13", "family").integers(2**31)))
    policy, worst = TabularPolicy(family, family.theta), 0.0
    for context, size in np.ndindex(3, 5):
        outcomes, group_size = law(policy, context), (2, 3, 4, 8, 16)[size]
        probs, counts = groups(outcomes.probs, group_size)
        mean = probs @ (counts * outcome_advantages(counts, outcomes.rewards, advantage)) @ outcomes.scores / group_size
        claim = slope(np.array([outcomes.value]), group_size)[0] * outcomes.gradient
        worst = max(worst, float(np.linalg.norm(mean - claim) / np.linalg.norm(claim)))
    return worst


@dataclass(frozen=True)
class Problem:
    """One parameter and two contexts that pull it apart: V_1 = sigmoid(theta), V_2 = sigmoid(4 - theta).

    Attributes:
        weights: f(x).
        reference: theta_ref, also where training starts.
        kappa: Coefficient of the penalty.
        size: G.
        low: Least theta that is searched.
        high: Largest.
    """

    weights: tuple[float, float] = (0.7, 0.3)
    reference: float = 0.0
    kappa: float = 0.1
    size: int = 32
    low: float = 0.0
    high: float = 6.0

    @property
    def family(self) -> Family:
        """Two actions, of which the second is right; its logit is theta in one context and 4 - theta in the other."""
        right, weights, theta = np.array([[0.0, 1.0], [0.0, 1.0]]), np.array(self.weights), np.array([self.reference])
        features = (np.array([[1.0], [-1.0]]) * right)[..., None]
        return Family("apart", weights, right, np.array([[0.0], [4.0]]) * right, features, None, theta)

    def policy(self, theta: float) -> TabularPolicy:
        """The policy at theta."""
        return TabularPolicy(self.family, np.array([theta]))

    def divergence(self, theta: float, reverse: bool = True) -> float:
        """E KL(pi_ref || pi) at theta, of which k3's weight is the gradient, or else E KL(pi || pi_ref)."""
        pi, reference = self.policy(theta).probs, self.policy(self.reference).probs
        first, second = (reference, pi) if reverse else (pi, reference)
        return float(np.array(self.weights) @ (first * np.log(first / second)).sum(1))

    def penalised(self, objective: Objective, theta: float, reverse: bool = True) -> float:
        """E objective(V(X)) - kappa KL."""
        gain = np.array(self.weights) @ objective(self.policy(theta).value)
        return float(gain) - self.kappa * self.divergence(theta, reverse)

    def argmax(self, objective: Objective, reverse: bool = True) -> float:
        """Maximiser over theta: the best of a grid, refined."""
        grid = np.linspace(self.low, self.high, 61)
        best = grid[np.argmax([self.penalised(objective, theta, reverse) for theta in grid])]
        found = minimize_scalar(lambda theta: -self.penalised(objective, theta, reverse),
                                bounds=(best - 0.1, best + 0.1), method="bounded", options={"xatol": 1e-9})  # fmt: skip
        return float(found.x)

    def field(self, theta: float, slope: Slope, size: int) -> float:
        """Mean step E[Phi_G'(V) g(X)] - kappa grad KL(pi_ref || pi); the gradient of that KL is -E_ref W."""
        policy = self.policy(theta)
        pull = -np.einsum("xa,xa->x", self.policy(self.reference).probs, policy.scores[..., 0])
        step = slope(policy.value, size) * policy.gradients[:, 0] - self.kappa * pull
        return float(np.array(self.weights) @ step)

    def fixed_point(self, slope: Slope, size: int) -> float:
        """Where the mean step is zero."""
        return float(brentq(lambda theta: self.field(theta, slope, size), self.low, self.high, xtol=1e-13))


def _optima(problem: Problem, slope: Slope, objective: Objective) -> tuple[dict[str, float], list[Finding]]:
    """The optima of both objectives and the fixed points of finite groups."""
    optima = {
        "arcsine": problem.argmax(objective),
        "value": problem.argmax(lambda value: value),
        "finite": problem.fixed_point(slope, problem.size),
    }
    sizes = [256 * 2**k for k in range(5)]
    points = [problem.fixed_point(slope, size) for size in sizes]
    gap = np.abs(np.array(points) - optima["arcsine"]).tolist()
    setting = f"V = sigmoid(theta), sigmoid(4 - theta), f = .7, .3, kappa = {problem.kappa:g}"
    findings = [
        exact("fixed-point", "the fixed points of finite G tend to argmax E[2 arcsin sqrt V] - kappa KL(pi_ref || pi)",
              f"{setting}, G = {sizes[0]}..{sizes[-1]} extrapolated", optima["arcsine"], extrapolate(points), 1e-6),
        exact("fixed-point-rate", "their distance from it is O(1/G)", f"{setting}, the same G", -1.0,
              limit_slope(gap), 1e-2),
        exact("apart", "and it is far from argmax E V - kappa KL(pi_ref || pi): distance in theta", setting, 0.5,
              abs(optima["arcsine"] - optima["value"]), 0.0, AT_LEAST),
        Finding("other-direction", "argmax E[2 arcsin sqrt V] - kappa KL(pi || pi_ref), which k3 does not reach",
                setting, optima["arcsine"], problem.argmax(objective, reverse=False), REPORTED),
    ]  # fmt: skip
    return optima, findings


class Step:
    """Algorithm 2's gradient estimate in the two contexts, on-policy, for many runs at once."""

    def __init__(self, problem: Problem, advantage: Advantage, weigh: Weigh):
        self.problem, self.weigh, self.family = problem, weigh, problem.family
        right = np.arange(problem.size + 1)
        self.counts = np.stack([problem.size - right, right], 1)
        self.advantages = outcome_advantages(self.counts, np.array([0.0, 1.0]), advantage)
        self.reference = np.log(problem.policy(problem.reference).probs)

    def probs(self, theta: Float64[np.ndarray, " runs"]) -> Float64[np.ndarray, "runs 2 2"]:
        """pi(a | x) of every run."""
        return tabular_runs.probs(self.family, theta[:, None])

    def __call__(
        self,
        theta: Float64[np.ndarray, " runs"],
        pi: Float64[np.ndarray, "runs 2 2"],
        contexts: Int[np.ndarray, "runs prompts"],
        right: Int[np.ndarray, "runs prompts"],
    ) -> Float64[np.ndarray, " runs"]:
        """Mean estimate over prompts; a group is known by its number of right completions."""
        rows = np.arange(len(theta))[:, None]
        scores = tabular_runs.scores(self.family, theta[:, None], pi)[rows, contexts, :, 0]
        log_probs, reference = np.log(pi)[rows, contexts], self.reference[contexts]
        weights = self.weigh(self.advantages[right], log_probs, None, reference, self.problem.kappa)
        return (self.counts[right] * weights * scores).sum(2).mean(1) / self.problem.size

    def mean(self, theta: float) -> float:
        """The estimate's mean: over both contexts and every group."""
        size, total = self.problem.size, 0.0
        same, right = np.full(size + 1, theta), np.arange(size + 1)[:, None]
        pi = self.probs(same)
        for context, weight in enumerate(self.problem.weights):
            chance = binom.pmf(right[:, 0], size, pi[0, context, 1])
            total += weight * float(chance @ self(same, pi, np.full_like(right, context), right))
        return total


@dataclass(frozen=True)
class Trained:
    """Mean theta over runs, with intervals, at some iterations."""

    iterations: list[int]
    theta: list[Interval]
    setting: str


def _train(work: Work, step: Step, iterations: int = 4096, prompts: int = 8, beta: float = 20.0) -> Trained:
    """Ascend with the rate beta/(i + 100) from theta_ref, all runs at once.

    The mean of theta_n is off by what is left of the start, -1e-4 here, and by O(1/n) as the field is curved, 4e-5;
    the interval is +-4e-3.
    """
    runs, rng = max(16, work.runs // 80), work.rng("proposition-13", "training")
    theta = np.full(runs, step.problem.reference)
    shown, found = [2**k for k in range(3, iterations.bit_length())], []
    for i in range(1, iterations + 1):
        contexts = (rng.random((runs, prompts)) < step.problem.weights[1]).astype(np.int64)
        pi = step.probs(theta)
        right = rng.binomial(step.problem.size, np.take_along_axis(pi[:, :, 1], contexts, axis=1))
        theta = theta + beta / (i + 100) * step(theta, pi, contexts, right)
        if i in shown:
            found.append(mean_interval(theta, work.confidence))
            work.progress(i, iterations, "training with normalised advantages")
    setting = f"{runs} runs, G = {step.problem.size}, B = {prompts}, n = {iterations}, rate {beta:g}/(i + 100)"
    return Trained(shown, found, setting)


def _training_findings(step: Step, slope: Slope, optima: dict[str, float], trained: Trained) -> list[Finding]:
    problem, last = step.problem, trained.theta[-1]
    grid = np.linspace(problem.low, problem.high, 13).tolist()
    error = max(abs(step.mean(theta) - problem.field(theta, slope, problem.size)) for theta in grid)
    return [
        exact("step", "mean step = E[Phi_G'(V) g(X)] - kappa grad KL(pi_ref || pi), over every group: largest error",
              f"13 values of theta, G = {problem.size}", 0.0, error),
        simulated("training", "training ends at the fixed point of its G: mean theta", trained.setting,
                  optima["finite"], last),
        exact("not-value", "and not at argmax E V - kappa KL: lower end of the interval less that theta",
              trained.setting, 0.0, last.low - optima["value"], 0.0, AT_LEAST),
    ]  # fmt: skip


def _objective_curves(problem: Problem, objective: Objective, optima: dict[str, float]) -> list[Curve]:
    """Both objectives over theta, each scaled to [0, 1], with their maximisers."""
    theta, curves = np.linspace(problem.low, problem.high, 121), []
    for key, argmax, gain in (("arcsine", ARCSINE, objective), ("value", VALUE, lambda value: value)):
        y = np.array([problem.penalised(gain, x) for x in theta])
        name = argmax.removeprefix("argmax ")
        curves.append(Curve("objectives", name, "predicted", theta, (y - y.min()) / (y.max() - y.min())))
        curves.append(Curve("objectives", argmax, "observed", np.array([optima[key]]), np.ones(1)))
    return curves


def _training_curves(trained: Trained, optima: dict[str, float]) -> list[Curve]:
    x = np.array(trained.iterations, dtype=np.float64)
    value, low, high = (np.array([getattr(t, end) for t in trained.theta]) for end in ("value", "low", "high"))
    lines = ("predicted", "finite", "fixed point of this G"), ("bound", "arcsine", ARCSINE), ("bound", "value", VALUE)
    return [
        Curve("training", "mean theta", "observed", x, value, low, high),
        *(Curve("training", name, kind, x, np.full_like(x, optima[key])) for kind, key, name in lines),
    ]
