"""The gradient of one iteration's loss and the step along it (Algorithm 1).

The loss of B prompts with G completions each is

    L = -(1/(B G)) sum_b sum_i A_bi log pi(y_bi | x_b),    log pi summed over the completion's tokens,

whose gradient is -g_hat with advantages A. Three facts make it cheap, and change no number beyond rounding:

- the completions of a prompt share its forward *and backward* pass: they run behind the prompt's keys and values, leave
  their gradients on these, and one backward pass of the prompt carries on from there;
- equal completions have equal scores: their advantages are added up and they are run once;
- a completion whose advantages add up to zero is not run (all of a group in which every reward is equal).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_repro.engine.attention import GroupedCache, extend, prefill
from grpo_repro.engine.sample import Rollout, pad_left
from grpo_repro.engine.schedule import learning_rate
from grpo_repro.errors import UserError
from grpo_repro.policies.causal_lm import CausalLM


@dataclass(frozen=True)
class Weighted:
    """The distinct completions of a batch that carry weight, sorted by prompt.

    Attributes:
        prompt: Index of each one's prompt.
        tokens: Token ids, cut to the longest.
        mask: True on every sampled token.
        weights: Sum of A_bi / (B G) over the completions that are equal to it, float64.
    """

    prompt: Int[np.ndarray, " distinct"]
    tokens: Int[Tensor, "distinct length"]
    mask: Bool[Tensor, "distinct length"]
    weights: Float[Tensor, " distinct"]


def merge(rollout: Rollout, advantages: Float[np.ndarray, "prompts group"]) -> Weighted:
    """Add up the advantages of equal completions of a prompt, and drop those whose sum is zero."""
    prompts, group, _ = rollout.tokens.shape
    longest = max(1, int(rollout.mask.sum(-1).max()))
    device = rollout.tokens.device
    key = torch.where(rollout.mask, rollout.tokens, -1)[..., :longest].reshape(prompts * group, longest)
    owner = torch.arange(prompts, device=device).repeat_interleave(group)
    distinct, index = torch.unique(torch.cat([owner[:, None], key], 1), dim=0, return_inverse=True)
    shares = torch.from_numpy(np.ascontiguousarray(advantages).reshape(-1) / (prompts * group)).to(device)
    weights = torch.zeros(len(distinct), dtype=torch.float64, device=device).index_add_(0, index, shares)
    distinct, weights = distinct[weights != 0], weights[weights != 0]
    tokens = distinct[:, 1:]
    return Weighted(distinct[:, 0].cpu().numpy(), tokens.clamp_min(0), tokens >= 0, weights)


def chunks(batch: Weighted, prompt_lengths: Sequence[int], micro_batch: int) -> list[list[list[int]]]:
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


def accumulate_gradient(
    policy: CausalLM,
    prompts: Sequence[Sequence[int]],
    rollout: Rollout,
    advantages: Float[np.ndarray, "prompts group"],
    temperature: float = 1.0,
    micro_batch: int = 256,
) -> None:
    """Add the gradient of the loss to `.grad` of the policy's parameters that require one.

    Args:
        policy: The policy.
        prompts: Token ids of each prompt, ragged.
        rollout: Its completions.
        advantages: A, float64.
        temperature: Of the distribution that was sampled from.
        micro_batch: Completions per pass; the gradient does not depend on it beyond rounding.
    """
    batch = merge(rollout, advantages)
    lengths = [len(prompt) for prompt in prompts]
    with torch.enable_grad():
        for part in chunks(batch, lengths, micro_batch):
            chosen = [prompts[int(batch.prompt[rows[0]])] for rows in part]
            shared = _prompt_graph(policy, chosen)
            widest = max(len(rows) for rows in part)
            step = max(1, micro_batch // len(part))
            for start in range(0, widest, step):
                _completions_backward(
                    policy, chosen, shared, batch, [r[start : start + step] for r in part], temperature
                )
            shared.backward()


@dataclass(frozen=True)
class _Shared:
    """The prompts of a part: their mask, keys and values in the graph, and the leaves that completions read."""

    mask: Tensor
    outputs: list[Tensor]
    keys: dict[int, Tensor]
    values: dict[int, Tensor]

    def backward(self) -> None:
        """Carry what the completions left on the leaves through the prompts' graph."""
        leaves = [*self.keys.values(), *self.values.values()]
        used = [(out, leaf.grad) for out, leaf in zip(self.outputs, leaves, strict=True) if leaf.grad is not None]
        used = [(out, grad) for out, grad in used if out.requires_grad]
        if used:
            torch.autograd.backward([out for out, _ in used], [grad for _, grad in used])


