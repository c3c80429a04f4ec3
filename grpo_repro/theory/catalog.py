"""The checks by name, importable without numpy: command line, validation and plans read it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_repro.theory.finding import Report, Work


@dataclass(frozen=True)
class Entry:
    """One check.

    Attributes:
        title: What the statement says, in a few words.
        module: Module of `grpo_repro.theory` that holds it.
        seconds: Time on one core with the default number of runs.
        simulated: Whether that time grows with the number of runs.
    """

    title: str
    module: str
    seconds: float
    simulated: bool = False

    def function(self, name: str) -> Callable[[Work], Report]:
        """The function that runs the check of this name."""
        module = importlib.import_module(f"grpo_repro.theory.{self.module}")
        found: Callable[[Work], Report] = getattr(module, name.replace("-", "_"))
        return found


CHECKS: dict[str, Entry] = {
    "lemma-1": Entry("the GRPO gradient is a second-order U-statistic", "identities", 1.0),
    "hoeffding": Entry("oracle error and degenerate sum: two orthogonal parts", "identities", 1.0),
    "theorem-2": Entry("mean squared error of each estimator", "identities", 1.0, True),
    "proposition-3": Entry("mean squared error of a minibatch", "identities", 1.0, True),
    "corollary-4": Entry("oracle property", "baselines", 1.0),
    "corollary-5": Entry("the best baseline that depends on the prompt only", "baselines", 1.0),
    "lemma-6": Entry("bounds of the suboptimality gap", "optimisation", 3.0, True),
    "theorem-7": Entry("scaling law of the best group size", "optimisation", 17.0, True),
    "theorem-8": Entry("asymptotic law of the suboptimality gap", "asymptotics", 60.0, True),
    "corollary-9": Entry("the law's weights approach the oracle's", "asymptotics", 1.0),
    "corollary-10": Entry("no prompt-only baseline has smaller weights", "asymptotics", 1.0),
    "lemma-11": Entry("Algorithm 2's estimator and its U-statistic", "production", 1.0),
    "theorem-12": Entry("bias and variance of Algorithm 2's estimator", "production", 1.0),
    "proposition-13": Entry("what the normalised algorithm maximises", "fixed_point", 3.0, True),
    "kl-estimators": Entry("k1, k2, k3: values and gradients", "divergence", 1.0),
}
"""Checks in the order of the paper."""
