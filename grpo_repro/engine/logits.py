"""Log-probabilities of given completions, without the logits of all positions at once.

A vocabulary of 150,000 makes logits the largest tensors by far: 256 completions of 512 tokens would take 80 GB. Only
the tokens of completions need them, and each token on its own. So beyond `LOGITS` numbers the output layer runs on
some positions at a time, and again in the backward pass: memory then depends on neither batch nor vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from grpo_repro.engine.attention import GroupedCache, extend, last_hidden

LOGITS = 1 << 25
"""Most logits at once: 128 MiB in float32, and about four times that with what follows from them."""


def positions_at_once(model: PreTrainedModel) -> int:
    """Number of positions whose logits are held at once."""
    return max(1, LOGITS // int(model.config.get_text_config().vocab_size))


def completion_log_probs(
    model: PreTrainedModel,
    inputs: Int[Tensor, "n context"],
    cache: GroupedCache,
    tokens: Int[Tensor, "n length"],
    mask: Bool[Tensor, "n length"],
    temperature: float,
    whole: bool = False,
) -> Float[Tensor, "n length"]:
    """Log-probabilities of completions behind their cached prompts.

    Args:
        model: A causal language model with the grouped attention.
        inputs: What the model reads; the last `length` positions predict the tokens.
        cache: The prompts.
        tokens: The completions.
        mask: Which tokens count.
        temperature: Logits are divided by it, in float32.
        whole: Take all logits in one piece, whatever their number.

    Returns:
        log pi(y_t | x, y_<t), float32; 0 outside the mask.
    """
    if whole or tokens.numel() <= positions_at_once(model):
        logits = extend(model, inputs, cache, keep=tokens.shape[1]).float() / temperature
        return torch.where(mask, torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0], 0.0)
    hidden = last_hidden(model, inputs, cache)[:, -tokens.shape[1] :][mask]
    found = torch.zeros(tokens.shape, device=tokens.device)
    return found.masked_scatter(mask, _in_parts(model, hidden, tokens[mask], temperature))


def _in_parts(
    model: PreTrainedModel, hidden: Float[Tensor, "m width"], tokens: Int[Tensor, " m"], temperature: float
) -> Float[Tensor, " m"]:
    def part(h: Tensor, y: Tensor) -> Tensor:
        logits = _head(model, h).float() / temperature
        return torch.log_softmax(logits, -1).gather(-1, y[:, None])[:, 0]

    size = positions_at_once(model)
    pieces = zip(hidden.split(size), tokens.split(size), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([part(h, y) for h, y in pieces])
    return torch.cat([checkpoint(part, h, y, use_reentrant=False, preserve_rng_state=False) for h, y in pieces])


def _head(model: PreTrainedModel, hidden: Float[Tensor, "m width"]) -> Float[Tensor, "m vocabulary"]:
    """Whatever the model makes of its decoder's last hidden states: output layer, soft caps, scales.

    The model's own forward pass is run on a decoder that returns the given states, so that no architecture's way of
    making logits is written here again.
    """
    decoder: Any = model.get_decoder()
    own = vars(decoder).get("forward")
    given = BaseModelOutputWithPast(last_hidden_state=hidden[None])
    decoder.forward = lambda *_, **__: given
    try:
        found: Any = model(inputs_embeds=hidden[None], use_cache=False)
    finally:
        del decoder.forward
        if own is not None:
            decoder.forward = own
    return found.logits[0]
