"""From recorded calls of a model's modules to the factors of every parameter's per-sample gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from grpo_repro.engine.factors import Factors, Use


@dataclass(frozen=True)
class Tap:
    """One call of a module that owns parameters: its input and its output (still in the graph)."""

    module: nn.Module
    inputs: Tensor
    output: Tensor


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter as a matrix; a vector has one row."""
    return (parameter.shape[0], parameter[0].numel()) if parameter.ndim > 1 else (1, parameter.numel())


def collect(collected: dict[int, Factors], tap: Tap, inputs: Tensor, grad: Tensor | None, samples: int) -> None:
    """File the factors of one module call under its parameters, those that are collected."""
    if grad is None:
        return
    module, grad = tap.module, grad.float()
    if type(module) is nn.Linear:
        if id(module.weight) in collected:
            collected[id(module.weight)].uses.append(Use(grad, inputs.float()))
        if module.bias is not None and id(module.bias) in collected:
            collected[id(module.bias)].add_dense(grad.sum(1))
    elif isinstance(module, nn.Embedding):
        collected[id(module.weight)].uses.append(Use(inputs, grad * _embedding_scale(module, inputs)))
    else:
        for name, gradient in _module_gradients(module, inputs, grad).items():
            collected[id(getattr(module, name))].add_dense(gradient.reshape(samples, -1).float())


def _embedding_scale(module: nn.Embedding, tokens: Tensor) -> Tensor | float:
    """What an embedding multiplies its rows by (Gemma), and 0 at the padding row, whose gradient torch drops."""
    scale: Tensor | float = 1.0
    if type(module) is not nn.Embedding:
        ones = torch.ones(1, 1, device=tokens.device).expand(module.weight.shape)
        scale = functional_call(module, {"weight": ones}, (tokens,))
    return scale if module.padding_idx is None else scale * (tokens != module.padding_idx)[..., None]


def _module_gradients(module: nn.Module, inputs: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Per-sample gradients of a small module's own parameters (norms, scales), each ``[samples, numel]``.

    A norm's output is affine in its weight, elementwise, so its derivative is the difference of its outputs with
    weights 1 and 0. Any other module goes through a batched vector-Jacobian product.
    """
    own = {name: p.detach() for name, p in module.named_parameters(recurse=False)}
    if type(module).__name__.endswith("Norm") and all(p.shape == inputs.shape[-1:] for p in own.values()):
        zero = {name: torch.zeros_like(p) for name, p in own.items()}
        base = functional_call(module, zero, (inputs,))
        slopes = {n: functional_call(module, zero | {n: torch.ones_like(p)}, (inputs,)) - base for n, p in own.items()}
        return {n: (grad * slope).flatten(1, -2).sum(1) for n, slope in slopes.items()}

    def pull(x: Tensor, e: Tensor) -> dict[str, Tensor]:
        return vjp(lambda p: functional_call(module, p, (x,)), own)[1](e)[0]

    return {name: g.flatten(1) for name, g in vmap(pull)(inputs, grad).items()}
