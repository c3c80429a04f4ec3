"""Small tabular policies that several test modules share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from grpo_repro.policies import tabular
from grpo_repro.policies.closed_form import TabularPolicy

SMALL = {
    "softmax": dict(contexts=4, actions=3, dimension=5),
    "likely-right": dict(contexts=4, actions=3, dimension=5),
    "constant-norm": dict(contexts=4, factors=2, dimension=3),
    "three-actions": dict(contexts=4, dimension=4, rank=2, asymmetry=0.3),
    "curved": dict(contexts=4, dimension=4, rank=2, asymmetry=0.3),
}
INTERIOR = ("three-actions", "curved")


def uneven(policy: TabularPolicy) -> TabularPolicy:
    """The same policy with unequal contexts (equal within the pairs of the interior families)."""
    weights = np.repeat([1.0, 2.5], 2)
    return TabularPolicy(replace(policy.family, context_probs=weights / weights.sum()), policy.theta)


def at(policy: TabularPolicy, theta: np.ndarray) -> TabularPolicy:
    """The policy of the same family at another theta."""
    return TabularPolicy(policy.family, theta)


every_policy = pytest.mark.parametrize(
    "policy", [pytest.param(uneven(tabular.build(name, args)), id=name) for name, args in SMALL.items()]
)
