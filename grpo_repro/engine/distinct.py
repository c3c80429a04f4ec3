"""The distinct completions of a batch: what equal ones have in common is computed once.

Equal completions of a prompt have equal log-probabilities and scores, so that a batch is its distinct completions, each
with the sum of what a loss gives to those that are equal to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_repro.engine.sample import Rollout


@dataclass(frozen=True)
class Distinct:
    """The distinct completions of each prompt, sorted by prompt.

    Attributes:
        prompt: Index of each one's prompt.
        tokens: Token ids, cut to the longest.
        mask: True on every sampled token.
    """

    prompt: Int[np.ndarray, " distinct"]
    tokens: Int[Tensor, "distinct length"]
    mask: Bool[Tensor, "distinct length"]


@dataclass(frozen=True)
class Weighted(Distinct):
    """Those that a loss gives weight to.

    Attributes:
        weights: Sum of A_bi / (B G) over the completions that are equal to it, float64.
        shares: Their number over B G, float64.
        old: log pi_old of its tokens; None where the policy has not moved since it sampled them.
        reference: log pi_ref of its tokens; None without a penalty in the loss.
    """

    weights: Float[Tensor, " distinct"]
    shares: Float[Tensor, " distinct"]
    old: Float[Tensor, "distinct length"] | None = None
    reference: Float[Tensor, "distinct length"] | None = None


def distinct(rollout: Rollout) -> tuple[Distinct, Int[Tensor, " completions"]]:
    """The distinct completions of each prompt, and which of them each of the B G completions is."""
    prompts, group, _ = rollout.tokens.shape
    longest = max(1, int(rollout.mask.sum(-1).max()))
    key = torch.where(rollout.mask, rollout.tokens, -1)[..., :longest].reshape(prompts * group, longest)
    owner = torch.arange(prompts, device=key.device).repeat_interleave(group)
    found, index = torch.unique(torch.cat([owner[:, None], key], 1), dim=0, return_inverse=True)
    tokens = found[:, 1:]
    return Distinct(found[:, 0].cpu().numpy(), tokens.clamp_min(0), tokens >= 0), index


def merge(
    rollout: Rollout,
    advantages: Float[np.ndarray, "prompts group"],
    moved: bool = False,
    reference: Float[Tensor, "prompts group length"] | None = None,
) -> Weighted:
    """Add up the advantages of equal completions of a prompt, and drop those that have no weight.

    Args:
        rollout: The completions.
        advantages: A, float64.
        moved: Whether the policy has moved since it sampled them.
        reference: log pi_ref of their tokens; a completion then has weight at an advantage of zero too.
    """
    prompts, group, length = rollout.tokens.shape
    batch, index = distinct(rollout)
    count = len(batch.prompt)
    device = index.device

    def total(values: Tensor) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=device).index_add_(0, index, values)

    weights = total(torch.from_numpy(np.ascontiguousarray(advantages).reshape(-1) / (prompts * group)).to(device))
    shares = total(torch.full((prompts * group,), 1 / (prompts * group), dtype=torch.float64, device=device))
    kept = weights != 0 if reference is None else torch.ones_like(weights, dtype=torch.bool)
    # Any of the equal completions stands for all of them.
    first = torch.zeros(count, dtype=torch.long, device=device)
    first[index] = torch.arange(prompts * group, device=device)

    def own(log_probs: Tensor | None) -> Tensor | None:
        if log_probs is None:
            return None
        return log_probs.reshape(prompts * group, length)[first[kept], : batch.tokens.shape[1]]

    return Weighted(
        batch.prompt[kept.cpu().numpy()], batch.tokens[kept], batch.mask[kept], weights[kept], shares[kept],
        own(rollout.log_probs if moved else None), own(reference),
    )  # fmt: skip


def chunks(batch: Distinct, prompt_lengths: Sequence[int], micro_batch: int) -> list[list[list[int]]]:
    """Divide a batch into parts that run together: for each part, for each of its prompts, rows of the batch.

    A part holds at most `micro_batch` rows, counted with the filling that brings its prompts to equal numbers of rows,
    and about `micro_batch` times the longest completion in tokens, prompts included. A prompt with more rows than that
    is a part of its own, passed through in pieces. Memory thus depends on the micro-batch, not on G.
    """
    length = batch.tokens.shape[1]
    prompts, starts, counts = np.unique(batch.prompt, return_index=True, return_counts=True)
    order = np.lexsort((np.array([prompt_lengths[p] for p in prompts]), -counts))
    parts: list[list[list[int]]] = []
    rows, longest = 0, 0
    for place in order:
        count, start = int(counts[place]), int(starts[place])
        grown = max(longest, prompt_lengths[int(prompts[place])])
        filled = rows * (len(parts[-1]) + 1) if parts else 0
        tokens = filled * (length + 1) + (grown * (len(parts[-1]) + 1) if parts else 0)
        if not parts or filled > micro_batch or tokens > micro_batch * (length + 1):
            parts.append([])
            rows, grown = count, prompt_lengths[int(prompts[place])]
        parts[-1].append(list(range(start, start + count)))
        longest = grown
    return parts
