"""How far another engine's log-probabilities are from the trainer's, and what is done about it.

An inference engine computes the same policy by other kernels, often in fewer bits. What it samples from, mu, is then
not quite the trainer's pi, and the gradient E_mu[A W] not quite that of J. The difference is measured for every batch;
where asked for, a completion's advantage is multiplied by

    w = min(pi(y) / mu(y), cap),    both of the whole completion.

Without a cap this removes the bias exactly (E_mu[w A W] = E_pi[A W]); the cap bounds the variance. The ratio is the
completion's and not each token's because the score W is the completion's: weights per token leave a bias however large
their cap is. Long completions have wider ratios, of course, and need agreement more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_repro.engine.sample import Rollout
from grpo_repro.engine.update import log_probs
from grpo_repro.errors import NotFinite, UserError
from grpo_repro.policies.causal_lm import CausalLM

LARGEST_MEAN = {"float32": 0.01}
"""Mean absolute difference beyond which two engines do not compute the same policy; other types get 0.2."""


@dataclass
class Agreement:
    """Differences |log mu - log pi| of sampled tokens, in nats, gathered over batches.

    Attributes:
        total: Their sum.
        tokens: Their number.
        largest: The largest.
    """

    total: float = 0.0
    tokens: int = 0
    largest: float = 0.0

    @property
    def mean(self) -> float:
        """Mean absolute difference per token."""
        return self.total / self.tokens if self.tokens else float("nan")

    def add(self, rollout: Rollout, own: Float[Tensor, "prompts group length"]) -> None:
        """Take in a batch.

        Args:
            rollout: With the sampler's log-probabilities.
            own: The trainer's, of the same tokens.

        Raises:
            NotFinite: If either are not finite.
        """
        found = (rollout.log_probs - own)[rollout.mask].abs().double()
        if not torch.isfinite(found).all():
            raise NotFinite("the log-probabilities of sampled tokens are not finite; check the weights and dtype")
        self.total += float(found.sum())
        self.tokens += found.numel()
        self.largest = max(self.largest, float(found.max()))

    def numbers(self) -> Float[Tensor, 3]:
        """Return it as numbers, for a saved state."""
        return torch.tensor([self.total, self.tokens, self.largest], dtype=torch.float64)

    @classmethod
    def from_numbers(cls, numbers: Float[Tensor, 3]) -> Agreement:
        """Take `numbers` back."""
        total, tokens, largest = numbers.tolist()
        return cls(total, int(tokens), largest)


def compare(
    policy: CausalLM, prompts: Sequence[Sequence[int]], rollout: Rollout, temperature: float, micro_batch: int,
    agreement: Agreement,
) -> Rollout:  # fmt: skip
    """Put the trainer's log-probabilities in the place of the sampler's, and take in how they differ.

    Args:
        policy: The policy, as it was when it was sampled from.
        prompts: Token ids of each prompt.
        rollout: Completions by another engine.
        temperature: Of the distribution sampled from.
        micro_batch: Completions per pass.
        agreement: Takes in the differences.

    Returns:
        The rollout with log pi of the trainer: ratios and penalties compare one engine's numbers with each other.

    Raises:
        UserError: If the two engines do not compute the same policy.
    """
    own = log_probs(policy, prompts, rollout, temperature, micro_batch)
    batch = Agreement()
    batch.add(rollout, own)
    kind = str(policy.model.dtype).removeprefix("torch.")
    limit = LARGEST_MEAN.get(kind, 0.2)
    if batch.mean > limit:
        raise UserError(
            f"the sampler's log-probabilities differ from the trainer's by {batch.mean:.2g} on average, more than "
            f"{limit:g}: they do not compute the same policy; use sampler=torch, or vllm.dtype=float32 if it is not"
        )
    agreement.total += batch.total
    agreement.tokens += batch.tokens
    agreement.largest = max(agreement.largest, batch.largest)
    return replace(rollout, log_probs=own)


def importance_weights(
    sampled: Float[Tensor, "prompts group length"], own: Float[Tensor, "prompts group length"], cap: float
) -> Float[np.ndarray, "prompts group"]:
    """The weights w = min(pi(y) / mu(y), cap) of each completion.

    Args:
        sampled: log mu of its tokens, 0 outside the mask.
        own: log pi of the same.
        cap: The largest weight.

    Returns:
        The weights, float64.

    >>> importance_weights(torch.tensor([[[-1.0, -1.0]]]), torch.tensor([[[-0.5, -1.0]]]), cap=2.0).round(3)
    array([[1.649]])
    """
    ratio = (own.double() - sampled.double()).sum(-1).clamp_max(float(np.log(cap)))
    return ratio.exp().cpu().numpy()
