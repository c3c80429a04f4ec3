"""Scores of sampled completions: squared norms, inner products and weighted sums, without a backward pass each.

The score of a completion is W = grad_theta log pi(y | x), summed over its tokens. One forward and one backward pass
over a whole group give, at every layer, the inputs and the output gradients of each completion (`engine.factors`),
and those determine everything that the U-statistics need. The prompt is run once for the group; its part of each
score comes from a batched backward pass of that one graph, driven by the gradients that each completion leaves on
the prompt's keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from grpo_repro.engine.attention import GroupedCache, prefill
from grpo_repro.engine.factors import Factors, sq_norms
from grpo_repro.engine.layers import chosen_parameters
from grpo_repro.engine.logits import completion_log_probs, positions_at_once
from grpo_repro.engine.taps import Tap, collect, matrix_shape
from grpo_repro.policies.causal_lm import CausalLM

WORTH_SHARING = 3e8
"""Prompt tokens x completions x parameters above which a separate pass over the prompt pays for its overhead."""


@dataclass(frozen=True)
class ScoreProducts:
    """What `Scorer.products` returns; S weight vectors, n completions, d parameters.

    Attributes:
        sq_norms: ||W_i||^2, float64 ``[completions]``.
        products: <W_i, sum_j w_sj W_j>, float64 ``[completions, weights]``.
        sums: sum_j w_sj W_j, float32 ``[weights, dim]``; scored parameters in the model's order, tied ones once.
        log_probs: log pi(y_i | x), float64 ``[completions]``.
    """

    sq_norms: Float[np.ndarray, " completions"]
    products: Float[np.ndarray, "completions weights"]
    sums: Float[Tensor, "weights dim"]
    log_probs: Float[np.ndarray, " completions"]


def unique_completions(
    tokens: Int[Tensor, "group length"], mask: Bool[Tensor, "group length"]
) -> tuple[Int[Tensor, "distinct longest"], Bool[Tensor, "distinct longest"], Int[np.ndarray, " group"]]:
    """Merge equal completions: equal tokens have equal scores, and short answers repeat a lot.

    Returns:
        The distinct completions with their masks (cut to the longest), and for each original one its index.
    """
    longest = int(mask.sum(1).max())
    key = torch.where(mask, tokens, -1)[:, :longest]
    distinct, index = torch.unique(key, dim=0, return_inverse=True)
    return distinct.clamp_min(0), distinct >= 0, index.cpu().numpy()


class Scorer:
    """Takes scores of a policy's completions; one prompt's group at a time.

    Used as a context manager: it records the inputs and outputs of the model's layers while it is open.

    Args:
        policy: The policy whose scores are taken.
        temperature: Of the distribution that was sampled from.
        micro_batch: Completions per backward pass; results do not depend on it.
        worth_sharing: In place of `WORTH_SHARING`; results do not depend on it either.
        score_params: Which parameters theta is (`layers.chosen_parameters`); scores, norms and sums are theirs.
    """

    def __init__(
        self, policy: CausalLM, temperature: float = 1.0, micro_batch: int = 256, worth_sharing: float | None = None,
        score_params: str = "all",
    ) -> None:  # fmt: skip
        self.policy, self.temperature, self.micro_batch = policy, temperature, micro_batch
        self.worth_sharing = WORTH_SHARING if worth_sharing is None else worth_sharing
        self.parameters = list(chosen_parameters(policy.model, score_params).values())
        self.dim = sum(p.numel() for p in self.parameters)
        self.chosen = {id(p) for p in self.parameters}
        head = policy.model.get_output_embeddings()
        self.scores_head = head is not None and any(id(p) in self.chosen for p in head.parameters())
        self.calls: list[Tap] | None = None
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Scorer:
        for module in self.policy.model.modules():
            if any(id(p) in self.chosen for p in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_hook(self._record))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _record(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self.calls is None:
            return
        if not output.requires_grad:
            output.requires_grad_()  # the graph starts here (at the embedding, or at the first scored layer)
        self.calls.append(Tap(module, inputs[0], output))

    @contextmanager
    def recording(self) -> Iterator[list[Tap]]:
        """Build a graph and collect the calls of every module with parameters."""
        calls: list[Tap] = []
        self.calls = calls
        try:
            with torch.enable_grad():
                yield calls
        finally:
            self.calls = None

    @torch.no_grad()
    def products(
        self,
        prompt: list[int],
        tokens: Int[Tensor, "completions length"],
        mask: Bool[Tensor, "completions length"],
        weights: Float[np.ndarray, "weights completions"] | None = None,
    ) -> ScoreProducts:
        """Squared norms of the scores of one prompt's completions and their products with weighted sums of scores.

        A group larger than the micro-batch is passed over twice: for the sums, then for the products with them.

        Args:
            prompt: Token ids of the prompt.
            tokens: Completions, padded on the right.
            mask: Which tokens belong to the completions (the ending token does).
            weights: w; rows are weight vectors over the completions. None computes norms only.

        Returns:
            Norms, products, weighted sums and log-probabilities.
        """
        count, device = len(tokens), self.policy.device
        w = torch.zeros(0, count) if weights is None else torch.from_numpy(np.asarray(weights, dtype=np.float32))
        w = w.to(device)
        sums = torch.zeros(len(w), self.dim, device=device)
        sq_norms = torch.zeros(count, dtype=torch.float64, device=device)
        products = torch.zeros(count, len(w), dtype=torch.float64, device=device)
        log_probs = torch.zeros(count, dtype=torch.float64, device=device)
        size = self._at_once(tokens.shape[1])
        one_pass = count <= size
        group = _Group(self, prompt, count)
        parts = [slice(start, start + size) for start in range(0, count, size)]
        for part in parts:
            factors, log_probs[part] = group.factors(tokens[part], mask[part])
            sq_norms[part] = _accumulate(factors, w[:, part], sums, products if one_pass else None)
        for part in parts if not one_pass and len(w) else []:
            products[part] = _dots(group.factors(tokens[part], mask[part])[0], sums)
        return ScoreProducts(sq_norms.cpu().numpy(), products.cpu().numpy(), sums, log_probs.cpu().numpy())

    def _at_once(self, length: int) -> int:
        """Completions per backward pass: fewer where their logits, kept for the output layer's scores, are many."""
        if not self.scores_head:
            return self.micro_batch
        return max(1, min(self.micro_batch, positions_at_once(self.policy.model) // length))

    @torch.no_grad()
    def add_sums(
        self,
        prompt: list[int],
        tokens: Int[Tensor, "completions length"],
        mask: Bool[Tensor, "completions length"],
        weights: Float[np.ndarray, "weights completions"],
        out: Float[Tensor, "weights dim"],
    ) -> None:
        """Add the weighted sums of scores, sum_j w_sj W_j, to ``out`` (nothing else is computed).

        Args:
            prompt: Token ids of the prompt.
            tokens: Completions, padded on the right.
            mask: Which tokens belong to the completions.
            weights: w; rows are weight vectors over the completions.
            out: Accumulator in float32, changed in place.
        """
        w = torch.from_numpy(np.asarray(weights, dtype=np.float32)).to(self.policy.device)
        group = _Group(self, prompt, len(tokens))
        size = self._at_once(tokens.shape[1])
        for start in range(0, len(tokens), size):
            part = slice(start, start + size)
            offset = 0
            for factor in group.factors(tokens[part], mask[part])[0]:
                for at, block in factor.blocks():
                    out[:, offset + at : offset + at + block.shape[1]].addmm_(w[:, part], block)
                offset += factor.numel


def _accumulate(factors: list[Factors], w: Tensor, sums: Tensor, products: Tensor | None) -> Tensor:
    """Add w W to ``sums`` and <W, w W> to ``products``; returns the squared norms."""
    samples = w.shape[1]
    if len(w) == 0:
        return sq_norms(factors, samples, w.device)
    norms = torch.zeros(samples, dtype=torch.float64, device=w.device)
    offset = 0
    for factor in factors:
        for start, block in factor.blocks():
            norms += torch.linalg.vecdot(block, block)
            part = w @ block
            sums[:, offset + start : offset + start + block.shape[1]] += part
            if products is not None:
                products += block @ part.T
        offset += factor.numel
    return norms


def _dots(factors: list[Factors], directions: Tensor) -> Tensor:
    """<W_i, directions_s>, float64 ``[samples, directions]``."""
    total: Tensor | float = 0.0
    offset = 0
    for factor in factors:
        for start, block in factor.blocks():
            part = directions[:, offset + start : offset + start + block.shape[1]]
            total = total + (block @ part.T).double()
        offset += factor.numel
    assert isinstance(total, Tensor)
    return total


class _Group:
    """One prompt's graph, from which the factors of any batch of its completions follow."""

    def __init__(self, scorer: Scorer, prompt: list[int], completions: int) -> None:
        self.scorer, self.policy = scorer, scorer.policy
        # The last prompt token always goes with the completions, so that all their logits come from one pass.
        shared = len(prompt) - 1
        if shared * completions * scorer.dim < scorer.worth_sharing:
            shared = 0
        self.prefix, self.rest = prompt[:shared], prompt[shared:]
        device = self.policy.device
        mask = torch.ones(1, shared, dtype=torch.bool, device=device)
        self.cache = GroupedCache(mask, plain=True)
        self.taps: list[Tap] = []
        if self.prefix:
            with scorer.recording() as taps:
                prefill(self.policy.model, torch.tensor([self.prefix], device=device), self.cache)
            self.taps = taps

    def factors(self, tokens: Tensor, mask: Tensor) -> tuple[list[Factors], Tensor]:
        """Factors of the completions' scores for every parameter, and log pi(y | x)."""
        samples = len(tokens)
        rest = torch.tensor(self.rest, device=tokens.device).expand(samples, -1)
        inputs = torch.cat([rest, tokens[:, :-1]], 1)
        keys, values = (
            {
                layer: x.detach().expand(samples, -1, -1, -1).requires_grad_(x.requires_grad)
                for layer, x in store.items()
            }
            for store in (self.cache.prompt_keys, self.cache.prompt_values)
        )
        own_mask = self.cache.prompt_mask.expand(samples, -1)
        own = GroupedCache(own_mask, plain=True, prompt_keys=keys, prompt_values=values, prefilled=True)
        with self.scorer.recording() as taps:
            token_log_probs = completion_log_probs(
                self.policy.model, inputs, own, tokens, mask, self.scorer.temperature, whole=self.scorer.scores_head
            )
            log_probs = token_log_probs.sum(1, dtype=torch.float64)
            total = log_probs.sum()
        leaves = [leaf for leaf in (*keys.values(), *values.values()) if leaf.requires_grad]
        grads = torch.autograd.grad(total, [t.output for t in taps] + leaves, allow_unused=True)
        collected = {id(p): Factors(matrix_shape(p)) for p in self.scorer.parameters}
        for tap, grad in zip(taps, grads, strict=False):
            collect(collected, tap, tap.inputs, grad, samples)
        if self.prefix:
            self._prompt_part(collected, grads[len(taps) :], samples)
        return list(collected.values()), log_probs.detach()

    def _prompt_part(self, collected: dict[int, Factors], grads: tuple[Tensor | None, ...], samples: int) -> None:
        """Carry the gradients on the prompt's keys and values through the prompt's graph, batched over samples."""
        outputs = [*self.cache.prompt_keys.values(), *self.cache.prompt_values.values()]
        outputs = [out for out in outputs if out.requires_grad]
        used = [(out, grad[:, None]) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
        back = torch.autograd.grad(
            [out for out, _ in used], [t.output for t in self.taps], [grad for _, grad in used],
            is_grads_batched=True, allow_unused=True, retain_graph=True,
        )  # fmt: skip
        for tap, grad in zip(self.taps, back, strict=True):
            # The last layer's queries, outputs and feed-forward at prompt positions reach no completion.
            if grad is not None:
                collect(collected, tap, tap.inputs.expand(samples, *tap.inputs.shape[1:]), grad[:, 0], samples)
