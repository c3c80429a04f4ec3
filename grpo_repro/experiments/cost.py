"""What language models cost, from stated formulas: peak memory by its parts, and time.

Bytes, with w for each weight, P parameters of which T are trained (in t bytes each), width h, keys of width k,
feed-forward width I, vocabulary V, L layers, H heads, and a context of C tokens:

    weights      P w, and P w more for a reference policy        gradients   T t
    optimiser    2 T t for adamw, 0 for sgd                      cache       2 k w L for each cached token
    activations  L (w (14 h + 4 k + 4 I) + 16 H C) for each token that a backward pass goes through; with gradient
                 checkpointing L w h, and one layer in full
    logits       16 V for each of these tokens; 40 V for each row that a token is sampled for
    self-check   20 T, before there are gradients and an optimiser
    saved state  the trained weights and the optimiser's averages twice, in the memory of the processor

Time: 2 P flops for each token sampled or only run forward and 6 P for each token trained on, over the device's rate,
`Machine.flops`; attention's own flops are left out. `benchmarks/measured_cost.py` holds both against measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_repro.machine import Machine
from grpo_repro.sizes import ModelSize

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
BASE = {False: 500_000_000, True: 1_000_000_000}
"""Bytes that torch and its libraries take by themselves on a CPU, and on a GPU."""

SELF_CHECK = 20
"""Bytes for each parameter in `engine.check`: two gradients, their sum, and those of the engine that it compares."""

SHORT = 16
"""Completions of at most so many tokens repeat: n^0.7 of n are distinct, and equal ones are computed once."""


def weights_dtype(config: Mapping[str, Any], machine: Machine, training: bool) -> str:
    """Type of a cell's weights: `auto` is float32 on a CPU and for all trained weights, else bfloat16."""
    named = str(config["model"]["dtype"])
    if named != "auto":
        return named
    adapters = (config["model"].get("lora") or {}).get("rank")
    return "bfloat16" if machine.on_gpu and (adapters or not training) else "float32"


def trained(config: Mapping[str, Any], size: ModelSize) -> int:
    """Number of parameters that gradients are taken of."""
    rank = (config["model"].get("lora") or {}).get("rank")
    h, k, i = size.hidden, size.kv_width, size.intermediate
    if rank:
        # A and B of queries, outputs, keys, values, gate, up and down.
        return int(rank * size.layers * (2 * 2 * h + 2 * (h + k) + 3 * (h + i)))
    if config.get("score_params") == "last_layer":
        return 2 * h * h + 2 * h * k + 3 * h * i + 2 * h
    return size.parameters


def cache_bytes(size: ModelSize, width: int, rows: int, length: int, prompts: int, prompt: int) -> int:
    """Keys and values of a batch that is sampled: its completions' own and its prompts'."""
    return 2 * size.kv_width * width * size.layers * (rows * length + prompts * prompt)


def sampling_bytes(size: ModelSize, width: int, rows: int, length: int, prompts: int, prompt: int) -> dict[str, int]:
    """Memory of sampling a batch: cache, logits, and one layer's tensors of the prompts' pass."""
    once = width * (6 * size.hidden + 3 * size.intermediate) + 4 * prompt
    return {
        "cache": cache_bytes(size, width, rows, length, prompts, prompt),
        "logits": 40 * size.vocabulary * rows,
        "activations": prompts * prompt * once,
    }


def backward_bytes(
    size: ModelSize, width: int, tokens: int, context: int, logits: int, checkpointing: bool = False
) -> dict[str, int]:
    """Memory of a backward pass.

    Args:
        size: The model.
        width: Bytes of a weight.
        tokens: Tokens that it goes through.
        context: Tokens that one of them sees.
        logits: Tokens with logits.
        checkpointing: Whether layers are run again instead of kept.
    """
    layer = width * (14 * size.hidden + 4 * size.kv_width + 4 * size.intermediate) + 16 * size.heads * context
    kept = layer + size.layers * width * size.hidden if checkpointing else size.layers * layer
    return {"activations": tokens * kept, "logits": 16 * size.vocabulary * logits}


def largest(*phases: dict[str, int]) -> dict[str, int]:
    """The phase that takes most; memory of the others is free again by then."""
    return max(phases, key=lambda parts: sum(parts.values()))
