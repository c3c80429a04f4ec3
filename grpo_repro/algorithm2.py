"""What Algorithm 2, the GRPO of practice, adds to Algorithm 1: the options of a training run, and which are in use.

An iteration of Algorithm 2 samples B G completions from pi_old and goes through its prompts in m equal parts. The j-th
part makes one step along

    (1/(B/m G)) sum_b sum_i sum_t [A_bi pi / pi_old - kappa (1 - pi_ref / pi)] grad log pi(y_bit | x_b, y_bi<t),

with A = (Z - leave-one-out mean) / se and pi the policy after j - 1 steps: `normalize`, `minibatches`,
`kl_coefficient` and `kl_estimator` (here k3). With the defaults it is Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


def remedies(config: Mapping[str, Any]) -> str:
    """What to change where training diverges, by what a run has set.

    >>> remedies({"clip_norm": None, "minibatches": 4})
    'lower learning_rate, set clip_norm=1.0, or lower minibatches=4'
    """
    options = Options.of(config)
    found = ["lower learning_rate"] + ["set clip_norm=1.0"] * (config["clip_norm"] is None)
    found += [f"lower weight_decay={decay:g}"] if (decay := config.get("weight_decay")) else []
    found += [f"lower minibatches={options.minibatches}"] * (options.minibatches > 1)
    found += [f"lower kl_coefficient={options.kl_coefficient:g}"] * options.penalized
    return ", ".join(found[:-1]) + (", or " if len(found) > 2 else " or " if len(found) > 1 else "") + found[-1]


@dataclass(frozen=True)
class Options:
    """The pieces of Algorithm 2 that a run uses; see `schema.TrainingConfig` for each."""

    normalize: bool = False
    minibatches: int = 1
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Options:
        """Read them from a configuration; what it does not state has its default.

        >>> Options.of({"minibatches": 4, "seed": 0}).minibatches
        4
        """
        return cls(**{item.name: config[item.name] for item in fields(cls) if item.name in config})

    def stated(self) -> dict[str, Any]:
        """Those that a cell's configuration states: a cell of Algorithm 1 has the same id as before there was another.

        >>> Options().stated()
        {}
        >>> Options(kl_coefficient=0.1).stated()
        {'kl_coefficient': 0.1, 'kl_estimator': 'k3'}
        """
        used = {
            "normalize": self.normalize, "minibatches": self.minibatches > 1, "kl_coefficient": self.penalized,
            "kl_estimator": self.penalized,
        }  # fmt: skip
        return {name: getattr(self, name) for name, use in used.items() if use}

    @property
    def penalized(self) -> bool:
        """Whether there is a penalty, and so a reference policy."""
        return self.kl_coefficient > 0

    @property
    def in_loss(self) -> float:
        """Kappa of the penalty in the loss (k3), 0 where there is none."""
        return self.kl_coefficient if self.kl_estimator == "k3" else 0.0

    @property
    def in_reward(self) -> float:
        """Kappa of the penalty on the advantage (k1-in-reward), 0 where there is none."""
        return self.kl_coefficient if self.kl_estimator == "k1-in-reward" else 0.0
