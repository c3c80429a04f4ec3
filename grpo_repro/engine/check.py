"""A self-check of a policy before anything is measured: the engine against plain passes of the same model.

The engine replaces the attention and takes scores from recorded layers. An architecture that does not go through
transformers' attention interface, or that uses a parameter in a way that the engine does not see, would give wrong
numbers without a sign. So every model is tried once on a few tokens, and refused unless all agrees.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from grpo_repro.engine.attention import use_grouped_attention
from grpo_repro.engine.sample import sample, uniforms
from grpo_repro.engine.scores import Scorer
from grpo_repro.errors import UserError
from grpo_repro.policies.causal_lm import CausalLM

PROMPT, COMPLETIONS, LENGTH = 6, 3, 3
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Largest error of log-probabilities (in float32 at best) and relative error of norms and sums; others get 0.1."""


def self_check(policy: CausalLM, prompt: list[int]) -> None:
    """Compare sampled log-probabilities, score norms and sums with plain forward and backward passes.

    Args:
        policy: A policy that was just loaded.
        prompt: Token ids of any prompt; its last few are used.

    Raises:
        UserError: If the engine does not give this architecture's numbers.
    """
    name = type(policy.model).__name__
    try:
        errors = _errors(policy, prompt[-PROMPT:])
    except UserError:
        raise
    except Exception as error:  # whatever an architecture that the engine does not know may raise
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise _refusal(name, reason) from error
    limit = TOLERANCE.get(policy.model.dtype, 0.1)
    for what, size in errors.items():
        if not size <= limit:
            reason = f"{what} differ from a plain pass by {size:.2g}, more than {limit:g}"
            if policy.model.dtype in (torch.bfloat16, torch.float16):
                short = str(policy.model.dtype).removeprefix("torch.")
                raise UserError(f"{name} in {short}: {reason}; use model.dtype=float32")
            raise _refusal(name, reason)


def _refusal(name: str, reason: str) -> UserError:
    return UserError(
        f"{name} is not supported by the engine ({reason}); take a decoder such as "
        "Qwen2, Qwen3, Llama, Mistral, Phi or Gemma"
    )


def _errors(policy: CausalLM, prompt: list[int]) -> dict[str, float]:
    random = uniforms([np.random.SeedSequence(0)], COMPLETIONS, LENGTH)
    rollout = sample(policy, [prompt], random)
    tokens, mask = rollout.tokens[0], rollout.mask[0]
    weights = np.linspace(-1.0, 2.0, COMPLETIONS)[None]
    found = {}
    for shared, worth in (("", np.inf), (" with a shared prompt", 0.0)):
        with Scorer(policy, worth_sharing=worth) as scorer:
            found[shared] = scorer.products(prompt, tokens, mask, weights)
    log_probs, gradients = _plain(policy, prompt, tokens, mask)
    norms = np.array([float(g.double().square().sum()) for g in gradients])
    total = sum(float(w) * g.double() for w, g in zip(weights[0], gradients, strict=True))
    assert isinstance(total, Tensor)
    scale, length = float(norms.max()) + 1e-30, float(total.norm()) + 1e-30
    errors = {"sampled log-probabilities": float((rollout.log_probs[0] - log_probs).abs().max())}
    for shared, scores in found.items():
        errors[f"score norms{shared}"] = float(np.abs(scores.sq_norms - norms).max()) / scale
        errors[f"sums of scores{shared}"] = float((scores.sums[0].double() - total).norm()) / length
    return errors


def _plain(policy: CausalLM, prompt: list[int], tokens: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities and scores by the model's own attention, one completion at a time."""
    model = policy.model
    parameters = list(model.parameters())
    log_probs, gradients = torch.zeros(mask.shape, device=policy.device), []
    model.set_attn_implementation("eager")
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for row, (y, inside) in enumerate(zip(tokens, mask, strict=True)):
            y = y[inside]
            whole = torch.cat([torch.tensor(prompt, device=policy.device), y])
            logits = model(input_ids=whole[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            chosen = torch.log_softmax(logits, -1).gather(-1, y[:, None])[:, 0]
            found = torch.autograd.grad(chosen.sum(), parameters, allow_unused=True, materialize_grads=True)
            log_probs[row, : len(y)] = chosen.detach()
            gradients.append(torch.cat([g.flatten().float() for g in found]))
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
        use_grouped_attention(model)
    return log_probs, gradients
