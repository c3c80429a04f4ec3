"""Lemma 1, the Hoeffding decomposition, Theorem 2 and Proposition 3, by enumeration of every group and simulation.

Notation: W = score, Z = reward, rho = Z - V, g = E W Z; G outputs for each of B prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jaxtyping import Float64, Int

from grpo_repro import estimators, stats, ustat
from grpo_repro.policies import families, tabular_runs
from grpo_repro.policies.closed_form import TabularPolicy
from grpo_repro.theory import laws
from grpo_repro.theory.exact import Law, law
from grpo_repro.theory.finding import Curve, Finding, Report, Work, exact, simulated
from grpo_repro.theory.laws import Estimator

Part = Callable[[Law, np.ndarray], np.ndarray]
"""A part of the error of every group, from the law and the outcomes of the groups' members."""

ALL_LAWS = "5 families and a law of real rewards, every group"


# Lemma 1.


def lemma_1(work: Work, estimator: Estimator = estimators.grpo) -> Report:
    """The grpo estimate is the U-statistic of kernel h(i, j) = (1/2)(W_i - W_j)(Z_i - Z_j), and unbiased."""
    rng = work.rng("lemma-1")
    group_sizes, dims = laws.SIZES, (1, 4, 16)
    found: dict[str, list[float]] = {"binary": [], "real": []}
    for size in group_sizes:
        for dim in dims:
            scores = rng.normal(size=(50, size, dim))
            value = rng.uniform(0.1, 0.9, size=(50, 1))
            rewards = {"binary": (rng.random((50, size)) < value) * 1.0, "real": value + rng.normal(size=(50, size))}
            for kind, z in rewards.items():
                found[kind].append(_kernel_deviation(scores, z, estimator))
    statement = "estimate = mean over pairs of (1/2)(Wi - Wj)(Zi - Zj), largest relative deviation"
    setting = f"random groups, G = {_listed(group_sizes)}, dim = {_listed(dims)}"
    findings = [
        exact(kind, statement, f"{kind} rewards, {setting}", 0.0, float(np.max(deviations)), 1e-12)
        for kind, deviations in found.items()
    ]
    biases = [_bias(prompt, size, estimator) for prompt in laws.every_law(work.seed).values() for size in (2, 3)]
    statement = "E estimate = g, largest deviation over sqrt(E||W||^2)"
    return Report([*findings, exact("unbiased", statement, f"{ALL_LAWS}, G = 2, 3", 0.0, np.max(biases), 1e-12)])


def _kernel_deviation(
    scores: Float64[np.ndarray, "groups size dim"], rewards: Float64[np.ndarray, "groups size"], estimator: Estimator
) -> float:
    """Largest difference of the estimate from the U-statistic, over the latter's root mean square."""
    unused = np.zeros(len(rewards))
    estimate = (estimator(rewards, unused, unused)[..., None] * scores).mean(1)
    i, j = np.triu_indices(scores.shape[1], 1)
    kernel = 0.5 * (scores[:, i] - scores[:, j]) * (rewards[:, i] - rewards[:, j])[..., None]
    u_statistic = kernel.mean(1)
    return float(np.abs(estimate - u_statistic).max() / np.sqrt((u_statistic**2).mean()))


def _bias(prompt: Law, size: int, estimator: Estimator) -> float:
    probs, members = laws.every_group(prompt, size)
    difference = probs @ laws.estimates(prompt, members, estimator) - prompt.gradient
    return float(np.linalg.norm(difference) / np.sqrt(prompt.probs @ laws.sq_norms(prompt)))


# The Hoeffding decomposition.


def first_order(prompt: Law, members: Int[np.ndarray, "groups size"]) -> Float64[np.ndarray, "groups dim"]:
    """T1 = (1/G) sum_i W_i rho_i - g, the oracle's error."""
    rho = prompt.rewards[members] - prompt.value
    return (prompt.scores[members] * rho[..., None]).mean(1) - prompt.gradient


