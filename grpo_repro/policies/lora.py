"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) by peft: W + (alpha / rank) B A, of which A and B are trained.

B starts at zero, so that the policy starts as its base; A is drawn from a fixed seed, so that the starting point is the
same in every process. There is no dropout: the trainer's log-probabilities must be the sampler's. Adapters are float32
whatever the base's dtype, for small updates are lost in the 8 bits of bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_repro.engine.layers import ADAPTER
from grpo_repro.errors import UserError
from grpo_repro.schema import LoraSettings

SEED = 0


def check_installed() -> None:
    """Refuse adapters where peft is missing.

    Raises:
        UserError: With what to install.
    """
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"model.lora.rank needs the package peft ({error}); pip install 'grpo-repro[lora]', or leave model.lora out"
        ) from error


def attach(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Put adapters on a model's linear layers, in place; the output layer gets none.

    Args:
        model: A loaded model.
        settings: Their rank (positive), alpha and targets.

    Raises:
        UserError: If peft is missing or finds no such layers.
    """
    check_installed()
    from peft import LoraConfig, inject_adapter_in_model

    assert settings.rank
    alpha: Any = settings.scale  # peft names it an integer, and divides it by the rank
    config = LoraConfig(
        r=settings.rank, lora_alpha=alpha, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
        target_modules=settings.targets or "all-linear",
    )  # fmt: skip
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            inject_adapter_in_model(config, model)
    except ValueError as error:
        linear = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise UserError(
            f"model.lora.targets={settings.targets} names no layers of {type(model).__name__} ({error}); it has "
            f"{', '.join(linear)}; null takes all but the output layer"
        ) from error
    for name, parameter in model.named_parameters():
        if ADAPTER in name:
            parameter.data = parameter.data.float()


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters."""
    return any(ADAPTER in name for name, _ in model.named_parameters())


@contextmanager
def base_of(model: nn.Module) -> Iterator[None]:
    """Turn the adapters off: the model is its base, with the same weights in the same memory."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
            layer.requires_grad_(False)  # which peft sets on its own
