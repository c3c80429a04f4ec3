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
from grpo_repro.engine.layers import chosen_parameters
from grpo_repro.engine.sample import sample, uniforms
from grpo_repro.engine.scores import Scorer
from grpo_repro.errors import UserError
from grpo_repro.policies.causal_lm import CausalLM

PROMPT, COMPLETIONS, LENGTH = 6, 3, 3
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Largest error of log-probabilities (in float32 at best) and relative error of norms and sums; others get 0.1."""


def self_check(policy: CausalLM, prompt: list[int], score_params: str = "all") -> None:
    """Compare sampled log-probabilities, score norms and sums with plain forward and backward passes.

    Args:
        policy: A policy that was just loaded.
        prompt: Token ids of any prompt; its last few are used.
        score_params: Which parameters scores are taken of.

    Raises:
        UserError: If the engine does not give this architecture's numbers.
    """
    name = type(policy.model).__name__
    try:
        errors = _errors(policy, prompt[-PROMPT:], score_params)
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


def _errors(policy: CausalLM, prompt: list[int], score_params: str) -> dict[str, float]:
    random = uniforms([np.random.SeedSequence(0)], COMPLETIONS, LENGTH)
    rollout = sample(policy, [prompt], random)
    tokens, mask = rollout.tokens[0], rollout.mask[0]
    weights = np.linspace(-1.0, 2.0, COMPLETIONS)[None]
    log_probs, norms, total = _plain(policy, prompt, tokens, mask, weights[0], score_params)
    scale, size = float(norms.max()) + 1e-30, float(total.norm()) + 1e-30
    errors = {"sampled log-probabilities": float((rollout.log_probs[0] - log_probs).abs().max())}
    for shared, worth in (("", np.inf), (" with a shared prompt", 0.0)):
        with Scorer(policy, worth_sharing=worth, score_params=score_params) as scorer:
            found = scorer.products(prompt, tokens, mask, weights)
        errors[f"score norms{shared}"] = float(np.abs(found.sq_norms - norms).max()) / scale
        errors[f"sums of scores{shared}"] = float((found.sums[0] - total).norm()) / size
    return errors


def _plain(
    policy: CausalLM, prompt: list[int], tokens: Tensor, mask: Tensor, weights: np.ndarray, score_params: str
) -> tuple[Tensor, np.ndarray, Tensor]:
    """Log-probabilities, norms and the weighted sum of scores by the model's own attention, one completion at a time.

    Two gradients are held at most: all of them would not fit beside a large model.
    """
    model = policy.model
    parameters = list(chosen_parameters(model, score_params).values())
    log_probs, norms, total = torch.zeros(mask.shape, device=policy.device), [], None
    model.set_attn_implementation("eager")
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for row, (y, inside) in enumerate(zip(tokens, mask, strict=True)):
            y = y[inside]
            whole = torch.cat([torch.tensor(prompt, device=policy.device), y])
            logits = model(input_ids=whole[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            chosen = torch.log_softmax(logits, -1).gather(-1, y[:, None])[:, 0]
            grads = torch.autograd.grad(chosen.sum(), parameters, allow_unused=True, materialize_grads=True)
            log_probs[row, : len(y)] = chosen.detach()
            gradient = torch.cat([g.flatten().float() for g in grads])
            norms.append(sum(float(part.double().square().sum()) for part in gradient.split(1 << 24)))
            total = float(weights[row]) * gradient + (0.0 if total is None else total)
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
        use_grouped_attention(model)
    assert total is not None
    return log_probs, np.array(norms), total
