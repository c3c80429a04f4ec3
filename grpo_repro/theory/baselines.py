"""Corollaries 4 and 5: grpo against the oracle, and the best baseline that depends on the prompt only.

Notation: W = score, Z = reward, V = E Z, g = E W Z, F = E||W||^2; G outputs for each prompt. Everything here is exact,
by enumeration of every group.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64
from scipy.optimize import minimize_scalar

from grpo_repro import estimators, ustat
from grpo_repro.policies import families
from grpo_repro.policies.closed_form import TabularPolicy
from grpo_repro.theory import laws
from grpo_repro.theory.exact import Law, law
from grpo_repro.theory.finding import AT_LEAST, AT_MOST, REPORTED, Curve, Finding, Report, Work, exact
from grpo_repro.theory.laws import Estimator

Baseline = Callable[[Law], float]
"""A constant of the prompt's law."""

# Corollary 4.


def error_ratio(terms: ustat.Components, group_size: int) -> float:
    """MSE_grpo / MSE_oracle = 1 + R / (S_o (G - 1))."""
    return 1 + (terms.second_order / (terms.first_order * (group_size - 1))).item()


def corollary_4(
    work: Work,
    formula: Callable[[ustat.Components, int], float] = error_ratio,
    ratio_rate: float = -1.0,
    difference_rate: float = -2.0,
    estimator: Estimator = estimators.grpo,
) -> Report:
    """The error of grpo over the oracle's comes down to one as 1/G, their difference to zero as 1/G^2."""
    observed, predicted, slopes, curves = [], [], [], []
    for name, (prompt, group_sizes) in _oracle_laws(work.seed).items():
        terms, at = laws.components(prompt), np.array(group_sizes, float)
        grpo = np.array([laws.mse(prompt, size, estimator) for size in group_sizes])
        oracle = np.array([laws.mse(prompt, size, estimators.oracle) for size in group_sizes])
        ratio = np.array([formula(terms, size) for size in group_sizes])
        observed += list(grpo / oracle)
        predicted += list(ratio)
        slopes.append((_slope(at - 1, grpo / oracle - 1), _slope(np.sqrt(at * (at - 1)), grpo - oracle)))
        if name == "three-actions":
            curves = [
                Curve("ratio", "R/(S_o (G-1))", "predicted", at, ratio - 1, estimator="grpo"),
                Curve("ratio", "enumerated", "observed", at, grpo / oracle - 1, estimator="grpo"),
            ]
    ratio_slope, difference_slope = (_furthest(found, rate) for found, rate in zip(
        zip(*slopes, strict=True), (ratio_rate, difference_rate), strict=True))  # fmt: skip
    deviation, setting = laws.largest_deviation(observed, predicted), "4 laws, every group, G from 2 to 64 or 256"
    statement = "MSE_grpo / MSE_oracle = 1 + R/(S_o (G-1)), largest relative deviation"
    falls = "MSE_grpo / MSE_oracle - 1 falls as 1/G: slope of its log against log(G-1), the furthest"
    closes = "MSE_grpo - MSE_oracle falls as G^-2: slope of its log against log sqrt(G(G-1)), the furthest"
    findings = [
        exact("ratio", statement, setting, 0.0, deviation),
        exact("ratio-slope", falls, setting, ratio_rate, ratio_slope, 1e-8),
        exact("difference-slope", closes, setting, difference_rate, difference_slope, 1e-8),
    ]
    return Report(findings, curves)


def _oracle_laws(seed: int) -> dict[str, tuple[Law, tuple[int, ...]]]:
    """Laws and their group sizes: those of four outcomes, and one of three, whose groups can be listed further."""
    every = laws.every_law(seed)
    # Only action 0 earns the reward: three outcomes.
    certain = families.three_actions(contexts=1, dimension=1, rank=1, gap=1.0, seed=seed)
    found = {name: (every[name], laws.SIZES) for name in ("softmax", "likely-right", "real rewards")}
    return {**found, "three-actions": (law(laws.at_theta(certain), 0), (*laws.SIZES, 128, 256))}


