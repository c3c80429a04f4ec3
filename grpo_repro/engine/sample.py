"""Sampling completions: one prefill for each prompt, one decoding row for each *distinct* completion.

The G completions of a prompt share the prompt's keys and values (`engine.attention`). They also share every step
until they first differ: at each step a row of the batch stands for all completions with the same tokens so far, so
64 short answers of which 15 are distinct cost 15 rows. The distribution is untouched: every completion has its own
random number at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_repro.engine.attention import GroupedCache, extend, prefill
from grpo_repro.errors import NotFinite, UserError
from grpo_repro.policies.causal_lm import CausalLM


@dataclass(frozen=True)
class Rollout:
    """Completions of a batch of prompts.

    Attributes:
        tokens: Token ids; the pad id after the end, int64 ``[prompts, group, length]``.
        mask: True on every sampled token, the ending token included.
        log_probs: log pi(y_t | x, y_<t) of the distribution sampled from (at the temperature used), float32; 0
            outside the mask.
        finished: True where an end token was sampled, False where the length ran out.
    """

    tokens: Int[Tensor, "prompts group length"]
    mask: Bool[Tensor, "prompts group length"]
    log_probs: Float[Tensor, "prompts group length"]
    finished: Bool[Tensor, "prompts group"]

    @property
    def lengths(self) -> Int[Tensor, "prompts group"]:
        """Number of tokens of each completion."""
        return self.mask.sum(-1)

    def part(self, prompts: slice) -> Rollout:
        """Return the completions of some of the prompts."""
        return Rollout(self.tokens[prompts], self.mask[prompts], self.log_probs[prompts], self.finished[prompts])


def uniforms(seeds: Sequence[np.random.SeedSequence], group_size: int, length: int) -> Float[np.ndarray, "p g t"]:
    """Random numbers of each prompt's completions from its own seed, so that no result depends on batching.

    Args:
        seeds: One for each prompt.
        group_size: Completions per prompt.
        length: Most tokens per completion.

    Returns:
        Independent uniforms on [0, 1), float64 ``[prompts, group, length]``.
    """
    return np.stack([np.random.Generator(np.random.Philox(s)).random((group_size, length)) for s in seeds])


def pad_left(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Stack ragged prompts with padding on the left; returns tokens and mask, ``[prompts, prompt_len]``."""
    longest = max(len(p) for p in prompts)
    tokens = torch.full((len(prompts), longest), pad_id, dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
    lengths = torch.tensor([len(p) for p in prompts])
    mask = torch.arange(longest) >= longest - lengths[:, None]
    return tokens.to(device), mask.to(device)


def _draw(log_probs: Tensor, row: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sampling of one token for each completion from its row's distribution.

    Args:
        log_probs: ``[rows, vocabulary]``.
        row: Row of each completion, ``[n]``.
        u: Uniforms, float64 ``[n]``.

    Returns:
        Tokens ``[n]``.
    """
    cdf = log_probs.double().exp_().cumsum_(-1)  # float32 sums over a large vocabulary would be biased
    target = u * cdf[row, -1]
    token = torch.searchsorted(cdf[row], target[:, None], right=True)[:, 0]
    return token.clamp_max_(log_probs.shape[-1] - 1)


class _Decoder:
    """State of one batch: which completions are alive and which row of the model's batch each follows."""

    def __init__(self, prompts: int, group: int, length: int, policy: CausalLM) -> None:
        device = policy.device
        self.policy = policy
        self.tokens = torch.full((prompts * group, length), policy.pad_id, device=device)
        self.log_probs = torch.zeros(prompts * group, length, device=device)
        self.lengths = torch.zeros(prompts * group, dtype=torch.long, device=device)
        self.alive = torch.arange(prompts * group, device=device)
        self.prompt = self.alive // group  # of each alive completion
        self.row = self.prompt.clone()  # row of the model's batch each alive completion follows
        self.eos = torch.tensor(policy.eos_ids, device=device)

    def accept(self, log_probs: Tensor, u: Tensor | None, step: int) -> Tensor:
        """Draw a token for every alive completion (the likeliest without u); returns the tokens of those that go on."""
        token = log_probs.argmax(-1)[self.row] if u is None else _draw(log_probs, self.row, u[self.alive, step])
        self.tokens[self.alive, step] = token
        self.log_probs[self.alive, step] = log_probs[self.row, token]
        self.lengths[self.alive] += 1
        going = ~torch.isin(token, self.eos)
        self.alive, self.prompt, self.row = self.alive[going], self.prompt[going], self.row[going]
        return token[going]

    def branch(self, parents: int, token: Tensor, prompts: int, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Give each distinct continuation a row.

        Returns:
            Parent row and token of every new row, ``[prompts * rows]``, the rows of a prompt adjacent; a prompt
            with fewer distinct continuations than another is filled with copies that nothing follows.
        """
        # Keys sort by prompt first because parent rows do.
        distinct, which = torch.unique(self.row * vocabulary + token, return_inverse=True)
        parent, new_token = distinct // vocabulary, distinct % vocabulary
        owner = parent // (parents // prompts)
        counts = torch.bincount(owner, minlength=prompts)
        rows = int(counts.max())
        slot = torch.arange(len(distinct), device=token.device) - (counts.cumsum(0) - counts)[owner]
        place = owner * rows + slot
        from_row = torch.arange(prompts, device=token.device).repeat_interleave(rows) * (parents // prompts)
        tokens = torch.full((prompts * rows,), self.policy.pad_id, device=token.device)
        from_row[place], tokens[place] = parent, new_token
        self.row = place[which]
        return from_row, tokens


def sample(
    policy: CausalLM,
    prompts: Sequence[Sequence[int]],
    uniform: Float[np.ndarray, "prompts group length"],
    temperature: float = 1.0,
) -> Rollout:
    """Sample a group of completions for each prompt.

    Args:
        policy: A causal language model.
        prompts: Token ids, ragged, none empty.
        uniform: The random numbers, one for each prompt, completion and step (see `uniforms`); their last axis is
            the largest number of new tokens.
        temperature: Logits are divided by it, and the log-probabilities are those of the divided logits.

    Returns:
        The completions; they end at any of the policy's end tokens.

    Raises:
        UserError: For an empty prompt or logits that are not finite.
    """
    count, group, length = uniform.shape
    u = torch.from_numpy(uniform.reshape(count * group, length)).to(policy.device)
    return _decode(policy, prompts, (count, group, length), u, temperature)


def greedy(policy: CausalLM, prompts: Sequence[Sequence[int]], length: int) -> Rollout:
    """Decode the likeliest token at every step; one completion of at most `length` tokens for each prompt.

    Raises:
        UserError: For an empty prompt or logits that are not finite.
    """
    return _decode(policy, prompts, (len(prompts), 1, length), None, 1.0)


@torch.no_grad()
def _decode(
    policy: CausalLM, prompts: Sequence[Sequence[int]], shape: tuple[int, int, int], u: Tensor | None,
    temperature: float,
) -> Rollout:  # fmt: skip
    if any(len(p) == 0 for p in prompts):
        raise UserError("a prompt has no tokens; give it a template that adds some")
    count, group, length = shape
    state = _Decoder(count, group, length, policy)
    device = policy.device
    tokens, mask = pad_left(prompts, policy.pad_id, policy.device)
    cache = GroupedCache(mask, append=True)
    logits = prefill(policy.model, tokens, cache)
    for step in range(length):
        log_probs = torch.log_softmax(logits.float() / temperature, -1)
        if not torch.isfinite(log_probs.amax()):
            raise NotFinite("the model's logits are not finite; check its weights and dtype (try float32)")
        token = state.accept(log_probs, u, step)
        if step + 1 == length or len(state.alive) == 0:
            break
        old = len(log_probs)
        from_row, new_tokens = state.branch(old, token, count, log_probs.shape[-1])
        if step and (len(from_row) != old or not torch.equal(from_row, torch.arange(old, device=device))):
            cache.select(from_row)
        logits = extend(policy.model, new_tokens[:, None], cache, past=step)[:, -1]
    inside = torch.arange(length, device=device) < state.lengths[:, None]
    last = state.tokens.gather(1, (state.lengths - 1)[:, None])[:, 0]
    finished = torch.isin(last, state.eos)
    return Rollout(
        state.tokens.view(shape), inside.view(shape), state.log_probs.view(shape), finished.view(count, group)
    )
