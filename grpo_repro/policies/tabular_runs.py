"""Many tabular policies of one family at once: exact returns and components, and Algorithm 1's gradient estimates.

Parameters have the shape ``[runs, dim]``, and every function treats all runs in one pass, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int
from scipy.special import log_softmax, softmax

from grpo_repro.errors import UserError
from grpo_repro.policies.families import Family

DIRECT = 16
"""Group size from which counts are drawn as multinomials rather than completion by completion."""


def logits(family: Family, theta: Float64[np.ndarray, "runs dim"]) -> Float64[np.ndarray, "runs contexts actions"]:
    """Logits of every run."""
    contexts, actions, dim = family.features.shape
    found = theta @ family.features.reshape(-1, dim).T
    if family.curvature is not None:
        squares = (theta[:, :, None] * theta[:, None, :]).reshape(len(theta), -1)
        found = found + 0.5 * squares @ family.curvature.reshape(-1, dim * dim).T
    return found.reshape(-1, contexts, actions) + family.offset


def probs(family: Family, theta: Float64[np.ndarray, "runs dim"]) -> Float64[np.ndarray, "runs contexts actions"]:
    """pi(a | x) of every run."""
    return softmax(logits(family, theta), axis=2)


def log_probs(family: Family, theta: Float64[np.ndarray, "runs dim"]) -> Float64[np.ndarray, "runs contexts actions"]:
    """Logarithm of pi(a | x) of every run, finite where pi is too small for a number."""
    return log_softmax(logits(family, theta), axis=2)


def scores(
    family: Family, theta: Float64[np.ndarray, "runs dim"], pi: Float64[np.ndarray, "runs contexts actions"]
) -> Float64[np.ndarray, "runs contexts actions dim"]:
    """W(x, a): the logit's derivative less its mean under pi."""
    slope = np.broadcast_to(family.features, (len(theta), *family.features.shape))
    if family.curvature is not None:
        dim = theta.shape[1]
        slope = slope + (theta @ family.curvature.reshape(-1, dim).T).reshape(slope.shape)
    return slope - (pi[:, :, None, :] @ slope)


def expected_return(family: Family, theta: Float64[np.ndarray, "runs dim"]) -> Float64[np.ndarray, " runs"]:
    """J(theta) = E Z, exact."""
    return np.einsum("x,sxa,xa->s", family.context_probs, probs(family, theta), family.reward_probs, optimize=True)


def components(
    family: Family, theta: Float64[np.ndarray, "runs dim"]
) -> tuple[Float64[np.ndarray, " runs"], Float64[np.ndarray, " runs"]]:
    """c1 = E||g(X) - g||^2 and c3 = E R(X), R = F sigma^2 + ||g(x)||^2, exact (Proposition 3).

    As in `TabularPolicy.c1`, c1 is zero where it is rounding error beside E F: G* is then infinite.
    """
    pi, f = probs(family, theta), family.context_probs
    w = scores(family, theta, pi)
    gradients = np.einsum("sxa,xa,sxad->sxd", pi, family.reward_probs, w, optimize=True)
    deviation = gradients - np.einsum("x,sxd->sd", f, gradients)[:, None]
    value = np.einsum("sxa,xa->sx", pi, family.reward_probs)
    norms = np.einsum("sxa,sxad,sxad->sx", pi, w, w, optimize=True)
    second_order = norms * value * (1 - value) + np.einsum("sxd,sxd->sx", gradients, gradients)
    spread = np.einsum("x,sxd,sxd->s", f, deviation, deviation, optimize=True)
    return np.where(spread > 1e-28 * (norms @ f), spread, 0.0), second_order @ f


def baseline(
    family: Family,
    estimator: str,
    pi: Float64[np.ndarray, "runs contexts actions"],
    w: Float64[np.ndarray, "runs contexts actions dim"],
) -> Float64[np.ndarray, "runs contexts"]:
    """The prompt-only baseline of an estimator, exact: 0, V(x), or b*(x) = E||W||^2 Z / E||W||^2.

    Zero for `grpo` too, whose baseline comes from the group.
    """
    value = np.einsum("sxa,xa->sx", pi, family.reward_probs)
    if estimator == "oracle":
        return value
    if estimator == "optimal":
        norms = np.einsum("sxad,sxad->sxa", w, w) * pi
        total = norms.sum(2)
        return np.divide(np.einsum("sxa,xa->sx", norms, family.reward_probs), total, out=value, where=total > 0)
    return np.zeros_like(value)


def action_weights(
    counts: Int[np.ndarray, "groups actions 2"],
    estimator: str,
    constants: Float64[np.ndarray, " groups"],
) -> Float64[np.ndarray, "groups actions"]:
    """Sum of the advantages of each action's completions in a group: they depend on its counts only.

    With R the sum of the group's G rewards, grpo's advantage is (G - R)/(G - 1) for a reward of 1 and -R/(G - 1) for 0.

    Args:
        counts: Number of completions with each action and reward (0, 1).
        estimator: `vanilla`, `grpo`, `oracle` or `optimal`.
        constants: Prompt-only baseline of each group; not used by `grpo`.
    """
    wrong, right = counts[..., 0], counts[..., 1]
    if estimator != "grpo":
        return right - constants[:, None] * (right + wrong)
    total = right.sum(1, keepdims=True)
    size = int(counts[0].sum())
    return (right * (size - total) - wrong * total) / (size - 1)