def second_order(prompt: Law, members: Int[np.ndarray, "groups size"]) -> Float64[np.ndarray, "groups dim"]:
    """T2 = -(1/(G (G-1))) sum over i != j of W_i rho_j."""
    scores, rho = prompt.scores[members], prompt.rewards[members] - prompt.value
    size = members.shape[1]
    others = rho.sum(1, keepdims=True) - rho
    return -(scores * others[..., None]).sum(1) / (size * (size - 1))


def hoeffding(
    work: Work,
    estimator: Estimator = estimators.grpo,
    first: Part = first_order,
    second: Part = second_order,
) -> Report:
    """The error of grpo is T1 + T2, orthogonal, T2 degenerate, with S_o/G and R/(G(G-1)) as mean squares."""
    group_sizes = (2, 3, 5, 8)
    found = [
        _decomposition(prompt, size, estimator, first, second)
        for prompt in laws.every_law(work.seed).values()
        for size in group_sizes
    ]
    worst = {part: float(np.max([case[part] for case in found])) for part in found[0]}
    statements = {
        "decomposition": "estimate - g = T1 + T2 in every group, largest deviation over the root mean square",
        "orthogonal": "E <T1, T2> = 0, largest over sqrt(E||T1||^2 E||T2||^2)",
        "degenerate": "E[T2 | one output] = 0, largest root mean square over T2's",
        "first-order": "E||T1||^2 = S_o/G, largest relative deviation",
        "second-order": "E||T2||^2 = R/(G(G-1)), largest relative deviation",
    }
    setting = f"{ALL_LAWS}, G = {_listed(group_sizes)}"
    return Report([exact(part, text, setting, 0.0, worst[part]) for part, text in statements.items()])


def _decomposition(prompt: Law, size: int, estimator: Estimator, first: Part, second: Part) -> dict[str, float]:
    """Relative deviations from each statement about T1 and T2 at one law and group size."""
    probs, members = laws.every_group(prompt, size)
    t1, t2 = first(prompt, members), second(prompt, members)
    error = laws.estimates(prompt, members, estimator) - prompt.gradient
    mean_square = [float(probs @ (part**2).sum(1)) for part in (t1, t2, error)]
    # P(group | a given member is k) = P(group) n_k / (G p_k), the members being exchangeable.
    counts = (members[:, :, None] == np.arange(len(prompt.probs))).sum(1)
    given_one = (probs[:, None] * counts).T @ t2 / (size * prompt.probs[:, None])
    conditional = prompt.probs @ (given_one**2).sum(1)
    terms = laws.components(prompt)
    return {
        "decomposition": float(np.abs(error - t1 - t2).max() / np.sqrt(mean_square[2])),
        "orthogonal": float(abs(probs @ (t1 * t2).sum(1)) / np.sqrt(mean_square[0] * mean_square[1])),
        "degenerate": float(np.sqrt(conditional / mean_square[1])),
        "first-order": abs(mean_square[0] * size / terms.first_order.item() - 1),
        "second-order": abs(mean_square[1] * size * (size - 1) / terms.second_order.item() - 1),
    }


# Theorem 2.


FORMULAS = {
    "vanilla": "MSE = (E||W||^2 Z^2 - ||g||^2)/G",
    "grpo": "MSE = S_o/G + R/(G(G-1))",
    "oracle": "MSE = S_o/G",
    "optimal": "MSE = (E||W||^2 (Z - b*)^2 - ||g||^2)/G",
}
DRAWN = ("vanilla", "grpo", "oracle")
SIMULATED = (2, 4, 8, 16, 32, 64, 128)


