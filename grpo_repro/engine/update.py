"""The gradient of one iteration's loss and the steps along it (Algorithms 1 and 2).

The loss of B prompts with G completions each is

    L = -(1/(B G)) sum_b sum_i A_bi log pi(y_bi | x_b),    log pi summed over the completion's tokens,

whose gradient is -g_hat with advantages A. Algorithm 2 goes through the prompts in minibatches of one step each and
weighs every token on its own (`kl.score_weights`): A_bi pi / pi_old - kappa (1 - pi_ref / pi) in the place of A_bi.
Three facts make it cheap, and change no number beyond rounding:

- the completions of a prompt share its forward *and backward* pass: they run behind the prompt's keys and values, leave
  their gradients on these, and one backward pass of the prompt carries on from there;
- equal completions have equal scores: their advantages are added up and they are run once;
- a completion whose advantages add up to zero is not run (all of a group in which every reward is equal), unless the
  loss has a penalty.
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

from grpo_repro.algorithm2 import Options, remedies
from grpo_repro.engine.attention import GroupedCache, prefill
from grpo_repro.engine.distinct import Distinct, Weighted, chunks, distinct, merge
from grpo_repro.engine.layers import recomputed
from grpo_repro.engine.logits import completion_log_probs
from grpo_repro.engine.sample import Rollout, pad_left
from grpo_repro.engine.schedule import learning_rate
from grpo_repro.errors import UserError
from grpo_repro.kl import score_weights
from grpo_repro.policies.causal_lm import CausalLM


def accumulate_gradient(
    policy: CausalLM,
    prompts: Sequence[Sequence[int]],
    rollout: Rollout,
    advantages: Float[np.ndarray, "prompts group"],
    temperature: float = 1.0,
    micro_batch: int = 256,
    moved: bool = False,
    reference: Float[Tensor, "prompts group length"] | None = None,
    coefficient: float = 0.0,
    recompute: bool = False,
) -> None:
    """Add the gradient of the loss to `.grad` of the policy's parameters that require one.

    Args:
        policy: The policy.
        prompts: Token ids of each prompt, ragged.
        rollout: Its completions.
        advantages: A, float64.
        temperature: Of the distribution that was sampled from.
        micro_batch: Completions per pass; the gradient does not depend on it beyond rounding.
        moved: Whether the policy has moved since it sampled them, so that tokens need the ratio pi / pi_old.
        reference: log pi_ref of the completions' tokens; None without a penalty in the loss.
        coefficient: kappa of that penalty.
        recompute: Run the layers again in the backward pass instead of keeping what is inside of them.
    """
    batch = merge(rollout, advantages, moved, reference)
    with torch.enable_grad(), recomputed(policy.model, recompute):
        for chosen, shared, pieces in _parts(policy, prompts, batch, micro_batch):
            for rows in pieces:
                _completions_backward(_run(policy, chosen, shared, batch, rows, temperature), batch, coefficient)
            shared.backward()


@torch.no_grad()
def log_probs(
    policy: CausalLM,
    prompts: Sequence[Sequence[int]],
    rollout: Rollout,
    temperature: float = 1.0,
    micro_batch: int = 256,
) -> Float[Tensor, "prompts group length"]:
    """Log-probabilities that a policy gives to the completions of another, in the passes of the gradient.

    Args:
        policy: The policy, such as pi_ref.
        prompts: Token ids of each prompt, ragged.
        rollout: The completions.
        temperature: Of the distribution that was sampled from.
        micro_batch: Completions per pass.

    Returns:
        log pi(y_t | x, y_<t), float32, 0 outside the mask.
    """
    batch, index = distinct(rollout)
    found = torch.zeros(batch.tokens.shape, device=index.device)
    for chosen, shared, pieces in _parts(policy, prompts, batch, micro_batch):
        for rows in pieces:
            piece = _run(policy, chosen, shared, batch, rows, temperature)
            found[piece.index[piece.real], : piece.log_probs.shape[1]] = piece.log_probs[piece.real]
    result = torch.zeros_like(rollout.log_probs)
    result.view(len(index), -1)[:, : found.shape[1]] = found[index]
    return result


def _parts(
    policy: CausalLM, prompts: Sequence[Sequence[int]], batch: Distinct, micro_batch: int
) -> Iterator[tuple[list[Sequence[int]], _Shared, list[list[list[int]]]]]:
    """Yield the prompts of each part, what they share, and the pieces in which its completions are run."""
    for part in chunks(batch, [len(prompt) for prompt in prompts], micro_batch):
        chosen = [prompts[int(batch.prompt[rows[0]])] for rows in part]
        step = max(1, micro_batch // len(part))
        starts = range(0, max(len(rows) for rows in part), step)
        yield chosen, _prompt_graph(policy, chosen), [[r[start : start + step] for r in part] for start in starts]


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
        cache.prefilled = False  # a layer that is run again in the backward pass must see what it saw
    outputs = [*cache.prompt_keys.values(), *cache.prompt_values.values()]
    # What depends on no trained parameter (below the first adapter) needs no gradient.
    keys, values = (
        {layer: x.detach().requires_grad_(x.requires_grad) for layer, x in store.items()}
        for store in (cache.prompt_keys, cache.prompt_values)
    )
    return _Shared(mask, outputs, keys, values)


@dataclass(frozen=True)
class _Piece:
    """Completions that were run: each one's row in the batch, whether it is no filling, and log pi, 0 after its end."""

    index: Int[Tensor, " n"]
    real: Bool[Tensor, " n"]
    log_probs: Float[Tensor, "n length"]