def draw_counts(
    joint: Float64[np.ndarray, "groups outcomes"], group_size: int, rng: np.random.Generator
) -> Int[np.ndarray, "groups outcomes"]:
    """Counts of G independent outcomes for each group, Multinomial(G, joint)."""
    if group_size >= DIRECT:
        return rng.multinomial(group_size, joint / joint.sum(1, keepdims=True))
    groups, outcomes = joint.shape
    ends = joint.cumsum(1)[:, None, :-1]
    outcome = (rng.random((groups, group_size, 1)) >= ends).sum(2)
    flat = np.arange(groups)[:, None] * outcomes + outcome
    return np.bincount(flat.ravel(), minlength=groups * outcomes).reshape(groups, outcomes)


@dataclass(frozen=True, eq=False)
class Draw:
    """Groups of completions of many runs, with the policies that they come from; actions and rewards as counts.

    Attributes:
        theta: Parameters sampled from, a copy.
        probs: pi_old(a | x).
        scores: W(x, a) at these parameters.
        contexts: Context of every group.
        counts: Completions of every group with each action and reward (0, 1).
    """

    theta: Float64[np.ndarray, "runs dim"]
    probs: Float64[np.ndarray, "runs contexts actions"]
    scores: Float64[np.ndarray, "runs contexts actions dim"]
    contexts: Int[np.ndarray, "runs prompts"]
    counts: Int[np.ndarray, "runs prompts actions 2"]

    @property
    def group_size(self) -> int:
        """G."""
        return int(self.counts[0, 0].sum())

    @property
    def places(self) -> Int[np.ndarray, " groups"]:
        """Index of every group's run and context among all of them."""
        runs, contexts, _ = self.probs.shape
        return (np.arange(runs)[:, None] * contexts + self.contexts).ravel()

    def groups(self) -> Int[np.ndarray, "groups actions 2"]:
        """The counts of all runs' groups, one run after the other."""
        return self.counts.reshape(-1, *self.counts.shape[2:])

    def weights(self, family: Family, estimator: str) -> Float[np.ndarray, "groups actions"]:
        """Sum of the advantages of each action's completions, see `action_weights`.

        Raises:
            UserError: For `grpo` with G = 1.
        """
        if estimator == "grpo" and self.group_size < 2:
            raise UserError(f"estimator grpo has no baseline at group size {self.group_size}; use 2 or more")
        constants = baseline(family, estimator, self.probs, self.scores).ravel()[self.places]
        return action_weights(self.groups(), estimator, constants)

    def totals(self, weights: Float[np.ndarray, "groups actions"]) -> Float[np.ndarray, "runs contexts actions"]:
        """Sums of the groups' numbers over the groups of each context."""
        actions = self.probs.shape[2]
        flat = self.places[:, None] * actions + np.arange(actions)
        return np.bincount(flat.ravel(), weights.ravel(), minlength=self.probs.size).reshape(self.probs.shape)


def draw(
    family: Family,
    theta: Float64[np.ndarray, "runs dim"],
    contexts: Int[np.ndarray, "runs prompts"],
    group_size: int,
    rng: np.random.Generator,
) -> Draw:
    """Draw G completions and their rewards for every context of every run.

    Args:
        family: The family.
        theta: Parameters.
        contexts: The B contexts of each run.
        group_size: G.
        rng: Source of the completions and rewards.
    """
    pi = probs(family, theta)
    runs, _, actions = pi.shape
    rewards = np.stack([1 - family.reward_probs, family.reward_probs], 2)
    joint = (pi[..., None] * rewards).reshape(-1, 2 * actions)
    places = (np.arange(runs)[:, None] * pi.shape[1] + contexts).ravel()
    counts = draw_counts(joint[places], group_size, rng).reshape(*contexts.shape, actions, 2)
    return Draw(theta.copy(), pi, scores(family, theta, pi), contexts, counts)


def along(
    totals: Float[np.ndarray, "runs contexts actions"], w: Float64[np.ndarray, "runs contexts actions dim"], size: int
) -> Float[np.ndarray, "runs dim"]:
    """Sum of weights times scores over the number of completions."""
    return np.einsum("sxa,sxad->sd", totals, w, optimize=True) / size


def gradient_estimate(
    family: Family,
    theta: Float64[np.ndarray, "runs dim"],
    contexts: Int[np.ndarray, "runs prompts"],
    group_size: int,
    estimator: str,
    rng: np.random.Generator,
) -> Float[np.ndarray, "runs dim"]:
    """Algorithm 1's estimate (1/B) sum_b (1/G) sum_i W_i (Z_i - C_i) of every run's gradient.

    Args:
        family: The family.
        theta: Parameters.
        contexts: The B contexts of each run.
        group_size: G.
        estimator: Its name; `grpo` needs G >= 2.
        rng: Source of the completions and rewards.

    Raises:
        UserError: For `grpo` with G = 1.
    """
    batch = draw(family, theta, contexts, group_size, rng)
    return along(batch.totals(batch.weights(family, estimator)), batch.scores, contexts.shape[1] * group_size)
