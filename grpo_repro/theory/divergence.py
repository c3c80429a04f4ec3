"""Estimates of a divergence: what they are on average, and of what their use in a loss is the gradient.

Every mean is a sum over the actions of a softmax policy, whose scores are W(a) = e_a - pi; the gradients that they are
held against come from automatic differentiation of the divergences themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from scipy.special import log_softmax

from grpo_repro import kl
from grpo_repro.theory.exact import groups
from grpo_repro.theory.finding import AT_LEAST, REPORTED, Curve, Finding, Report, Work, exact
from grpo_repro.theory.sequences import outcome_advantages

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(log pi, log pi_ref) -> a number to differentiate."""


def towards_reference(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """KL(pi || pi_ref)."""
    return (policy.exp() * (policy - reference)).sum()


def from_reference(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """KL(pi_ref || pi)."""
    return (reference.exp() * (reference - policy)).sum()


def nothing(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """0."""
    return 0 * policy.sum()


def minus_half_chi_square(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """-(1/2) chi^2(pi || pi_ref) = -(1/2) (sum pi^2/pi_ref - 1)."""
    return -((2 * policy - reference).exp().sum() - 1) / 2


GRADIENTS: Mapping[str, Divergence] = {"k1": nothing, "k2": towards_reference, "k3": from_reference}
"""Of what the mean of each estimate's gradient, taken as a loss, is the gradient."""


def inverted_weight(log_ratio: Float64[np.ndarray, " actions"]) -> Float64[np.ndarray, " actions"]:
    """The weight that the paper prints for k3, 1 - pi/pi_ref."""
    return 1 - np.exp(log_ratio)


@dataclass(frozen=True, eq=False)
class Pair:
    """A softmax policy and its reference, by their logits."""

    logits: Float64[np.ndarray, " actions"]
    reference: Float64[np.ndarray, " actions"]

    @property
    def log_ratio(self) -> Float64[np.ndarray, " actions"]:
        """L = log pi - log pi_ref."""
        return log_softmax(self.logits) - log_softmax(self.reference)

    @property
    def probs(self) -> Float64[np.ndarray, " actions"]:
        """The policy pi(a)."""
        return np.exp(log_softmax(self.logits))

    @property
    def scores(self) -> Float64[np.ndarray, "actions actions"]:
        """W(a) = e_a - pi."""
        return np.eye(len(self.logits)) - self.probs

    def mean_gradient(self, weight: Callable) -> Float64[np.ndarray, " actions"]:
        """E[weight(l) W]."""
        return (self.probs * weight(self.log_ratio)) @ self.scores

    def gradient(self, divergence: Divergence) -> Float64[np.ndarray, " actions"]:
        """The divergence's gradient in the logits, by automatic differentiation in float64."""
        logits = torch.tensor(self.logits, requires_grad=True)
        reference = torch.log_softmax(torch.tensor(self.reference), 0)
        divergence(torch.log_softmax(logits, 0), reference).backward()
        assert logits.grad is not None
        return logits.grad.numpy()

    def value(self, divergence: Divergence) -> float:
        """The divergence itself."""
        policy, reference = (torch.log_softmax(torch.tensor(x), 0) for x in (self.logits, self.reference))
        return float(divergence(policy, reference))

    def in_reward(self, penalty: Callable, size: int) -> Float64[np.ndarray, " actions"]:
        """E (1/G) sum_i W_i penalty_i over every group: what a penalty in the reward adds to the descent."""
        probs, counts = groups(self.probs, size)
        return probs @ (counts * outcome_advantages(counts, self.log_ratio, penalty)) @ self.scores / size


def kl_estimators(
    work: Work,
    estimates: Mapping[str, tuple[Callable, Callable]] = kl.ESTIMATES,
    gradients: Mapping[str, Divergence] = GRADIENTS,
    penalty: Callable = kl.reward_penalty,
    inverted: Divergence = minus_half_chi_square,
) -> Report:
    """Means and gradients of k1, k2, k3, of k1 in the reward, and of the ratio that the paper prints.

    Args:
        work: Seed.
        estimates: Value and weight of each estimate, those under test.
        gradients: The divergence whose gradient each is claimed to give as a loss.
        penalty: What k1 in the reward takes from the advantages of a group.
        inverted: What the weight 1 - pi/pi_ref is claimed to differentiate.
    """
    rng = work.rng("kl-estimators")
    pairs = [Pair(rng.normal(size=5), rng.normal(size=5)) for _ in range(20)]
    setting = "20 random softmax policies with 5 actions, the largest error"
    findings = [
        *_values(pairs, estimates, setting),
        *(
            exact(f"gradient-{name}", f"{name} as a loss: mean gradient = grad {_label(gradients[name])}", setting,
                  0.0, max(_distance(x.mean_gradient(weight), x.gradient(gradients[name])) for x in pairs))
            for name, (_, weight) in estimates.items()
        ),
        exact("k3-direction", "k3 as a loss: mean gradient is not grad KL(pi || pi_ref): largest relative difference",
              setting, 0.05, max(_relative(x.mean_gradient(estimates["k3"][1]), x.gradient(towards_reference))
                                 for x in pairs), 0.0, AT_LEAST),
        exact("k1-in-reward", "k1 in the reward, less its leave-one-out mean: mean gradient = grad KL(pi || pi_ref)",
              f"{setting}, G = 4", 0.0,
              max(_distance(x.in_reward(penalty, 4), x.gradient(towards_reference)) for x in pairs)),
        exact("inverted", "weight 1 - pi/pi_ref, as printed: mean gradient = -grad chi^2(pi || pi_ref)/2",
              setting, 0.0, max(_relative(x.mean_gradient(inverted_weight), x.gradient(inverted)) for x in pairs)),
    ]  # fmt: skip
    return Report(findings, _curves(pairs[0], estimates))


def _label(divergence: Divergence) -> str:
    """A divergence's formula: the first line of its docstring, or its name."""
    return (divergence.__doc__ or divergence.__name__).strip().split("\n")[0].rstrip(".")


def _distance(first: Float64[np.ndarray, " n"], second: Float64[np.ndarray, " n"]) -> float:
    return float(np.linalg.norm(first - second))


def _relative(first: Float64[np.ndarray, " n"], second: Float64[np.ndarray, " n"]) -> float:
    return _distance(first, second) / float(np.linalg.norm(second))


def _values(pairs: list[Pair], estimates: Mapping[str, tuple[Callable, Callable]], setting: str) -> list[Finding]:
    """Mean of each estimate against KL(pi || pi_ref), and their variances."""
    divergence = np.array([x.value(towards_reference) for x in pairs])
    values = {name: [value(x.log_ratio) for x in pairs] for name, (value, _) in estimates.items()}
    means = {name: np.array([x.probs @ v for x, v in zip(pairs, rows, strict=True)]) for name, rows in values.items()}
    spread = {
        name: np.array([x.probs @ (v - m) ** 2 for x, v, m in zip(pairs, rows, means[name], strict=True)])
        for name, rows in values.items()
    }
    unbiased = [
        exact(f"value-{name}", f"{name} is unbiased for KL(pi || pi_ref)", setting, 0.0,
              float(np.abs(means[name] - divergence).max()))
        for name in ("k1", "k3")
    ]  # fmt: skip
    return [
        *unbiased,
        exact("value-k2", "k2 is biased: largest relative error", setting, 0.05,
              float(np.abs(means["k2"] / divergence - 1).max()), 0.0, AT_LEAST),
        Finding("variance", "Var k3 / Var k1, median over the policies (below one: k3 is steadier here)", setting, 1.0,
                float(np.median(spread["k3"] / spread["k1"])), REPORTED),
    ]  # fmt: skip


def _curves(pair: Pair, estimates: Mapping[str, tuple[Callable, Callable]]) -> list[Curve]:
    """Derivatives along a straight path of logits away from the reference, t = 0 being the reference itself."""
    direction, t = pair.logits - pair.reference, np.linspace(0, 1.5, 31)
    path = [Pair(pair.reference + x * direction, pair.reference) for x in t]
    lines: list[tuple[str, Divergence]] = [
        ("d KL(pi || pi_ref)", towards_reference),
        ("d KL(pi_ref || pi)", from_reference),
    ]
    points: list[tuple[str, Callable]] = [(f"{name} as a loss", weight) for name, (_, weight) in estimates.items()]
    points.sort(key=lambda point: point[0] == "k1 as a loss")  # k2 and k3 beside the lines that they belong to
    points.append(("1 - pi/pi_ref, as printed", inverted_weight))
    every_third = slice(None, None, 3)
    return [
        *(Curve("kl", name, "predicted", t, np.array([x.gradient(d) @ direction for x in path])) for name, d in lines),
        *(
            Curve("kl", name, "observed", t[every_third],
                  np.array([x.mean_gradient(w) @ direction for x in path[every_third]]))
            for name, w in points
        ),
    ]  # fmt: skip