def theorem_2(
    work: Work,
    formula: Callable[[ustat.Components, int, str], np.ndarray] = ustat.mse,
    table: dict[str, Estimator] = estimators.ESTIMATORS,
) -> Report:
    """The mean squared error of every estimator, and the rate at which grpo's comes down to the oracle's."""
    observed: dict[str, list[float]] = {name: [] for name in table}
    predicted: dict[str, list[float]] = {name: [] for name in table}
    for prompt in laws.every_law(work.seed).values():
        terms = laws.components(prompt)
        for size in laws.sizes(prompt):
            probs, members = laws.every_group(prompt, size)
            for name, estimator in table.items():
                observed[name].append(float(probs @ laws.squared_errors(prompt, members, estimator)))
                predicted[name].append(formula(terms, size, name).item())
    found = []
    for name in table:
        deviation = laws.largest_deviation(observed[name], predicted[name])
        statement = f"{FORMULAS[name]}, largest relative deviation"
        found.append(exact(name, statement, f"{ALL_LAWS}, G = 2 to 64 (8 for large laws)", 0.0, deviation))
    slope, difference = _difference(work, formula, table)
    return Report([*found, slope], [*_mse_curves(work, formula, observed), *difference])


def _mse_curves(
    work: Work, formula: Callable[[ustat.Components, int, str], np.ndarray], observed: dict[str, list[float]]
) -> list[Curve]:
    """The errors of the first law at each group size: the enumerated ones, and the formula between them."""
    prompt = next(iter(laws.every_law(work.seed).values()))
    terms, at = laws.components(prompt), np.array(laws.sizes(prompt), float)
    line, curves = np.arange(at[0], at[-1] + 1), []
    for name in DRAWN:
        values = np.array([formula(terms, int(size), name).item() for size in line])
        curves.append(Curve("mse", f"{name}, formula", "predicted", line, values, estimator=name))
        curves.append(Curve("mse", name, "observed", at, np.array(observed[name][: len(at)]), estimator=name))
    return curves


def _difference(
    work: Work, formula: Callable[[ustat.Components, int, str], np.ndarray], table: dict[str, Estimator]
) -> tuple[Finding, list[Curve]]:
    """The difference of the errors of grpo and oracle on the same simulated groups, and its slope in G.

    Neither the decomposition nor its orthogonality is used: E||e_grpo||^2 - E||e_oracle||^2 is a mean of paired
    differences.
    """
    family = families.softmax(contexts=1, seed=work.seed)
    prompt = law(laws.at_theta(family), 0)
    terms, rng = laws.components(prompt), work.rng("theorem-2")
    paired = []
    for size in SIMULATED:
        members = rng.choice(len(prompt.probs), p=prompt.probs, size=(work.runs, size))
        errors = [laws.squared_errors(prompt, members, table[name]) for name in ("grpo", "oracle")]
        paired.append(errors[0] - errors[1])
    intervals = [stats.mean_interval(values, work.confidence) for values in paired]
    mean, low, high = np.array([(found.value, found.low, found.high) for found in intervals]).T
    standard_error = np.array([values.std(ddof=1) / np.sqrt(work.runs) for values in paired])
    at = np.array(SIMULATED, float)
    slope = laws.log_slope(np.sqrt(at * (at - 1)), mean, standard_error, work.confidence)
    gap = [(formula(terms, size, "grpo") - formula(terms, size, "oracle")).item() for size in SIMULATED]
    curves = [
        Curve("difference", "R/(G(G-1))", "predicted", at, np.array(gap), estimator="grpo"),
        Curve("difference", "simulated", "observed", at, mean, low, high, estimator="grpo"),
    ]
    statement = "MSE_grpo - MSE_oracle falls as (G(G-1))^-1: slope of its log against log sqrt(G(G-1))"
    setting = f"softmax, 8 actions, G = 2 to {SIMULATED[-1]}, {work.runs} groups of each size"
    return simulated("difference-slope", statement, setting, -2.0, slope), curves


# Proposition 3.


