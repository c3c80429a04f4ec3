"""What the engine does to a model's layers: choosing parameters to score, and recomputing layers in backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo_repro.errors import UserError

ADAPTER = ".lora_"
"""What the name of every parameter of a LoRA adapter has, and that of no other (peft's names)."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a decoder, in their order.

    Raises:
        UserError: If the architecture does not name them.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise UserError(
            f"the layers of {type(model).__name__} are not known; use score_params=all and gradient_checkpointing=false"
        )
    return found


def chosen_parameters(model: nn.Module, which: str) -> dict[str, nn.Parameter]:
    """The parameters theta in the scores grad_theta log pi, by name and in the model's order, tied ones once.

    Args:
        model: A causal language model.
        which: `all`; `lora` for those of the adapters; `last_layer` for those of the last decoder block.

    Raises:
        UserError: If there are none of that kind.
    """
    named = dict(model.named_parameters())
    if which == "all":
        return named
    if which == "lora":
        found = {name: parameter for name, parameter in named.items() if ADAPTER in name}
    else:
        last = {id(parameter) for parameter in decoder_layers(model)[-1].parameters()}
        found = {name: parameter for name, parameter in named.items() if id(parameter) in last}
    if not found:
        raise UserError(f"score_params={which}, and the model has no such parameters; use score_params=all")
    return found


@contextmanager
def recomputed(model: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Keep the inputs of the decoder's blocks only, and run each block again in the backward pass.

    A block then leaves one vector of the model's width for each token instead of everything inside of it. Nothing is
    random in a block, so that no bit of the gradient changes. (The switch of transformers works in training mode only,
    which would turn dropout on.)

    Args:
        model: A causal language model.
        wanted: False leaves it alone.
    """
    blocks = decoder_layers(model) if wanted else []
    for block in blocks:
        block.forward = partial(_recompute, block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _recompute(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **named)