def _run(
    policy: CausalLM, prompts: list[Sequence[int]], shared: _Shared, batch: Distinct, rows: list[list[int]],
    temperature: float,
) -> _Piece:  # fmt: skip
    """Forward pass of one piece: the same number of rows for each prompt, missing ones filled."""
    widest = max(len(r) for r in rows)
    index = torch.tensor([r + [r[-1] if r else 0] * (widest - len(r)) for r in rows], device=policy.device).view(-1)
    real = torch.tensor([[k < len(r) for k in range(widest)] for r in rows], device=policy.device).view(-1)
    tokens, mask = batch.tokens[index], batch.mask[index]
    longest = int(mask.sum(1).max())
    tokens, mask = tokens[:, :longest], mask[:, :longest]
    last = torch.tensor([prompt[-1] for prompt in prompts], device=policy.device).repeat_interleave(widest)
    own = GroupedCache(shared.mask, prompt_keys=shared.keys, prompt_values=shared.values, prefilled=True)
    inputs = torch.cat([last[:, None], tokens[:, :-1]], 1)
    return _Piece(index, real, completion_log_probs(policy.model, inputs, own, tokens, mask, temperature))


def _completions_backward(piece: _Piece, batch: Weighted, coefficient: float) -> None:
    """Backward pass of one piece; its filling has no weight."""

    def own(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[piece.index, : piece.log_probs.shape[1]]

    advantage, share = (
        torch.where(piece.real, values[piece.index], 0.0).to(torch.float32)[:, None]
        for values in (batch.weights, batch.shares)
    )
    weights = score_weights(
        advantage, piece.log_probs.detach(), own(batch.old), own(batch.reference), coefficient * share
    )
    (-weights * piece.log_probs).sum().backward()


class Learner:
    """A policy with its optimiser.

    Args:
        policy: The policy; its parameters are changed in place.
        config: Holds `optimizer` (`sgd` or `adamw`), `learning_rate`, `schedule`, `warmup`, `iterations`,
            `weight_decay`, `clip_norm` (None for no clipping), `temperature`, `micro_batch` and, unless they have their
            defaults, the `algorithm2.Options` and `gradient_checkpointing`.
    """

    def __init__(self, policy: CausalLM, config: Mapping[str, Any]) -> None:
        self.policy, self.config = policy, config
        self.options = Options.of(config)
        self.parameters = policy.trained
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[config["optimizer"]]
        self.optimizer: torch.optim.Optimizer = kind(
            list(self.parameters.values()), lr=0.0, weight_decay=config["weight_decay"]
        )
        for parameter in self.parameters.values():
            # Never None: without a gradient the optimiser would leave its averages alone instead of adding zero.
            parameter.grad = torch.zeros_like(parameter)

    def step(
        self, prompts: Sequence[Sequence[int]], rollout: Rollout, advantages: Float[np.ndarray, "prompts group"],
        iteration: int, reference: Float[Tensor, "prompts group length"] | None = None,
    ) -> float:  # fmt: skip
        """Make the updates of one iteration: one for each minibatch, in the order of the prompts.

        Args:
            prompts: Token ids of each prompt; the number of minibatches divides their number.
            rollout: Completions sampled from the policy as it is.
            advantages: A, float64.
            iteration: i, counted from 1; the learning rate follows from it.
            reference: log pi_ref of the completions' tokens; read where the loss has a penalty.

        Returns:
            ||g_hat|| before clipping, averaged over the minibatches.

        Raises:
            UserError: If a gradient is not finite.
        """
        parts = self.options.minibatches
        size = len(prompts) // parts
        norms = []
        for number in range(parts):
            part = slice(number * size, (number + 1) * size)
            theirs = None if reference is None or not self.options.in_loss else reference[part]
            self.optimizer.zero_grad(set_to_none=False)
            with self._trainable():
                # Until the first step pi is pi_old, and there is no ratio.
                accumulate_gradient(
                    self.policy, prompts[part], rollout.part(part), advantages[part], self.config["temperature"],
                    self.config["micro_batch"], number > 0, theirs, self.options.in_loss,
                    self.config.get("gradient_checkpointing", False),
                )  # fmt: skip
            norms.append(self._move(iteration))
        return sum(norms) / parts

    def _move(self, iteration: int) -> float:
        """Make one step along the gradient and return its norm before clipping."""
        limit = self.config["clip_norm"]
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), math.inf if limit is None else limit))
        rate = learning_rate(self.config, iteration)
        if not math.isfinite(norm):
            remedy = remedies(self.config)
            raise UserError(f"the gradient of iteration {iteration} is not finite at learning rate {rate:g}; {remedy}")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return norm

    @contextmanager
    def _trainable(self) -> Iterator[None]:
        """Sampling and scores keep no graph of the weights: they require gradients during the update only."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in self.parameters.values():
                parameter.requires_grad_(False)

    def state(self) -> dict[str, Tensor]:
        """What is trained (of a policy with adapters, these alone) and the optimiser's averages, by name.

        They lie in the processor's memory, for a GPU's is full of them.
        """
        copied = {name: parameter.detach().to("cpu", copy=True) for name, parameter in self.parameters.items()}
        found = {f"weights/{name}": parameter for name, parameter in copied.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{key}/{name}"] = torch.as_tensor(value).detach().to("cpu", copy=True)
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