def proposition_3(work: Work, formula: Callable[..., float] = ustat.minibatch_mse) -> Report:
    """The error of a minibatch: independent prompts, and B of a pool of M without replacement."""
    independent, pool = _every_minibatch(work, formula)
    statements = {
        "independent": "MSE = c1/B + c2/(BG) + c3/(BG(G-1))",
        "pool": "MSE = c1 (1/B - 1/M) M/(M-1) + c2/(BG) + c3/(BG(G-1))",
    }
    deviation, setting = "largest relative deviation", "3 families, every minibatch, B = 2, G = 2, 3"
    return Report(
        [
            exact(
                "independent", f"{statements['independent']}, {deviation}", f"{setting}, unequal f", 0.0, independent
            ),
            exact("pool", f"{statements['pool']}, {deviation}", f"{setting}, M = 2, 3, 4", 0.0, pool),
            *_simulated_minibatches(work, formula, statements),
        ]
    )


def _every_minibatch(work: Work, formula: Callable[..., float]) -> tuple[float, float]:
    """Largest relative deviation of the enumerated error of two prompts: independent ones, and two of M."""
    rng = work.rng("proposition-3")
    pairs: dict[str, list[tuple[float, float]]] = {"independent": [], "pool": []}
    for contexts in (2, 3, 4):
        for policy in _policies(contexts, work.seed):
            uneven = replace(policy.family, context_probs=rng.dirichlet(np.full(contexts, 2.0)))
            drawn = laws.at_theta(uneven)
            both = np.outer(drawn.context_probs, drawn.context_probs)
            different = (1 - np.eye(contexts)) / (contexts * (contexts - 1))
            for size in (2, 3):
                error, predicted = laws.pair_mse(drawn, size, both), formula(drawn.c1, drawn.c2, drawn.c3, 2, size)
                pairs["independent"].append((error, predicted))
                error = laws.pair_mse(policy, size, different)
                pairs["pool"].append((error, formula(policy.c1, policy.c2, policy.c3, 2, size, contexts)))
    first, second = (laws.largest_deviation(*zip(*found, strict=True)) for found in pairs.values())
    return first, second


def _policies(contexts: int, seed: int) -> list[TabularPolicy]:
    built = [
        families.softmax(contexts=contexts, actions=3, dimension=4, seed=seed),
        families.constant_norm(contexts=contexts, factors=2, dimension=2, seed=seed),
        families.curved(contexts=contexts, dimension=3, rank=2, seed=seed),
    ]
    return [laws.at_theta(family) for family in built]


def _simulated_minibatches(work: Work, formula: Callable[..., float], statements: dict[str, str]) -> list[Finding]:
    contexts, prompts, size, runs = 24, 16, 8, max(work.runs // 4, 2)
    policy = laws.at_theta(families.softmax(contexts=contexts, actions=4, dimension=8, seed=work.seed))
    rng = work.rng("proposition-3", "simulated")
    order = rng.permuted(np.tile(np.arange(contexts), (runs, 1)), axis=1)
    drawn = {
        "independent": (rng.integers(contexts, size=(runs, prompts)), None),
        "pool": (order[:, :prompts], contexts),
    }
    found = []
    for part, (batches, pool) in drawn.items():
        errors = _minibatch_errors(policy, batches, size, rng)
        predicted = formula(policy.c1, policy.c2, policy.c3, prompts, size, pool)
        setting = f"softmax, B = {prompts} of {contexts} contexts, G = {size}, {runs} minibatches"
        interval = stats.mean_interval(errors, work.confidence)
        found.append(simulated(f"{part}-simulated", statements[part], setting, predicted, interval))
    return found


def _minibatch_errors(
    policy: TabularPolicy, batches: Int[np.ndarray, "runs prompts"], size: int, rng: np.random.Generator
) -> Float64[np.ndarray, " runs"]:
    """||g_hat - g||^2 of each minibatch, by the estimate that training uses."""
    theta = np.tile(policy.theta, (len(batches), 1))
    estimate = tabular_runs.gradient_estimate(policy.family, theta, batches, size, "grpo", rng)
    return ((estimate - policy.gradient) ** 2).sum(1)


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
