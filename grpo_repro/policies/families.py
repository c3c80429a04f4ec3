"""Families of policies small enough to compute everything exactly: contexts x actions.

Every family here has logits that are quadratic in the parameter,

    logit(x, a; theta) = offset[x, a] + <phi(x, a), theta> + (1/2) theta' M(x, a) theta,

so that the logit's derivatives are phi + M theta and M, and a family is nothing but its arrays. The reward
is binary: Z ~ Bernoulli(q[x, a]).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float64
from scipy.optimize import linprog
from scipy.special import expit

from grpo_repro.errors import UserError


@dataclass(frozen=True, eq=False)
class Family:
    """A family of policies pi_theta(a | x) over a finite set of contexts, with a starting parameter.

    Attributes:
        name: Key in `FAMILIES`, or any other label.
        context_probs: f(x), sums to one. Shape [contexts].
        reward_probs: q(x, a) = P(Z = 1 | x, a). Shape [contexts, actions].
        offset: Part of the logit that does not depend on theta. Shape [contexts, actions].
        features: phi(x, a), the part linear in theta. Shape [contexts, actions, dim].
        curvature: M(x, a), symmetric, the quadratic part; None for zero. Shape [contexts, actions, dim, dim].
        theta: The parameter at which the family is evaluated unless another is named. Shape [dim].
        optimum: A maximiser of J over theta where one is known exactly, else None. Shape [dim].
    """

    name: str
    context_probs: Float64[np.ndarray, " contexts"]
    reward_probs: Float64[np.ndarray, "contexts actions"]
    offset: Float64[np.ndarray, "contexts actions"]
    features: Float64[np.ndarray, "contexts actions dim"]
    curvature: Float64[np.ndarray, "contexts actions dim dim"] | None
    theta: Float64[np.ndarray, " dim"]
    optimum: Float64[np.ndarray, " dim"] | None = None

    def __post_init__(self) -> None:
        """Refuse arrays that do not describe a policy."""
        f, q = self.context_probs, self.reward_probs
        if f.min() < 0 or abs(f.sum() - 1) > 1e-12:
            raise ValueError(f"context_probs sum to {f.sum()!r} with minimum {f.min()!r}: give probabilities")
        if q.min() < 0 or q.max() > 1:
            raise ValueError(f"reward_probs lie in [{q.min()!r}, {q.max()!r}]: give probabilities")

    def logits(self, theta: Float64[np.ndarray, " dim"]) -> Float64[np.ndarray, "contexts actions"]:
        """Return the logits at theta, shape [contexts, actions]."""
        linear = self.offset + self.features @ theta
        return linear if self.curvature is None else linear + 0.5 * (self.curvature @ theta) @ theta

    def jacobian(self, theta: Float64[np.ndarray, " dim"]) -> Float64[np.ndarray, "contexts actions dim"]:
        """Return the derivative of every logit, phi + M theta, shape [contexts, actions, dim]."""
        return self.features if self.curvature is None else self.features + self.curvature @ theta


def softmax(
    contexts: int = 64, actions: int = 8, dimension: int = 16, theta_scale: float = 1.0, seed: int = 0
) -> Family:
    """Softmax-linear policy, logits <theta, phi(x, a)>, with random features, rewards and theta.

    A difficulty per context spreads V(x) over (0, 1); the reward does not depend on the logits.
    """
    _require(contexts >= 1 and actions >= 2 and dimension >= 1, "contexts >= 1, actions >= 2, dimension >= 1")
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(contexts, actions, dimension)) / np.sqrt(dimension)
    theta = theta_scale * rng.normal(size=dimension)
    return _linear("softmax", features, _spread_rewards(rng, contexts, actions), theta)


def likely_right(
    contexts: int = 64,
    actions: int = 8,
    dimension: int = 16,
    theta_scale: float = 6.0,
    right: float = 0.95,
    wrong: float = 0.05,
    seed: int = 0,
) -> Family:
    """Softmax-linear policy whose likeliest action is the right one, as in a model that knows the answer.

    The likely action has a small score and earns the reward: ||W||^2 and Z are negatively correlated (about
    -0.67 at the defaults), Assumption 2 fails, and vanilla has about half the oracle's MSE.
    """
    _require(contexts >= 1 and actions >= 2 and dimension >= 1, "contexts >= 1, actions >= 2, dimension >= 1")
    _require(0 <= wrong < right <= 1, "0 <= wrong < right <= 1")
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(contexts, actions, dimension)) / np.sqrt(dimension)
    theta = theta_scale * rng.normal(size=dimension)
    likeliest = np.argmax(features @ theta, axis=1)
    reward_probs = np.where(np.arange(actions) == likeliest[:, None], float(right), float(wrong))
    return _linear("likely-right", features, reward_probs, theta)


def constant_norm(contexts: int = 64, factors: int = 3, dimension: int = 4, seed: int = 0) -> Family:
    """Policy that satisfies Assumption 2 by construction, with a non-zero gradient.

    Actions are sign vectors s in {-1, +1}^m and logits sum_k s_k z_k with z_k = <phi(x), theta_k>. At
    theta = 0 the signs are independent fair coins, so W = s (x) phi(x) and ||W||^2 = m ||phi(x)||^2 for every
    action, whatever the rewards are. The claim is about `theta`, which is zero: elsewhere the norm varies.
    """
    _require(contexts >= 1 and factors >= 1 and dimension >= 1, "contexts >= 1, factors >= 1, dimension >= 1")
    _require(factors <= 10, "factors <= 10 (the number of actions is 2^factors)")
    rng = np.random.default_rng(seed)
    signs = np.array(list(itertools.product([-1.0, 1.0], repeat=factors)))
    phi = rng.normal(size=(contexts, dimension)) / np.sqrt(dimension)
    features = np.einsum("ak,xp->xakp", signs, phi).reshape(contexts, len(signs), factors * dimension)
    rewards = _spread_rewards(rng, contexts, len(signs))
    return _linear("constant-norm", features, rewards, np.zeros(factors * dimension))


def three_actions(
    contexts: int = 32,
    dimension: int = 6,
    rank: int = 3,
    gap: float = 0.4,
    asymmetry: float = 0.0,
    theta_scale: float = 1.0,
    seed: int = 0,
) -> Family:
    """Interior optimum: actions -1, 0, +1 with logits y z, z = <phi(x), theta>.

    Rewards q_0 = b + gap and q_(+-1) = b +- asymmetry_x / 2, with b random per context, so J = E[b + (gap +
    asymmetry_x sinh z) / (1 + 2 cosh z)]. A single context with q_+ != q_- has its optimum away from z = 0.
    With an asymmetry, contexts therefore come in pairs of equal phi and probability and of opposite
    asymmetry_x: the odd terms cancel at *every* theta, J is maximal exactly where z = 0 on all contexts,
    and there H = -(2/9) gap E[phi phi'], of the features' rank. Without asymmetry all g(x) vanish at the
    optimum (c1 = 0); with it they do not.

    With a gap near 1 and theta_scale=0 the rewarded action has score zero, and Assumption 2 fails as far as
    it can: gap=0.9 gives vanilla 0.36 of the oracle's MSE, gap=1 none at all.
    """
    _require(0 < gap <= 1, "0 < gap <= 1")
    rng = np.random.default_rng(seed)
    phi, signs = _paired_features(rng, contexts, dimension, rank, asymmetry)
    half = abs(asymmetry) / 2
    _require(half <= 1 - max(gap, half), "|asymmetry| / 2 <= 1 - max(gap, |asymmetry| / 2)")
    base = rng.uniform(half, 1 - max(gap, half), size=contexts)
    tilt = signs * asymmetry / 2
    rewards = np.stack([base - tilt, base + gap, base + tilt], axis=1).clip(0, 1)
    features = np.array([-1.0, 0.0, 1.0])[None, :, None] * phi[:, None, :]
    theta = theta_scale * rng.normal(size=dimension)
    return _linear("three-actions", features, rewards, theta, optimum=np.zeros(dimension))


def curved(
    contexts: int = 32,
    dimension: int = 6,
    rank: int = 3,
    kappa: float = 1.0,
    gap: float = 0.4,
    asymmetry: float = 0.0,
    theta_scale: float = 1.0,
    seed: int = 0,
) -> Family:
    """Interior optimum of constant score norm: actions (s, t) in {-1, +1}^2, logit s z - kappa t z^2 / 2.

    Rewards q_t + s asymmetry_x / 2 with q_- = b random per context and q_+ = b + gap. The signs are
    independent, P(t = +1) = 1 / (1 + exp(kappa z^2)) <= 1/2, and contexts are paired as in `three_actions`:
    J = E[b + gap / (1 + exp(kappa z^2))], maximal exactly where z = 0. There W = s phi(x) has constant norm
    (Assumption 2 holds) and H = -(kappa gap / 2) E[phi phi'].
    """
    _require(0 < gap <= 1 and kappa > 0, "0 < gap <= 1 and kappa > 0")
    rng = np.random.default_rng(seed)
    phi, pair_signs = _paired_features(rng, contexts, dimension, rank, asymmetry)
    half = abs(asymmetry) / 2
    _require(half <= 1 - gap - half, "|asymmetry| <= 1 - gap")
    base = rng.uniform(half, 1 - gap - half, size=contexts)
    s, t = np.array(list(itertools.product([-1.0, 1.0], repeat=2))).T
    rewards = base[:, None] + gap * (t > 0) + pair_signs[:, None] * s * asymmetry / 2
    curvature = np.einsum("a,xi,xj->xaij", -kappa * t, phi, phi)
    return Family(
        name="curved",
        context_probs=np.full(contexts, 1 / contexts),
        reward_probs=rewards.clip(0, 1),
        offset=np.zeros((contexts, 4)),
        features=s[None, :, None] * phi[:, None, :],
        curvature=curvature,
        theta=theta_scale * rng.normal(size=dimension),
        optimum=np.zeros(dimension),
    )


FAMILIES: dict[str, Callable[..., Family]] = {
    "softmax": softmax,
    "likely-right": likely_right,
    "constant-norm": constant_norm,
    "three-actions": three_actions,
    "curved": curved,
}


def build_family(name: str | None, args: Mapping[str, Any] = MappingProxyType({})) -> Family:
    """Build a family by its name in `FAMILIES`, with checked arguments.

    Args:
        name: Key in `FAMILIES`.
        args: Arguments of that family's function; the others keep their defaults.

    Raises:
        UserError: Unknown family or argument, a value of the wrong type, or one out of range.
    """
    if name not in FAMILIES:
        raise UserError(f"unknown tabular family {name!r}; model.family is one of {', '.join(FAMILIES)}")
    parameters = inspect.signature(FAMILIES[name]).parameters
    for key, value in args.items():
        if key not in parameters:
            raise UserError(f"family {name} has no argument {key!r}; it takes {', '.join(parameters)}")
        wanted = (int, float) if isinstance(parameters[key].default, float) else (int,)
        if isinstance(value, bool) or not isinstance(value, wanted) or not np.isfinite(value):
            kind = "a number" if float in wanted else "an integer"
            raise UserError(f"family {name}: {key} is {value!r}; give {kind}")
        if key == "seed" and value < 0:
            raise UserError(f"family {name}: seed is {value!r}; give an integer >= 0")
    return FAMILIES[name](**args)


def separable_return(family: Family) -> float | None:
    """Return sup over theta of J = E max_a q(X, a), if some theta makes every best action the likeliest.

    Only for logits linear in theta: then pi at t * theta puts all its mass on the best actions as t grows.
    The condition <theta, phi(x, a*) - phi(x, a)> >= 1 for every context and every a that is not best is a
    linear program. It is sufficient; with tied best actions only the first is tried. The supremum is not
    attained.

    Returns:
        The supremum, or None where the condition fails and the supremum is therefore not known.
    """
    if family.curvature is not None:
        return None
    q, phi = family.reward_probs, family.features
    seen = family.context_probs > 0
    best = q.argmax(axis=1)
    margins = np.take_along_axis(phi, best[:, None, None], axis=1) - phi
    rows = margins[seen[:, None] & (q < q.max(axis=1, keepdims=True))]
    if len(rows):
        dimension = phi.shape[2]
        answer = linprog(np.zeros(dimension), A_ub=-rows, b_ub=-np.ones(len(rows)), bounds=(None, None))
        if answer.status != 0:
            return None
    return float(family.context_probs @ q.max(axis=1))


def _linear(
    name: str,
    features: Float64[np.ndarray, "contexts actions dim"],
    reward_probs: Float64[np.ndarray, "contexts actions"],
    theta: Float64[np.ndarray, " dim"],
    optimum: Float64[np.ndarray, " dim"] | None = None,
) -> Family:
    """Return the family with logits <theta, phi> and equally likely contexts."""
    contexts = len(reward_probs)
    uniform = np.full(contexts, 1 / contexts)
    return Family(name, uniform, reward_probs, np.zeros_like(reward_probs), features, None, theta, optimum)


def _spread_rewards(rng: np.random.Generator, contexts: int, actions: int) -> Float64[np.ndarray, "contexts actions"]:
    """Draw reward probabilities whose mean over actions spreads over (0, 1) from context to context."""
    difficulty = 2.0 * rng.normal(size=(contexts, 1))
    return expit(difficulty + 1.5 * rng.normal(size=(contexts, actions)))


def _paired_features(
    rng: np.random.Generator, contexts: int, dimension: int, rank: int, asymmetry: float
) -> tuple[Float64[np.ndarray, "contexts dim"], Float64[np.ndarray, " contexts"]]:
    """Draw features of the given rank, and the sign of each context's asymmetry (0 where there is none).

    With an asymmetry, contexts 2k and 2k+1 share their features and have opposite signs.
    """
    _require(contexts >= 1 and 1 <= rank <= dimension, "contexts >= 1 and 1 <= rank <= dimension")
    _require(asymmetry == 0 or contexts % 2 == 0, "an even number of contexts when asymmetry is not 0")
    distinct = contexts if asymmetry == 0 else contexts // 2
    _require(rank <= distinct, "rank <= contexts (<= contexts / 2 when asymmetry is not 0)")
    directions = np.linalg.qr(rng.normal(size=(dimension, rank)))[0]
    signs = np.zeros(contexts) if asymmetry == 0 else np.tile([1.0, -1.0], distinct)
    drawn = rng.normal(size=(distinct, rank)) @ directions.T / np.sqrt(rank)
    return np.repeat(drawn, contexts // distinct, axis=0), signs


def _require(holds: bool, condition: str) -> None:
    if not holds:
        raise UserError(f"the arguments of the tabular family are out of range; they need {condition}")