def _slope(x: Float64[np.ndarray, " points"], y: Float64[np.ndarray, " points"]) -> float:
    """Slope of log y against log x by least squares; not a number where some y is not positive."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0]) if (y > 0).all() else float("nan")


def _furthest(slopes: tuple[float, ...], rate: float) -> float:
    """The slope that is furthest from the rate."""
    return slopes[int(np.argmax(np.abs(np.array(slopes) - rate)))]


# Corollary 5.

SIZE = 2
"""Group size of Corollary 5: G MSE does not depend on it for a baseline that is a constant of the prompt."""
STRICT = 1e-9
"""A strict inequality holds by more than rounding."""


def value(prompt: Law) -> float:
    """V = E Z."""
    return prompt.value


def corollary_5(
    work: Work, optimal_baseline: Baseline = laws.optimal_baseline, value_baseline: Baseline = value
) -> Report:
    """V is the best prompt-only baseline where Assumption 2 holds; elsewhere b* is, and vanilla can beat the oracle."""
    constant = laws.at_theta(families.constant_norm(contexts=12, factors=2, dimension=3, seed=work.seed))
    likely = laws.at_theta(families.likely_right(seed=work.seed))
    found = [
        *_assumption_holds(constant, value_baseline),
        *_assumption_fails(likely, optimal_baseline, work.rng("corollary-5")),
    ]
    shown = {"constant-norm": _prompts(constant)[0], "likely-right": _prompts(likely)[0]}
    return Report(found, _order_curves(shown, value_baseline, optimal_baseline))


def constant_mse(prompt: Law) -> Callable[[float], float]:
    """E||g_hat - g||^2 over every group as a function of b, the baseline C of every output."""
    probs, members = laws.every_group(prompt, SIZE)
    return lambda b: float(probs @ laws.squared_errors(prompt, members, lambda rewards, *unused: rewards - b))


def best_constant(prompt: Law) -> float:
    """The b of least enumerated error, by a numerical search that knows no formula."""
    error = constant_mse(prompt)
    scale = error(0.5)
    found = minimize_scalar(lambda b: error(float(b)) / scale, bounds=(-1, 2), options={"xatol": 1e-10})
    return float(found.x)


def _prompts(policy: TabularPolicy) -> list[Law]:
    return [law(policy, context) for context in range(len(policy.context_probs))]


def _setting(policy: TabularPolicy) -> str:
    contexts, actions = policy.reward_probs.shape
    correlation = policy.score_reward_correlation
    return f"{policy.family.name}, {contexts} contexts, {actions} actions, corr(||W||^2, Z) = {correlation:.2f}"


def _assumption_holds(policy: TabularPolicy, value_baseline: Baseline) -> list[Finding]:
    setting, prompts = _setting(policy), _prompts(policy)
    distance = float(np.max([abs(best_constant(prompt) - value_baseline(prompt)) for prompt in prompts]))
    excess = [error(0.0) / error(value_baseline(prompt)) for prompt in prompts for error in [constant_mse(prompt)]]
    return [
        exact("value-best", "least error at b = V: largest distance of the minimiser", setting, 0.0, distance, 1e-6),
        exact("vanilla-worse", "MSE_vanilla / MSE_oracle > 1 for each prompt: the smallest", setting, 1 + STRICT,
              float(np.min(excess)), 0.0, AT_LEAST),
    ]  # fmt: skip


def _assumption_fails(policy: TabularPolicy, optimal_baseline: Baseline, rng: np.random.Generator) -> list[Finding]:
    setting, prompts = _setting(policy), _prompts(policy)
    correlation = policy.score_reward_correlation
    distance, ratio, vanilla, oracle = [], [], [], []
    for prompt in prompts:
        error, best = constant_mse(prompt), optimal_baseline(prompt)
        distance.append(abs(best_constant(prompt) - best))
        # Far from b* and close to it: a wrong b* loses against some of them.
        others = np.concatenate([rng.uniform(-1, 2, 50), best + 0.05 * rng.normal(size=50)])
        ratio.append(min(error(float(b)) for b in others) / error(best))
        vanilla.append(error(0.0))
        oracle.append(error(prompt.value))
    order = float(np.sum(vanilla) / np.sum(oracle))
    return [
        Finding("correlation", "corr(||W||^2, Z) is not 0: Assumption 2 fails", setting, 0.0, correlation, REPORTED),
        exact("order-reverses", "MSE_vanilla / MSE_oracle < 1, mean over prompts", setting, 1 - STRICT, order, 0.0,
              AT_MOST),
        exact("optimal-best", "least error at b* = E||W||^2 Z / E||W||^2: largest distance of the minimiser", setting,
              0.0, float(np.max(distance)), 1e-6),
        exact("none-better", "MSE(b) / MSE(b*) >= 1 for 100 random b of each prompt: the smallest", setting, 1.0,
              float(np.min(ratio)), 1e-12, AT_LEAST),
    ]  # fmt: skip


def _order_curves(prompts: dict[str, Law], value_baseline: Baseline, optimal_baseline: Baseline) -> list[Curve]:
    """The error as a function of a constant baseline, over the oracle's, with the three that have names."""
    grid = np.linspace(-0.25, 1.25, 61)
    curves = []
    for name, prompt in prompts.items():
        norms, terms = laws.sq_norms(prompt), laws.components(prompt)
        moment = np.array([prompt.probs @ (norms * (prompt.rewards - b) ** 2) for b in grid])
        curve = (moment - terms.gradient_sq_norm) / terms.first_order
        curves.append(Curve("order", name, "predicted", grid, curve))
    named: dict[str, Baseline] = {
        "vanilla": lambda prompt: 0.0, "oracle": value_baseline, "optimal": optimal_baseline
    }  # fmt: skip
    errors = [constant_mse(prompt) for prompt in prompts.values()]
    oracle = [error(prompt.value) for error, prompt in zip(errors, prompts.values(), strict=True)]
    for name, baseline in named.items():
        x = np.array([baseline(prompt) for prompt in prompts.values()])
        y = np.array([error(b) / at_value for error, b, at_value in zip(errors, x, oracle, strict=True)])
        curves.append(Curve("order", name, "observed", x, y, estimator=name))
    return curves