def _prompt_graph(policy: CausalLM, prompts: list[Sequence[int]]) -> _Shared:
    """Run all but the last token of the prompts; the last goes with the completions, for their first logits."""
    tokens, mask = pad_left([prompt[:-1] for prompt in prompts], policy.pad_id, policy.device)
    cache = GroupedCache(mask)
    if mask.shape[1]:
        prefill(policy.model, tokens, cache)
    outputs = [*cache.prompt_keys.values(), *cache.prompt_values.values()]
    keys, values = (
        {layer: x.detach().requires_grad_() for layer, x in store.items()}
        for store in (cache.prompt_keys, cache.prompt_values)
    )
    return _Shared(mask, outputs, keys, values)


def _completions_backward(
    policy: CausalLM, prompts: list[Sequence[int]], shared: _Shared, batch: Weighted, rows: list[list[int]],
    temperature: float,
) -> None:  # fmt: skip
    """Backward pass of one piece: the same number of rows for each prompt, missing ones filled without weight."""
    widest = max(len(r) for r in rows)
    index = torch.tensor([r + [r[-1] if r else 0] * (widest - len(r)) for r in rows], device=policy.device).view(-1)
    real = torch.tensor([[k < len(r) for k in range(widest)] for r in rows], device=policy.device).view(-1)
    tokens, mask = batch.tokens[index], batch.mask[index]
    weights = torch.where(real, batch.weights[index], 0.0).to(torch.float32)
    longest = int(mask.sum(1).max())
    tokens, mask = tokens[:, :longest], mask[:, :longest]
    last = torch.tensor([prompt[-1] for prompt in prompts], device=policy.device).repeat_interleave(widest)
    own = GroupedCache(shared.mask, prompt_keys=shared.keys, prompt_values=shared.values, prefilled=True)
    logits = extend(policy.model, torch.cat([last[:, None], tokens[:, :-1]], 1), own).float() / temperature
    log_probs = torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0]
    (-weights[:, None] * torch.where(mask, log_probs, 0.0)).sum().backward()


class Learner:
    """A policy with its optimiser.

    Args:
        policy: The policy; its parameters are changed in place.
        config: Holds `optimizer` (`sgd` or `adamw`), `learning_rate`, `schedule`, `warmup`, `iterations`,
            `weight_decay`, `clip_norm` (None for no clipping), `temperature` and `micro_batch`.
    """

    def __init__(self, policy: CausalLM, config: Mapping[str, Any]) -> None:
        self.policy, self.config = policy, config
        self.parameters = dict(policy.model.named_parameters())
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[config["optimizer"]]
        self.optimizer: torch.optim.Optimizer = kind(
            list(self.parameters.values()), lr=0.0, weight_decay=config["weight_decay"]
        )
        for parameter in self.parameters.values():
            # Never None: without a gradient the optimiser would leave its averages alone instead of adding zero.
            parameter.grad = torch.zeros_like(parameter)

    def step(
        self, prompts: Sequence[Sequence[int]], rollout: Rollout, advantages: Float[np.ndarray, "prompts group"],
        iteration: int,
    ) -> float:  # fmt: skip
        """Make one update.

        Args:
            prompts: Token ids of each prompt.
            rollout: Completions sampled from the policy as it is.
            advantages: A, float64.
            iteration: i, counted from 1; the learning rate follows from it.

        Returns:
            ||g_hat||, before clipping.

        Raises:
            UserError: If the gradient is not finite.
        """
        self.optimizer.zero_grad(set_to_none=False)
        with self._trainable():
            accumulate_gradient(
                self.policy, prompts, rollout, advantages, self.config["temperature"], self.config["micro_batch"]
            )
        limit = self.config["clip_norm"]
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), math.inf if limit is None else limit))
        rate = learning_rate(self.config, iteration)
        if not math.isfinite(norm):
            raise UserError(
                f"the gradient of iteration {iteration} is not finite at learning rate {rate:g}; lower learning_rate "
                "or set clip_norm=1.0"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return norm

    @contextmanager
    def _trainable(self) -> Iterator[None]:
        """Sampling and scores keep no graph of the weights: they require gradients during the update only."""
        self.policy.model.requires_grad_(True)
        try:
            yield
        finally:
            self.policy.model.requires_grad_(False)

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimiser's averages, by name."""
        found = {f"weights/{name}": parameter.detach().clone() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{key}/{name}"] = torch.as_tensor(value).detach().clone()
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state of `state`."""
        for key, value in state.items():
            kind, _, name = key.partition("/")
            parameter = self.parameters[name]
            if kind == "weights":
                parameter.data.copy_(value)
            elif value is not None:
                where = "cpu" if kind == "step" else parameter.device
                self.optimizer.state[parameter][kind] = value.to(where)
